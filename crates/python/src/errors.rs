//! Errors of the library as Python exceptions.

use std::error::Error;
use std::path::Path;

use pyo3::exceptions::{PyFileNotFoundError, PyValueError};
use pyo3::prelude::*;

/// Returns an error and its causes as one line.
pub(crate) fn line(error: &dyn Error) -> String {
    let mut message = error.to_string();
    let mut source = error.source();
    while let Some(inner) = source {
        let text = inner.to_string();
        if !message.contains(&text) {
            message += &format!(": {text}");
        }
        source = inner.source();
    }
    message.replace(['\n', '\r'], " ")
}

/// Returns `ValueError` with the library's line.
pub(crate) fn value(error: impl Error) -> PyErr {
    PyValueError::new_err(line(&error))
}

/// Returns `FileNotFoundError` if there is nothing at `path`, otherwise `ValueError`.
pub(crate) fn at(path: &Path, error: impl Error) -> PyErr {
    if path.exists() { value(error) } else { PyFileNotFoundError::new_err(line(&error)) }
}
