//! One NVIDIA GPU: found at run time, its kernels compiled at first use.
//!
//! Nothing of CUDA is needed to build. [`Gpu::open`] looks for the driver and a device, and for NVRTC, which compiles
//! the sources in `kernels/` for the GPU at hand; compiled kernels are cached on disk. [`Gpu::emulated`] runs the
//! same sources and launches on the CPU, slowly and for tests: that is how kernels are checked where there is no GPU.
//! With `--device trace-sm90` nothing is computed, and everything a GPU would be asked to do is listed: that shows
//! the blocks, copies and waits of a pass of full size without one.
//!
//! This crate knows memory, launches and kernels' texts. It knows no operation: which kernel computes what, with
//! which arguments, is written in `moeworks_ops`, one launcher a file.
//!
//! Work is queued on one stream, and memory is allocated and freed in its order, so nothing waits for the device
//! except a copy to the host. A step that is repeated ([`Gpu::capture_replay`]), such as a token of decoding, becomes
//! a few graphs whose kernels overlap from Hopper on: each kernel begins with the instruction to wait for those
//! before it. A device that fails ends the operation with a panic whose payload is a [`GpuError`], because operations
//! have no error results.
#![allow(unsafe_code)] // The driver, NVRTC, cuBLASLt and page-locked memory are foreign interfaces.

mod backend;
mod blas;
mod choice;
mod device;
mod emulated;
mod error;
mod expert_cache;
mod fetch;
mod gpu;
mod graph;
mod kernel_cache;
mod launch;
mod library;
mod nvidia;
mod nvrtc;
mod options;
mod pending;
pub mod sources;
mod tensor_map;
mod testing;
mod traffic;

pub use blas::{DenseProduct, Onto};
pub use choice::{Chosen, DeviceChoice, UnknownDevice};
pub use emulated::Emulation;
pub use error::GpuError;
pub use expert_cache::{ExpertCache, ExpertCacheStats, ExpertStacks};
pub use fetch::Fetched;
pub use gpu::{COUNTERS, Gpu};
pub use graph::CapturedLaunch;
pub use launch::{Arg, Launch};
pub use nvrtc::{Nvrtc, Target};
pub use options::{
    CUBLASLT_VARIABLE, GpuOptions, KERNEL_CACHE_VARIABLE, NO_PACE_VARIABLE, NO_TENSOR_COPIES_VARIABLE, NVRTC_VARIABLE,
};
pub use pending::{Pending, PendingCombine, PendingNorm, PendingProduct, PendingQkvAppend, ProductKernel};
pub use sources::{SOURCES, Source};
pub use tensor_map::{BOX_COLUMNS, Matrices, TensorMap};
pub use traffic::Traffic;
