//! The MoE layer: router, dispatch, experts and shared experts, in three phases.
//!
//! Forward keeps the input, the router's probabilities, the routing, the dispatch and the experts' pre-activations;
//! neither the experts' outputs nor their activations. Backward gives the input's gradient at once and leaves the
//! weights' gradients, the router's included, as a task.
//!
//! With p = softmax(x W_r^T) over all experts, choices i_1..i_k and their weights w, `y = sum_j w_j expert_ij(x) +
//! shared(x)`. The choice itself has no gradient: the router learns through w, the balance loss (through p) and the z-loss
//! (through the log-sum-exp).

use std::sync::Arc;

use moeworks_ops::Context;
use moeworks_ops::elementwise::{add_assign, sum_of_squares};
use moeworks_ops::experts::{
    ExpertGrads, ExpertRows, ExpertsSaved, NO_ROW, WeightGradInputs, experts_backward, experts_forward,
    experts_weight_grad,
};
use moeworks_ops::linear::{Write, linear, linear_backward_input, linear_backward_weight};
use moeworks_ops::top_k::{ScoreGrads, TopK, softmax_top_k, softmax_top_k_backward};
use moeworks_tensor::{DType, Random, Tensor};

use crate::jitter::Jitter;
use crate::shared::{SharedSaved, SharedTask};
use crate::{ConfigError, Dispatch, LayerStats, LossGrad, MoeConfig, MoeWeights, Routing, ScoreOrder};

/// An MoE layer: its configuration, checked. Weights are arguments.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeLayer {
    config: MoeConfig,
}

/// What backward needs of forward, and what forward decided. Cloning shares the tensors.
#[derive(Clone)]
pub struct MoeSaved {
    inner: Arc<Saved>,
}

struct Saved {
    x: Tensor,
    jitter: Option<Jitter>,
    squared_logits: f64,
    scores: TopK,
    routing: Routing,
    dispatch: Dispatch,
    experts: ExpertsSaved,
    shared: Option<SharedSaved>,
}

/// The gradient of a layer's weights, to be computed when it suits.
pub struct MoeGradTask {
    saved: Arc<Saved>,
    dy: Tensor,
    dlogits: Tensor,
    dh: Tensor,
    shared: Option<SharedTask>,
    config: MoeConfig,
}

impl MoeLayer {
    /// A layer of `config`, or what is wrong with it.
    pub fn new(config: MoeConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        Ok(Self { config })
    }

    /// The configuration.
    #[must_use]
    pub fn config(&self) -> &MoeConfig {
        &self.config
    }

    /// The layer's output `y [T, D]` (f32) for `x [T, D]` (f32 or bf16), and what backward needs.
    ///
    /// Products of experts are taken in their weights' type, those of the router in f32. `noise` is the source of the
    /// jitter in training, addressed by the element's position in x, so each layer and each pass needs a stream of its own;
    /// with `None`, or a configuration without jitter, there is none. Panics if `weights` or `x` have other shapes than the
    /// configuration says.
    #[must_use]
    pub fn forward(
        &self,
        ctx: &Context,
        weights: &MoeWeights,
        x: &Tensor,
        noise: Option<&Random>,
    ) -> (Tensor, MoeSaved) {
        weights.check(&self.config);
        assert_eq!(x.shape(), [x.rows(), self.config.width], "input of an MoE layer");
        let jitter = noise.map(|&random| Jitter { eps: self.config.jitter, random }).filter(|jitter| jitter.eps > 0.0);
        let (squared_logits, scores, routing) = self.scores(ctx, weights, x, jitter);
        let dispatch = Dispatch::new(ctx, &routing, self.config.capacity_factor);
        let (mut y, experts) = experts_forward(ctx, x, weights.experts(self.config.activation), dispatch.rows());
        let shared = weights.shared.as_ref().map(|shared| {
            let (shared_y, saved) = SharedSaved::forward(ctx, shared, self.config.activation, x);
            add_assign(ctx, &mut y, &shared_y);
            saved
        });
        let saved = Saved { x: x.clone(), jitter, squared_logits, scores, routing, dispatch, experts, shared };
        (y, MoeSaved { inner: Arc::new(saved) })
    }

    /// The decision alone: which experts each token of `x [T, D]` goes to. Arguments as in [`forward`](Self::forward).
    #[must_use]
    pub fn route(&self, ctx: &Context, weights: &MoeWeights, x: &Tensor, noise: Option<&Random>) -> Routing {
        let jitter = noise.map(|&random| Jitter { eps: self.config.jitter, random }).filter(|jitter| jitter.eps > 0.0);
        self.scores(ctx, weights, x, jitter).2
    }

    /// The sum of the squared logits, which become the probabilities in place, the scores and the choice.
    fn scores(&self, ctx: &Context, weights: &MoeWeights, x: &Tensor, jitter: Option<Jitter>) -> (f64, TopK, Routing) {
        let noisy = jitter.map(|jitter| jitter.apply(ctx, x));
        let logits = linear(ctx, noisy.as_ref().unwrap_or(x), &weights.router, DType::F32);
        let squared_logits = sum_of_squares(ctx, &logits);
        let scores = softmax_top_k(ctx, logits, self.config.top_k, self.is_normalized());
        let routing = Routing::from_tensors(self.config.num_experts, scores.ids.clone(), scores.weights.clone());
        (squared_logits, scores, routing)
    }

