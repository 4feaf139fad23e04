//! The extension module `moeworks._native`: what the Python package calls, as plain functions.
//!
//! Memory of tensors comes as addresses and leaves as DLPack capsules, so that PyTorch is not needed to build, and
//! weights and large results are not copied. Python code in `python/moeworks` checks types, shapes and devices, and
//! keeps tensors alive during a call; nothing else should call these functions. The lock of the interpreter is
//! released while they compute. A panic becomes `RuntimeError`.
#![allow(unsafe_code)] // The interpreter's module table, and memory of PyTorch's tensors.

mod calls;
mod choices;
mod context;
mod direct;
mod dlpack;
mod errors;
mod evaluate;
mod exchange;
mod experts;
mod generate;
mod grouped;
mod memory;
mod model;
mod program;
mod routing;
mod train;

use std::cell::UnsafeCell;
use std::ffi::CStr;
use std::panic;
use std::ptr;

use pyo3::exceptions::PyImportError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCFunction, PyDict, PyModule, PyTuple};

/// A function of the module. It gets its positional arguments.
type Function = fn(&Bound<'_, PyTuple>) -> PyResult<Py<PyAny>>;

/// The functions by name; `_native.pyi` has their types.
const FUNCTIONS: [(&CStr, Function); 15] = [
    (c"describe", context::describe),
    (c"experts_direct", direct::direct),
    (c"experts_forward", experts::forward),
    (c"experts_backward", experts::backward),
    (c"grouped", grouped::grouped),
    (c"load", model::load),
    (c"encode", model::encode),
    (c"decode", model::decode),
    (c"render", model::render),
    (c"start", generate::start),
    (c"next", generate::next),
    (c"evaluate", evaluate::evaluate),
    (c"read_routing", routing::read_routing),
    (c"train", train::train),
    (c"run", program::run),
];

/// The module's definition, which the interpreter writes to.
struct Definition(UnsafeCell<ffi::PyModuleDef>);

// SAFETY: only the interpreter uses the definition, while it holds its lock.
unsafe impl Sync for Definition {}

static DEFINITION: Definition = Definition(UnsafeCell::new(ffi::PyModuleDef {
    m_base: ffi::PyModuleDef_HEAD_INIT,
    m_name: c"_native".as_ptr(),
    m_doc: c"Kernels, models and the program of Moeworks. Use the functions of the package instead.".as_ptr(),
    m_size: -1,
    m_methods: ptr::null_mut(),
    m_slots: ptr::null_mut(),
    m_traverse: None,
    m_clear: None,
    m_free: None,
}));

/// Creates the module; the interpreter calls this at the first import.
///
/// # Safety
/// The calling thread must hold the interpreter's lock.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn PyInit__native() -> *mut ffi::PyObject {
    // SAFETY: the definition is static, and the interpreter's lock is held.
    let module = unsafe { ffi::PyModule_Create(DEFINITION.0.get()) };
    if module.is_null() {
        return module;
    }
    let filled = panic::catch_unwind(|| {
        Python::attach(|py| {
            // SAFETY: the module was just created, and this function returns its only reference.
            let module = unsafe { Bound::from_borrowed_ptr(py, module) };
            fill(module.cast::<PyModule>()?).inspect_err(|error| error.clone_ref(py).restore(py))
        })
    });
    match filled {
        Ok(Ok(())) => module,
        failed => {
            if failed.is_err() {
                Python::attach(|py| PyImportError::new_err("moeworks._native cannot be set up").restore(py));
            }
            // SAFETY: this is the only reference.
            unsafe { ffi::Py_DECREF(module) };
            ptr::null_mut()
        }
    }
}

/// Adds the functions and the version.
fn fill(module: &Bound<'_, PyModule>) -> PyResult<()> {
    for (name, function) in FUNCTIONS {
        let call = move |args: &Bound<'_, PyTuple>, _named: Option<&Bound<'_, PyDict>>| function(args);
        module
            .add(name.to_str().unwrap_or_default(), PyCFunction::new_closure(module.py(), Some(name), None, call)?)?;
    }
    module.add("__version__", env!("CARGO_PKG_VERSION"))
}
