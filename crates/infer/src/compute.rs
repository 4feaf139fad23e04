//! The compute context: threads, device, and the size of the expert cache.

use moeworks_gpu::{DeviceChoice, GpuError};
use moeworks_ops::{Context, MachineOptions};

use crate::InferError;

/// The most threads; no machine has that many cores.
pub const MAX_THREADS: usize = 1024;

/// Options of the compute context.
#[derive(Clone, Debug, Default)]
pub struct ComputeOptions {
    /// The number of threads; 0 for one on each core.
    pub threads: usize,
    /// The device.
    pub device: DeviceChoice,
    /// Bytes of GPU memory that hold experts. The other experts stay in host memory until tokens choose them. 0 keeps
    /// all on the GPU.
    pub expert_cache_bytes: usize,
    /// True if a token must have the same bits in any batch and for any split of the prompt
    /// ([`Context::with_batch_invariance`]).
    pub is_batch_invariant: bool,
    /// The options of the machine.
    pub machine: MachineOptions,
}

/// A compute context, with the reason if there is no GPU.
pub struct FoundContext {
    /// The context.
    pub ctx: Context,
    /// The reason why the CPU is used although any device was allowed; `None` if the CPU was asked for or a GPU was
    /// found.
    pub missing: Option<GpuError>,
}

impl ComputeOptions {
    /// Makes the context.
    ///
    /// # Errors
    /// Fails if there are too many threads, the device is missing, an expert cache is asked for without a GPU, or
    /// batch invariance with one.
    pub fn context(self) -> Result<FoundContext, InferError> {
        let Self { threads, device, expert_cache_bytes, is_batch_invariant, machine } = self;
        if threads > MAX_THREADS {
            return Err(InferError::ManyThreads { threads, most: MAX_THREADS });
        }
        let ctx = if threads == 0 { Context::cpu_all_cores() } else { Context::cpu(threads) };
        let (ctx, missing) = ctx.on_device(device, &machine)?;
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
