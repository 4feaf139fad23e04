//! Matrix products of a linear map `y = x w^T`: forward, gradient of the input, gradient of the weight.
//!
//! Each is one call of the engine in `gemm`. Weights in f16 are multiplied as the f32 that they are exactly. With
//! bf16 weights both factors are bf16, and sums are f32 in an order that depends on the instruction set. Results of
//! two instruction sets therefore differ by the rounding of sums, of order `sqrt(depth) * 2^-24` relative to the sum
//! of magnitudes.

use moeworks_tensor::{DType, Device, Tensor};

use crate::cuda::{self, On};
use crate::elementwise::{add_assign, rounded_once, written_wide};
use crate::gemm::kernel::Tile;
use crate::gemm::source::Source;
use crate::gemm::store::{Scratch, Store};
use crate::gemm::{Compute, Epilogue, Form, Group, Place, Product, run};
use crate::parallel::Lent;
use crate::simd::{Float, Level, with_float};
use crate::skinny_gemm::{Gradients, weight_gradients};
use crate::{Context, quantized};

/// The way in which a gradient goes to its buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Write {
    /// Overwrites the whole buffer.
    Replace,
    /// Adds the gradient to the buffer.
    Add,
}

/// Returns `y [T, out] = x [T, in] w^T` with `w [out, in]`. Both may be f32 or bf16. Products are bf16 with f32 sums
/// if `w` is bf16 (an f32 `x` is rounded first), otherwise f32. `w` may also be f16 or quantized: see [`quantized`].
/// `out` is the type of `y`.
#[must_use]
pub fn linear(ctx: &Context, x: &Tensor, w: &Tensor, out: DType) -> Tensor {
    let (rows, depth, columns) = (x.rows(), x.cols(), w.rows());
    assert_eq!(w.cols(), depth, "linear: x {:?}, w {:?}", x.shape(), w.shape());
    if let Some(on) = On::taking_weights(ctx, w.dtype()) {
        return cuda::linear::forward(on, x, w, out);
    }
    let mut y = ctx.empty(&[rows, columns], out);
    products_of_a_type(ctx, x, &[w], std::slice::from_mut(&mut y));
    y
}

/// Returns `base + x w^T`, f32 like `base [T, out]`; types as in [`linear`].
#[must_use]
pub fn linear_onto(ctx: &Context, x: &Tensor, w: &Tensor, base: &Tensor) -> Tensor {
    assert_eq!(base.shape(), [x.rows(), w.rows()], "linear_onto: x {:?}, w {:?}", x.shape(), w.shape());
    if let Some(on) = On::taking_weights(ctx, w.dtype()) {
        assert_eq!(w.cols(), x.cols(), "linear_onto: x {:?}, w {:?}", x.shape(), w.shape());
        return cuda::linear::forward_onto(on, x, w, DType::F32, Some(base));
    }
    let mut y = linear(ctx, x, w, DType::F32);
    add_assign(ctx, &mut y, base);
    y
}

/// Returns `x w^T` as [`linear`] does, for several matrices. Consecutive matrices of one type are multiplied
/// together, which with few rows saves the time between products.
#[must_use]
pub fn linear_each<const N: usize>(ctx: &Context, x: &Tensor, ws: [&Tensor; N], out: DType) -> [Tensor; N] {
    ws.iter().for_each(|w| assert_eq!(w.cols(), x.cols(), "linear: x {:?}, w {:?}", x.shape(), w.shape()));
    if ctx.device() != Device::Cpu {
        let on = On::of(ctx).filter(|_| ws.iter().all(|w| On::taking_weights(ctx, w.dtype()).is_some()));
        let one_by_one = || ws.map(|w| linear(ctx, x, w, out));
        return on.map_or_else(one_by_one, |on| cuda::linear::forward_each(on, x, ws, out));
    }
    let mut ys = ws.map(|w| ctx.empty(&[x.rows(), w.rows()], out));
    let mut rest = &mut ys[..];
    for ws in ws.chunk_by(|a, b| a.dtype() == b.dtype()) {
        let (ys, later) = rest.split_at_mut(ws.len());
        products_of_a_type(ctx, x, ws, ys);
        rest = later;
    }
    ys
}

/// Computes `y = x w^T` for matrices of one type.
fn products_of_a_type(ctx: &Context, x: &Tensor, ws: &[&Tensor], ys: &mut [Tensor]) {
    let (rows, depth, dtype) = (x.rows(), x.cols(), ws[0].dtype());
    with_float!(ys[0].dtype(), T => {
        let store = BatchedStore(ys.iter_mut().map(replaced::<T>).collect());
        if dtype.is_quantized() {
            let groups: Vec<_> = ws.iter().map(|&w| quantized::Group {
                indices: None,
                first: 0,
                rows,
                weights: quantized::matrix(w, 0, w.rows(), false),
                columns: w.rows(),
            }).collect();
            quantized::run(ctx, &quantized::Product { a: x, weights: ws[0], groups: &groups, is_paired: false }, &store);
        } else {
            let a = Source::rows(x, 0);
            let groups: Vec<_> =
                ws.iter().map(|&w| Group { a, b: Source::rows(w, 0), rows, columns: w.rows(), depth }).collect();
            let product = Product { form: Form::Nt, compute: Compute::from_dtype(dtype), groups: &groups, is_paired: false };
            run(ctx, &product, &store);
        }
    });
}

