//! Root mean square normalisation (Zhang and Sennrich, 1910.07467): `y = x / rms(x) * weight`, row by row.
//!
//! A row is as wide as the weight, so a `[T, H h]` tensor with a weight `[h]` is normed head by head. Arithmetic is
//! f32 whatever the types. Backward, with `r = 1 / rms` and `g = weight dy`: `dx = r (g - x r^2 mean(g x))`, and
//! `dweight = sum over rows of dy x r`.

mod parts;

use moeworks_tensor::{DType, Tensor};

use crate::Context;
use crate::cuda::{self, On};
use crate::elementwise::add_assign;
use crate::linear::Write;
use crate::parallel::{Lent, PIECE, is_far, piece_range};
use crate::simd::{Float, LANES, fence, kernel, store_all, stream_lanes, sum_lanes, with_float};
pub use parts::{rms_norm_part, rms_norm_part_backward, row_products};

/// Normalises the rows of `x` (f32 or bf16). `weight` `[W]` is f32 or bf16; `eps` is added to the mean square; `out`
/// is the type of `y`. Returns `y` in the shape of `x`, and `1 / rms` of each row, f32.
#[must_use]
pub fn rms_norm(ctx: &Context, x: &Tensor, weight: &Tensor, eps: f32, out: DType) -> (Tensor, Tensor) {
    let rows = Rows::new(x, weight);
    if let Some(on) = On::of(ctx) {
        return cuda::rms_norm::forward(on, x, weight, eps, out);
    }
    let weight = weight.to_f32_vec();
    let mut y = ctx.empty(x.shape(), out);
    let mut inv_rms = ctx.empty(&[rows.count], DType::F32);
    with_float!(x.dtype(), X => with_float!(out, Y => {
        let x = x.slice::<X>();
        let is_far = is_far(&y, rows.width);
        let (y, inv_rms) = (Lent::new(y.slice_mut::<Y>()), Lent::new(inv_rms.f32s_mut()));
        ctx.threads().run(rows.num_tasks(), |task| {
            let (range, elements) = rows.task(task);
            // SAFETY: the tasks' rows do not overlap.
            let (y, inv_rms) = unsafe { (y.range(elements.clone()), inv_rms.range(range)) };
            forward_kernel::<X, Y>(ctx.isa(), &x[elements], &weight, eps, y, inv_rms, is_far);
        });
    }));
    (y, inv_rms)
}

/// Elements that one instruction rounds.
const ROUNDED: usize = 32;

kernel! {
    bf16 if matches!(Y::DTYPE, DType::BF16);
    fn forward_kernel<S: Level, X: Float, Y: Float>(
        x: &[X],
        weight: &[f32],
        eps: f32,
        y: &mut [Y],
        inv_rms: &mut [f32],
        is_far: bool,
    ) {
        let width = weight.len();
        for ((x, y), inv_rms) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)).zip(inv_rms) {
            let mut lanes = [0.0; LANES];
            let (groups, rest) = x.as_chunks::<LANES>();
            for group in groups {
                for (lane, x) in lanes.iter_mut().zip(group) {
                    *lane = S::mul_add(x.load(), x.load(), *lane);
                }
            }
            for (lane, x) in lanes.iter_mut().zip(rest) {
                *lane = S::mul_add(x.load(), x.load(), *lane);
            }
            let scale = 1.0 / (sum_lanes(lanes) / width as f32 + eps).sqrt();
            *inv_rms = scale;
            if is_far && Y::DTYPE == DType::F32 {
                let y: &mut [f32] = bytemuck::cast_slice_mut(y);
                let columns = groups.iter().zip(weight.as_chunks::<LANES>().0);
                for ((x, weight), y) in columns.zip(y.as_chunks_mut::<LANES>().0) {
                    stream_lanes::<S>(&std::array::from_fn(|i| x[i].load() * scale * weight[i]), y);
                }
                continue;
            }
            if !matches!(Y::DTYPE, DType::BF16) {
                for ((y, x), weight) in y.iter_mut().zip(x).zip(weight) {
                    *y = Y::store(x.load() * scale * weight);
                }
                continue;
            }
            let ((x, last_x), (y, last_y)) = (x.as_chunks::<ROUNDED>(), y.as_chunks_mut::<ROUNDED>());
            let (weights, last_weights) = weight.as_chunks::<ROUNDED>();
            for ((y, x), weights) in y.iter_mut().zip(x).zip(weights) {
                let mut normed = [0.0; ROUNDED];
                for i in 0..ROUNDED {
                    normed[i] = x[i].load() * scale * weights[i];
                }
                store_all::<S, Y>(&normed, y);
            }
            for ((y, x), weight) in last_y.iter_mut().zip(last_x).zip(last_weights) {
                *y = Y::store(x.load() * scale * weight);
            }
        }
        if is_far {
            fence();
        }
    }
}

