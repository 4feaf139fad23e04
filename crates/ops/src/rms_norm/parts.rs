//! RMSNorm over a width that is sharded across tensor-parallel ranks. Forward and backward each all-reduce one number
//! for each row, the sum over ranks of [`row_products`].

use moeworks_tensor::{DType, Tensor};

use super::{RmsNormInputs, Rows};
use crate::Context;
use crate::linear::Write;
use crate::parallel::Lent;
use crate::simd::{Float, LANES, kernel, sum_lanes, with_float};

/// Returns `sum over columns of a b weight` for each row, `[rows]` f32; without `weight`, which is as wide as a row,
/// of `a b`. Forward needs it of `x` and `x`, backward of `dy`, `x` and the weight.
#[must_use]
pub fn row_products(ctx: &Context, a: &Tensor, b: &Tensor, width: usize, weight: Option<&Tensor>) -> Tensor {
    let weight = weight.map_or_else(|| vec![1.0; width], Tensor::to_f32_vec);
    let rows = Rows::wide(a, width);
    assert_eq!((a.len(), weight.len()), (b.len(), width), "row_products: {:?}, {:?}", a.shape(), b.shape());
    let mut sums = ctx.empty(&[rows.count], DType::F32);
    with_float!(a.dtype(), A => with_float!(b.dtype(), B => {
        let (a, b) = (a.slice::<A>(), b.slice::<B>());
        let sums = Lent::new(sums.f32s_mut());
        ctx.threads().run(rows.num_tasks(), |task| {
            let (range, elements) = rows.task(task);
            // SAFETY: the tasks' rows do not overlap.
            let sums = unsafe { sums.range(range) };
            products_kernel::<A, B>(ctx.isa(), &a[elements.clone()], &b[elements], &weight, sums);
        });
    }));
    sums
}

kernel! {
    fn products_kernel<S: Level, A: Float, B: Float>(a: &[A], b: &[B], weight: &[f32], sums: &mut [f32]) {
        let width = weight.len();
        for ((a, b), sum) in a.chunks_exact(width).zip(b.chunks_exact(width)).zip(sums) {
            let mut lanes = [0.0; LANES];
            let columns = a.chunks(LANES).zip(b.chunks(LANES)).zip(weight.chunks(LANES));
            for ((a, b), weight) in columns {
                for (((lane, a), b), weight) in lanes.iter_mut().zip(a).zip(b).zip(weight) {
                    *lane = S::mul_add(a.load() * weight, b.load(), *lane);
                }
            }
            *sum = sum_lanes(lanes);
        }
    }
}

/// Computes this rank's columns of [`rms_norm`](super::rms_norm) from `inv_rms` `[rows]`, the `1 / rms` of whole
/// rows. Returns `y` in the shape of `x`.
#[must_use]
pub fn rms_norm_part(ctx: &Context, x: &Tensor, weight: &Tensor, inv_rms: &Tensor, out: DType) -> Tensor {
    let rows = Rows::new(x, weight);
    assert_eq!(inv_rms.len(), rows.count, "rms_norm_part: inv_rms");
    let (weight, inv_rms) = (weight.to_f32_vec(), inv_rms.f32s());
    let mut y = ctx.empty(x.shape(), out);
    with_float!(x.dtype(), X => with_float!(out, Y => {
        let (x, y) = (x.slice::<X>(), Lent::new(y.slice_mut::<Y>()));
        ctx.threads().run(rows.num_tasks(), |task| {
            let (range, elements) = rows.task(task);
            // SAFETY: the tasks' rows do not overlap.
            let y = unsafe { y.range(elements.clone()) };
            let both = x[elements].chunks_exact(rows.width).zip(y.chunks_exact_mut(rows.width));
            for ((x, y), scale) in both.zip(&inv_rms[range]) {
                for ((y, x), weight) in y.iter_mut().zip(x).zip(&weight) {
                    *y = Y::store(x.load() * scale * weight);
                }
            }
        });
    }));
    y
}

/// Computes this rank's columns of [`rms_norm_backward`](super::rms_norm_backward). `inv_rms` are the `1 / rms` of
/// whole rows, and `means` the means of `dy x weight` over whole rows (`[rows]` f32 both). Returns `dx` and writes or
/// adds the gradient of this rank's weight.
#[must_use]
pub fn rms_norm_part_backward(
    ctx: &Context,
    dy: &Tensor,
    RmsNormInputs { x, weight, inv_rms }: RmsNormInputs<'_>,
    means: &Tensor,
    write: Write,
    dweight: &mut Tensor,
) -> Tensor {
    let rows = Rows::new(x, weight);
    assert_eq!((dy.len(), means.len(), dweight.len()), (x.len(), rows.count, rows.width), "rms_norm_part backward");
    let (weight, dweight) = (weight.to_f32_vec(), dweight.f32s_mut());
    let mut dx = ctx.empty(x.shape(), DType::F32);
    if write == Write::Replace {
        dweight.fill(0.0);
    }
    let (dy, x) = (dy.to_f32_vec(), x.to_f32_vec());
    let of_rows = inv_rms.f32s().iter().zip(means.f32s());
    let rows =
        dy.chunks_exact(rows.width).zip(x.chunks_exact(rows.width)).zip(dx.f32s_mut().chunks_exact_mut(rows.width));
    for (((dy, x), dx), (scale, mean)) in rows.zip(of_rows) {
        let shift = mean * scale * scale;
        for (((dx, dy), x), weight) in dx.iter_mut().zip(dy).zip(x).zip(&weight) {
            *dx = scale * (dy * weight - x * shift);
        }
        for ((dweight, dy), x) in dweight.iter_mut().zip(dy).zip(x) {
            *dweight += dy * x * scale;
        }
    }
    dx
}