    /// The softmax over the chosen logits is the softmax over all of them divided by the sum over the chosen.
    fn is_normalized(&self) -> bool {
        self.config.normalize_weights || self.config.score_order == ScoreOrder::TopKThenSoftmax
    }

    /// The gradient of the input `[T, D]` (f32), and the weights' gradients as a task. `dy` is `[T, D]`, f32 or bf16, the
    /// gradient of `y`; `losses` is what the losses on the router say. `weights` are those of forward.
    #[must_use]
    pub fn backward(
        &self,
        ctx: &Context,
        weights: &MoeWeights,
        saved: &MoeSaved,
        dy: &Tensor,
        losses: &LossGrad,
    ) -> (Tensor, MoeGradTask) {
        let saved = &saved.inner;
        assert_eq!(dy.shape(), saved.x.shape(), "gradient of an MoE layer's output");
        let rows = saved.dispatch.rows();
        let experts = weights.experts(self.config.activation);
        let backward = experts_backward(ctx, dy, experts, rows, &saved.experts);
        let mut dx = backward.dx;

        let dweights = choice_grads(ctx, rows, backward.d_row_weights.f32s());
        let grads = ScoreGrads {
            weights: dweights.f32s(),
            probs: &losses.balance,
            lse_squared: losses.z / saved.x.rows().max(1) as f32,
        };
        let dlogits = softmax_top_k_backward(ctx, &saved.scores, self.is_normalized(), grads);
        let mut router_dx = linear_backward_input(ctx, &dlogits, &weights.router, DType::F32);
        if let Some(jitter) = saved.jitter {
            jitter.apply_assign(ctx, &mut router_dx);
        }
        add_assign(ctx, &mut dx, &router_dx);

        let shared = saved.shared.as_ref().zip(weights.shared.as_ref()).map(|(saved, weights)| {
            let (shared_dx, task) = saved.backward(ctx, weights, self.config.activation, dy);
            add_assign(ctx, &mut dx, &shared_dx);
            task
        });
        let saved = Arc::clone(saved);
        let task = MoeGradTask { saved, dy: dy.clone(), dlogits, dh: backward.dh, shared, config: self.config.clone() };
        (dx, task)
    }
}

/// The gradient of each choice's weight from that of each row's; a dropped choice has none.
fn choice_grads(ctx: &Context, rows: ExpertRows<'_>, d_row_weights: &[f32]) -> Tensor {
    const PIECE: usize = 1 << 13;
    let mut grads = ctx.empty(&[rows.token_rows.len()], DType::F32);
    ctx.threads().run_pieces(grads.f32s_mut(), PIECE, |piece, grads| {
        for (grad, &row) in grads.iter_mut().zip(&rows.token_rows[piece * PIECE..]) {
            *grad = if row == NO_ROW { 0.0 } else { d_row_weights[row as usize] };
        }
    });
    grads
}

impl MoeSaved {
    /// Which experts each token went to.
    #[must_use]
    pub fn routing(&self) -> &Routing {
        &self.inner.routing
    }

    /// Which row went where.
    #[must_use]
    pub fn dispatch(&self) -> &Dispatch {
        &self.inner.dispatch
    }

    /// `[T, E]`: the softmax of the logits over all experts.
    #[must_use]
    pub fn probs(&self) -> &[f32] {
        self.inner.scores.probs.f32s()
    }

    /// What the routing looked like.
    #[must_use]
    pub fn stats(&self) -> LayerStats {
        let Saved { x, squared_logits, scores, dispatch, .. } = &*self.inner;
        let per_token = 1.0 / x.rows().max(1) as f64;
        LayerStats {
            num_tokens: x.rows(),
            num_choices: dispatch.token_rows().len(),
            num_dropped: dispatch.num_dropped(),
            num_rerouted: 0,
            tokens_per_expert: dispatch.tokens_per_expert().to_vec(),
            kept_per_expert: dispatch.rows_per_expert().collect(),
            mean_prob: scores.sums.probs.iter().map(|sum| (sum * per_token) as f32).collect(),
            mean_entropy: scores.sums.entropy * per_token,
            z: scores.sums.lse_squared * per_token,
            mean_squared_logit: squared_logits * per_token / scores.probs.cols() as f64,
        }
    }
}

impl MoeGradTask {
    /// Computes the gradients of all weights of the layer and writes or adds them to `grads`, which is f32 throughout. An
    /// expert without rows gets zeros, or is left as it is.
    pub fn run(self, ctx: &Context, write: Write, grads: &mut MoeWeights) {
        let Saved { x, jitter, dispatch, experts, .. } = &*self.saved;
        let inputs = WeightGradInputs { x, dy: &self.dy, saved: experts, dh: &self.dh };
        let into = ExpertGrads { gate_up: &mut grads.gate_up, down: &mut grads.down };
        experts_weight_grad(ctx, inputs, self.config.activation, dispatch.rows(), write, into);
        let noisy = jitter.map(|jitter| jitter.apply(ctx, x));
        let router_x = noisy.as_ref().unwrap_or(x);
        linear_backward_weight(ctx, &self.dlogits, router_x, DType::F32, write, &mut grads.router);
        if let (Some(task), Some(saved), Some(grads)) = (self.shared, &self.saved.shared, &mut grads.shared) {
            task.run(ctx, saved, (x, &self.dy), self.config.activation, write, grads);
        }
    }
}
