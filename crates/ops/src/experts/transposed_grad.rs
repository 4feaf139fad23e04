//! The backward pass of experts whose stacks are [transposed](Tensor::transposed), `[E, D, 2 F]` and `[E, F, D]`:
//! products read them as they are stored, and their gradients are written in the same order.

use std::borrow::Cow;

use moeworks_tensor::{DType, Tensor};

use super::weight_grad::{GradOf, weighed_activations};
use super::{
    ExpertRows, ExpertWeights, ExpertsBackward, ExpertsSaved, WeightGradTarget, all_experts, experts_backward, groups,
    used_experts,
};
use crate::Context;
use crate::elementwise::rounded_once;
use crate::gemm::source::Source;
use crate::gemm::{Compute, Form, Group};
use crate::linear::Write;
use crate::parallel::PIECE;
use crate::simd::with_float;

/// The matrices of a stack `[E, N, K]` as factors of the gradient of an input, `dy [R, N]` times `[N, K]`.
pub(super) struct InputGradOperand<'a> {
    pub(super) form: Form,
    stored: &'a Tensor,
    /// Rows of a matrix as it is stored.
    rows: usize,
}

impl<'a> InputGradOperand<'a> {
    /// Describes a stack whose matrices have `rows` rows, N, unless they are stored transposed.
    pub(super) fn new(stack: &'a Tensor, rows: usize) -> Self {
        match stack.as_transposed() {
            Some((base, _)) => Self { form: Form::Nt, stored: base, rows: stack.cols() },
            None => Self { form: Form::Nn, stored: stack, rows },
        }
    }

    /// Returns the matrix of expert `e`.
    pub(super) fn matrix(&self, e: usize) -> Source<'a> {
        Source::rows(self.stored, e * self.rows)
    }
}

/// Returns the gradient of `h [R, 2 F]` with its columns in the order in which `gate_up` is stored.
pub(super) fn in_stored_order<'a>(ctx: &Context, dh: &'a Tensor, gate_up: &Tensor) -> Cow<'a, Tensor> {
    match gate_up.as_transposed() {
        Some((_, true)) => Cow::Owned(interleaved(ctx, dh)),
        _ => Cow::Borrowed(dh),
    }
}

/// Returns the columns of both halves of `dh [R, 2 F]` in turn.
fn interleaved(ctx: &Context, dh: &Tensor) -> Tensor {
    let columns = dh.cols();
    let mut stored = ctx.empty(dh.shape(), dh.dtype());
    if columns == 0 {
        return stored;
    }
    with_float!(dh.dtype(), T => {
        let (dh, rows_per_piece) = (dh.slice::<T>(), (PIECE / columns).max(1));
        ctx.threads().run_pieces(stored.slice_mut::<T>(), rows_per_piece * columns, |index, stored| {
            let rows = dh[index * rows_per_piece * columns..].chunks_exact(columns);
            for (stored, row) in stored.chunks_exact_mut(columns).zip(rows) {
                let (gate, up) = row.split_at(columns / 2);
                for ((pair, &gate), &up) in stored.as_chunks_mut::<2>().0.iter_mut().zip(gate).zip(up) {
                    *pair = [gate, up];
                }
            }
        });
    });
    stored
}

/// Computes [`experts_backward`] and the gradients of transposed stacks, in the order in which these are stored:
/// `[E, D, 2 F]` and `[E, F, D]`.
///
/// # Panics
/// Panics if a stack is not transposed.
pub fn experts_backward_as_stored(
    ctx: &Context,
    x: &Tensor,
    dy: &Tensor,
    weights: ExpertWeights<'_>,
    rows: ExpertRows<'_>,
    saved: &ExpertsSaved,
    target: WeightGradTarget<'_>,
) -> ExpertsBackward {
    let is_transposed = [weights.gate_up, weights.down].iter().all(|stack| stack.as_transposed().is_some());
    assert!(is_transposed, "gradients of experts in the order of transposed stacks");
    let back = experts_backward(ctx, dy, weights, rows, saved);
    let WeightGradTarget { write, of_used, grads } = target;
    let dtype = back.dh.dtype();
    let experts = &if of_used || write == Write::Add { used_experts(rows) } else { all_experts(rows) };
    let of = GradOf { ctx, rows, experts, write, beside: None };
    let a = weighed_activations(ctx, saved, dtype, weights.activation, rows, weights.down.cols());
    down(of, &a, &rounded_once(ctx, dy, dtype), grads.down);
    drop(a);
    gate_up(of, x, &in_stored_order(ctx, &back.dh, weights.gate_up), dtype, grads.gate_up);
    back
}

/// Computes `a^T dy [F, D]` for each expert, from the weighed activations `a [R, F]` and `dy [T, D]`.
fn down(of: GradOf<'_>, a: &Tensor, dy: &Tensor, grad: &mut Tensor) {
    let product = groups(of.experts, |_, range| Group {
        a: Source::rows(a, range.start),
        b: Source::gathered(dy, &of.rows.tokens[range.clone()]),
        rows: a.cols(),
        columns: dy.cols(),
        depth: range.len(),
    });
    of.product(&product, Compute::from_dtype(a.dtype()), a.cols(), dy.cols(), grad);
}

/// Computes `x^T dh [D, 2 F]` for each expert, from `x [T, D]` and `dh [R, 2 F]`.
fn gate_up(of: GradOf<'_>, x: &Tensor, dh: &Tensor, dtype: DType, grad: &mut Tensor) {
    let columns = grad.cols();
    let product = groups(of.experts, |_, range| Group {
        a: Source::gathered(x, &of.rows.tokens[range.clone()]),
        b: Source::rows(dh, range.start),
        rows: x.cols(),
        columns,
        depth: range.len(),
    });
    of.product(&product, Compute::from_dtype(dtype), x.cols(), columns, grad);
}
