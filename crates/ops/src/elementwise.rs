//! Operations that treat every element alike: sums, scales, casts, norms and random filling.

use std::borrow::Cow;

use moeworks_tensor::{DType, Random, Tensor};

use crate::cuda::{self, On};
use crate::deferred::Deferred;
use crate::linear::Write;
use crate::parallel::{PIECE, piece_range};
use crate::random::fill_normals;
use crate::simd::{Float, LANES, kernel, with_float, with_stored};
use crate::{Context, Isa};

/// Copies `count` rows of `x` from row `first` on to rows `start..` of `y`, which has the same type and row length.
pub fn copy_rows(ctx: &Context, x: &Tensor, first: usize, y: &mut Tensor, start: usize, count: usize) {
    assert_eq!((x.cols(), x.dtype()), (y.cols(), y.dtype()), "copy_rows: {:?} to {:?}", x.shape(), y.shape());
    assert!(first + count <= x.rows() && start + count <= y.rows(), "copy_rows: {count} rows from {first} to {start}");
    let row = x.cols() * x.dtype().size();
    if let Some(on) = On::of(ctx).filter(|_| row.is_multiple_of(2)) {
        return cuda::elementwise::copy_rows(on, x, first, y, start, count);
    }
    y.bytes_mut()[start * row..][..count * row].copy_from_slice(&x.bytes()[first * row..][..count * row]);
}

/// Copies the rows of each of `count` sequences, `x` `[count n, W]`, to its rows from `start` on in `y` `[count
/// capacity, W]`.
pub fn copy_rows_of_each(ctx: &Context, x: &Tensor, y: &mut Tensor, start: usize, count: usize) {
    copy_some_rows_of_each(ctx, x, 0, y, start, x.rows() / count, count);
}

/// Copies `rows` rows of each of `count` sequences: from row `first` on in `x` `[count n, W]` to row `start` on in
/// `y` `[count capacity, W]`.
pub fn copy_some_rows_of_each(
    ctx: &Context,
    x: &Tensor,
    first: usize,
    y: &mut Tensor,
    start: usize,
    rows: usize,
    count: usize,
) {
    assert_eq!((x.cols(), x.dtype()), (y.cols(), y.dtype()), "copy_rows_of_each: {:?} to {:?}", x.shape(), y.shape());
    let (given, capacity) = (x.rows() / count, y.rows() / count);
    assert!((given * count, capacity * count) == (x.rows(), y.rows()), "copy_rows_of_each: {count} sequences");
    assert!(first + rows <= given && start + rows <= capacity, "copy_rows_of_each: {rows} of {given} to {capacity}");
    let row = x.cols() * x.dtype().size();
    if let Some(on) = On::of(ctx).filter(|_| count > 1 && row.is_multiple_of(2)) {
        return cuda::elementwise::copy_rows_of_each(on, x, first, y, start, rows, count);
    }
    for sequence in 0..count {
        copy_rows(ctx, x, sequence * given + first, y, sequence * capacity + start, rows);
    }
}

/// Adds `x` (f32, bf16 or f16) to `y` (f32), element by element.
pub fn add_assign(ctx: &Context, y: &mut Tensor, x: &Tensor) {
    assert_eq!(y.len(), x.len(), "add_assign: y {:?}, x {:?}", y.shape(), x.shape());
    if let Some(on) = On::taking(ctx, &[x.dtype()]) {
        return cuda::elementwise::add_assign(on, y, x);
    }
    with_stored!(x.dtype(), T => {
        let x = x.slice::<T>();
        ctx.threads().run_pieces(y.f32s_mut(), PIECE, |index, y| {
            add_kernel::<T>(ctx.isa(), y, &x[piece_range(index, PIECE, x.len())]);
        });
    });
}

/// Returns `[pieces, C]`: the sums of the rows of `x` `[R, C]` (f32) from each of `starts` to the next, in order. The
/// last of `starts` is R.
#[must_use]
pub fn sums_of_rows(ctx: &Context, x: &Tensor, starts: &[u32]) -> Tensor {
    let (cols, count) = (x.cols(), starts.len().saturating_sub(1));
    assert!(
        starts.is_sorted() && starts.last().is_none_or(|&end| end as usize <= x.rows()),
        "sums of rows: {starts:?}"
    );
    if let Some(on) = On::taking(ctx, &[x.dtype()]).filter(|_| count > 0) {
        return cuda::elementwise::sums_of_rows(on, x, starts);
    }
    let mut sums = ctx.zeros(&[count, cols], DType::F32);
    let x = x.f32s();
    ctx.threads().run_pieces(sums.f32s_mut(), cols.max(1), |piece, sums| {
        let rows = starts[piece] as usize * cols..starts[piece + 1] as usize * cols;
        x[rows].chunks_exact(cols.max(1)).for_each(|row| add_kernel::<f32>(ctx.isa(), sums, row));
    });
    sums
}

