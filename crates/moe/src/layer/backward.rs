//! The backward pass of a layer, and the gradients of its weights.

use std::sync::Arc;

use moeworks_ops::elementwise::{add_assign, into_type};
use moeworks_ops::experts::{
    ExpertGrads, ExpertRows, WeightGradInputs, WeightGradTarget, add_bias_row_weight_grads, choice_weight_grads,
    experts_backward, experts_backward_with_weight_grad, experts_bias_grad, experts_weight_grad,
    experts_weight_grad_of_used,
};
use moeworks_ops::linear::Write;
use moeworks_ops::{Activation, Context};
use moeworks_tensor::Tensor;

use super::saved::{ExpertsPart, Saved};
use super::{BackwardInput, MoeLayer, MoeSaved, WgradTarget};
use crate::ep::{MergedChunks, RanksBackwardInput, RanksSaved, RanksTask};
use crate::router::{RouterGradTask, RouterGrads};
use crate::shared::{SharedInputs, SharedTask, kept};
use crate::weights::is_left_out;
use crate::zero_computation::{self, ZeroComputationChoices, ZeroComputationGrads};
use crate::{MoeConfig, MoeWeights, RouterInput};

/// A deferred computation of the gradients of a layer's weights.
pub struct MoeGradTask {
    saved: Arc<Saved>,
    dy: Tensor,
    router: Option<RouterGradTask>,
    zero_computation: Option<ZeroComputationGrads>,
    experts: ExpertsTask,
    shared: Option<SharedTask>,
    config: MoeConfig,
}

/// The inputs of the experts' gradients besides forward's saved state.
enum ExpertsTask {
    Here {
        dh: Tensor,
        weighed: Option<Tensor>,
        /// True if backward has written the gradients of the matrices already.
        is_done: bool,
    },
    Ranks(Box<RanksTask>),
}

/// The gradients that come back from the experts.
struct ExpertsBack {
    /// `[T, D]`
    dx: Tensor,
    /// `[T K]`: the gradient of each choice's weight.
    dweights: Tensor,
    task: ExpertsTask,
    /// The gradient from the shared experts, if it was computed while rows travelled.
    shared: Option<SharedBack>,
}

/// The gradient of the input that comes back from the shared experts, `[T, D]`, and the task of their weights.
struct SharedBack {
    dx: Tensor,
    task: SharedTask,
}

