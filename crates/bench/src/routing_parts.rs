//! The work of an MoE layer except its experts: `"part": "routing"` of `moeworks bench moe`.
//!
//! Uses the operations of the layer itself (a softmax of linear logits, the K largest). Forward: logits, choices and
//! their sums, the counting sort, and the sum of rows after the experts. With `"both"` also backward: gradients of
//! the choices' weights, of the logits, of the router and of its input, and the sum of rows of the inputs' gradients.
//! Rows are gathered within the experts' products, which is not included.

use moeworks_ops::counting_sort::sort_all_choices;
use moeworks_ops::experts::{choice_weight_grads, combine};
use moeworks_ops::linear::Write;
use moeworks_ops::logits::{logits, logits_backward_input_add, logits_backward_weight};
use moeworks_ops::top_k::{ScoreGrads, TopK, choice_sums, softmax_top_k_backward, softmax_top_k_with};
use moeworks_ops::{Context, elementwise};
use moeworks_tensor::{DType, Purpose, Random, Tensor};

use crate::moe_layer::LayerShape;

/// The operands: inputs, the router, the experts' outputs for the rows of choices, and the gradients of their
/// weights.
pub(crate) struct Routed {
    shape: LayerShape,
    x: Tensor,
    router: Tensor,
    outputs: Tensor,
    d_row_weights: Tensor,
}

impl Routed {
    /// Draws operands for `tokens` tokens at random.
    pub(crate) fn new(ctx: &Context, shape: LayerShape, tokens: usize) -> Self {
        let draw = |stream, rows: usize, columns: usize, dtype| {
            let mut tensor = ctx.empty(&[rows, columns], DType::F32);
            elementwise::fill_normal(ctx, &Random::new(0, Purpose::Test, stream), 1.0, &mut tensor);
            elementwise::cast(ctx, &tensor, dtype)
        };
        let rows = tokens * shape.k;
        Self {
            shape,
            x: draw(0, tokens, shape.d, shape.dtype),
            router: draw(1, shape.e, shape.d, DType::F32),
            outputs: draw(2, rows, shape.d, shape.dtype),
            d_row_weights: draw(3, 1, rows, DType::F32).reshaped(&[rows]),
        }
    }

    /// Runs the forward part, and with `is_both` the backward part.
    pub(crate) fn pass(&self, ctx: &Context, is_both: bool) {
        let LayerShape { d, e, k, .. } = self.shape;
        let size = [self.x.rows(), d];
        let scores = softmax_top_k_with(ctx, logits(ctx, &self.x, &self.router), k, true, is_both);
        let sums = is_both.then(|| choice_sums(ctx, &scores.ids, &scores.weights, e));
        let sorted = sort_all_choices(ctx, &scores.ids, &scores.weights, e);
        let rows = sorted.rows();
        drop(combine(ctx, &self.outputs, rows, Some(rows.weights), &size));
        if is_both {
            let mut dx = combine(ctx, &self.outputs, rows, None, &size);
            let dweights = choice_weight_grads(ctx, rows, &self.d_row_weights);
            self.router_backward(ctx, &scores, &dweights, &mut dx);
        }
        drop(sums);
    }

    fn router_backward(&self, ctx: &Context, scores: &TopK, dweights: &Tensor, dx: &mut Tensor) {
        let grads = ScoreGrads { weights: dweights.into(), probs: &[], lse_squared: 0.0 };
        let dlogits = softmax_top_k_backward(ctx, scores, true, grads);
        logits_backward_input_add(ctx, &dlogits, &self.router, self.shape.dtype, dx);
        let mut dw = ctx.empty(self.router.shape(), DType::F32);
        logits_backward_weight(ctx, &dlogits, &self.x, Write::Replace, &mut dw);
    }
}
