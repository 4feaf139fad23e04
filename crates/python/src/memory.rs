//! Tensors over memory of another library, such as PyTorch's.

use std::slice;
use std::sync::Arc;

use moeworks_tensor::{DType, Tensor};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Memory that the caller of a function keeps alive.
struct Foreign {
    address: usize,
    len: usize,
}

impl AsRef<[u8]> for Foreign {
    fn as_ref(&self) -> &[u8] {
        if self.len == 0 {
            return &EMPTY.0;
        }
        // SAFETY: the maker of the tensor over this memory promised that it is readable while the tensor lives.
        unsafe { slice::from_raw_parts(self.address as *const u8, self.len) }
    }
}

/// No bytes, aligned for every type.
#[repr(align(64))]
struct Empty([u8; 0]);

static EMPTY: Empty = Empty([]);

/// Returns a read-only tensor over the elements at `address`.
///
/// # Safety
/// Until the tensor and its clones are dropped the memory must be readable, and nobody may write to it.
pub(crate) unsafe fn tensor(address: usize, shape: &[usize], dtype: DType) -> PyResult<Tensor> {
    let count = shape.iter().try_fold(1_usize, |count, &dim| count.checked_mul(dim));
    let len = count.and_then(|count| count.checked_mul(dtype.size()));
    let len = len.ok_or_else(|| PyValueError::new_err(format!("a tensor of shape {shape:?} is too large")))?;
    Tensor::from_foreign(Arc::new(Foreign { address, len }), 0..len, shape, dtype)
        .ok_or_else(|| PyValueError::new_err(format!("the memory of a tensor of shape {shape:?} is not aligned")))
}

/// Returns the values at `address`.
///
/// # Safety
/// They must be readable, aligned and not written to for as long as the slice is used.
pub(crate) unsafe fn values<'a, T: bytemuck::AnyBitPattern>(address: usize, len: usize) -> &'a [T] {
    if len == 0 {
        return &[];
    }
    // SAFETY: the function's condition.
    unsafe { slice::from_raw_parts(address as *const T, len) }
}