impl MoeLayer {
    /// Returns the gradient of the input, `[T, D]` f32, and a task for the weights' gradients. `dy` is the gradient
    /// of `y`, `[T, D]`, f32 or bf16. `input` is a [`LossGrad`](crate::LossGrad), the gradients of the auxiliary
    /// losses, or a [`BackwardInput`]. `weights` must be those of forward.
    #[must_use]
    pub fn backward<'a>(
        &self,
        ctx: &Context,
        weights: &MoeWeights,
        saved: &MoeSaved,
        dy: &Tensor,
        input: impl Into<BackwardInput<'a>>,
    ) -> (Tensor, MoeGradTask) {
        let BackwardInput { losses, d_next_router_logits, wgrad } = input.into();
        let saved = saved.state();
        assert_eq!(dy.shape(), saved.x.shape(), "gradient of an MoE layer's output");
        // Convert once here, or every GEMM that takes it would convert it again.
        let dy = &into_type(ctx, dy.clone(), weights.gate_up.dtype());
        let ExpertsBack { mut dx, mut dweights, task: experts, shared } =
            self.experts_backward(ctx, weights, saved, dy, wgrad);
        let zero_computation = saved.exact_x.as_ref().map(|x| {
            let (routing, dispatch) = (&saved.routing, &saved.dispatch);
            let choices = ZeroComputationChoices { config: &self.config, weights, routing, dispatch, x };
            let dy = zero_computation::exact(ctx, &self.config, dy);
            choices.backward(dy.as_ref().unwrap_or(x), &mut dx, &mut dweights)
        });
        let grads = RouterGrads { dweights: &dweights, used: saved.routing.tensors().0, losses, d_next_router_logits };
        let input = RouterInput::default();
        let router = self.router(weights, &input);
        let router = self.timed("router, backward", || router.backward(ctx, &saved.router, grads, &mut dx));
        let shared = shared.or_else(|| self.shared_backward(ctx, weights, saved, dy));
        let shared = shared.map(|shared| {
            add_assign(ctx, &mut dx, &shared.dx);
            shared.task
        });
        let saved = Arc::clone(saved);
        let task = MoeGradTask {
            saved,
            dy: dy.clone(),
            router,
            zero_computation,
            experts,
            shared,
            config: self.config.clone(),
        };
        (dx, task)
    }

    fn experts_backward(
        &self,
        ctx: &Context,
        weights: &MoeWeights,
        saved: &Saved,
        dy: &Tensor,
        wgrad: Option<WgradTarget<'_>>,
    ) -> ExpertsBack {
        let experts_saved = match &saved.experts {
            ExpertsPart::Ranks(on_ranks) => {
                return self.backward_on_ranks(ctx, weights, RanksBack { layer: saved, saved: on_ranks, dy, wgrad });
            }
            ExpertsPart::Here(saved) => kept(saved),
        };
        let (rows, experts) = (saved.dispatch.rows(), weights.experts(self.config.activation));
        let is_done = wgrad.is_some();
        let mut back = match wgrad {
            Some(WgradTarget { write, only_used, grads }) => {
                let grads = ExpertGrads { gate_up: &mut grads.gate_up, down: &mut grads.down };
                let target = WeightGradTarget { write, of_used: only_used, grads };
                experts_backward_with_weight_grad(ctx, &saved.x, dy, experts, rows, experts_saved, target)
            }
            None => experts_backward(ctx, dy, experts, rows, experts_saved),
        };
        if let Some((_, down)) = &weights.biases {
            add_bias_row_weight_grads(ctx, dy, down, rows, &mut back.d_row_weights);
        }
        let dweights = choice_weight_grads(ctx, rows, &back.d_row_weights);
        let task = ExpertsTask::Here { dh: back.dh, weighed: back.weighed, is_done };
        ExpertsBack { dx: back.dx, dweights, task, shared: None }
    }

    /// Computes the backward pass of experts on several ranks, and under the first exchange that of shared experts.
    fn backward_on_ranks(&self, ctx: &Context, weights: &MoeWeights, input: RanksBack<'_>) -> ExpertsBack {
        let RanksBack { layer, saved, dy, wgrad } = input;
        let (mut shared, is_early) = (None, saved.ranks().computes_shared_under_dispatch());
        let meanwhile = || shared = if is_early { self.shared_backward(ctx, weights, layer, dy) } else { None };
        let input = RanksBackwardInput { activation: self.config.activation, dy, wgrad };
        let back = saved.backward(ctx, weights, input, meanwhile);
        let task = ExpertsTask::Ranks(Box::new(back.task));
        ExpertsBack { dx: back.dx, dweights: back.dweights, task, shared }
    }

    /// Computes the gradient of the input from the shared experts, if there are any.
    fn shared_backward(&self, ctx: &Context, weights: &MoeWeights, saved: &Saved, dy: &Tensor) -> Option<SharedBack> {
        let (saved, weights) = saved.shared.as_ref().zip(weights.shared.as_ref())?;
        let backward = || {
            self.wait_as_for(|pace| pace.shared_backward_s);
            saved.backward(ctx, weights, self.config.activation, dy)
        };
        let (dx, task) = self.timed("shared experts, backward", backward);
        Some(SharedBack { dx, task })
    }
}

/// The inputs of a backward pass of experts on several ranks.
struct RanksBack<'a> {
    layer: &'a Saved,
    saved: &'a RanksSaved,
    dy: &'a Tensor,
    wgrad: Option<WgradTarget<'a>>,
}

impl WgradTarget<'_> {
    /// Returns the same target, for one use.
    fn reborrow(&mut self) -> WgradTarget<'_> {
        WgradTarget { write: self.write, only_used: self.only_used, grads: &mut *self.grads }
    }

    /// Computes the gradients of the experts' matrices.
    pub(crate) fn of_experts(
        self,
        ctx: &Context,
        inputs: WeightGradInputs<'_>,
        activation: Activation,
        rows: ExpertRows<'_>,
    ) {
        let Self { write, only_used, grads } = self;
        let into = ExpertGrads { gate_up: &mut grads.gate_up, down: &mut grads.down };
        if only_used && write == Write::Replace {
            experts_weight_grad_of_used(ctx, inputs, activation, rows, into);
        } else {
            experts_weight_grad(ctx, inputs, activation, rows, write, into);
        }
    }
}