kernel! {
    fn add_kernel<S: Level, T: Float>(y: &mut [f32], x: &[T]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y += x.load();
        }
    }
}

/// Multiplies `y` (f32 or bf16) by `s`.
pub fn scale_assign(ctx: &Context, y: &mut Tensor, s: f32) {
    if let Some(on) = On::of(ctx) {
        return cuda::elementwise::scale_assign(on, y, s);
    }
    with_float!(y.dtype(), T => {
        ctx.threads().run_pieces(y.slice_mut::<T>(), PIECE, |_, y| scale_kernel::<T>(ctx.isa(), y, s));
    });
}

kernel! {
    fn scale_kernel<S: Level, T: Float>(y: &mut [T], s: f32) {
        for y in y {
            *y = T::store(y.load() * s);
        }
    }
}

/// Returns `1 / (1 + e^-x)` of each element of `x` (f32).
#[must_use]
pub fn sigmoid(ctx: &Context, x: &Tensor) -> Tensor {
    if let Some(on) = On::of(ctx) {
        return cuda::elementwise::sigmoid(on, x);
    }
    let mut y = ctx.empty(x.shape(), DType::F32);
    y.f32s_mut().iter_mut().zip(x.f32s()).for_each(|(y, x)| *y = 1.0 / (1.0 + (-x).exp()));
    y
}

/// Returns the gradient `dy y (1 - y)` of `x`, where `y` is its [`sigmoid`]; all f32.
#[must_use]
pub fn sigmoid_backward(ctx: &Context, dy: &Tensor, y: &Tensor) -> Tensor {
    assert_eq!(dy.len(), y.len(), "sigmoid backward: dy {:?}, y {:?}", dy.shape(), y.shape());
    if let Some(on) = On::of(ctx) {
        return cuda::elementwise::sigmoid_backward(on, dy, y);
    }
    let mut dx = ctx.empty(y.shape(), DType::F32);
    let inputs = dy.f32s().iter().zip(y.f32s());
    dx.f32s_mut().iter_mut().zip(inputs).for_each(|(dx, (dy, y))| *dx = dy * y * (1.0 - y));
    dx
}

/// Writes elements of `x` (f32 or bf16) from `first` on, each times one of `factors`, to `y`.
pub fn multiply_into(isa: Isa, x: &Tensor, first: usize, factors: &[f32], y: &mut [f32]) {
    let range = first..first + factors.len();
    with_float!(x.dtype(), T => multiply_kernel::<T>(isa, &x.slice::<T>()[range], factors, y));
}

kernel! {
    fn multiply_kernel<S: Level, X: Float>(x: &[X], factors: &[f32], y: &mut [f32]) {
        for ((y, &x), factor) in y.iter_mut().zip(x).zip(factors) {
            *y = x.load() * factor;
        }
    }
}

/// Adds `bias [N]` (f32 or bf16) to every row of `y [.., N]` (f32 or bf16).
pub fn add_rows(ctx: &Context, y: &mut Tensor, bias: &Tensor) {
    let cols = y.cols();
    assert_eq!(bias.len(), cols, "add_rows: y {:?}, bias {:?}", y.shape(), bias.shape());
    if y.is_empty() {
        return;
    }
    if let Some(on) = On::of(ctx) {
        return cuda::elementwise::add_rows(on, y, bias);
    }
    let bias = bias.to_f32_vec();
    with_float!(y.dtype(), T => {
        ctx.threads().run_pieces(y.slice_mut::<T>(), (PIECE / cols).max(1) * cols, |_, y| {
            add_rows_kernel::<T>(ctx.isa(), y, &bias);
        });
    });
}

kernel! {
    fn add_rows_kernel<S: Level, T: Float>(y: &mut [T], bias: &[f32]) {
        for row in y.chunks_exact_mut(bias.len()) {
            for (y, bias) in row.iter_mut().zip(bias) {
                *y = T::store(y.load() + bias);
            }
        }
    }
}

