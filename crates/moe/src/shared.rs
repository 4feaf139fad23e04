//! Shared experts: a dense feed-forward that every token passes, as one expert that gets every token with weight 1. That
//! way the activation is fused into the products as it is for routed experts.

use moeworks_ops::elementwise::{add_assign, cast};
use moeworks_ops::experts::{
    ExpertGrads, ExpertRows, ExpertWeights, ExpertsSaved, WeightGradInputs, experts_backward, experts_forward,
    experts_weight_grad,
};
use moeworks_ops::linear::{Write, linear, linear_backward_input, linear_backward_weight};
use moeworks_ops::{Activation, Context};
use moeworks_tensor::{DType, Tensor};

use crate::SharedWeights;

/// What backward needs of forward.
pub(crate) struct SharedSaved {
    rows: IdentityRows,
    experts: ExpertsSaved,
    gated: Option<Gated>,
}

/// Where the output is multiplied by a gate: the gates `[T]` and the output before.
struct Gated {
    gates: Vec<f32>,
    y: Tensor,
}

/// What the weights' gradients need of backward.
pub(crate) struct SharedTask {
    dh: Tensor,
    weighed: Option<Tensor>,
    /// The gradient of the experts' output, before the gate.
    dy: Option<Tensor>,
    /// The gradient of the gate's logits, `[T, 1]`.
    d_logits: Option<Tensor>,
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
        let stack = ExpertWeights { gate_up: &gate_up, down: &down, activation };
        let (y, experts) = experts_forward(ctx, x, stack, rows.rows());
        let Some(gate) = &weights.gate else { return (y, Self { rows, experts, gated: None }) };
        let gates: Vec<f32> =
            linear(ctx, x, gate, DType::F32).f32s().iter().map(|l| 1.0 / (1.0 + (-l).exp())).collect();
        let gated_y = scaled_rows(ctx, &y, &gates);
        (gated_y, Self { rows, experts, gated: Some(Gated { gates, y }) })
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
        let stack = ExpertWeights { gate_up: &gate_up, down: &down, activation };
        let (Some(gated), Some(gate)) = (&self.gated, &weights.gate) else {
            let backward = experts_backward(ctx, dy, stack, self.rows.rows(), &self.experts);
            return (backward.dx, SharedTask { dh: backward.dh, weighed: backward.weighed, dy: None, d_logits: None });
        };
        let d_logits = gated.logits_backward(ctx, dy);
        let dy = scaled_rows(ctx, dy, &gated.gates);
        let backward = experts_backward(ctx, &dy, stack, self.rows.rows(), &self.experts);
        let mut dx = backward.dx;
        add_assign(ctx, &mut dx, &linear_backward_input(ctx, &d_logits, gate, DType::F32));
        (dx, SharedTask { dh: backward.dh, weighed: backward.weighed, dy: Some(dy), d_logits: Some(d_logits) })
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
        let dy = self.dy.as_ref().unwrap_or(dy);
        let weighed = self.weighed.as_ref();
        let inputs = WeightGradInputs { x, dy, saved: &saved.experts, dh: &self.dh, weighed };
        let into = ExpertGrads { gate_up: &mut grads.gate_up, down: &mut grads.down };
        experts_weight_grad(ctx, inputs, activation, saved.rows.rows(), write, into);
        if let (Some(d_logits), Some(gate)) = (&self.d_logits, &mut grads.gate) {
            linear_backward_weight(ctx, d_logits, x, DType::F32, write, gate);
        }
    }
}

impl Gated {
    /// The gradient of the gate's logits: `<dy, y> g (1 - g)`.
    fn logits_backward(&self, ctx: &Context, dy: &Tensor) -> Tensor {
        let (dy, y, width) = (dy.to_f32_vec(), self.y.f32s(), self.y.cols());
        let mut d_logits = ctx.empty(&[self.gates.len(), 1], DType::F32);
        let rows = dy.chunks_exact(width).zip(y.chunks_exact(width)).zip(&self.gates);
        for (d_logit, ((dy, y), gate)) in d_logits.f32s_mut().iter_mut().zip(rows) {
            let dot: f32 = dy.iter().zip(y).map(|(dy, y)| dy * y).sum();
            *d_logit = dot * gate * (1.0 - gate);
        }
        d_logits
    }
}

/// The rows of `x`, each times its factor, in f32.
fn scaled_rows(ctx: &Context, x: &Tensor, factors: &[f32]) -> Tensor {
    let mut y = cast(ctx, x, DType::F32);
    let width = y.cols();
    for (row, factor) in y.f32s_mut().chunks_exact_mut(width).zip(factors) {
        row.iter_mut().for_each(|y| *y *= factor);
    }
    y
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
        ExpertRows::new(&self.offsets, &self.tokens, &self.weights, &self.tokens, 1)
    }
}
