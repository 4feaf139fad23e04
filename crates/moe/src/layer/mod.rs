//! The MoE layer: router, dispatch, experts and shared experts, in three phases.
//!
//! Forward keeps the input, the router's probabilities, the routing, the dispatch and the experts' pre-activations;
//! neither the experts' outputs nor their activations. Backward gives the input's gradient at once and leaves the
//! weights' gradients, the router's included, as a task.
//!
//! With choices i_1..i_k and their weights w, `y = sum_j w_j expert_ij(x) + shared(x)`. The choice itself has no gradient:
//! the router learns through w and through the losses on its scores.

mod backward;
mod forward;
mod saved;

use moeworks_ops::Context;
use moeworks_ops::experts::send_experts_ahead;
use moeworks_ops::linear::Write;
use moeworks_tensor::Tensor;

use crate::ep::LayerRanks;
use crate::router::ScoreRouter;
use crate::{ConfigError, ExpertIds, LossGrad, MoeConfig, MoeWeights, RouterInput, Routing, RoutingError};
pub use backward::MoeGradTask;
pub use saved::MoeSaved;

/// An MoE layer: its configuration, checked. Weights are arguments.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeLayer {
    config: MoeConfig,
    /// The ranks that hold the experts, if not all are here.
    ranks: Option<LayerRanks>,
}

/// The inputs of a layer's forward pass besides `x`. A [`RouterInput`] alone becomes one.
#[derive(Clone, Copy, Debug, Default)]
pub struct ForwardInput<'a> {
    /// The router's inputs.
    pub router: RouterInput<'a>,
    /// `[T, D]` f32: the stream that the layer's output is added to; none for the output alone.
    pub base: Option<&'a Tensor>,
}

impl<'a> From<&RouterInput<'a>> for ForwardInput<'a> {
    fn from(router: &RouterInput<'a>) -> Self {
        Self { router: *router, base: None }
    }
}

/// The inputs of a layer's backward pass besides the gradient of its output. A [`LossGrad`] alone becomes one.
pub struct BackwardInput<'a> {
    /// The gradients by the losses on the router.
    pub losses: &'a LossGrad,
    /// `[T, E]` f32: the gradient of this router's logits by those of the next MoE layer, its
    /// [`MoeGradTask::d_previous_logits`]. In a model with [gating residuals](crate::RouterConfig::gate_residual).
    pub d_next_router_logits: Option<&'a Tensor>,
    /// The place of the weights' gradients: those of the experts' matrices are then written in the backward pass, beside those of
    /// the inputs, which takes less time. The task is run with the same target.
    pub wgrad: Option<WgradTarget<'a>>,
}

impl<'a> From<&'a LossGrad> for BackwardInput<'a> {
    fn from(losses: &'a LossGrad) -> Self {
        Self { losses, d_next_router_logits: None, wgrad: None }
    }
}

/// The place of the gradients of a layer's weights.
pub struct WgradTarget<'a> {
    /// Whether they replace what is there or are added to it.
    pub write: Write,
    /// Whether the gradients of experts without tokens stay as they are even if others are replaced: for a caller who keeps them zero.
    pub only_used: bool,
    /// The gradients: f32, or bf16 for the experts' matrices.
    pub grads: &'a mut MoeWeights,
}

impl<'a> WgradTarget<'a> {
    /// Gradients of all experts, written to `grads` as `write` says.
    pub fn new(write: Write, grads: &'a mut MoeWeights) -> Self {
        Self { write, only_used: false, grads }
    }
}

impl MoeLayer {
    /// A layer of `config`, or what is wrong with it.
    pub fn new(config: MoeConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        Ok(Self { config, ranks: None })
    }

    /// A layer of `config` whose experts live on the ranks of `ranks`: weights are those of the experts held here, in their
    /// order. All ranks of the group make the same calls of [`forward`](Self::forward) and [`backward`](Self::backward),
    /// each with tokens of its own, or none. Panics if the placement is of another number of experts.
    pub fn over_ranks(config: MoeConfig, ranks: LayerRanks) -> Result<Self, ConfigError> {
        assert_eq!(ranks.placement().num_experts(), config.num_experts, "experts of a placement");
        Ok(Self { ranks: Some(ranks), ..Self::new(config)? })
    }

    /// The configuration.
    #[must_use]
    pub fn config(&self) -> &MoeConfig {
        &self.config
    }

    /// Checks expert ids `[T, K]` that are to be handed in for `num_tokens` tokens, in [`RouterInput::expert_ids`].
    ///
    /// # Errors
    /// [`RoutingError`]: the scheme takes none, or the list has another length, an id that no expert has, or an expert twice for a
    /// token.
    pub fn expert_ids(&self, ctx: &Context, num_tokens: usize, ids: &[u32]) -> Result<ExpertIds, RoutingError> {
        ExpertIds::new(ctx, &self.config, num_tokens, ids)
    }

    /// The decision alone: the experts that each token of `x [T, D]` goes to. Arguments as in [`forward`](Self::forward).
    ///
    /// Fails if a logit is not finite. `forward` does not: there such a token's output is NaN, so that a training step shows
    /// it in its loss.
    pub fn route(
        &self,
        ctx: &Context,
        weights: &MoeWeights,
        x: &Tensor,
        input: &RouterInput<'_>,
    ) -> Result<Routing, RoutingError> {
        Ok(self.router(weights, input).checked(ctx, x)?.routing)
    }

    /// Predicts the experts `[T, K]` of the tokens of `x [T, D]`, where `x` is what the layer's input will probably be: none where
    /// this says nothing of them, as its router looks at more. Arguments as in [`forward`](Self::forward).
    #[must_use]
    pub fn predict_experts(
        &self,
        ctx: &Context,
        weights: &MoeWeights,
        x: &Tensor,
        input: &RouterInput<'_>,
    ) -> Option<Tensor> {
        let is_of_input = self.ranks.is_none() && !self.config.router.gate_residual;
        let decide = || self.router(weights, input).forward(ctx, x).routing.tensors().0.clone();
        is_of_input.then(decide)
    }

    /// Sends experts that were [predicted](Self::predict_experts) to a GPU, where they otherwise stay in the host's memory
    /// (`moeworks_gpu::Gpu::with_expert_cache`).
    pub fn prefetch_experts(&self, ctx: &Context, weights: &MoeWeights, ids: &Tensor) {
        let num_experts = weights.gate_up.shape()[0];
        send_experts_ahead(ctx, weights.experts(self.config.activation), num_experts, ids.u32s());
    }

    /// Does `work`; where ranks have a meter it learns how long it took.
    fn timed<R>(&self, name: &'static str, work: impl FnOnce() -> R) -> R {
        match &self.ranks {
            Some(ranks) => ranks.time(name, work),
            None => work(),
        }
    }

    fn router<'a>(&'a self, weights: &'a MoeWeights, input: &'a RouterInput<'a>) -> ScoreRouter<'a> {
        ScoreRouter { config: &self.config, weights, input, cross_rank: None }
    }
}
