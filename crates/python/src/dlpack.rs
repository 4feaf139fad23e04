//! Results as DLPack capsules, without a copy (version 0.8 of the structs, which every reader takes).

use std::ffi::{CStr, c_void};
use std::ptr;

use moeworks_tensor::{DType, Tensor};
use pyo3::exceptions::PyValueError;
use pyo3::ffi;
use pyo3::prelude::*;

/// The name of a capsule that nobody has taken yet; a reader renames it.
const NAME: &CStr = c"dltensor";

/// DLPack's number of the CPU.
const CPU: i32 = 1;

#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct Managed {
    tensor: DlTensor,
    owner: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

/// An exported tensor with its sizes. It has no Python object, because the deleter runs on any thread without the
/// interpreter's lock.
struct Export {
    managed: Managed,
    dims: Vec<i64>,
    strides: Vec<i64>,
    _tensor: Tensor,
}

/// Frees an export.
///
/// # Safety
/// `managed` must be the first field of a leaked `Box<Export>`, which nobody uses afterwards.
unsafe extern "C" fn delete(managed: *mut Managed) {
    // SAFETY: `owner` is the box that `capsule` leaked; the condition of the function.
    drop(unsafe { Box::from_raw((*managed).owner.cast::<Export>()) });
}

/// Frees the export of a capsule that no reader took.
///
/// # Safety
/// The interpreter calls this with a capsule that `capsule` made.
unsafe extern "C" fn forget(capsule: *mut ffi::PyObject) {
    // SAFETY: the capsule is alive during the call. Under its first name it still has the export.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, NAME.as_ptr()) == 1 {
            delete(ffi::PyCapsule_GetPointer(capsule, NAME.as_ptr()).cast::<Managed>());
        }
    }
}

/// Returns a capsule with the memory of `tensor`, which must not be shared.
pub(crate) fn capsule(py: Python<'_>, mut tensor: Tensor) -> PyResult<Py<PyAny>> {
    let (code, bits) = match tensor.dtype() {
        DType::F32 => (2, 32),
        DType::F16 => (2, 16),
        DType::BF16 => (4, 16),
        DType::U32 => (1, 32),
        other => return Err(PyValueError::new_err(format!("{other:?} has no DLPack type"))),
    };
    let dims: Vec<i64> = tensor.shape().iter().map(|&dim| dim as i64).collect();
    let mut strides = vec![1; dims.len()];
    for i in (1..dims.len()).rev() {
        strides[i - 1] = strides[i] * dims[i].max(1);
    }
    let data = tensor.bytes_mut().as_mut_ptr().cast::<c_void>();
    let tensor_fields = DlTensor {
        data,
        device_type: CPU,
        device_id: 0,
        ndim: dims.len() as i32,
        code,
        bits,
        lanes: 1,
        shape: ptr::null_mut(),
        strides: ptr::null_mut(),
        byte_offset: 0,
    };
    let managed = Managed { tensor: tensor_fields, owner: ptr::null_mut(), deleter: Some(delete) };
    let export = Box::into_raw(Box::new(Export { managed, dims, strides, _tensor: tensor }));
    // SAFETY: the box was just leaked, so that its fields have their places until `delete`; the capsule has the only
    // pointer to it.
    unsafe {
        (*export).managed.owner = export.cast();
        (*export).managed.tensor.shape = (*export).dims.as_mut_ptr();
        (*export).managed.tensor.strides = (*export).strides.as_mut_ptr();
        let managed = (&raw mut (*export).managed).cast::<c_void>();
        Ok(Bound::from_owned_ptr_or_err(py, ffi::PyCapsule_New(managed, NAME.as_ptr(), Some(forget)))?.unbind())
    }
}

/// Returns a capsule of `tensor`, or `None`.
pub(crate) fn some(py: Python<'_>, tensor: Option<Tensor>) -> PyResult<Option<Py<PyAny>>> {
    tensor.map(|tensor| capsule(py, tensor)).transpose()
}
