//! Calls without the interpreter's lock, and results as Python objects.

use std::panic::{self, AssertUnwindSafe};

use moeworks_gpu::GpuError;
use pyo3::BoundObject as _;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

/// Runs `work` without the interpreter's lock. A panic becomes `RuntimeError`.
pub(crate) fn unlocked<R: Send>(py: Python<'_>, work: impl FnOnce() -> R + Send) -> PyResult<R> {
    py.detach(|| panic::catch_unwind(AssertUnwindSafe(work)))
        .map_err(|payload| PyRuntimeError::new_err(message_of(&*payload)))
}

/// Returns the message of a panic.
pub(crate) fn message_of(payload: &(dyn std::any::Any + Send)) -> String {
    if let Some(error) = payload.downcast_ref::<GpuError>() {
        return error.to_string();
    }
    let text = payload.downcast_ref::<String>().map(String::as_str).or_else(|| payload.downcast_ref::<&str>().copied());
    format!("internal error: {}", text.unwrap_or("a computation failed"))
}

/// Converts a result to a Python object.
pub(crate) fn object<'py, T: IntoPyObject<'py>>(py: Python<'py>, value: T) -> PyResult<Py<PyAny>> {
    let bound = value.into_pyobject(py).map_err(Into::into)?;
    Ok(bound.into_bound().into_any().unbind())
}
