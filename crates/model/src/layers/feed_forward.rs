//! The feed-forward block: an MoE layer, or a dense network, which is one expert that takes every row with weight 1.

use moeworks_moe::{
    BackwardInput, ForwardInput, LayerStats, LossGrad, MoeGradTask, MoeLayer, MoeSaved, RouterInput, WgradTarget,
    is_left_out,
};
use moeworks_ops::experts::{
    ExpertBiases, ExpertGrads, ExpertWeights, ExpertsSaved, WeightGradInputs, experts_backward, experts_bias_grad,
    experts_forward_onto, experts_weight_grad,
};
use moeworks_ops::linear::Write;
use moeworks_ops::{Activation, Context};
use moeworks_tensor::{DType, Tensor};

use super::Pass;
use super::attention::{WRONG_KIND, add_residual, scaled};
use super::norm::Norm;
use crate::tensor_ranks::{Run, TensorRanks};
use crate::weights::{DenseWeights, FeedForwardWeights, LayerWeights, NormWeights};

/// A feed-forward block.
#[derive(Clone, Debug)]
pub(crate) struct FeedForwardBlock {
    /// The routed layer; none if this layer is dense.
    pub(crate) moe: Option<MoeLayer>,
    pub(crate) activation: Activation,
    pub(crate) norm: Norm,
    /// Multiplies what the block adds to the residual stream.
    pub(crate) residual_multiplier: f32,
    /// Whether ranks that make the same pass have some hidden numbers each, in a dense layer.
    pub(crate) is_cut: bool,
}

/// What backward needs of forward, besides the block's input.
pub(crate) struct FeedForwardSaved {
    norm: Tensor,
    normed: Tensor,
    inner: InnerSaved,
}

enum InnerSaved {
    /// Nothing where no backward pass was to follow.
    Dense(Option<ExpertsSaved>),
    Moe(MoeSaved, IsWhole),
}

/// Whether the ranks of a tensor-parallel group took whole sequences through a layer with experts.
type IsWhole = bool;

impl FeedForwardSaved {
    /// What the router decided; none in a dense layer.
    pub(crate) fn moe(&self) -> Option<&MoeSaved> {
        match &self.inner {
            InnerSaved::Dense(_) => None,
            InnerSaved::Moe(saved, _) => Some(saved),
        }
    }

    /// What the router did; none in a dense layer.
    pub(crate) fn stats(&self) -> Option<LayerStats> {
        self.moe().map(MoeSaved::stats)
    }
}

/// The gradients of the block's matrices, still to be computed.
#[allow(clippy::large_enum_variant)] // lives for a moment: nothing is gained by another allocation
pub(crate) enum FeedForwardGradTask {
    Dense {
        normed: Tensor,
        dy: Tensor,
        saved: ExpertsSaved,
        dh: Tensor,
        weighed: Option<Tensor>,
        activation: Activation,
    },
    Moe(MoeGradTask),
}

