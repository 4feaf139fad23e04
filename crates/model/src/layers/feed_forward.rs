//! The feed-forward block: an MoE layer, or a dense network, which is a single expert that takes every row with
//! weight 1.

use std::sync::Arc;

use moeworks_moe::{
    BackwardInput, ForwardInput, LossGrad, MoeGradTask, MoeLayer, MoeSaved, RouterInput, WgradTarget, is_left_out,
};
use moeworks_ops::experts::{
    AllRows, ExpertBiases, ExpertGrads, ExpertWeights, ExpertsSaved, ForwardOptions, WeightGradInputs,
    experts_backward, experts_bias_grad, experts_forward_with, experts_weight_grad,
};
use moeworks_ops::linear::Write;
use moeworks_ops::{Activation, Context};
use moeworks_tensor::{DType, Tensor};

use super::Pass;
use super::attention::{WRONG_KIND, add_residual, scaled};
use super::norm::{Norm, NormBackward};
use super::weight_grads::GradWrite;
use crate::tensor_ranks::{Run, TensorRanks};
use crate::weights::{DenseWeights, FeedForwardWeights, LayerWeights};

/// A feed-forward block.
#[derive(Clone, Debug)]
pub(crate) struct FeedForwardBlock {
    /// The MoE layer; none in a dense block.
    pub(crate) moe: Option<MoeLayer>,
    pub(crate) activation: Activation,
    pub(crate) norm: Norm,
    /// The factor of the block's output before it is added to the residual stream.
    pub(crate) residual_multiplier: f32,
    /// True if a dense block is sharded over tensor-parallel ranks.
    pub(crate) is_cut: bool,
}

/// The activations that backward needs.
pub(crate) struct FeedForwardSaved {
    /// `[T, D]`: the block's input.
    x: Tensor,
    norm: Tensor,
    normed: Tensor,
    inner: InnerSaved,
}

enum InnerSaved {
    /// None if no backward pass follows.
    Dense(Option<ExpertsSaved>),
    Moe(MoeSaved, IsWhole),
}

/// True if the ranks of a tensor-parallel group took whole sequences through an MoE layer.
type IsWhole = bool;

impl FeedForwardSaved {
    /// Returns the routing; none in a dense block.
    pub(crate) fn moe(&self) -> Option<&MoeSaved> {
        match &self.inner {
            InnerSaved::Dense(_) => None,
            InnerSaved::Moe(saved, _) => Some(saved),
        }
    }
}

/// The gradients that the block's backward starts from.
#[derive(Clone, Copy)]
pub(crate) struct FeedForwardOutputGrads<'a> {
    /// `[T, D]`: the gradient of the block's output.
    pub(crate) dy: &'a Tensor,
    /// `[T, E]`: the gradient of the router's logits from the next MoE layer.
    pub(crate) d_router_logits: Option<&'a Tensor>,
    /// The gradients of the losses on the router.
    pub(crate) loss_grad: Option<&'a LossGrad>,
}

/// The gradients of the block's matrices, still to be computed.
#[allow(clippy::large_enum_variant)] // lives for a moment: nothing is gained by another allocation
pub(crate) enum FeedForwardGradTask {
    Dense(DenseGradTask),
    Moe(MoeGradTask),
}

/// The gradients of the matrices of a dense block, still to be computed.
pub(crate) struct DenseGradTask {
    all_rows: Arc<AllRows>,
    normed: Tensor,
    dy: Tensor,
    saved: ExpertsSaved,
    dh: Tensor,
    weighed: Option<Tensor>,
    activation: Activation,
}

