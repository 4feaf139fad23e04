//! Launchers of the operations on a GPU, one file an operation, with the arguments and results of their CPU versions.
//! The kernels and everything below a launch are in `moeworks_gpu`.
//!
//! The CPU version has checked shapes before it calls these. Each launch's safety rests on that: kernels stay inside
//! the sizes that they are given.

mod activations;
pub(crate) mod attention;
mod batched_gemm;
pub(crate) mod blocks;
pub(crate) mod e4m3;
pub(crate) mod elementwise;
pub(crate) mod experts;
mod fused_norm;
mod grouped;
pub(crate) mod grouped_linear;
pub(crate) mod head_loss;
pub(crate) mod heads;
pub(crate) mod layer_norm;
pub(crate) mod linear;
pub(crate) mod logits;
pub(crate) mod peak;
pub(crate) mod qkv_norm_rope_append;
pub(crate) mod rms_norm;
pub(crate) mod router;
pub(crate) mod sampling;
mod scattered;
mod small_m_gemm;
mod tile_list;
mod wgrad;

use moeworks_gpu::{Arg, DenseProduct, Gpu, Launch, Pending, Source};
use moeworks_tensor::{DType, Element, Tensor};

use crate::Context;
use crate::deferred::List;
use crate::gemm::Form;

/// Threads of a block where the kernel does not say otherwise.
const THREADS: usize = 256;
/// Warps of such a block.
const WARPS: usize = THREADS / 32;

/// A context's GPU and its memory, which every operation here needs.
#[derive(Clone, Copy)]
pub(crate) struct On<'a> {
    ctx: &'a Context,
    gpu: &'a Gpu,
}

impl<'a> On<'a> {
    /// Returns the GPU of a context; none if it has none.
    pub(crate) fn of(ctx: &'a Context) -> Option<Self> {
        ctx.gpu().map(|gpu| Self { ctx, gpu })
    }

    /// Returns the GPU of a context if it has kernels for weights of this type: floats of 16 or 32 bits, or
    /// quantized.
    pub(crate) fn taking_weights(ctx: &'a Context, dtype: DType) -> Option<Self> {
        Self::of(ctx).filter(|_| takes_weights(dtype))
    }

    /// Returns the GPU of a context if its kernels take all of these types; the host computes with others.
    pub(crate) fn taking(ctx: &'a Context, dtypes: &[DType]) -> Option<Self> {
        Self::of(ctx).filter(|_| dtypes.iter().all(|dtype| matches!(dtype, DType::F32 | DType::BF16)))
    }

    fn empty(self, shape: &[usize], dtype: DType) -> Tensor {
        self.gpu.empty(self.ctx.pool(), shape, dtype)
    }

    /// Returns the tensor as f32, for small tensors that kernels take in this type alone.
    fn f32s(self, tensor: &Tensor) -> Tensor {
        match tensor.dtype() {
            DType::F32 => tensor.clone(),
            _ => Tensor::from_slice(self.ctx.pool(), tensor.shape(), &tensor.to_f32_vec()),
        }
    }

    /// Returns a list where it is, or a copy of the host's.
    fn list<E: Element>(self, list: List<'_, E>) -> Listed<'_> {
        match list {
            List::Tensor(tensor) => Listed::There(tensor),
            List::Host(list) => Listed::Copied(Tensor::from_slice(self.ctx.pool(), &[list.len()], list)),
        }
    }

    /// Copies a list of integers to the GPU.
    fn u32s(self, values: &[u32]) -> Tensor {
        Tensor::from_slice(self.ctx.pool(), &[values.len()], values)
    }

    /// Returns a list of integers on the GPU. It is copied once and cached, because it recurs.
    fn cached_list(self, values: &[u32]) -> Tensor {
        self.gpu.cached_list(self.ctx.pool(), values)
    }

    /// Copies a list of floats to the GPU.
    fn floats(self, values: &[f32]) -> Tensor {
        Tensor::from_slice(self.ctx.pool(), &[values.len()], values)
    }

    fn read_or_none<'t>(self, tensor: Option<&'t Tensor>) -> Arg<'t> {
        tensor.map_or(Arg::none(), |tensor| self.gpu.read(tensor))
    }

    fn read<'t>(self, tensor: &'t Tensor) -> Arg<'t> {
        self.gpu.read(tensor)
    }

    fn write<'t>(self, tensor: &'t mut Tensor) -> Arg<'t> {
        self.gpu.write(tensor)
    }

    /// Launches `blocks` blocks of [`THREADS`] threads.
    ///
    /// # Safety
    ///
    /// See [`Gpu::launch`].
    unsafe fn launch(self, source: &'static Source, kernel: &str, blocks: usize, args: &[Arg<'_>]) {
        let launch = Launch { source, kernel, grid: [blocks, 1, 1], threads: THREADS, shared: 0, args };
        // SAFETY: the caller's promise.
        unsafe { self.gpu.launch(&launch) };
    }
}

impl On<'_> {
    /// Launches `blocks` blocks of [`THREADS`] threads of an operation that may be fused with the next one.
    ///
    /// # Safety
    ///
    /// See [`Gpu::launch`].
    unsafe fn launch_pending(
        self,
        source: &'static Source,
        kernel: &str,
        blocks: usize,
        args: &[Arg<'_>],
        pending: Pending<'_>,
    ) {
        let launch = Launch { source, kernel, grid: [blocks, 1, 1], threads: THREADS, shared: 0, args };
        // SAFETY: the caller's promise.
        unsafe { self.gpu.launch_pending(&launch, pending) };
    }
}

/// A [`List`] as a tensor.
enum Listed<'a> {
    There(&'a Tensor),
    Copied(Tensor),
}

impl Listed<'_> {
    fn tensor(&self) -> &Tensor {
        match self {
            Self::There(tensor) => tensor,
            Self::Copied(tensor) => tensor,
        }
    }
}

/// Returns the product of this form with `[rows, columns, depth]`, as NVIDIA's library takes it.
fn dense_product(form: Form, [rows, columns, depth]: [usize; 3], is_rounded: bool) -> DenseProduct {
    let (is_a_transposed, is_b_transposed) = (form == Form::Tn, form == Form::Nt);
    DenseProduct { is_a_transposed, is_b_transposed, rows, columns, depth, is_rounded }
}

/// Returns the f64 that a kernel wrote as two 32-bit numbers.
fn double([low, high]: [u32; 2]) -> f64 {
    f64::from_bits(u64::from(low) | u64::from(high) << 32)
}

/// Returns whether products have kernels for weights of this type.
fn takes_weights(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::BF16) || dtype.is_quantized()
}

/// Returns the name of a float type in kernels' names.
fn name(dtype: DType) -> &'static str {
    match dtype {
        DType::BF16 => "bf16",
        _ => "f32",
    }
}
