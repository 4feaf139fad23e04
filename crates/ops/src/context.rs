//! The context of operations: device, memory, threads and instruction set.

use std::ffi::OsString;

use moeworks_tensor::{DType, Device, MemoryPool, Tensor};

use crate::cuda::{self, On};
use crate::{Isa, Threads};
use moeworks_gpu::{DeviceChoice, Gpu, GpuError, GpuOptions};

/// The variable that, set to 1, asks for f32 products in AMX tiles: see [`Isa::AmxF32`].
pub const F32_TILES_VARIABLE: &str = "MOEWORKS_F32_TILES";

/// Options of the machine that a program reads once and passes to what makes a context.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MachineOptions {
    /// Options of GPUs.
    pub gpu: GpuOptions,
    /// Takes f32 products of many rows in AMX tiles, where there are tiles.
    pub has_f32_tiles: bool,
}

impl MachineOptions {
    /// Makes the options that environment variables name. `value` returns the value of a variable.
    pub fn from_variables(value: impl Fn(&str) -> Option<OsString>) -> Self {
        let has_f32_tiles = value(F32_TILES_VARIABLE).is_some_and(|value| value == "1");
        Self { gpu: GpuOptions::from_variables(value), has_f32_tiles }
    }

    /// Returns the instruction set whose kernels are fastest here.
    #[must_use]
    pub fn isa(&self) -> Isa {
        Isa::detect().with_f32_tiles(self.has_f32_tiles)
    }
}

/// The device, its memory and its threads, passed to every operation. Clones share the pool and the threads.
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
    /// Creates a CPU context with `num_threads` threads (at least one; the calling thread counts) and the best
    /// instruction set.
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

    /// Creates a CPU context with one thread for each core that this process may use.
    #[must_use]
    pub fn cpu_all_cores() -> Self {
        Self::cpu(std::thread::available_parallelism().map_or(1, usize::from))
    }

    /// Returns this context with another instruction set, which must be one of [`Isa::available`].
    #[must_use]
    pub fn with_isa(mut self, isa: Isa) -> Self {
        assert!(Isa::available().contains(&isa), "{isa:?} is not available on this machine");
        self.isa = isa;
        self
    }

    /// Returns this context with a GPU. Operations that have kernels run there, the others on the host.
    #[must_use]
    pub fn with_gpu(mut self, gpu: Gpu) -> Self {
        self.gpu = Some(gpu);
        self
    }

    /// Returns this context with or without FP8 experts: experts with bf16 weights multiply in FP8, forward and for
    /// the gradients of their inputs. Both operands are rounded as [`e4m3`](crate::e4m3) describes, and sums are f32.
    /// Weight gradients stay bf16 products of unrounded operands. CPUs, and GPUs before Hopper, compute the same
    /// numbers with bf16 products.
    #[must_use]
    pub fn with_fp8_experts(mut self, has_fp8_experts: bool) -> Self {
        self.has_fp8_experts = has_fp8_experts;
        self
    }

    /// Returns whether experts multiply in FP8.
    #[must_use]
    pub fn has_fp8_experts(&self) -> bool {
        self.has_fp8_experts
    }

    /// Returns this context with or without batch invariance: the bits that a forward pass gives a row do not depend
    /// on the other rows of the pass, on their number, or on the pieces that a sequence is taken in. A single kernel
    /// then takes all numbers of rows. Backward passes and GPUs are not covered.
    ///
    /// With vectors of 512 bits and with AMX, float products skip the skinny kernels, because all others sum in one
    /// order. Elsewhere, and for quantized weights everywhere, rows go in pieces of 16 to the skinny kernels.
    /// Attention treats a single query like many.
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

    /// Returns this context without a GPU: all operations run on the host and copy there what only the GPU has.
    #[must_use]
    pub fn on_host(&self) -> Self {
        Self { gpu: None, ..self.clone() }
    }

    /// Returns this context with the instruction set that the options ask for.
    #[must_use]
    pub fn on_machine(self, machine: &MachineOptions) -> Self {
        Self { isa: self.isa.with_f32_tiles(machine.has_f32_tiles), ..self }
    }

    /// Returns this context on the chosen device of the machine, and the reason where `auto` found no GPU.
    ///
    /// # Errors
    ///
    /// If a GPU that was asked for is missing or cannot be used.
    pub fn on_device(
        self,
        choice: DeviceChoice,
        machine: &MachineOptions,
    ) -> Result<(Self, Option<GpuError>), GpuError> {
        let chosen = choice.open(&machine.gpu)?;
        Ok((Self { gpu: chosen.gpu, ..self.on_machine(machine) }, chosen.missing))
    }

    /// Waits until all work queued on the device is done. On the CPU operations are done when they return.
    pub fn wait(&self) {
        if let Some(gpu) = &self.gpu {
            gpu.synchronize();
        }
    }

    /// Describes the device for people.
    #[must_use]
    pub fn describe(&self) -> String {
        match &self.gpu {
            Some(gpu) => gpu.name().to_owned(),
            None => format!("{} threads, {:?} kernels", self.threads.count(), self.isa),
        }
    }

    /// Returns the device.
    #[must_use]
    pub fn device(&self) -> Device {
        if self.gpu.is_some() { Device::Cuda } else { Device::Cpu }
    }

    /// Returns the GPU, if there is one.
    #[must_use]
    pub fn gpu(&self) -> Option<&Gpu> {
        self.gpu.as_ref()
    }

    /// Runs a step that recurs with the same operations; on a GPU as [`Gpu::capture_replay`] does.
    pub fn capture_replay<R>(&self, step: impl FnOnce() -> R) -> R {
        match &self.gpu {
            Some(gpu) => gpu.capture_replay(step),
            None => step(),
        }
    }

    /// Returns the memory pool.
    #[must_use]
    pub fn pool(&self) -> &MemoryPool {
        &self.pool
    }

    /// Returns the thread pool.
    #[must_use]
    pub fn threads(&self) -> &Threads {
        &self.threads
    }

    /// Returns the instruction set that kernels use.
    #[must_use]
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Allocates a tensor of zeros from the pool.
    #[must_use]
    pub fn zeros(&self, shape: &[usize], dtype: DType) -> Tensor {
        Tensor::zeros(&self.pool, shape, dtype)
    }

    /// Allocates a tensor with unspecified contents from the pool.
    #[must_use]
    pub fn empty(&self, shape: &[usize], dtype: DType) -> Tensor {
        Tensor::empty(&self.pool, shape, dtype)
    }

    /// Allocates a tensor with unspecified contents on the device, without a copy there. Only operations may write to
    /// it first.
    #[must_use]
    pub fn empty_on_device(&self, shape: &[usize], dtype: DType) -> Tensor {
        match &self.gpu {
            Some(gpu) => gpu.empty(&self.pool, shape, dtype),
            None => self.empty(shape, dtype),
        }
    }

    /// Allocates a tensor of zeros on the device, without a copy there.
    #[must_use]
    pub fn zeros_on_device(&self, shape: &[usize], dtype: DType) -> Tensor {
        let is_whole = (shape.iter().product::<usize>() * dtype.size()).is_multiple_of(4);
        match On::of(self).filter(|_| is_whole) {
            Some(on) => {
                let mut y = self.empty_on_device(shape, dtype);
                cuda::elementwise::fill_with_zeros(on, &mut y);
                y
            }
            None => self.zeros(shape, dtype),
        }
    }
}
