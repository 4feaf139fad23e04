//! A router's logits `x w^T` with f32 weights and bf16 activations, forward and backward.
//!
//! The CPU takes them as f32 products, as [`linear`](crate::linear) does. On a GPU f32 products would be a large part
//! of a layer's time, because its tensor cores multiply bf16. There an f32 number is split into three bf16: its first
//! eight digits, the next eight, and the last (Henry, Tang and Heinecke, 1904.06376). Products with bf16 numbers are
//! exact, and their sums are exact except for f32 rounding. Of products of two split numbers, terms below 2^-24 of
//! the whole are left out. The other parts of an infinity are 0, so that its product with an infinite activation is
//! NaN.

use moeworks_tensor::{DType, Tensor};

use crate::Context;
use crate::cuda::{self, On};
use crate::elementwise::add_assign;
use crate::linear::{Write, linear, linear_backward_input, linear_backward_weight};

/// Returns logits `[T, E]` (f32) of `x [T, D]` (f32 or bf16) and `w [E, D]` (f32).
#[must_use]
pub fn logits(ctx: &Context, x: &Tensor, w: &Tensor) -> Tensor {
    assert_eq!((w.cols(), w.dtype()), (x.cols(), DType::F32), "logits: x {:?}, w {:?}", x.shape(), w.shape());
    match On::of(ctx).filter(|_| cuda::logits::takes([x.rows(), w.rows(), w.cols()], x.dtype())) {
        Some(on) => cuda::logits::forward(on, x, w),
        None => linear(ctx, x, w, DType::F32),
    }
}

/// Returns the gradient `[T, D]` (f32) of `x`, which is of type `of`, from that of the logits (f32).
#[must_use]
pub fn logits_backward_input(ctx: &Context, dlogits: &Tensor, w: &Tensor, of: DType) -> Tensor {
    assert_eq!((w.rows(), w.dtype()), (dlogits.cols(), DType::F32), "logits: gradient {:?}", dlogits.shape());
    match with_kernels_back(ctx, dlogits, w, of) {
        Some(on) => cuda::logits::backward_input(on, dlogits, w, None),
        None => linear_backward_input(ctx, dlogits, w, DType::F32),
    }
}

/// Adds the gradient of `x` to `dx`, `[T, D]` f32.
pub fn logits_backward_input_add(ctx: &Context, dlogits: &Tensor, w: &Tensor, of: DType, dx: &mut Tensor) {
    assert_eq!(dx.shape(), [dlogits.rows(), w.cols()], "logits: gradient {:?}", dlogits.shape());
    match with_kernels_back(ctx, dlogits, w, of) {
        Some(on) => *dx = cuda::logits::backward_input(on, dlogits, w, Some(dx)),
        None => add_assign(ctx, dx, &linear_backward_input(ctx, dlogits, w, DType::F32)),
    }
}

fn with_kernels_back<'a>(ctx: &'a Context, dlogits: &Tensor, w: &Tensor, of: DType) -> Option<On<'a>> {
    On::of(ctx).filter(|_| cuda::logits::takes_backward([dlogits.rows(), w.rows(), w.cols()], of))
}

/// Computes the gradient of `w` (f32), replaced or added, from that of the logits (f32).
pub fn logits_backward_weight(ctx: &Context, dlogits: &Tensor, x: &Tensor, write: Write, dw: &mut Tensor) {
    let sizes = [x.rows(), dlogits.cols(), x.cols()];
    assert_eq!((dlogits.rows(), dw.len()), (sizes[0], sizes[1] * sizes[2]), "logits: gradient {:?}", dlogits.shape());
    match On::of(ctx).filter(|_| cuda::logits::takes_backward(sizes, x.dtype())) {
        Some(on) => cuda::logits::backward_weight(on, dlogits, x, write, dw),
        None => linear_backward_weight(ctx, dlogits, x, DType::F32, write, dw),
    }
}

#[cfg(test)]
#[path = "logits_tests.rs"]
mod tests;
