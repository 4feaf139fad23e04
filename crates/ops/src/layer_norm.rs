//! Layer normalisation (Ba et al., 1607.06450): `y = (x - mean) / std * weight + bias`, row by row.
//!
//! Arithmetic is f32 whatever the types; the variance is computed from the centred row. Backward, with `n = (x -
//! mean) / std` and `g = weight dy`: `dx = (g - mean(g) - n mean(g n)) / std`, `dweight = sum over rows of dy n`,
//! `dbias = sum of dy`.

use moeworks_tensor::{DType, Tensor};

use crate::Context;
use crate::cuda::{self, On};
use crate::linear::Write;
use crate::parallel::{Lent, PIECE, piece_range};
use crate::simd::{Float, LANES, kernel, sum_lanes, with_float};

/// The weights of a layer norm.
#[derive(Clone, Copy)]
pub struct LayerNormWeights<'a> {
    /// `[W]`, f32 or bf16.
    pub weight: &'a Tensor,
    /// `[W]`, f32 or bf16.
    pub bias: &'a Tensor,
}

/// The gradients of a layer norm's weights, `[W]` f32 each.
pub struct LayerNormGrads<'a> {
    /// Gradient of the weight.
    pub weight: &'a mut Tensor,
    /// Gradient of the bias.
    pub bias: &'a mut Tensor,
}
/// Normalises the rows of `x` (f32 or bf16), each as wide as the weight. `eps` is added to the variance; `out` is the
/// type of `y`. Returns `y` in the shape of `x`, and each row's mean and `1 / std`, `[rows, 2]` f32.
#[must_use]
pub fn layer_norm(ctx: &Context, x: &Tensor, weights: LayerNormWeights<'_>, eps: f32, out: DType) -> (Tensor, Tensor) {
    let rows = Rows::new(x, weights.weight);
    assert_eq!(weights.bias.len(), rows.width, "layer_norm: bias {:?}", weights.bias.shape());
    if let Some(on) = On::taking(ctx, &[x.dtype(), out]) {
        return cuda::layer_norm::forward(on, x, weights, eps, out);
    }
    let (weight, bias) = (weights.weight.to_f32_vec(), weights.bias.to_f32_vec());
    let mut y = ctx.empty(x.shape(), out);
    let mut statistics = ctx.empty(&[rows.count, 2], DType::F32);
    with_float!(x.dtype(), X => with_float!(out, Y => {
        let x = x.slice::<X>();
        let (y, statistics) = (Lent::new(y.slice_mut::<Y>()), Lent::new(statistics.f32s_mut()));
        ctx.threads().run(rows.num_tasks(), |task| {
            let (range, elements) = rows.task(task);
            // SAFETY: the tasks' rows do not overlap.
            let (y, statistics) =
                unsafe { (y.range(elements.clone()), statistics.range(2 * range.start..2 * range.end)) };
            forward_kernel::<X, Y>(ctx.isa(), &x[elements], &weight, &bias, eps, y, statistics);
        });
    }));
    (y, statistics)
}

kernel! {
    fn forward_kernel<S: Level, X: Float, Y: Float>(
        x: &[X],
        weight: &[f32],
        bias: &[f32],
        eps: f32,
        y: &mut [Y],
        statistics: &mut [f32],
    ) {
        let width = weight.len();
        let rows = x.chunks_exact(width).zip(y.chunks_exact_mut(width)).zip(statistics.as_chunks_mut::<2>().0);
        for ((x, y), statistics) in rows {
            let mean = sum_of::<X>(x, |x| x) / width as f32;
            let variance = sum_of::<X>(x, |x| (x - mean) * (x - mean)) / width as f32;
            let scale = 1.0 / (variance + eps).sqrt();
            *statistics = [mean, scale];
            for (((y, x), weight), bias) in y.iter_mut().zip(x).zip(weight).zip(bias) {
                *y = Y::store(S::mul_add((x.load() - mean) * scale, *weight, *bias));
            }
        }
    }
}

/// Returns the sum of `f` of the elements, in an order that depends on their number alone.
#[inline(always)]
fn sum_of<X: Float>(x: &[X], f: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let (groups, rest) = x.as_chunks::<LANES>();
    for group in groups.iter().map(|group| group.as_slice()).chain([rest]) {
        for (lane, x) in lanes.iter_mut().zip(group) {
            *lane += f(x.load());
        }
    }
    sum_lanes(lanes)
}

