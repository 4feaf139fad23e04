//! What an operation computes with.

use moeworks_tensor::{DType, Device, MemoryPool, Tensor};

use crate::cuda::{self, On};
use crate::{Isa, Threads};
use moeworks_gpu::{DeviceChoice, Gpu, GpuError};

/// The device, its memory and its threads, handed to every operation. Cloning shares the pool and the threads.
#[derive(Clone)]
pub struct Context {
    gpu: Option<Gpu>,
    pool: MemoryPool,
    threads: Threads,
    isa: Isa,
    has_fp8_experts: bool,
    is_batch_invariant: bool,
}

impl Context {
    /// A CPU context with `num_threads` threads (at least one; the calling thread counts) and the best instruction set.
    #[must_use]
    pub fn cpu(num_threads: usize) -> Self {
        Self {
            gpu: None,
            pool: MemoryPool::new(),
            threads: Threads::new(num_threads),
            isa: Isa::detect(),
            has_fp8_experts: false,
            is_batch_invariant: false,
        }
    }

    /// A CPU context with one thread for each core that this process may use.
    #[must_use]
    pub fn cpu_all_cores() -> Self {
        Self::cpu(std::thread::available_parallelism().map_or(1, usize::from))
    }

    /// The same context with another instruction set, which must be one of [`Isa::available`].
    #[must_use]
    pub fn with_isa(mut self, isa: Isa) -> Self {
        assert!(Isa::available().contains(&isa), "{isa:?} is not available on this machine");
        self.isa = isa;
        self
    }

    /// The same context with a GPU: operations that have kernels run there, the others here.
    #[must_use]
    pub fn with_gpu(mut self, gpu: Gpu) -> Self {
        self.gpu = Some(gpu);
        self
    }

    /// The same context where experts whose weights are bf16 multiply in eight-bit floats, forward and back to their inputs: both operands
    /// are rounded as [`e4m3`](crate::e4m3) says, and sums are f32. Gradients of weights stay products in bf16 of what was not rounded.
    /// The processor, and GPUs before Hopper, have no such products or none used here: they compute the same in bf16.
    #[must_use]
    pub fn with_fp8_experts(mut self, has_fp8_experts: bool) -> Self {
        self.has_fp8_experts = has_fp8_experts;
        self
    }

    /// Whether experts multiply in eight-bit floats.
    #[must_use]
    pub fn has_fp8_experts(&self) -> bool {
        self.has_fp8_experts
    }

    /// Returns this context with or without batch invariance: the bits that a forward pass gives a row do not depend on the other rows
    /// of the pass, on their number or on the pieces that a sequence is taken in. One kernel then takes all numbers of rows. Backward
    /// passes and GPUs are not covered.
    ///
    /// With vectors of 512 bits and with tiles, products of floats skip the kernels for few rows, because all others sum in one order.
    /// Elsewhere, and with weights in blocks everywhere, rows are taken in pieces of 16 by the kernels for few rows. Attention takes a
    /// single query as it takes many.
    #[must_use]
    pub fn with_batch_invariance(mut self, is_batch_invariant: bool) -> Self {
        self.is_batch_invariant = is_batch_invariant;
        self
    }

    /// Returns whether forward passes are batch-invariant.
    #[must_use]
    pub fn is_batch_invariant(&self) -> bool {
        self.is_batch_invariant
    }

    /// The same context without a GPU: all operations run on the host, where they fetch what only the GPU has.
    #[must_use]
    pub fn on_host(&self) -> Self {
        Self { gpu: None, ..self.clone() }
    }

    /// The same context with the chosen device, and why there is none where `auto` found no GPU.
    ///
    /// # Errors
    ///
    /// What is missing for a GPU that was asked for.
    pub fn on_device(self, choice: DeviceChoice) -> Result<(Self, Option<GpuError>), GpuError> {
        let chosen = choice.open()?;
        Ok((Self { gpu: chosen.gpu, ..self }, chosen.missing))
    }

    /// Waits until everything that was asked of the device is done; the processor's operations are when they return.
    pub fn wait(&self) {
        if let Some(gpu) = &self.gpu {
            gpu.synchronize();
        }
    }

    /// What computes, for people.
    #[must_use]
    pub fn describe(&self) -> String {
        match &self.gpu {
            Some(gpu) => gpu.name().to_owned(),
            None => format!("{} threads, {:?} kernels", self.threads.count(), self.isa),
        }
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> Device {
        if self.gpu.is_some() { Device::Cuda } else { Device::Cpu }
    }

    /// The GPU, if there is one.
    #[must_use]
    pub fn gpu(&self) -> Option<&Gpu> {
        self.gpu.as_ref()
    }

    /// Runs a step that comes again and again with the same operations; on a GPU as [`Gpu::capture_replay`] says.
    pub fn capture_replay<R>(&self, step: impl FnOnce() -> R) -> R {
        match &self.gpu {
            Some(gpu) => gpu.capture_replay(step),
            None => step(),
        }
    }

    /// The memory pool.
    #[must_use]
    pub fn pool(&self) -> &MemoryPool {
        &self.pool
    }

    /// The thread pool.
    #[must_use]
    pub fn threads(&self) -> &Threads {
        &self.threads
    }

    /// The instruction set that kernels use.
    #[must_use]
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// A tensor of zeros from the pool.
    #[must_use]
    pub fn zeros(&self, shape: &[usize], dtype: DType) -> Tensor {
        Tensor::zeros(&self.pool, shape, dtype)
    }

    /// A tensor with unspecified contents from the pool.
    #[must_use]
    pub fn empty(&self, shape: &[usize], dtype: DType) -> Tensor {
        Tensor::empty(&self.pool, shape, dtype)
    }

    /// The same where the device computes, for operations alone to write: nothing is copied there first.
    #[must_use]
    pub fn empty_there(&self, shape: &[usize], dtype: DType) -> Tensor {
        match &self.gpu {
            Some(gpu) => gpu.empty(&self.pool, shape, dtype),
            None => self.empty(shape, dtype),
        }
    }

    /// Zeros where the device computes: nothing is copied there.
    #[must_use]
    pub fn zeros_there(&self, shape: &[usize], dtype: DType) -> Tensor {
        let is_whole = (shape.iter().product::<usize>() * dtype.size()).is_multiple_of(4);
        match On::of(self).filter(|_| is_whole) {
            Some(on) => {
                let mut y = self.empty_there(shape, dtype);
                cuda::elementwise::fill_with_zeros(on, &mut y);
                y
            }
            None => self.zeros(shape, dtype),
        }
    }
}
