//! Shared experts: a dense feed-forward that every token passes, as one expert that gets every token with weight 1. That
//! way the activation is fused into the products as it is for routed experts.

use moeworks_ops::experts::{
    ExpertGrads, ExpertRows, ExpertWeights, ExpertsSaved, WeightGradInputs, experts_backward, experts_forward,
    experts_weight_grad,
};
use moeworks_ops::linear::Write;
use moeworks_ops::{Activation, Context};
use moeworks_tensor::{DType, Tensor};

use crate::SharedWeights;

/// What backward needs of forward.
pub(crate) struct SharedSaved {
    rows: IdentityRows,
    experts: ExpertsSaved,
}

/// What the weights' gradients need of backward.
pub(crate) struct SharedTask {
    dh: Tensor,
}

impl SharedSaved {
    /// `y [T, D]` (f32) of `x [T, D]`.
    pub(crate) fn forward(
        ctx: &Context,
        weights: &SharedWeights,
        activation: Activation,
        x: &Tensor,
    ) -> (Tensor, Self) {
        let rows = IdentityRows::new(ctx, x.rows());
        let (gate_up, down) = stacked(weights);
        let weights = ExpertWeights { gate_up: &gate_up, down: &down, activation };
        let (y, experts) = experts_forward(ctx, x, weights, rows.rows());
        (y, Self { rows, experts })
    }

    /// The gradient of `x`, and the weights' as a task.
    pub(crate) fn backward(
        &self,
        ctx: &Context,
        weights: &SharedWeights,
        activation: Activation,
        dy: &Tensor,
    ) -> (Tensor, SharedTask) {
        let (gate_up, down) = stacked(weights);
        let weights = ExpertWeights { gate_up: &gate_up, down: &down, activation };
        let backward = experts_backward(ctx, dy, weights, self.rows.rows(), &self.experts);
        (backward.dx, SharedTask { dh: backward.dh })
    }
}

impl SharedTask {
    /// Writes or adds the gradients, from the layer's input and the gradient of its output.
    pub(crate) fn run(
        self,
        ctx: &Context,
        saved: &SharedSaved,
        (x, dy): (&Tensor, &Tensor),
        activation: Activation,
        write: Write,
        grads: &mut SharedWeights,
    ) {
        let inputs = WeightGradInputs { x, dy, saved: &saved.experts, dh: &self.dh };
        let into = ExpertGrads { gate_up: &mut grads.gate_up, down: &mut grads.down };
        experts_weight_grad(ctx, inputs, activation, saved.rows.rows(), write, into);
    }
}

/// The weights in the shape of a stack of one expert.
fn stacked(weights: &SharedWeights) -> (Tensor, Tensor) {
    let stack = |tensor: &Tensor| tensor.clone().reshaped(&[1, tensor.rows(), tensor.cols()]);
    (stack(&weights.gate_up), stack(&weights.down))
}

/// Row t is token t, weight 1.
struct IdentityRows {
    offsets: [u32; 2],
    tokens: Tensor,
    weights: Tensor,
}

impl IdentityRows {
    fn new(ctx: &Context, num_tokens: usize) -> Self {
        let mut tokens = ctx.empty(&[num_tokens], DType::U32);
        tokens.u32s_mut().iter_mut().zip(0..).for_each(|(token, t)| *token = t);
        let mut weights = ctx.empty(&[num_tokens], DType::F32);
        weights.f32s_mut().fill(1.0);
        Self { offsets: [0, num_tokens as u32], tokens, weights }
    }

    fn rows(&self) -> ExpertRows<'_> {
        ExpertRows {
            offsets: &self.offsets,
            tokens: self.tokens.u32s(),
            weights: self.weights.f32s(),
            token_rows: self.tokens.u32s(),
            num_choices: 1,
        }
    }
}