impl FeedForwardBlock {
    /// Returns the ranks that share the block's work: in a dense block only if it is sharded.
    fn ranks<'a>(&self, pass: &Pass<'a>) -> Option<&'a TensorRanks> {
        pass.tensor.filter(|_| self.moe.is_some() || self.is_cut)
    }

    /// Maps `x [T, D]` f32 to `y [T, D]` f32.
    pub(crate) fn forward(
        &self,
        pass: &Pass<'_>,
        weights: &LayerWeights,
        x: Tensor,
        input: &RouterInput<'_>,
    ) -> (Tensor, FeedForwardSaved) {
        let ctx = pass.ctx;
        let dtype = match &weights.feed_forward {
            FeedForwardWeights::Dense(w) => w.gate_up.dtype().of_activations(),
            FeedForwardWeights::Moe(w) => w.gate_up.dtype().of_activations(),
        };
        let (normed, norm) = self.norm.forward(ctx, &weights.feed_forward_norm, &x, dtype);
        // The residual stream, if it can be added as part of the products.
        let base = (self.residual_multiplier == 1.0 && self.ranks(pass).is_none()).then_some(&x);
        let (mut y, inner) = match (&weights.feed_forward, &self.moe) {
            (FeedForwardWeights::Moe(w), Some(moe)) => {
                let is_whole = input.seq_len > 0;
                let (y, saved) = match Run::new(pass, is_whole) {
                    None => moe.forward(ctx, w, &normed, ForwardInput { router: *input, base }),
                    Some(run) => {
                        let expert_ids = input.expert_ids.map(|ids| run.expert_ids(ctx, ids));
                        let input = RouterInput { expert_ids: expert_ids.as_ref(), ..run.input(input) };
                        let (y, saved) = moe.forward(ctx, w, &run.rows(ctx, &normed), &input);
                        (run.whole(ctx, &y), saved)
                    }
                };
                (y, InnerSaved::Moe(saved, is_whole))
            }
            (FeedForwardWeights::Dense(w), None) => self.dense_forward(pass, w, &normed, base),
            _ => panic!("{WRONG_KIND}"),
        };
        if base.is_none() {
            add_residual(ctx, &mut y, self.residual_multiplier, &x);
        }
        (y, FeedForwardSaved { x, norm, normed, inner })
    }

    /// Computes the output of a dense network, plus `base` if given.
    fn dense_forward(
        &self,
        pass: &Pass<'_>,
        w: &DenseWeights,
        normed: &Tensor,
        base: Option<&Tensor>,
    ) -> (Tensor, InnerSaved) {
        let (ctx, ranks) = (pass.ctx, self.ranks(pass));
        // A bias after a sum over ranks is added once.
        let zeros = ranks.map(|_| ctx.zeros(&[1, normed.cols()], DType::F32));
        let biases = w.biases.as_ref();
        let biases_of_part =
            biases.map(|(gate_up, down)| ExpertBiases { gate_up, down: zeros.as_ref().unwrap_or(down) });
        let is_forward_only = !pass.mode.keeps_for_backward();
        let options = ForwardOptions { biases: biases_of_part, base, is_forward_only };
        let (mut y, saved) =
            experts_forward_with(ctx, normed, dense(w, self.activation), pass.all_rows.rows(), options);
        if let Some(ranks) = ranks {
            let bias = biases.map(|(_, down)| down.clone().reshaped(&[normed.cols()]));
            ranks.sum_biased(ctx, &mut y, bias.as_ref());
        }
        (y, InnerSaved::Dense(saved))
    }

    /// Returns the experts `[T, K]` that a residual stream `x [T, D]` would be routed to in this layer; none in a
    /// dense layer, or if the router cannot tell.
    pub(crate) fn predict_next_experts(
        &self,
        pass: &Pass<'_>,
        weights: &LayerWeights,
        x: &Tensor,
        input: &RouterInput<'_>,
    ) -> Option<Tensor> {
        let (FeedForwardWeights::Moe(w), Some(moe)) = (&weights.feed_forward, &self.moe) else { return None };
        let dtype = w.gate_up.dtype().of_activations();
        let (normed, _) = self.norm.forward(pass.ctx, &weights.feed_forward_norm, x, dtype);
        moe.predict_experts(pass.ctx, w, &normed, input)
    }

    /// Starts to gather the experts of this rank's domain, if there are domains, under the attention before them.
    pub(crate) fn start_gathering(&self, pass: &Pass<'_>, weights: &LayerWeights) {
        if let (FeedForwardWeights::Moe(w), Some(moe)) = (&weights.feed_forward, &self.moe) {
            moe.start_gathering(pass.ctx, w, pass.mode.keeps_for_backward());
        }
    }

    /// Copies predicted experts to the GPU ahead of their use.
    pub(crate) fn prefetch_experts(&self, ctx: &Context, weights: &LayerWeights, ids: &Tensor) {
        if let (FeedForwardWeights::Moe(w), Some(moe)) = (&weights.feed_forward, &self.moe) {
            moe.prefetch_experts(ctx, w, ids);
        }
    }

    /// Returns the gradient of the block's input, and the task that computes the matrices' gradients. Gradients that
    /// are cheaper to compute together with the input's are written to `grads` at once, unless `how` leaves all to
    /// the task. The norm weight's gradient is written.
    pub(crate) fn backward(
        &self,
        pass: &Pass<'_>,
        weights: &LayerWeights,
        saved: FeedForwardSaved,
        output: FeedForwardOutputGrads<'_>,
        how: GradWrite,
        grads: &mut LayerWeights,
    ) -> (Tensor, FeedForwardGradTask) {
        let ctx = pass.ctx;
        let FeedForwardSaved { x, norm, normed, inner } = saved;
        let d_block = scaled(ctx, output.dy, self.residual_multiplier);
        let (d_normed, task) = match (inner, &weights.feed_forward, &self.moe, output.loss_grad) {
            (InnerSaved::Moe(saved, is_whole), FeedForwardWeights::Moe(w), Some(moe), Some(loss_grad)) => {
                let run = Run::new(pass, is_whole);
                let dy = run.as_ref().map_or_else(|| d_block.clone(), |run| run.rows(ctx, &d_block));
                let FeedForwardWeights::Moe(grads) = &mut grads.feed_forward else { panic!("{WRONG_KIND}") };
                let is_now = how.matrices_at_once && !is_left_out(&grads.gate_up);
                let wgrad = is_now.then_some(WgradTarget::new(how.write, grads));
                let d_next_router_logits = output.d_router_logits;
                let input = BackwardInput { losses: loss_grad, d_next_router_logits, wgrad };
                let (dx, task) = moe.backward(ctx, w, &saved, &dy, input);
                let dx = match run {
                    None => dx,
                    Some(run) => run.whole(ctx, &dx),
                };
                (dx, FeedForwardGradTask::Moe(task))
            }
            (InnerSaved::Dense(saved), FeedForwardWeights::Dense(w), None, _) => {
                let saved = saved.expect("a pass that was to be forward only has no backward pass");
                let (dx, task) = self.dense_backward(pass, w, normed, d_block, saved);
                (dx, FeedForwardGradTask::Dense(task))
            }
            _ => panic!("{WRONG_KIND}"),
        };
        let around = NormBackward { x: &x, statistics: &norm, dy: &d_normed, base: Some(output.dy) };
        let (norm_weights, d_norm) = (&weights.feed_forward_norm, &mut grads.feed_forward_norm);
        let dx = self.norm.backward(ctx, norm_weights, around, how.write, d_norm);
        (dx, task)
    }

    fn dense_backward(
        &self,
        pass: &Pass<'_>,
        w: &DenseWeights,
        normed: Tensor,
        dy: Tensor,
        saved: ExpertsSaved,
    ) -> (Tensor, DenseGradTask) {
        let (all_rows, activation) = (Arc::clone(&pass.all_rows), self.activation);
        let mut back = experts_backward(pass.ctx, &dy, dense(w, activation), all_rows.rows(), &saved);
        if let Some(ranks) = self.ranks(pass) {
            ranks.sum(&mut back.dx);
        }
        let (dh, weighed) = (back.dh, back.weighed);
        (back.dx, DenseGradTask { all_rows, normed, dy, saved, dh, weighed, activation })
    }
}