/// Sums the rows of `x [.., N]` (f32 or bf16), written or added to `sums [N]` (f32). A task owns columns and goes
/// through the rows in order, so the result does not depend on the number of threads.
pub fn sum_rows(ctx: &Context, x: &Tensor, write: Write, sums: &mut Tensor) {
    /// Columns of a task: four cache lines.
    const COLS: usize = 64;
    let cols = x.cols();
    assert_eq!(sums.len(), cols, "sum_rows: x {:?}, sums {:?}", x.shape(), sums.shape());
    if let Some(on) = On::taking(ctx, &[x.dtype()]) {
        return cuda::elementwise::sum_rows(on, x, write, sums);
    }
    with_float!(x.dtype(), T => {
        let x = x.slice::<T>();
        ctx.threads().run_pieces(sums.f32s_mut(), COLS, |index, sums| {
            if write == Write::Replace {
                sums.fill(0.0);
            }
            for row in x.chunks_exact(cols.max(1)) {
                sums.iter_mut().zip(&row[index * COLS..]).for_each(|(sum, x)| *sum += x.load());
            }
        });
    });
}

/// Clamps every element of `y` (f32 or bf16) to `[-limit, limit]`. NaN stays.
pub fn clip_assign(ctx: &Context, y: &mut Tensor, limit: f32) {
    if let Some(on) = On::taking(ctx, &[y.dtype()]) {
        return cuda::elementwise::clip_assign(on, y, limit);
    }
    with_float!(y.dtype(), T => {
        ctx.threads().run_pieces(y.slice_mut::<T>(), PIECE, |_, y| {
            for y in y {
                let x = y.load();
                if x.abs() > limit {
                    *y = T::store(limit.copysign(x));
                }
            }
        });
    });
}

/// Turns the gradient of the result `y` of [`clip_assign`] into that of its input: zero where `y` is at a limit. `dy`
/// is f32.
pub fn clip_backward_assign(ctx: &Context, dy: &mut Tensor, y: &Tensor, limit: f32) {
    assert_eq!(dy.len(), y.len(), "clip_backward_assign: dy {:?}, y {:?}", dy.shape(), y.shape());
    with_float!(y.dtype(), T => {
        let limit = T::store(limit).load();
        if let Some(on) = On::taking(ctx, &[y.dtype()]) {
            return cuda::elementwise::clip_backward_assign(on, dy, y, limit);
        }
        let y = y.slice::<T>();
        ctx.threads().run_pieces(dy.f32s_mut(), PIECE, |index, dy| {
            for (dy, y) in dy.iter_mut().zip(&y[piece_range(index, PIECE, y.len())]) {
                if y.load().abs() >= limit {
                    *dy = 0.0;
                }
            }
        });
    });
}

/// Returns a copy of `x` (f32, bf16 or f16) as `dtype` (one of these), rounded to nearest, ties to even.
#[must_use]
pub fn cast(ctx: &Context, x: &Tensor, dtype: DType) -> Tensor {
    if let Some(on) = On::taking(ctx, &[x.dtype(), dtype]) {
        return cuda::elementwise::cast(on, x, dtype);
    }
    let mut y = ctx.empty(x.shape(), dtype);
    cast_into(ctx, x, &mut y);
    y
}

/// Rounds an operand to bf16 if products in `dtype` would do so: once instead of for each few columns.
pub(crate) fn rounded_once<'a>(ctx: &Context, x: &'a Tensor, dtype: DType) -> Cow<'a, Tensor> {
    let is_rounded = dtype == DType::BF16 && x.dtype() == DType::F32;
    if is_rounded { Cow::Owned(cast(ctx, x, DType::BF16)) } else { Cow::Borrowed(x) }
}

/// Lets `work` write to `x` as f32, and rounds the result if `x` is bf16. With `is_read` the f32 buffer starts with
/// the contents of `x`.
pub(crate) fn written_wide(ctx: &Context, x: &mut Tensor, is_read: bool, work: impl FnOnce(&mut Tensor)) {
    if x.dtype() == DType::F32 {
        return work(x);
    }
    let mut wide = if is_read { cast(ctx, x, DType::F32) } else { ctx.empty_on_device(x.shape(), DType::F32) };
    work(&mut wide);
    cast_into(ctx, &wide, x);
}

/// Returns `x` (f32 or bf16) as `dtype`, without a copy if it is of that type.
#[must_use]
pub fn into_type(ctx: &Context, x: Tensor, dtype: DType) -> Tensor {
    if x.dtype() == dtype { x } else { cast(ctx, &x, dtype) }
}

