//! Experts whose matrices a file stores transposed, `[E, D, 2 F]` and `[E, F, D]`, the columns of gate and up
//! interleaved (GPT-OSS in floats) or the gate's first (Aria). They are multiplied as they are stored.

use moeworks_tensor::{DType, Tensor};

use super::{Expert, groups};
use crate::activation::activate;
use crate::gemm::source::Source;
use crate::gemm::store::Store;
use crate::gemm::{self, Compute, Finish, Form, Group, Product};
use crate::linear::Write;
use crate::parallel::{Lent, piece_range};
use crate::simd::{Float, kernel};
use crate::{Activation, Context};

/// Multiplies each expert's rows of `a` by its matrix of a transposed stack `[E, K, N]`. With `tokens` the rows are
/// gathered by token, otherwise they are consecutive.
pub(super) fn product(
    ctx: &Context,
    a: &Tensor,
    tokens: Option<&[u32]>,
    base: &Tensor,
    experts: &[Expert],
    epilogue: &dyn Finish,
) {
    let (depth, columns) = (a.cols(), base.cols());
    let groups = groups(experts, |e, range| Group {
        a: tokens.map_or_else(|| Source::rows(a, range.start), |tokens| Source::gathered(a, &tokens[range.clone()])),
        b: Source::rows(base, e * depth),
        rows: range.len(),
        columns,
        depth,
    });
    let compute = Compute::from_dtype(base.dtype());
    gemm::run(ctx, &Product { form: Form::Nn, compute, groups: &groups, is_paired: false }, epilogue);
}

/// The activation between the two products, with the bias before it.
pub(super) struct Between<'a> {
    pub(super) activation: Activation,
    /// `[E, 2 F]`, the gate's first.
    pub(super) bias: Option<&'a [f32]>,
    pub(super) experts: &'a [Expert],
    /// True if the product's columns are those of gate and up in turn.
    pub(super) is_interleaved: bool,
}

/// Computes `h [R, 2 F]`, the gate's F columns first, and its activation `a [R, F]` from the first product.
pub(super) fn activate_pairs<T: Float>(
    ctx: &Context,
    x: &Tensor,
    tokens: Option<&[u32]>,
    base: &Tensor,
    between: &Between<'_>,
    h: &mut Tensor,
    a: &mut Tensor,
) {
    let (rows, af) = (h.rows(), h.cols());
    let mut sums = ctx.empty(&[rows, af], DType::F32);
    let offsets: Vec<_> = between.experts.iter().map(|(_, range)| range.start * af).collect();
    let store = Store { to: Lent::new(sums.f32s_mut()), offsets: &offsets, stride: af, write: Write::Replace };
    product(ctx, x, tokens, base, between.experts, &store);
    let (h, a, sums) = (Lent::new(h.slice_mut::<T>()), Lent::new(a.slice_mut::<T>()), sums.f32s());
    ctx.threads().run(rows.div_ceil(ROWS), |task| {
        for row in piece_range(task, ROWS, rows) {
            let (expert, _) = between.experts[between.experts.partition_point(|(_, range)| range.end <= row)];
            let bias = between.bias.map(|bias| &bias[expert * af..][..af]);
            // SAFETY: each row is one call's alone.
            let (h, a) = unsafe { (h.range(row * af..(row + 1) * af), a.range(row * af / 2..(row + 1) * af / 2)) };
            let sums = RowSums { sums: &sums[row * af..][..af], is_interleaved: between.is_interleaved };
            row_kernel::<T>(ctx.isa(), sums, between.activation, bias, h, a);
        }
    });
}

/// Rows that a task activates.
const ROWS: usize = 4;

/// Columns that are activated at a time.
const PART: usize = 64;

/// The sums of a row, of which those of gate and up are interleaved or not.
#[derive(Clone, Copy)]
struct RowSums<'a> {
    sums: &'a [f32],
    is_interleaved: bool,
}

kernel! {
    fn row_kernel<S: Level, T: Float>(
        from: RowSums<'_>,
        activation: Activation,
        bias: Option<&[f32]>,
        h: &mut [T],
        a: &mut [T],
    ) {
        let f = a.len();
        let (gate_to, up_to) = h.split_at_mut(f);
        for start in (0..f).step_by(PART) {
            let end = (start + PART).min(f);
            let mut parts = [[0.0; PART]; 2];
            for (half, part) in parts.iter_mut().enumerate() {
                if from.is_interleaved {
                    for (to, pair) in part.iter_mut().zip(from.sums[2 * start..2 * end].as_chunks::<2>().0) {
                        *to = pair[half];
                    }
                } else {
                    part[..end - start].copy_from_slice(&from.sums[half * f + start..half * f + end]);
                }
                if let Some(bias) = bias {
                    part.iter_mut().zip(&bias[half * f + start..half * f + end]).for_each(|(x, bias)| *x += bias);
                }
            }
            let [mut gate, mut up] = parts;
            // As in the other way the activation is taken of what is saved.
            for (to, part) in [(&mut gate_to[start..end], &mut gate), (&mut up_to[start..end], &mut up)] {
                for (to, x) in to.iter_mut().zip(part) {
                    *to = T::store(*x);
                    *x = to.load();
                }
            }
            activate::<S>(activation, &mut gate, &up);
            a[start..end].iter_mut().zip(&gate).for_each(|(to, x)| *to = T::store(*x));
        }
    }
}

#[cfg(test)]
#[path = "transposed_tests.rs"]
mod tests;