impl FeedForwardBlock {
    /// The ranks that make the same pass and have a part in it: in a dense layer only where it is cut.
    fn ranks<'a>(&self, pass: &Pass<'a>) -> Option<&'a TensorRanks> {
        pass.tensor.filter(|_| self.moe.is_some() || self.is_cut)
    }

    /// `x [T, D]` f32 to `y [T, D]` f32.
    pub(crate) fn forward(
        &self,
        pass: &Pass<'_>,
        weights: &LayerWeights,
        x: &Tensor,
        input: &RouterInput<'_>,
    ) -> (Tensor, FeedForwardSaved) {
        let ctx = pass.ctx;
        let dtype = match &weights.feed_forward {
            FeedForwardWeights::Dense(w) => w.gate_up.dtype().of_activations(),
            FeedForwardWeights::Moe(w) => w.gate_up.dtype().of_activations(),
        };
        let (normed, norm) = self.norm.forward(ctx, &weights.feed_forward_norm, x, dtype);
        // What the block adds to, where nothing has to be done to the sum first.
        let ranks = self.ranks(pass);
        let base = (self.residual_multiplier == 1.0 && ranks.is_none()).then_some(x);
        let (mut y, inner) = match (&weights.feed_forward, &self.moe) {
            (FeedForwardWeights::Moe(w), Some(moe)) => {
                let is_whole = input.seq_len > 0;
                let (y, saved) = match Run::of(pass, is_whole) {
                    None => moe.forward(ctx, w, &normed, ForwardInput { router: *input, base }),
                    Some(run) => {
                        let (y, saved) = moe.forward(ctx, w, &run.of_rows(ctx, &normed), &run.of_input(input));
                        (run.whole(ctx, &y), saved)
                    }
                };
                (y, InnerSaved::Moe(saved, is_whole))
            }
            (FeedForwardWeights::Dense(w), None) => {
                let rows = pass.all_rows.rows();
                // The bias behind a sum over ranks is added once.
                let zeros = ranks.map(|_| ctx.zeros(&[1, normed.cols()], DType::F32));
                let biases = w.biases.as_ref();
                let of_part =
                    biases.map(|(gate_up, down)| ExpertBiases { gate_up, down: zeros.as_ref().unwrap_or(down) });
                let experts = dense(w, self.activation);
                let options = (base, input.is_forward_only);
                let (mut y, saved) = experts_forward_onto(ctx, &normed, experts, of_part, rows, options);
                if let Some(ranks) = ranks {
                    let bias = biases.map(|(_, down)| down.clone().reshaped(&[normed.cols()]));
                    ranks.sum_biased(ctx, &mut y, bias.as_ref());
                }
                (y, InnerSaved::Dense(saved))
            }
            _ => panic!("{WRONG_KIND}"),
        };
        if base.is_none() {
            add_residual(ctx, &mut y, self.residual_multiplier, x);
        }
        (y, FeedForwardSaved { norm, normed, inner })
    }

    /// The experts `[T, K]` that a residual stream `x [T, D]` would go to here, if this layer has any and its router tells.
    pub(crate) fn foresee(
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

    /// Sends experts that were foreseen to a GPU before they are wanted.
    pub(crate) fn send_ahead(&self, ctx: &Context, weights: &LayerWeights, ids: &Tensor) {
        if let (FeedForwardWeights::Moe(w), Some(moe)) = (&weights.feed_forward, &self.moe) {
            moe.prefetch_experts(ctx, w, ids);
        }
    }

    /// The gradient of `x` from that of `y`, and the task that finds the matrices' gradients but for those that are better found at
    /// once, which are written to `grads`. The norm weight's gradient is written to `d_norm`, both as `write` says. `dnext` is the
    /// gradient of the router's logits by the next MoE layer.
    pub(crate) fn backward(
        &self,
        pass: &Pass<'_>,
        weights: &LayerWeights,
        (x, saved): (&Tensor, FeedForwardSaved),
        (dy, dnext, loss_grad): (&Tensor, Option<&Tensor>, Option<&LossGrad>),
        write: Write,
        (d_norm, grads): (&mut NormWeights, &mut FeedForwardWeights),
    ) -> (Tensor, FeedForwardGradTask) {
        let ctx = pass.ctx;
        let FeedForwardSaved { norm, normed, inner } = saved;
        let d_block = scaled(ctx, dy, self.residual_multiplier);
        let (d_normed, task) = match (inner, &weights.feed_forward, &self.moe, loss_grad) {
            (InnerSaved::Moe(saved, is_whole), FeedForwardWeights::Moe(w), Some(moe), Some(loss_grad)) => {
                let run = Run::of(pass, is_whole);
                let dy = run.as_ref().map_or_else(|| d_block.clone(), |run| run.of_rows(ctx, &d_block));
                let FeedForwardWeights::Moe(grads) = grads else { panic!("{WRONG_KIND}") };
                let wgrad = (!is_left_out(&grads.gate_up)).then_some(WgradTarget::new(write, grads));
                let input = BackwardInput { losses: loss_grad, d_next_router_logits: dnext, wgrad };
                let (dx, task) = moe.backward(ctx, w, &saved, &dy, input);
                let dx = match run {
                    None => dx,
                    Some(run) => run.whole(ctx, &dx),
                };
                (dx, FeedForwardGradTask::Moe(task))
            }
            (InnerSaved::Dense(saved), FeedForwardWeights::Dense(w), None, _) => {
                let saved = saved.expect("a pass that was to be forward only has no backward pass");
                let rows = pass.all_rows.rows();
                let mut back = experts_backward(ctx, &d_block, dense(w, self.activation), rows, &saved);
                if let Some(ranks) = self.ranks(pass) {
                    ranks.sum(&mut back.dx);
                }
                let activation = self.activation;
                let (dh, weighed) = (back.dh, back.weighed);
                let task = FeedForwardGradTask::Dense { normed, dy: d_block, saved, dh, weighed, activation };
                (back.dx, task)
            }
            _ => panic!("{WRONG_KIND}"),
        };
        let dx =
            self.norm.backward_onto(ctx, &weights.feed_forward_norm, (x, &norm), (&d_normed, Some(dy)), write, d_norm);
        (dx, task)
    }
}

fn dense(weights: &DenseWeights, activation: Activation) -> ExpertWeights<'_> {
    ExpertWeights { gate_up: &weights.gate_up, down: &weights.down, activation }
}

impl FeedForwardGradTask {
    /// Makes of the gradient of this router's logits by the next one's that of the logits of the MoE layer before; a dense layer
    /// hands it on.
    pub(crate) fn replace_dnext(&self, dnext: &mut Option<Tensor>) {
        if let Self::Moe(task) = self {
            *dnext = task.d_previous_logits().cloned();
        }
    }

    /// Writes the gradients of the block's matrices.
    pub(crate) fn run(self, pass: &Pass<'_>, write: Write, grads: &mut FeedForwardWeights) {
        match (self, grads) {
            (Self::Moe(task), FeedForwardWeights::Moe(grads)) => task.run(pass.ctx, WgradTarget::new(write, grads)),
            (Self::Dense { normed, dy, saved, dh, weighed, activation }, FeedForwardWeights::Dense(grads)) => {
                let weighed = weighed.as_ref();
                let inputs = WeightGradInputs { x: &normed, dy: &dy, saved: &saved, dh: &dh, weighed };
                let rows = pass.all_rows.rows();
                if !is_left_out(&grads.gate_up) {
                    let into = ExpertGrads { gate_up: &mut grads.gate_up, down: &mut grads.down };
                    experts_weight_grad(pass.ctx, inputs, activation, rows, write, into);
                }
                if let Some((gate_up, down)) = grads.biases.as_mut().filter(|(gate_up, _)| !is_left_out(gate_up)) {
                    experts_bias_grad(pass.ctx, (&dy, &dh), rows, write, (gate_up, down));
                }
            }
            _ => panic!("{WRONG_KIND}"),
        }
    }
}
