//! Shared experts: a dense feed-forward that every token passes through. It runs as a single expert that gets every
//! token with weight 1, or with the weight of a sigmoid gate (Qwen2-MoE). This reuses the experts' fused activation,
//! and the gate's gradient is the gradient of a row's weight.

use moeworks_ops::elementwise::{add_assign, sigmoid, sigmoid_backward};
use moeworks_ops::experts::{
    AllRows, ExpertGrads, ExpertWeights, ExpertsBackward, ExpertsSaved, ForwardOptions, WeightGradInputs,
    experts_backward, experts_forward_with, experts_weight_grad,
};
use moeworks_ops::linear::{Write, linear, linear_backward_input, linear_backward_weight};
use moeworks_ops::{Activation, Context};
use moeworks_tensor::{DType, Tensor};

use crate::{SharedWeights, is_left_out};

/// The state that backward needs from forward.
pub(crate) struct SharedSaved {
    /// All tokens as rows, each weighted by its gate if there is one.
    rows: AllRows,
    /// The experts' saved state; none after a forward-only pass.
    experts: Option<ExpertsSaved>,
}

/// The state that the weights' gradients need from backward.
pub(crate) struct SharedTask {
    dh: Tensor,
    weighed: Option<Tensor>,
    /// `[T, 1]`: the gradient of the gate's logits.
    d_logits: Option<Tensor>,
}

/// The inputs of a forward pass.
#[derive(Clone, Copy)]
pub(crate) struct SharedPass<'a> {
    pub(crate) x: &'a Tensor,
    /// The sum that the output is added to; none for the output alone.
    pub(crate) base: Option<&'a Tensor>,
    pub(crate) activation: Activation,
    pub(crate) is_forward_only: bool,
}

/// The inputs of the weights' gradients.
#[derive(Clone, Copy)]
pub(crate) struct SharedInputs<'a> {
    pub(crate) x: &'a Tensor,
    pub(crate) dy: &'a Tensor,
    pub(crate) activation: Activation,
}

impl SharedSaved {
    /// Computes the shared experts' output for `x [T, D]`, added to `base [T, D]`, f32, if there is one.
    pub(crate) fn forward(ctx: &Context, weights: &SharedWeights, pass: SharedPass<'_>) -> (Tensor, Self) {
        let SharedPass { x, base, activation, is_forward_only } = pass;
        let mut rows = AllRows::new(ctx, x.rows());
        if let Some(gate) = &weights.gate {
            rows = rows.weighed(sigmoid(ctx, &linear(ctx, x, gate, DType::F32)));
        }
        let (gate_up, down) = stacked(weights);
        let stack = ExpertWeights { gate_up: &gate_up, down: &down, activation };
        let options = ForwardOptions { biases: None, base, is_forward_only };
        let (y, experts) = experts_forward_with(ctx, x, stack, rows.rows(), options);
        (y, Self { rows, experts })
    }

    /// Returns the gradient of `x` and a task for the gradients of the weights.
    pub(crate) fn backward(
        &self,
        ctx: &Context,
        weights: &SharedWeights,
        activation: Activation,
        dy: &Tensor,
    ) -> (Tensor, SharedTask) {
        let (gate_up, down) = stacked(weights);
        let stack = ExpertWeights { gate_up: &gate_up, down: &down, activation };
        let ExpertsBackward { mut dx, d_row_weights, dh, weighed } =
            experts_backward(ctx, dy, stack, self.rows.rows(), kept(&self.experts));
        let d_logits = weights.gate.as_ref().map(|gate| {
            let gates = self.rows.weights().clone().reshaped(&[dy.rows(), 1]);
            let d_logits = sigmoid_backward(ctx, &d_row_weights, &gates);
            add_assign(ctx, &mut dx, &linear_backward_input(ctx, &d_logits, gate, DType::F32));
            d_logits
        });
        (dx, SharedTask { dh, weighed, d_logits })
    }
}

impl SharedTask {
    /// Writes or adds the gradients.
    pub(crate) fn run(
        self,
        ctx: &Context,
        saved: &SharedSaved,
        SharedInputs { x, dy, activation }: SharedInputs<'_>,
        write: Write,
        grads: &mut SharedWeights,
    ) {
        let weighed = self.weighed.as_ref();
        let inputs = WeightGradInputs { x, dy, saved: kept(&saved.experts), dh: &self.dh, weighed };
        if !is_left_out(&grads.gate_up) {
            let into = ExpertGrads { gate_up: &mut grads.gate_up, down: &mut grads.down };
            experts_weight_grad(ctx, inputs, activation, saved.rows.rows(), write, into);
        }
        if let (Some(d_logits), Some(gate)) = (&self.d_logits, &mut grads.gate) {
            linear_backward_weight(ctx, d_logits, x, DType::F32, write, gate);
        }
    }
}

/// Returns the state that a backward pass needs. Panics after a forward-only pass, which has no backward pass.
pub(crate) fn kept(saved: &Option<ExpertsSaved>) -> &ExpertsSaved {
    saved.as_ref().expect("a pass that was to be forward only has no backward pass")
}

/// Reshapes the weights to a stack of one expert.
fn stacked(weights: &SharedWeights) -> (Tensor, Tensor) {
    let stack = |tensor: &Tensor| tensor.clone().reshaped(&[1, tensor.rows(), tensor.cols()]);
    (stack(&weights.gate_up), stack(&weights.down))
}
