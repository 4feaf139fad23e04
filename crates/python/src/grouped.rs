//! Products of groups of rows, each with a matrix of its own, on PyTorch's tensors.

use moeworks_ops::elementwise::into_type;
use moeworks_ops::experts::{ExpertRows, NO_ROW};
use moeworks_ops::grouped_linear::{
    GroupedRows, grouped_linear, grouped_linear_backward_input, grouped_linear_backward_weight,
};
use moeworks_ops::linear::Write;
use moeworks_tensor::{DType, Tensor};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::calls::{object, unlocked};
use crate::experts::{dtype, padded};
use crate::{context, dlpack, memory};

/// The form, the type, M rows, K and N columns, G groups, and the number of threads.
type Sizes = (String, String, usize, usize, usize, usize, usize);
/// The addresses of a, b and the groups' ends.
type Memory = (usize, usize, usize);

/// Returns the first row of each group and the end of the last. `ends` are those of the groups, one after another.
fn offsets(ends: &[i32], num_rows: usize) -> PyResult<Vec<u32>> {
    let mut offsets = vec![0];
    for (group, &end) in ends.iter().enumerate() {
        let before = offsets[group];
        match u32::try_from(end) {
            Ok(end) if end >= before && end as usize <= num_rows => offsets.push(end),
            _ => {
                let message =
                    format!("offs[{group}] is {end}: must be from {before} to the number of rows, {num_rows}");
                return Err(PyValueError::new_err(message));
            }
        }
    }
    Ok(offsets)
}

/// `grouped((form, dtype, m, k, n, g, threads), (a, b, ends)) -> capsule`. The forms, for each group's rows:
///
/// - `nn`: a `[M, K]` times b `[G, K, N]`, `[M, N]`
/// - `nt`: a `[M, K]` times the transposes of b `[G, N, K]`, `[M, N]`
/// - `tn`: the transpose of a `[M, K]` times b `[M, N]`, `[G, K, N]`
///
/// Rows after the last group give zeros.
pub(crate) fn grouped(args: &Bound<'_, PyTuple>) -> PyResult<Py<PyAny>> {
    let py = args.py();
    let (sizes, memory): (Sizes, Memory) = args.extract()?;
    let element = dtype(&sizes.1)?;
    if !["nn", "nt", "tn"].contains(&&*sizes.0) {
        return Err(PyValueError::new_err(format!("form {:?}: must be nn, nt or tn", sizes.0)));
    }
    // SAFETY: the Python code that calls this has checked the tensors and keeps them alive.
    let result = unlocked(py, || unsafe { product(&sizes, memory, element) })??;
    object(py, dlpack::capsule(py, result)?)
}

/// Computes the product.
///
/// # Safety
/// As for [`memory::tensor`], for all addresses.
unsafe fn product(sizes: &Sizes, memory: Memory, dtype: DType) -> PyResult<Tensor> {
    let (form, _, m, k, n, g, num_threads) = sizes;
    let (form, m, k, n, g) = (&**form, *m, *k, *n, *g);
    let ctx = &context::shared(*num_threads);
    // SAFETY: the function's condition.
    let offsets = offsets(unsafe { memory::values::<i32>(memory.2, g) }, m)?;
    let used = *offsets.last().unwrap_or(&0);
    let tokens: Vec<u32> = (0..used).collect();
    let token_rows: Vec<u32> = (0..m as u32).map(|row| if row < used { row } else { NO_ROW }).collect();
    let weights = vec![1.0_f32; used as usize];
    let rows = ExpertRows::new(&offsets, &tokens, &weights, &token_rows, 1);
    let (used, width) = (used as usize, if form == "nt" { n } else { k });
    let groups = GroupedRows { rows, first: 0, width };
    // SAFETY: the function's condition. Of `a` and `b` the rows of groups are read.
    let result = unsafe {
        match form {
            "nt" => {
                let (a, b) = (memory::tensor(memory.0, &[m, k], dtype)?, memory::tensor(memory.1, &[g * n, k], dtype)?);
                padded(ctx, grouped_linear(ctx, &a, &b, groups), m)
            }
            "nn" => {
                let a = memory::tensor(memory.0, &[used, k], dtype)?;
                let b = memory::tensor(memory.1, &[g * k, n], dtype)?;
                grouped_linear_backward_input(ctx, &a, &b, groups)
            }
            _ => {
                let (a, b) = (memory::tensor(memory.0, &[used, k], dtype)?, memory::tensor(memory.1, &[m, n], dtype)?);
                let mut grad = ctx.empty(&[g * k, n], dtype);
                grouped_linear_backward_weight(ctx, &a, &b, groups, Write::Replace, &mut grad);
                grad.reshaped(&[g, k, n])
            }
        }
    };
    Ok(into_type(ctx, result, dtype))
}