fn dense(weights: &DenseWeights, activation: Activation) -> ExpertWeights<'_> {
    ExpertWeights { gate_up: &weights.gate_up, down: &weights.down, activation }
}

impl FeedForwardGradTask {
    /// Replaces the gradient of this router's logits by that of the previous MoE layer's logits; a dense layer passes
    /// it on.
    pub(crate) fn replace_d_router_logits(&self, d_router_logits: &mut Option<Tensor>) {
        if let Self::Moe(task) = self {
            *d_router_logits = task.d_previous_logits().cloned();
        }
    }

    /// Writes the gradients of the block's matrices.
    pub(crate) fn run(self, ctx: &Context, write: Write, grads: &mut FeedForwardWeights) {
        match (self, grads) {
            (Self::Moe(task), FeedForwardWeights::Moe(grads)) => task.run(ctx, WgradTarget::new(write, grads)),
            (Self::Dense(task), FeedForwardWeights::Dense(grads)) => task.run(ctx, write, grads),
            _ => panic!("{WRONG_KIND}"),
        }
    }
}

impl DenseGradTask {
    fn run(self, ctx: &Context, write: Write, grads: &mut DenseWeights) {
        let Self { all_rows, normed, dy, saved, dh, weighed, activation } = self;
        let inputs = WeightGradInputs { x: &normed, dy: &dy, saved: &saved, dh: &dh, weighed: weighed.as_ref() };
        if !is_left_out(&grads.gate_up) {
            let into = ExpertGrads { gate_up: &mut grads.gate_up, down: &mut grads.down };
            experts_weight_grad(ctx, inputs, activation, all_rows.rows(), write, into);
        }
        if let Some((gate_up, down)) = grads.biases.as_mut().filter(|(gate_up, _)| !is_left_out(gate_up)) {
            experts_bias_grad(ctx, &dy, &dh, all_rows.rows(), write, gate_up, down);
        }
    }
}
