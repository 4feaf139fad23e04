//! The gradients of the experts' weights, alone or together with those of their inputs.

use moeworks_tensor::{DType, Tensor};

use super::{Expert, ExpertRows, ExpertsSaved, activate_row, all_experts, groups, used_experts};
use crate::cuda::{self, On};
use crate::elementwise::rounded_once;
use crate::gemm::source::Source;
use crate::gemm::{Compute, Finish, Form, Group, Product};
use crate::linear::Write;
use crate::parallel::{Lent, PIECE};
use crate::simd::with_float;
use crate::skinny_gemm::{Gradients, product_with_gradients, weight_gradients};
use crate::{Activation, Context};

/// Buffers for the gradients of [`ExpertWeights`](super::ExpertWeights), same shapes. f32, or bf16 where half the
/// bytes are worth a rounding: sums are f32 and rounded once.
pub struct ExpertGrads<'a> {
    /// The gradient of `gate_up`.
    pub gate_up: &'a mut Tensor,
    /// The gradient of `down`.
    pub down: &'a mut Tensor,
}

/// The inputs of [`experts_weight_grad`].
#[derive(Clone, Copy)]
pub struct WeightGradInputs<'a> {
    /// `[T, D]`: the layer's input.
    pub x: &'a Tensor,
    /// `[T, D]`: the gradient of its output.
    pub dy: &'a Tensor,
    /// The activations that forward saved.
    pub saved: &'a ExpertsSaved,
    /// `[R, A F]`: the gradient of `h` that backward returned.
    pub dh: &'a Tensor,
    /// `[R, F]`: [`ExpertsBackward::weighed`](super::ExpertsBackward::weighed). Without it the host computes.
    pub weighed: Option<&'a Tensor>,
}

/// Computes the gradients of the weights. With [`Write::Replace`] an expert without rows gets zeros; with
/// [`Write::Add`] it is not touched.
pub fn experts_weight_grad(
    ctx: &Context,
    inputs: WeightGradInputs<'_>,
    activation: Activation,
    rows: ExpertRows<'_>,
    write: Write,
    grads: ExpertGrads<'_>,
) {
    weight_grad(ctx, inputs, activation, rows, write == Write::Add, write, grads);
}

/// Computes [`experts_weight_grad`] with [`Write::Replace`], but leaves the gradients of experts without rows as they
/// are.
///
/// For callers who know that these are zeros, or who do not read them. With few tokens most of the time of replacing
/// goes into zeros.
pub fn experts_weight_grad_of_used(
    ctx: &Context,
    inputs: WeightGradInputs<'_>,
    activation: Activation,
    rows: ExpertRows<'_>,
    grads: ExpertGrads<'_>,
) {
    weight_grad(ctx, inputs, activation, rows, true, Write::Replace, grads);
}

/// Computes the gradients of the weights. With `keeps_unused` the gradients of experts without rows are left as they
/// are.
pub(super) fn weight_grad(
    ctx: &Context,
    inputs: WeightGradInputs<'_>,
    activation: Activation,
    rows: ExpertRows<'_>,
    keeps_unused: bool,
    write: Write,
    grads: ExpertGrads<'_>,
) {
    let WeightGradInputs { x, dy, saved, dh, weighed } = inputs;
    let (d, f) = (x.cols(), grads.down.cols());
    let af = f * activation.num_inputs();
    let (r, dtype) = (rows.tokens.len(), dh.dtype());
    assert_eq!((saved.h.len(), dh.len(), dy.cols()), (r * af, r * af, d), "weight gradient of experts");
    if let Some((on, weighed)) = On::of(ctx).zip(weighed) {
        let rows = cuda::experts::WgradRows { rows, keeps_unused };
        return cuda::experts::weight_grad(on, inputs, weighed, activation, rows, write, grads);
    }
    // An expert without rows is a product without depth: zeros.
    let experts = &if keeps_unused { used_experts(rows) } else { all_experts(rows) };
    let dy = &*rounded_once(ctx, dy, dtype);
    let of = GradOf { ctx, rows, experts, write, beside: None };
    let a = weighed_activations(ctx, saved, dtype, activation, rows, f);
    of.down(dy, &a, grads.down);
    drop(a);
    of.gate_up(dh, x, af, grads.gate_up);
}