/// Returns the gradient `dx` (f32, shape of `x`) of [`layer_norm`]'s input, and writes or adds those of weight and
/// bias to `grads`. `dy` is f32 or bf16; `statistics` is what forward returned.
#[must_use]
pub fn layer_norm_backward(
    ctx: &Context,
    dy: &Tensor,
    x: &Tensor,
    statistics: &Tensor,
    weight: &Tensor,
    write: Write,
    grads: LayerNormGrads<'_>,
) -> Tensor {
    let rows = Rows::new(x, weight);
    let LayerNormGrads { weight: dweight, bias: dbias } = grads;
    assert_eq!((dy.len(), statistics.len()), (x.len(), 2 * rows.count), "layer_norm backward: dy {:?}", dy.shape());
    assert_eq!((dweight.len(), dbias.len()), (rows.width, rows.width), "layer_norm backward: dweight, dbias");
    if let Some(on) = On::taking(ctx, &[x.dtype(), dy.dtype()]) {
        let saved = cuda::layer_norm::LayerNormSaved { x, statistics, weight };
        return cuda::layer_norm::backward(on, dy, saved, write, dweight, dbias);
    }
    let weight = weight.to_f32_vec();
    let statistics = statistics.f32s();
    let mut dx = ctx.empty(x.shape(), DType::F32);
    // Two rows of partial sums per task. Tasks are cut by shape, and their sums are added up in order.
    let mut partial = ctx.zeros(&[rows.num_tasks(), 2 * rows.width], DType::F32);
    with_float!(x.dtype(), X => with_float!(dy.dtype(), Y => {
        let (x, dy) = (x.slice::<X>(), dy.slice::<Y>());
        let (dx, partial) = (Lent::new(dx.f32s_mut()), Lent::new(partial.f32s_mut()));
        ctx.threads().run(rows.num_tasks(), |task| {
            let (range, elements) = rows.task(task);
            let sums = 2 * task * rows.width..2 * (task + 1) * rows.width;
            // SAFETY: the tasks' rows do not overlap, nor do their partial sums.
            let (dx, sums) = unsafe { (dx.range(elements.clone()), partial.range(sums)) };
            let statistics = &statistics[2 * range.start..2 * range.end];
            backward_kernel::<X, Y>(ctx.isa(), &dy[elements.clone()], &x[elements], &weight, statistics, dx, sums);
        });
    }));
    let (dweight, dbias) = (dweight.f32s_mut(), dbias.f32s_mut());
    if write == Write::Replace {
        dweight.fill(0.0);
        dbias.fill(0.0);
    }
    for sums in partial.f32s().chunks_exact(2 * rows.width) {
        let (of_weight, of_bias) = sums.split_at(rows.width);
        dweight.iter_mut().zip(of_weight).for_each(|(total, sum)| *total += sum);
        dbias.iter_mut().zip(of_bias).for_each(|(total, sum)| *total += sum);
    }
    dx
}

kernel! {
    fn backward_kernel<S: Level, X: Float, Y: Float>(
        dy: &[Y],
        x: &[X],
        weight: &[f32],
        statistics: &[f32],
        dx: &mut [f32],
        sums: &mut [f32],
    ) {
        let width = weight.len();
        let (dweight, dbias) = sums.split_at_mut(width);
        let rows = dy.chunks_exact(width).zip(x.chunks_exact(width)).zip(dx.chunks_exact_mut(width));
        for (((dy, x), dx), &[mean, scale]) in rows.zip(statistics.as_chunks::<2>().0) {
            for ((dx, dy), weight) in dx.iter_mut().zip(dy).zip(weight) {
                *dx = dy.load() * weight;
            }
            let shift = sum_of::<f32>(dx, |g| g) / width as f32;
            let mut slope = 0.0;
            for (g, x) in dx.iter().zip(x) {
                slope = S::mul_add(*g, (x.load() - mean) * scale, slope);
            }
            slope /= width as f32;
            for (dx, x) in dx.iter_mut().zip(x) {
                *dx = scale * (*dx - shift - (x.load() - mean) * scale * slope);
            }
            for (((dweight, dbias), dy), x) in dweight.iter_mut().zip(dbias.iter_mut()).zip(dy).zip(x) {
                *dweight = S::mul_add(dy.load(), (x.load() - mean) * scale, *dweight);
                *dbias += dy.load();
            }
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
        let width = weight.len();
        assert!(width > 0 && x.len().is_multiple_of(width), "layer_norm: x {:?}, weight [{width}]", x.shape());
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
