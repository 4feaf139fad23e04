//! The context that computes: threads, a device, and how much of a GPU's memory holds experts.

use moeworks_gpu::{DeviceChoice, GpuError};
use moeworks_ops::Context;

use crate::InferError;

/// Threads at most: more than any machine has cores for.
pub const MAX_THREADS: usize = 1024;

/// Options of the context that computes.
#[derive(Clone, Copy, Debug, Default)]
pub struct ComputeOptions {
    /// Threads; 0 for one on each core.
    pub threads: usize,
    /// The device.
    pub device: DeviceChoice,
    /// Bytes of a GPU's memory for experts, of which the others stay in the host's memory until tokens choose them; 0
    /// for all on the GPU.
    pub expert_cache_bytes: usize,
    /// Whether a token has the same bits in any batch and in any pieces of a prompt
    /// ([`Context::with_batch_invariance`]).
    pub is_batch_invariant: bool,
}

/// A context, and what it lacks.
pub struct FoundContext {
    /// Computes.
    pub ctx: Context,
    /// Says why the CPU computes where any device would do; none where that was asked for, or a GPU was found.
    pub missing: Option<GpuError>,
}

impl ComputeOptions {
    /// Makes the context.
    ///
    /// # Errors
    /// If there are too many threads, the device is not there, an expert cache is asked for without a GPU, or batch
    /// invariance with one.
    pub fn context(self) -> Result<FoundContext, InferError> {
        let Self { threads, device, expert_cache_bytes, is_batch_invariant } = self;
        if threads > MAX_THREADS {
            return Err(InferError::ManyThreads { threads, most: MAX_THREADS });
        }
        let ctx = if threads == 0 { Context::cpu_all_cores() } else { Context::cpu(threads) };
        let (ctx, missing) = ctx.on_device(device)?;
        if is_batch_invariant && ctx.gpu().is_some() {
            return Err(InferError::BatchInvarianceOnGpu);
        }
        let ctx = ctx.with_batch_invariance(is_batch_invariant);
        let ctx = match ctx.gpu().cloned() {
            _ if expert_cache_bytes == 0 => ctx,
            Some(gpu) => ctx.with_gpu(gpu.with_expert_cache(expert_cache_bytes)),
            None if device == DeviceChoice::Auto => ctx,
            None => return Err(InferError::ExpertCacheWithoutGpu),
        };
        Ok(FoundContext { ctx, missing })
    }
}
