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
pub(crate) const CPU: i32 = 1;

/// DLPack's number of signed integers.
pub(crate) const INT: u8 = 0;
/// DLPack's number of unsigned integers.
const UNSIGNED: u8 = 1;
/// DLPack's number of IEEE floats.
pub(crate) const FLOAT: u8 = 2;
/// DLPack's number of bfloats.
pub(crate) const BFLOAT: u8 = 4;

/// The most dims of a result.
const MAX_DIMS: usize = 3;

/// The place, type and sizes of a tensor.
#[repr(C)]
pub(crate) struct DlTensor {
    pub(crate) data: *mut c_void,
    pub(crate) device_type: i32,
    pub(crate) device_id: i32,
    pub(crate) ndim: i32,
    pub(crate) code: u8,
    pub(crate) bits: u8,
    pub(crate) lanes: u16,
    pub(crate) shape: *mut i64,
    pub(crate) strides: *mut i64,
    pub(crate) byte_offset: u64,
}

impl DlTensor {
    /// A tensor without memory, for a function that fills it in.
    pub(crate) const EMPTY: Self = Self {
        data: ptr::null_mut(),
        device_type: 0,
        device_id: 0,
        ndim: 0,
        code: 0,
        bits: 0,
        lanes: 0,
        shape: ptr::null_mut(),
        strides: ptr::null_mut(),
        byte_offset: 0,
    };
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
    dims: [i64; MAX_DIMS],
    strides: [i64; MAX_DIMS],
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
        DType::F32 => (FLOAT, 32),
        DType::F16 => (FLOAT, 16),
        DType::BF16 => (BFLOAT, 16),
        DType::U32 => (UNSIGNED, 32),
        other => return Err(PyValueError::new_err(format!("{other:?} has no DLPack type"))),
    };
    let num_dims = tensor.shape().len();
    if num_dims > MAX_DIMS {
        return Err(PyValueError::new_err(format!("a result of {num_dims} dims: at most {MAX_DIMS} are passed on")));
    }
    let (mut dims, mut strides) = ([1; MAX_DIMS], [1; MAX_DIMS]);
    dims.iter_mut().zip(tensor.shape()).for_each(|(to, &dim)| *to = dim as i64);
    for i in (1..num_dims).rev() {
        strides[i - 1] = strides[i] * dims[i].max(1);
    }
    let data = tensor.bytes_mut().as_mut_ptr().cast::<c_void>();
    let fields = DlTensor { data, device_type: CPU, ndim: num_dims as i32, code, bits, lanes: 1, ..DlTensor::EMPTY };
    let managed = Managed { tensor: fields, owner: ptr::null_mut(), deleter: Some(delete) };
    let export = Box::into_raw(Box::new(Export { managed, dims, strides, _tensor: tensor }));
    // SAFETY: the box was just leaked, so that its fields have their places until `delete`; the capsule has the only
    // pointer to it.
    unsafe {
        (*export).managed.owner = export.cast();
        (*export).managed.tensor.shape = (&raw mut (*export).dims).cast();
        (*export).managed.tensor.strides = (&raw mut (*export).strides).cast();
        let managed = (&raw mut (*export).managed).cast::<c_void>();
        Ok(Bound::from_owned_ptr_or_err(py, ffi::PyCapsule_New(managed, NAME.as_ptr(), Some(forget)))?.unbind())
    }
}

/// Returns a capsule of `tensor`, or `None`.
pub(crate) fn some(py: Python<'_>, tensor: Option<Tensor>) -> PyResult<Option<Py<PyAny>>> {
    tensor.map(|tensor| capsule(py, tensor)).transpose()
}