impl MoeGradTask {
    /// Returns `[T, E]` f32: the gradient of the previous MoE layer's logits; `None` without gating residuals.
    #[must_use]
    pub fn d_previous_logits(&self) -> Option<&Tensor> {
        self.router.as_ref()?.dprevious.as_ref()
    }

    /// Computes the gradients of all weights of the layer and writes or adds them to `target`. An expert without rows
    /// gets zeros, or is left unchanged if [`WgradTarget::only_used`] is true.
    pub fn run(mut self, ctx: &Context, mut target: WgradTarget<'_>) {
        let is_wanted = !self.is_done() && !is_left_out(&target.grads.gate_up);
        let merged = self.merged(ctx);
        match (&self.saved.experts, &merged) {
            _ if !is_wanted => {}
            (ExpertsPart::Ranks(saved), Some(merged)) => {
                saved.weight_grads(ctx, self.config.activation, merged, target.reborrow());
            }
            _ => {
                let (inputs, rows) = self.inputs(merged.as_ref());
                target.reborrow().of_experts(ctx, inputs, self.config.activation, rows);
            }
        }
        if let ExpertsPart::Ranks(saved) = &self.saved.experts {
            saved.wait_as_for_attention_weights();
        }
        self.run_rest(ctx, target.write, merged.as_ref(), target.grads);
    }

    /// Returns whether backward has computed the gradients of the experts' matrices already.
    fn is_done(&self) -> bool {
        match &self.experts {
            ExpertsTask::Here { is_done, .. } => *is_done,
            ExpertsTask::Ranks(task) => task.is_done(),
        }
    }

    /// Merges the rows that arrived from all ranks; none if all experts are on this rank.
    fn merged(&mut self, ctx: &Context) -> Option<MergedChunks> {
        match (&self.saved.experts, &mut self.experts) {
            (ExpertsPart::Ranks(saved), ExpertsTask::Ranks(task)) => Some(saved.merged(ctx, task)),
            _ => None,
        }
    }

    /// Returns the inputs of the experts' gradients and their rows.
    fn inputs<'a>(&'a self, merged: Option<&'a MergedChunks>) -> (WeightGradInputs<'a>, ExpertRows<'a>) {
        let Saved { x, experts, dispatch, .. } = &*self.saved;
        match (experts, &self.experts, merged) {
            (ExpertsPart::Here(saved), ExpertsTask::Here { dh, weighed, .. }, _) => {
                let saved = kept(saved);
                (WeightGradInputs { x, dy: &self.dy, saved, dh, weighed: weighed.as_ref() }, dispatch.rows())
            }
            (_, _, Some(merged)) => merged.inputs(),
            _ => unreachable!("backward makes the task of what forward saved"),
        }
    }

    /// Computes all gradients except those of the experts' matrices.
    fn run_rest(self, ctx: &Context, write: Write, merged: Option<&MergedChunks>, grads: &mut MoeWeights) {
        let Saved { x, router, .. } = &*self.saved;
        if let Some((gate_up, down)) = grads.biases.as_mut().filter(|(gate_up, _)| !is_left_out(gate_up)) {
            let (WeightGradInputs { dy, dh, .. }, rows) = self.inputs(merged);
            let grads = |write: Write, gate_up: &mut Tensor, down: &mut Tensor| {
                experts_bias_grad(ctx, dy, dh, rows, write, gate_up, down);
            };
            match &self.saved.experts {
                ExpertsPart::Ranks(saved) => saved.bias_grads(ctx, write, [gate_up, down], grads),
                ExpertsPart::Here(_) => grads(write, gate_up, down),
            }
        }
        if let (ExpertsPart::Ranks(saved), ExpertsTask::Ranks(task)) = (&self.saved.experts, &self.experts) {
            saved.shadow_weight_grads(ctx, x, &self.dy, task, grads);
        }
        if let Some(task) = self.router {
            task.run(ctx, router, x, write, grads);
        }
        if let Some(grads_of) = self.zero_computation {
            grads_of.run(write, grads);
        }
        if let (Some(task), Some(saved), Some(grads)) = (self.shared, &self.saved.shared, &mut grads.shared) {
            task.run(ctx, saved, SharedInputs { x, dy: &self.dy, activation: self.config.activation }, write, grads);
        }
    }
}
