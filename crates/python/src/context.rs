//! The compute context of operations on PyTorch's tensors: one in a process.

use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::{process, ptr};

use moeworks_infer::compute::MAX_THREADS;
use moeworks_ops::{Context, Isa, MachineOptions};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::calls::object;

/// The context with its number of threads.
struct Held {
    num_threads: usize,
    ctx: Context,
}

type Slot = Mutex<Option<Held>>;

/// The slot of the process that [`PROCESS`] names. Slots are never freed: a forked process has none of the threads of
/// its parent's context, and perhaps a lock that nobody will open, so that it gets a slot of its own.
static SLOT: AtomicPtr<Slot> = AtomicPtr::new(ptr::null_mut());
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// Returns the slot of this process.
fn slot() -> &'static Slot {
    let here = process::id();
    if PROCESS.load(Ordering::Acquire) != here {
        let fresh: &'static Slot = Box::leak(Box::new(Mutex::new(None)));
        SLOT.store(ptr::from_ref(fresh).cast_mut(), Ordering::Release);
        PROCESS.store(here, Ordering::Release);
    }
    // SAFETY: the pointer was stored before the number of the process, and its target is never freed.
    unsafe { &*SLOT.load(Ordering::Acquire) }
}

/// Returns the context with `num_threads` threads, of which the caller is one. Results do not depend on the number.
pub(crate) fn shared(num_threads: usize) -> Context {
    let num_threads = num_threads.clamp(1, MAX_THREADS);
    let mut held = slot().lock().unwrap_or_else(PoisonError::into_inner);
    match &*held {
        Some(held) if held.num_threads == num_threads => held.ctx.clone(),
        _ => {
            let ctx = Context::cpu(num_threads);
            *held = Some(Held { num_threads, ctx: ctx.clone() });
            ctx
        }
    }
}

/// Reads the options of the machine from `os.environ`.
pub(crate) fn machine(py: Python<'_>) -> PyResult<MachineOptions> {
    let variables = py.import("os")?.getattr("environ")?;
    Ok(MachineOptions::from_variables(|name| variables.call_method1("get", (name,)).ok()?.extract().ok()))
}

/// `describe() -> tuple[str, int]`: the kernels' instruction set and the cores that this process may use.
pub(crate) fn describe(args: &Bound<'_, PyTuple>) -> PyResult<Py<PyAny>> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    object(args.py(), (format!("{:?}", Isa::detect()), cores))
}
