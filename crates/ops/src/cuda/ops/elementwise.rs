//! Conversions of elements on a GPU.

use moeworks_tensor::{DType, Tensor};

use super::{On, THREADS};
use crate::cuda::sources::ELEMENTWISE;

/// A copy of `x` (f32 or bf16) as `dtype` (f32 or bf16), rounded to the nearest, ties to even.
pub(super) fn cast(on: On<'_>, x: &Tensor, dtype: DType) -> Tensor {
    let mut y = on.empty(x.shape(), dtype);
    let is_bf16 = |dtype: DType| (dtype == DType::BF16).into();
    let args = [on.read(x), is_bf16(x.dtype()), on.write(&mut y), is_bf16(dtype), x.len().into()];
    // SAFETY: a thread reads and writes its elements, of as many as both have.
    unsafe { on.launch(&ELEMENTWISE, "cast_elements", x.len().div_ceil(4 * THREADS), &args) };
    y
}