/// Writes `x` to `y`, which has as many elements and its own float type.
pub fn cast_into(ctx: &Context, x: &Tensor, y: &mut Tensor) {
    assert_eq!(y.len(), x.len(), "cast_into: y {:?}, x {:?}", y.shape(), x.shape());
    if let Some(on) = On::taking(ctx, &[x.dtype(), y.dtype()]) {
        return cuda::elementwise::cast_into(on, x, y);
    }
    with_stored!(x.dtype(), X => with_stored!(y.dtype(), Y => {
        let mut to = y.slice_mut::<Y>();
        for x in x.parts() {
            let (here, rest) = to.split_at_mut(x.len());
            let x = x.slice::<X>();
            ctx.threads().run_pieces(here, PIECE, |index, y| {
                cast_kernel::<X, Y>(ctx.isa(), &x[piece_range(index, PIECE, x.len())], y);
            });
            to = rest;
        }
    }));
}

kernel! {
    fn cast_kernel<S: Level, X: Float, Y: Float>(x: &[X], y: &mut [Y]) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = Y::store(x.load());
        }
    }
}

/// Sets every element of `y` (f32) to `value`.
pub fn fill(ctx: &Context, y: &mut Tensor, value: f32) {
    match On::of(ctx) {
        Some(on) => cuda::elementwise::fill(on, y, value),
        None => y.f32s_mut().fill(value),
    }
}

/// Returns the sum of the squares of `x` (f32, bf16 or f16), added up in f64 in an order that depends on the length
/// alone. It is not finite if an element is not.
#[must_use]
pub fn sum_of_squares(ctx: &Context, x: &Tensor) -> f64 {
    sums_of_squares(ctx, &[x])[0]
}

/// Returns the [`sum_of_squares`] of each of several tensors.
#[must_use]
pub fn sums_of_squares(ctx: &Context, tensors: &[&Tensor]) -> Deferred<Vec<f64>> {
    let dtypes: Vec<_> = tensors.iter().map(|x| x.dtype()).collect();
    match On::taking(ctx, &dtypes) {
        Some(on) => cuda::elementwise::sums_of_squares(on, tensors),
        None => Deferred::now(tensors.iter().map(|x| squares_in_host(ctx, x)).collect()),
    }
}

fn squares_in_host(ctx: &Context, x: &Tensor) -> f64 {
    let mut partial = vec![0.0; x.len().div_ceil(PIECE)];
    with_stored!(x.dtype(), T => {
        let x = x.slice::<T>();
        ctx.threads().run_pieces(&mut partial, 1, |index, sum| {
            sum[0] = squares_kernel::<T>(ctx.isa(), &x[piece_range(index, PIECE, x.len())]);
        });
    });
    partial.iter().sum()
}

kernel! {
    fn squares_kernel<S: Level, T: Float>(x: &[T]) -> f64 {
        let mut lanes = [0.0_f64; LANES];
        let (groups, rest) = x.as_chunks::<LANES>();
        for group in groups {
            for (lane, x) in lanes.iter_mut().zip(group) {
                let x = f64::from(x.load());
                *lane += x * x;
            }
        }
        for (lane, x) in lanes.iter_mut().zip(rest) {
            let x = f64::from(x.load());
            *lane += x * x;
        }
        lanes.iter().sum()
    }
}

/// Fills `y` (f32 or bf16) with normal numbers of mean 0, redrawn until within three standard deviations. `std` is
/// the deviation before that cut. Element i depends on `random`, i and the number of elements alone.
pub fn fill_normal(ctx: &Context, random: &Random, std: f32, y: &mut Tensor) {
    let len = y.len() as u64;
    with_float!(y.dtype(), T => {
        ctx.threads().run_pieces(y.slice_mut::<T>(), PIECE, |index, y| {
            let mut draws = [0.0; 512];
            for (y, position) in y.chunks_mut(draws.len()).zip(((index * PIECE) as u64..).step_by(draws.len())) {
                let draws = &mut draws[..y.len()];
                fill_normals(ctx.isa(), random, position, draws);
                for ((y, draw), position) in y.iter_mut().zip(draws).zip(position..) {
                    let is_near = draw.abs() <= 3.0;
                    *y = T::store(std * if is_near { *draw } else { truncated_normal(random, position, len) });
                }
            }
        });
    });
}

/// Returns the first of the normal numbers at `position`, `position + stride` and so on that is within three
/// deviations.
fn truncated_normal(random: &Random, position: u64, stride: u64) -> f32 {
    let draws = (0..).map(|attempt| random.normal(position + attempt * stride));
    draws.into_iter().find(|draw: &f32| draw.abs() <= 3.0).unwrap_or(0.0)
}