/// Returns the epilogue that replaces a whole matrix.
fn replaced<T: Float>(y: &mut Tensor) -> Store<'_, T> {
    let stride = y.cols();
    Store { to: Lent::new(y.slice_mut::<T>()), offsets: &[0], stride, write: Write::Replace }
}

/// An epilogue with a matrix for each group.
struct BatchedStore<'a, T>(Vec<Store<'a, T>>);

impl<T: Float> Epilogue for BatchedStore<'_, T> {
    #[inline(always)]
    fn prefetch(&self, at: Place) {
        self.0[at.group].prefetch(Place { group: 0, ..at });
    }

    #[inline(always)]
    fn tile<S: Level>(&self, at: Place, tile: &mut Tile, second: Option<&mut Tile>, scratch: &mut Scratch) {
        self.0[at.group].tile::<S>(Place { group: 0, ..at }, tile, second, scratch);
    }
}

/// Returns `dx [T, in] = dy [T, out] w`, types as in [`linear`].
#[must_use]
pub fn linear_backward_input(ctx: &Context, dy: &Tensor, w: &Tensor, out: DType) -> Tensor {
    let (rows, depth, columns) = (dy.rows(), dy.cols(), w.cols());
    assert_eq!(w.rows(), depth, "linear backward: dy {:?}, w {:?}", dy.shape(), w.shape());
    if let Some(on) = On::taking(ctx, &[w.dtype()]) {
        return cuda::linear::backward_input(on, dy, w, out, None);
    }
    let group = Group { a: Source::rows(dy, 0), b: Source::rows(w, 0), rows, columns, depth };
    let mut dx = ctx.empty(&[rows, columns], out);
    product(ctx, Form::Nn, Compute::from_dtype(w.dtype()), group, &mut dx);
    dx
}

/// Returns `base + dy w`, f32 like `base [T, in]`; types as in [`linear`].
#[must_use]
pub fn linear_backward_input_onto(ctx: &Context, dy: &Tensor, w: &Tensor, base: &Tensor) -> Tensor {
    assert_eq!(base.shape(), [dy.rows(), w.cols()], "linear backward: dy {:?}, w {:?}", dy.shape(), w.shape());
    if let Some(on) = On::taking(ctx, &[w.dtype()]) {
        assert_eq!(w.rows(), dy.cols(), "linear backward: dy {:?}, w {:?}", dy.shape(), w.shape());
        return cuda::linear::backward_input(on, dy, w, DType::F32, Some(base));
    }
    let mut dx = linear_backward_input(ctx, dy, w, DType::F32);
    add_assign(ctx, &mut dx, base);
    dx
}

/// Computes `dw [out, in] = dy^T x`, replaced or added as `write` says. `dw` is f32, or bf16 rounded once from sums
/// in f32. Products are taken in `compute` (f32 or bf16).
pub fn linear_backward_weight(ctx: &Context, dy: &Tensor, x: &Tensor, compute: DType, write: Write, dw: &mut Tensor) {
    let (depth, rows, columns) = (dy.rows(), dy.cols(), x.cols());
    assert_eq!(
        (x.rows(), dw.len()),
        (depth, rows * columns),
        "linear backward: dy {:?}, x {:?}",
        dy.shape(),
        x.shape()
    );
    if let Some(on) = On::of(ctx) {
        return written_wide(ctx, dw, write == Write::Add, |dw| {
            cuda::linear::backward_weight(on, dy, x, compute, write, dw);
        });
    }
    let dy = &*rounded_once(ctx, dy, compute);
    let group = Group { a: Source::rows(dy, 0), b: Source::rows(x, 0), rows, columns, depth };
    let product = Product { form: Form::Tn, compute: Compute::from_dtype(compute), groups: &[group], is_paired: false };
    with_float!(dw.dtype(), T => {
        let to = Lent::new(dw.slice_mut::<T>());
        weight_gradients(ctx, &product, Gradients { to, offsets: &[0], stride: columns, write });
    });
}

fn product(ctx: &Context, form: Form, compute: Compute, group: Group<'_>, to: &mut Tensor) {
    let product = Product { form, compute, groups: &[group], is_paired: false };
    with_float!(to.dtype(), T => {
        run(ctx, &product, &replaced::<T>(to));
    });
}

#[cfg(test)]
#[path = "linear_tests.rs"]
mod tests;