/// Returns each row's weight times its activations, `[R, F]`.
pub(super) fn weighed_activations(
    ctx: &Context,
    saved: &ExpertsSaved,
    dtype: DType,
    activation: Activation,
    rows: ExpertRows<'_>,
    f: usize,
) -> Tensor {
    let af = f * activation.num_inputs();
    let mut a = ctx.empty(&[rows.tokens.len(), f], dtype);
    with_float!(dtype, T => {
        let (isa, h) = (ctx.isa(), saved.h.slice::<T>());
        let rows_per_piece = (PIECE / f.max(1)).max(1);
        ctx.threads().run_pieces(a.slice_mut::<T>(), rows_per_piece * f.max(1), |index, a| {
            let first = index * rows_per_piece;
            let rows = h[first * af..].chunks_exact(af).zip(&rows.weights[first..]);
            for ((h, &weight), a) in rows.zip(a.chunks_exact_mut(f)) {
                activate_row::<T>(isa, (activation, weight), h, a);
            }
        });
    });
    a
}

/// The parts that the gradients of both stacks of matrices have in common.
#[derive(Clone, Copy)]
pub(super) struct GradOf<'a> {
    pub(super) ctx: &'a Context,
    pub(super) rows: ExpertRows<'a>,
    /// The experts whose gradients are written.
    pub(super) experts: &'a [Expert],
    pub(super) write: Write,
    /// The product `A B` of the same rows with the matrices whose gradients these are, and its epilogue, where both
    /// are computed together.
    pub(super) beside: Option<(&'a Product<'a>, &'a dyn Finish)>,
}

impl GradOf<'_> {
    /// Computes `dy^T a` for each expert, from `dy [T, D]` and the weighed activations `a [R, F]`.
    pub(super) fn down(self, dy: &Tensor, a: &Tensor, grad: &mut Tensor) {
        let product = groups(self.experts, |_, range| Group {
            a: Source::gathered(dy, &self.rows.tokens[range.clone()]),
            b: Source::rows(a, range.start),
            rows: dy.cols(),
            columns: a.cols(),
            depth: range.len(),
        });
        self.product(&product, Compute::from_dtype(a.dtype()), dy.cols(), a.cols(), grad);
    }

    /// Computes `dh^T x` for each expert, from `dh [R, A F]` and `x [T, D]`. Without rows `dh` may have another
    /// shape, so `af` is passed.
    pub(super) fn gate_up(self, dh: &Tensor, x: &Tensor, af: usize, grad: &mut Tensor) {
        let product = groups(self.experts, |_, range| Group {
            a: Source::rows(dh, range.start),
            b: Source::gathered(x, &self.rows.tokens[range.clone()]),
            rows: af,
            columns: x.cols(),
            depth: range.len(),
        });
        self.product(&product, Compute::from_dtype(dh.dtype()), af, x.cols(), grad);
    }

    /// Computes the product of each expert's group, a gradient of `rows` by `columns`.
    pub(super) fn product(
        self,
        groups: &[Group<'_>],
        compute: Compute,
        rows: usize,
        columns: usize,
        grad: &mut Tensor,
    ) {
        let offsets: Vec<_> = self.experts.iter().map(|(e, _)| e * rows * columns).collect();
        let product = Product { form: Form::Tn, compute, groups, is_paired: false };
        with_float!(grad.dtype(), T => {
            let to = Lent::new(grad.slice_mut::<T>());
            let gradients = Gradients { to, offsets: &offsets, stride: columns, write: self.write };
            match self.beside {
                Some((forward, epilogue)) => {
                    product_with_gradients(self.ctx, forward, epilogue, &product, gradients);
                }
                None => weight_gradients(self.ctx, &product, gradients),
            }
        });
    }
}