/// Computes the gradients of [`rms_norm`]: returns `dx` (f32, shape of `x`) and writes or adds that of the weight to
/// `dweight` (f32). `dy` is f32 or bf16; `inv_rms` is what forward returned.
#[must_use]
pub fn rms_norm_backward(
    ctx: &Context,
    dy: &Tensor,
    x: &Tensor,
    weight: &Tensor,
    inv_rms: &Tensor,
    write: Write,
    dweight: &mut Tensor,
) -> Tensor {
    rms_norm_backward_onto(ctx, dy, RmsNormInputs { x, weight, inv_rms }, None, write, dweight)
}

/// The input, the weight and the `1 / rms` of each row of a norm, which its backward pass needs.
#[derive(Clone, Copy)]
pub struct RmsNormInputs<'a> {
    /// The input, rows as wide as the weight.
    pub x: &'a Tensor,
    /// `[W]`: the weight.
    pub weight: &'a Tensor,
    /// `[rows]` f32: `1 / rms` of each row, as forward returned it.
    pub inv_rms: &'a Tensor,
}

/// The rows of `dx` that a task writes, past the caches if `is_far`.
struct Dx<'a> {
    values: &'a mut [f32],
    is_far: bool,
}

/// Computes [`rms_norm_backward`] and adds `base` (f32, shape of `x`), if there is one, to `dx`: the gradient that
/// bypasses the norm.
#[must_use]
pub fn rms_norm_backward_onto(
    ctx: &Context,
    dy: &Tensor,
    inputs: RmsNormInputs<'_>,
    base: Option<&Tensor>,
    write: Write,
    dweight: &mut Tensor,
) -> Tensor {
    let RmsNormInputs { x, weight, inv_rms } = inputs;
    let rows = Rows::new(x, weight);
    assert_eq!(dy.len(), x.len(), "rms_norm backward: dy {:?}, x {:?}", dy.shape(), x.shape());
    assert_eq!((inv_rms.len(), dweight.len()), (rows.count, rows.width), "rms_norm backward: inv_rms, dweight");
    if let Some(base) = base {
        assert_eq!((base.len(), base.dtype()), (x.len(), DType::F32), "rms_norm backward: base {:?}", base.shape());
    }
    if let Some(on) = On::of(ctx) {
        return cuda::rms_norm::backward(on, dy, inputs, base, write, dweight);
    }
    let weight = weight.to_f32_vec();
    let inv_rms = inv_rms.f32s();
    let mut dx = ctx.empty(x.shape(), DType::F32);
    // One row of partial sums a task; tasks are cut by shape, and added up in order.
    let mut partial = ctx.zeros(&[rows.num_tasks(), rows.width], DType::F32);
    with_float!(x.dtype(), X => with_float!(dy.dtype(), Y => {
        let (x, dy) = (x.slice::<X>(), dy.slice::<Y>());
        let is_far = is_far(&dx, rows.width);
        let (dx, partial) = (Lent::new(dx.f32s_mut()), Lent::new(partial.f32s_mut()));
        ctx.threads().run(rows.num_tasks(), |task| {
            let (range, elements) = rows.task(task);
            // SAFETY: the tasks' rows do not overlap, nor do their partial sums.
            let (dx, sums) = unsafe { (dx.range(elements.clone()), partial.range(task * rows.width..(task + 1) * rows.width)) };
            let (dy, x) = (&dy[elements.clone()], &x[elements]);
            backward_kernel::<X, Y>(ctx.isa(), dy, x, &weight, &inv_rms[range], Dx { values: dx, is_far }, sums);
        });
    }));
    let dweight = dweight.f32s_mut();
    if write == Write::Replace {
        dweight.fill(0.0);
    }
    for sums in partial.f32s().chunks_exact(rows.width) {
        dweight.iter_mut().zip(sums).for_each(|(total, sum)| *total += sum);
    }
    if let Some(base) = base {
        add_assign(ctx, &mut dx, base);
    }
    dx
}

