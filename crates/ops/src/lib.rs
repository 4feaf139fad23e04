//! Every numeric operation, one file an operation, forward and backward side by side.
//!
//! Operations are concrete functions over [`Tensor`](moeworks_tensor::Tensor)s that take a [`Context`]: the memory
//! pool, the threads and the instruction set to use. They know nothing of models or of MoE policy. Operations assert
//! the shapes they are given. Results are the same bits whatever the number of threads, because work is divided by
//! output and sums are cut by shape.
//!
//! Shape letters: T tokens, D width, F expert width, E experts, K experts a token, R rows (token-expert pairs), V
//! vocabulary, H heads, S sequence.
//!
//! The unit tests pass under AddressSanitizer, without the emulation of a GPU, whose threads have stacks of their
//! own. They take two to ten minutes (run on machines with AVX-512 BF16, which covers every kernel except AMX's, and
//! on machines with AVX-512 alone):
//!
//! ```sh
//! MOEWORKS_NO_EMULATION=1 RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=address \
//!     cargo test -p moeworks-ops --lib --target x86_64-unknown-linux-gnu
//! ```
//!
//! The aarch64 kernels ([`Isa::Neon`]) have been run only under emulation, where these tests pass in 13 minutes,
//! except for the one that measures speed. With Rust's target, a linker and `qemu-user` installed:
//!
//! ```sh
//! export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
//! export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER='qemu-aarch64 -cpu max -L /usr/aarch64-linux-gnu'
//! MOEWORKS_NO_EMULATION=1 cargo test -p moeworks-ops --target aarch64-unknown-linux-gnu -- \
//!     --skip every_rate_is_measured
//! ```
// Most of the code around the x86-64 kernels is for them alone.
#![cfg_attr(not(target_arch = "x86_64"), allow(dead_code, unused_imports, unused_mut, unused_variables))]
#![allow(unsafe_code)] // Vector kernels, lent memory between threads and mapped files live here and nowhere above.

mod activation;
pub mod adamw;
pub mod attention;
#[cfg(test)]
mod batch_invariance_tests;
pub mod columns;
mod context;
pub mod counting_sort;
mod cuda;
pub mod deferred;
pub mod e4m3;
pub mod elementwise;
pub mod embedding;
pub mod experts;
#[cfg(test)]
mod f16_tests;
mod gemm;
pub mod gemm_plan {
    //! The kernel that takes a product on the host, as a value.

    pub use crate::gemm::plan::{Dequantize, GemmKernel, GemmPlan, GemmProblem, RowLayout};
    pub use crate::gemm::{Compute, Form};
}
pub mod grouped_linear;
pub mod head_loss;
pub mod heads;
mod isa;
pub mod layer_norm;
pub mod linear;
pub mod logits;
mod mapped;
mod parallel;
pub mod peak;
mod prefetch;
pub mod qkv_norm_rope_append;
pub mod quantized;
pub mod random;
pub mod rms_norm;
pub mod rope;
pub mod router_rows;
pub mod sampling;
pub mod score_top_k;
mod simd;
mod skinny_gemm;
#[cfg(test)]
mod test_data;
mod threads;
pub mod top_k;
mod vmath;

pub use activation::Activation;
pub use context::{Context, F32_TILES_VARIABLE, MachineOptions};
pub use isa::Isa;
pub use mapped::MappedFile;
pub use threads::Threads;
