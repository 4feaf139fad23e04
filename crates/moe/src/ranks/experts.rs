//! Forward and backward of experts that live on several ranks.

use moeworks_ops::embedding::embedding;
use moeworks_ops::experts::{
    ExpertRows, ExpertsSaved, WeightGradInputs, add_bias_row_weight_grads, combine, experts_backward,
    experts_forward_biased,
};
use moeworks_ops::{Activation, Context};
use moeworks_tensor::Tensor;

use super::{ExpertRanks, Travel};
use crate::{Dispatch, MoeWeights};

/// What backward needs of forward: the rows that arrived, and what the experts held here saved of them.
pub(crate) struct RanksSaved {
    travel: Travel,
    /// `[A, D]`
    x: Tensor,
    experts: ExpertsSaved,
}

/// What [`RanksSaved::backward`] finds.
pub(crate) struct RanksBackward {
    /// `[T, D]` f32: the gradient of the input.
    pub(crate) dx: Tensor,
    /// `[R]`: the gradient of each sent row's weight.
    pub(crate) d_row_weights: Vec<f32>,
    /// What the gradients of the weights held here are computed of.
    pub(crate) task: RanksTask,
}

/// The gradients of the experts held here, still to be computed.
pub(crate) struct RanksTask {
    /// `[A, D]`
    pub(crate) dy: Tensor,
    pub(crate) dh: Tensor,
    row_weights: Vec<f32>,
}

impl RanksSaved {
    /// `y [T, D]` f32 of `x [T, D]`: its rows through their experts wherever these are.
    pub(crate) fn forward(
        ctx: &Context,
        ranks: &ExpertRanks,
        (weights, activation): (&MoeWeights, Activation),
        x: &Tensor,
        (dispatch, num_choices): (&Dispatch, usize),
    ) -> (Tensor, Self) {
        let travel = Travel::of(ranks, dispatch, num_choices);
        let arrived = travel.there(ctx, &embedding(ctx, travel.tokens(), x, x.dtype()));
        let ones = vec![1.0; travel.num_arrived()];
        let (experts, biases) = (weights.experts(activation), weights.expert_biases());
        let (y, experts) = experts_forward_biased(ctx, &arrived, experts, biases, travel.arrived_rows(&ones));
        let outputs = travel.back(ctx, &y);
        let y = combine(ctx, &outputs, travel.sent_rows(), Some(travel.weights()), &[x.rows(), x.cols()]);
        (y, Self { travel, x: arrived, experts })
    }

    /// The rows sent, in whose order the gradients of their weights are.
    pub(crate) fn sent_rows(&self) -> ExpertRows<'_> {
        self.travel.sent_rows()
    }

    /// From `dy [T, D]`, f32 or bf16, the gradient of the output.
    pub(crate) fn backward(
        &self,
        ctx: &Context,
        (weights, activation): (&MoeWeights, Activation),
        dy: &Tensor,
    ) -> RanksBackward {
        let travel = &self.travel;
        let arrived = travel.there(ctx, &embedding(ctx, travel.tokens(), dy, dy.dtype()));
        let column = |values: &[f32]| Tensor::from_slice(ctx.pool(), &[values.len(), 1], values);
        let row_weights = travel.sorted(travel.there(ctx, &column(travel.weights())).f32s());
        let rows = travel.arrived_rows(&row_weights);
        let mut backward = experts_backward(ctx, &arrived, weights.experts(activation), rows, &self.experts);
        if let Some((_, down)) = &weights.biases {
            add_bias_row_weight_grads(&arrived, down, rows, &mut backward.d_row_weights);
        }
        let d_row_weights = column(&travel.unsorted(backward.d_row_weights.f32s()));
        let d_row_weights = travel.back(ctx, &d_row_weights).f32s().to_vec();
        let dx = travel.back(ctx, &backward.dx);
        let dx = combine(ctx, &dx, travel.sent_rows(), None, &[dy.rows(), dy.cols()]);
        let task = RanksTask { dy: arrived, dh: backward.dh, row_weights };
        RanksBackward { dx, d_row_weights, task }
    }

    /// What the weight gradients are computed from, and for which rows.
    pub(crate) fn task_inputs<'a>(&'a self, task: &'a RanksTask) -> (WeightGradInputs<'a>, ExpertRows<'a>) {
        let inputs = WeightGradInputs { x: &self.x, dy: &task.dy, saved: &self.experts, dh: &task.dh };
        (inputs, self.travel.arrived_rows(&task.row_weights))
    }
}