kernel! {
    fn backward_kernel<S: Level, X: Float, Y: Float>(
        dy: &[Y],
        x: &[X],
        weight: &[f32],
        inv_rms: &[f32],
        dx: Dx<'_>,
        dweight: &mut [f32],
    ) {
        let (width, Dx { values: dx, is_far }) = (weight.len(), dx);
        let rows = dy.chunks_exact(width).zip(x.chunks_exact(width)).zip(dx.chunks_exact_mut(width)).zip(inv_rms);
        for (((dy, x), dx), &scale) in rows {
            let mut lanes = [0.0; LANES];
            let (groups, last_dy) = dy.as_chunks::<LANES>();
            let (groups_x, last_x) = x.as_chunks::<LANES>();
            let (groups_weight, last_weight) = weight.as_chunks::<LANES>();
            for ((dy, x), weight) in groups.iter().zip(groups_x).zip(groups_weight) {
                for i in 0..LANES {
                    lanes[i] = S::mul_add(dy[i].load() * weight[i], x[i].load(), lanes[i]);
                }
            }
            for (((dy, x), weight), lane) in last_dy.iter().zip(last_x).zip(last_weight).zip(&mut lanes) {
                *lane = S::mul_add(dy.load() * weight, x.load(), *lane);
            }
            let shift = sum_lanes(lanes) / width as f32 * scale * scale;
            let dx_of = |dy: Y, x: X, weight: f32| scale * (dy.load() * weight - x.load() * shift);
            // Two loops, so that each writes one slice.
            if is_far {
                let groups = groups.iter().zip(groups_x).zip(groups_weight);
                for (dx, ((dy, x), weight)) in dx.as_chunks_mut::<LANES>().0.iter_mut().zip(groups) {
                    stream_lanes::<S>(&std::array::from_fn(|i| dx_of(dy[i], x[i], weight[i])), dx);
                }
            } else {
                for (((dx, dy), x), &weight) in dx.iter_mut().zip(dy).zip(x).zip(weight) {
                    *dx = dx_of(*dy, *x, weight);
                }
            }
            for ((dweight, dy), x) in dweight.iter_mut().zip(dy).zip(x) {
                *dweight = S::mul_add(dy.load(), x.load() * scale, *dweight);
            }
        }
        if is_far {
            fence();
        }
    }
}

/// The division of rows among tasks.
struct Rows {
    width: usize,
    count: usize,
    per_task: usize,
}

impl Rows {
    fn new(x: &Tensor, weight: &Tensor) -> Self {
        Self::wide(x, weight.len())
    }

    fn wide(x: &Tensor, width: usize) -> Self {
        assert!(width > 0 && x.len().is_multiple_of(width), "rms_norm: x {:?}, weight [{width}]", x.shape());
        Self { width, count: x.len() / width, per_task: (PIECE / width).max(1) }
    }

    fn num_tasks(&self) -> usize {
        self.count.div_ceil(self.per_task)
    }

    /// Returns the rows of a task, and their elements.
    fn task(&self, task: usize) -> (std::ops::Range<usize>, std::ops::Range<usize>) {
        let rows = piece_range(task, self.per_task, self.count);
        (rows.clone(), rows.start * self.width..rows.end * self.width)
    }
}
