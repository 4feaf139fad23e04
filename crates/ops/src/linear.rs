//! Matrix products of a linear map `y = x w^T`: forward, gradient of the input, gradient of the weight.

use moeworks_tensor::{DType, Tensor};

use crate::Context;

/// Whether a gradient replaces what is in its buffer or is added to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Write {
    /// The buffer's contents are overwritten, all of them.
    Replace,
    /// The gradient is added.
    Add,
}

/// `y [T, out] = x [T, in] w^T` with `w [out, in]`. Both may be f32 or bf16; products are taken in bf16 with f32 sums if
/// `w` is bf16 (an f32 `x` is rounded first), in f32 otherwise. `out` is the type of `y`.
#[must_use]
pub fn linear(ctx: &Context, x: &Tensor, w: &Tensor, out: DType) -> Tensor {
    let (rows, inner, cols) = (x.rows(), x.cols(), w.rows());
    assert_eq!(w.cols(), inner, "linear: x {:?}, w {:?}", x.shape(), w.shape());
    let (a, b) = (x.to_f32_vec(), w.to_f32_vec());
    let mut y = vec![0.0; rows * cols];
    ctx.threads().run_pieces(&mut y, cols.max(1), |t, y| {
        for (o, y) in y.iter_mut().enumerate() {
            *y = (0..inner).map(|i| a[t * inner + i] * b[o * inner + i]).sum();
        }
    });
    crate::linear::store(ctx, &[rows, cols], &y, out)
}

/// `dx [T, in] = dy [T, out] w`, types as in [`linear`].
#[must_use]
pub fn linear_backward_input(ctx: &Context, dy: &Tensor, w: &Tensor, out: DType) -> Tensor {
    let (rows, inner, cols) = (dy.rows(), dy.cols(), w.cols());
    assert_eq!(w.rows(), inner, "linear backward: dy {:?}, w {:?}", dy.shape(), w.shape());
    let (a, b) = (dy.to_f32_vec(), w.to_f32_vec());
    let mut dx = vec![0.0; rows * cols];
    ctx.threads().run_pieces(&mut dx, cols.max(1), |t, dx| {
        for o in 0..inner {
            for (i, dx) in dx.iter_mut().enumerate() {
                *dx += a[t * inner + o] * b[o * cols + i];
            }
        }
    });
    store(ctx, &[rows, cols], &dx, out)
}

/// `dw [out, in] = dy^T x` or `+=`, as `write` says; `dw` is f32. Products are taken in `compute` (f32 or bf16).
pub fn linear_backward_weight(ctx: &Context, dy: &Tensor, x: &Tensor, compute: DType, write: Write, dw: &mut Tensor) {
    let (rows, outs, ins) = (dy.rows(), dy.cols(), x.cols());
    assert_eq!((x.rows(), dw.len()), (rows, outs * ins), "linear backward: dy {:?}, x {:?}", dy.shape(), x.shape());
    let _ = compute;
    let (a, b) = (dy.to_f32_vec(), x.to_f32_vec());
    ctx.threads().run_pieces(dw.f32s_mut(), ins.max(1), |o, dw| {
        if write == Write::Replace {
            dw.fill(0.0);
        }
        for t in 0..rows {
            for (i, dw) in dw.iter_mut().enumerate() {
                *dw += a[t * outs + o] * b[t * ins + i];
            }
        }
    });
}

pub(crate) fn store(ctx: &Context, shape: &[usize], values: &[f32], dtype: DType) -> Tensor {
    let mut tensor = ctx.empty(shape, dtype);
    match dtype {
        DType::F32 => tensor.f32s_mut().copy_from_slice(values),
        DType::BF16 => {
            tensor.bf16s_mut().iter_mut().zip(values).for_each(|(y, &x)| *y = moeworks_tensor::bf16::from_f32(x));
        }
        DType::U32 => unreachable!("no float result is u32"),
    }
    tensor
}
