//! The MoE layer: router, dispatch, experts and shared experts, in three phases.
//!
//! Forward saves the input, the router's probabilities, the routing, the dispatch and the experts' pre-activations,
//! but neither the experts' outputs nor their activations. Backward returns the input's gradient at once and leaves
//! the weights' gradients, the router's included, as a task.
//!
//! With choices i_1..i_k and weights w, `y = sum_j w_j expert_ij(x) + shared(x)`. The discrete choice has no
//! gradient: the router learns through w and through the losses on its scores.

mod backward;
mod forward;
mod saved;

use moeworks_ops::Context;
use moeworks_ops::experts::send_experts_ahead;
use moeworks_ops::linear::Write;
use moeworks_tensor::Tensor;

use crate::ep::{LayerRanks, Pace, RemoteLayer};
use crate::router::ScoreRouter;
use crate::{ConfigError, ExpertIds, LossGrad, MoeConfig, MoeWeights, RouterInput, Routing, RoutingError};
pub use backward::MoeGradTask;
pub use saved::MoeSaved;

/// An MoE layer with a validated configuration. Weights are arguments of its methods.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeLayer {
    config: MoeConfig,
    /// The ranks that hold the experts; none if all are on this rank.
    ranks: Option<LayerRanks>,
    /// The ranks that hold the experts of a model in use; none if all are on this rank.
    remote: Option<RemoteLayer>,
}

/// The inputs of a layer's forward pass besides `x`. A [`RouterInput`] converts to one.
#[derive(Clone, Copy, Debug, Default)]
pub struct ForwardInput<'a> {
    /// The router's inputs.
    pub router: RouterInput<'a>,
    /// `[T, D]` f32: a tensor to add the layer's output to, such as the residual stream; none for the output alone.
    pub base: Option<&'a Tensor>,
}

impl<'a> From<&RouterInput<'a>> for ForwardInput<'a> {
    fn from(router: &RouterInput<'a>) -> Self {
        Self { router: *router, base: None }
    }
}

/// The inputs of a layer's backward pass besides the gradient of its output. A [`LossGrad`] converts to one.
pub struct BackwardInput<'a> {
    /// The gradients of the auxiliary losses.
    pub losses: &'a LossGrad,
    /// `[T, E]` f32: the gradient of this router's logits from the next MoE layer, its
    /// [`MoeGradTask::d_previous_logits`]; used with [gating residuals](crate::RouterConfig::gate_residual).
    pub d_next_router_logits: Option<&'a Tensor>,
    /// The target of the weights' gradients, if known already. Backward then computes those of the experts' matrices
    /// together with the input's gradient, which is faster. The task must run with the same target.
    pub wgrad: Option<WgradTarget<'a>>,
}

impl<'a> From<&'a LossGrad> for BackwardInput<'a> {
    fn from(losses: &'a LossGrad) -> Self {
        Self { losses, d_next_router_logits: None, wgrad: None }
    }
}

/// The destination of the gradients of a layer's weights.
pub struct WgradTarget<'a> {
    /// The choice of replacing the gradients or adding to them.
    pub write: Write,
    /// True to leave the gradients of experts without tokens unchanged even when others are replaced; for callers who
    /// keep them at zero.
    pub only_used: bool,
    /// The gradients: f32, or bf16 for the experts' matrices.
    pub grads: &'a mut MoeWeights,
}

impl<'a> WgradTarget<'a> {
    /// Creates a target for the gradients of all experts.
    pub fn new(write: Write, grads: &'a mut MoeWeights) -> Self {
        Self { write, only_used: false, grads }
    }
}

impl MoeLayer {
    /// Creates a layer.
    ///
    /// # Errors
    /// [`ConfigError`] for an invalid setting.
    pub fn new(config: MoeConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        Ok(Self { config, ranks: None, remote: None })
    }

