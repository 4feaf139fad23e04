//! PyTorch's tensors by its table of C functions (DLPack 1), which say in one call where a tensor's memory is.

use std::ffi::{CStr, c_int, c_void};

use pyo3::exceptions::PyValueError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyAny;

use crate::dlpack::{BFLOAT, CPU, DlTensor, FLOAT, INT};

/// The name of the capsule that a type of tensors offers.
const NAME: &CStr = c"dlpack_exchange_api";

/// The major version of DLPack whose table is read here.
const MAJOR: u32 = 1;

/// The most dims of a tensor that is viewed.
const MAX_DIMS: usize = 3;

#[repr(C)]
struct Header {
    major: u32,
    minor: u32,
    previous: *const c_void,
}

/// The table; functions that are not called here are untyped.
#[repr(C)]
struct Table {
    header: Header,
    allocate: *const c_void,
    managed_from_object: *const c_void,
    managed_to_object: *const c_void,
    view_of_object: Option<unsafe extern "C" fn(*mut ffi::PyObject, *mut DlTensor) -> c_int>,
    current_stream: *const c_void,
}

/// A type of elements that kernels take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    /// f32.
    F32,
    /// bf16.
    Bf16,
    /// i64.
    I64,
}

/// A tensor on the CPU whose elements are consecutive and aligned.
#[derive(Clone, Copy)]
pub(crate) struct View {
    /// The address of the first element.
    pub(crate) address: usize,
    /// The type of elements.
    pub(crate) element: Element,
    dims: [usize; MAX_DIMS],
    num_dims: usize,
}

impl View {
    /// Returns the sizes if there are `N`.
    pub(crate) fn shape<const N: usize>(&self) -> Option<[usize; N]> {
        self.dims[..self.num_dims].try_into().ok()
    }

    /// Makes a view; `None` for a tensor that is elsewhere, of another type, or not consecutive.
    ///
    /// # Safety
    /// `shape` and `strides` of the tensor must be readable.
    unsafe fn new(tensor: &DlTensor) -> Option<Self> {
        let element = match (tensor.code, tensor.bits) {
            (FLOAT, 32) => Element::F32,
            (BFLOAT, 16) => Element::Bf16,
            (INT, 64) => Element::I64,
            _ => return None,
        };
        let num_dims = usize::try_from(tensor.ndim).ok().filter(|&num| num <= MAX_DIMS)?;
        if tensor.device_type != CPU || tensor.lanes != 1 {
            return None;
        }
        let mut dims = [0; MAX_DIMS];
        let mut step = 1_i64;
        for i in (0..num_dims).rev() {
            // SAFETY: the function's condition; a table of DLPack 1 has strides for every tensor with dims, or none.
            let (dim, stride) = unsafe {
                let stride = if tensor.strides.is_null() { step } else { *tensor.strides.add(i) };
                (*tensor.shape.add(i), stride)
            };
            if dim > 1 && stride != step {
                return None;
            }
            dims[i] = usize::try_from(dim).ok()?;
            step = step.checked_mul(dim.max(1))?;
        }
        let address = (tensor.data as usize).checked_add(usize::try_from(tensor.byte_offset).ok()?)?;
        let is_aligned = address.is_multiple_of(usize::from(tensor.bits) / 8);
        is_aligned.then_some(Self { address, element, dims, num_dims })
    }
}

/// The functions of PyTorch.
pub(crate) struct Exchange<'a> {
    table: &'a Table,
}

impl<'a> Exchange<'a> {
    /// Reads the capsule `torch.Tensor.__dlpack_c_exchange_api__`.
    pub(crate) fn new(capsule: &'a Bound<'_, PyAny>) -> PyResult<Self> {
        // SAFETY: the interpreter checks the capsule and its name; such a capsule has a table that is never freed and
        // begins with its version.
        let table = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), NAME.as_ptr()).cast::<Table>().as_ref() };
        let Some(table) = table else { return Err(PyErr::fetch(capsule.py())) };
        if table.header.major != MAJOR {
            return Err(PyValueError::new_err(format!("DLPack {}: must be {MAJOR}", table.header.major)));
        }
        Ok(Self { table })
    }

    /// Returns where a tensor is; `None` for one that no [`View`] describes.
    ///
    /// # Safety
    /// `tensor` must be of the type whose capsule this is.
    pub(crate) unsafe fn view(&self, tensor: &Bound<'_, PyAny>) -> Option<View> {
        let call = self.table.view_of_object?;
        let mut found = DlTensor::EMPTY;
        // SAFETY: the function's condition; PyTorch fills the tensor in, whose sizes live as long as the object.
        let is_found = unsafe { call(tensor.as_ptr(), &raw mut found) } == 0;
        if !is_found {
            // Its reason is that of a tensor without such memory, which slower code explains.
            drop(PyErr::take(tensor.py()));
            return None;
        }
        // SAFETY: the call above succeeded.
        unsafe { View::new(&found) }
    }
}