    /// Creates a layer whose experts are spread over `ranks`. Its weights are those of the experts that this rank
    /// holds by the placement in force, in ascending order. All ranks of the group must make the same calls of
    /// [`forward`](Self::forward) and [`backward`](Self::backward), each with its own tokens, or none. Panics if the
    /// placement is for another number of experts.
    pub fn expert_parallel(config: MoeConfig, ranks: LayerRanks) -> Result<Self, ConfigError> {
        assert_eq!(ranks.placement().num_experts(), config.num_experts, "experts of a placement");
        Ok(Self { ranks: Some(ranks), ..Self::new(config)? })
    }

    /// Spreads the experts of a layer in use over ranks. Its weights are then those of the experts on this rank, the
    /// root, and only passes that are forward only can be made. Panics if the placement is for another number of
    /// experts.
    #[must_use]
    pub fn with_remote_experts(self, remote: RemoteLayer) -> Self {
        assert_eq!(remote.placement().num_experts(), self.config.num_experts, "experts of a placement");
        Self { remote: Some(remote), ..self }
    }

    /// Returns the configuration.
    #[must_use]
    pub fn config(&self) -> &MoeConfig {
        &self.config
    }

    /// Checks the expert ids `[T, K]` of `num_tokens` tokens for [`RouterInput::expert_ids`].
    ///
    /// # Errors
    /// [`RoutingError`] if the scheme takes no expert ids, or if the list has a wrong length, an id out of range, or
    /// an expert twice for a token.
    pub fn expert_ids(&self, ctx: &Context, num_tokens: usize, ids: &[u32]) -> Result<ExpertIds, RoutingError> {
        ExpertIds::new(ctx, &self.config, num_tokens, ids)
    }

    /// Chooses the experts of each token of `x [T, D]` without running them. The arguments are those of
    /// [`forward`](Self::forward).
    ///
    /// Fails if a logit is not finite. `forward` does not fail: the token's output is then NaN, which shows in the
    /// loss of a training step.
    pub fn route(
        &self,
        ctx: &Context,
        weights: &MoeWeights,
        x: &Tensor,
        input: &RouterInput<'_>,
    ) -> Result<Routing, RoutingError> {
        Ok(self.router(weights, input).checked(ctx, x)?.routing)
    }

    /// Predicts the experts `[T, K]` of the tokens from `x [T, D]`, an estimate of the layer's input. `None` if the
    /// router needs more than its input, or if the experts are on several ranks. The arguments are those of
    /// [`forward`](Self::forward).
    #[must_use]
    pub fn predict_experts(
        &self,
        ctx: &Context,
        weights: &MoeWeights,
        x: &Tensor,
        input: &RouterInput<'_>,
    ) -> Option<Tensor> {
        let is_of_input = self.ranks.is_none() && self.remote.is_none() && !self.config.router.gate_residual;
        let decide = || self.router(weights, input).forward(ctx, x).routing.tensors().0.clone();
        is_of_input.then(decide)
    }

    /// Copies [predicted](Self::predict_experts) experts to the GPU ahead of their use, when experts are kept in host
    /// memory (`moeworks_gpu::Gpu::with_expert_cache`).
    pub fn prefetch_experts(&self, ctx: &Context, weights: &MoeWeights, ids: &Tensor) {
        let num_experts = weights.gate_up.shape()[0];
        send_experts_ahead(ctx, weights.experts(self.config.activation), num_experts, ids.u32s());
    }

    /// Returns the ranks with the placement that is in force for a pass.
    fn ranks_in_force(&self) -> Option<LayerRanks> {
        self.ranks.as_ref().map(LayerRanks::in_force)
    }

    /// Runs `work` and reports its time to the ranks' meter, if there is one.
    fn timed<R>(&self, name: &'static str, work: impl FnOnce() -> R) -> R {
        match &self.ranks {
            Some(ranks) => ranks.time(name, work),
            None => work(),
        }
    }

    /// Waits as long as a computation takes where waits stand for computations.
    fn wait_as_for(&self, seconds: impl FnOnce(&Pace) -> f64) {
        if let Some(ranks) = &self.ranks {
            ranks.wait_as_for(1, seconds);
        }
    }

    fn router<'a>(&'a self, weights: &'a MoeWeights, input: &'a RouterInput<'a>) -> ScoreRouter<'a> {
        ScoreRouter { config: &self.config, weights, input, cross_rank: None }
    }
}
