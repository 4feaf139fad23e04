//! The handle of a GPU: opening it, memory, launches.

use std::collections::HashMap;
use std::panic::panic_any;
use std::sync::{Arc, Mutex};

use moeworks_tensor::{DType, DeviceBlock, MemoryPool, Tensor};

use crate::backend::Backend;
use crate::blas::{DenseProduct, Onto, Places};
use crate::device::{Capturing, Device, lock};
use crate::emulated::Emulated;
use crate::expert_cache::{ExpertCache, ExpertCacheStats};
use crate::nvidia::{self, Nvidia, PendingCopy};
use crate::{Arg, CapturedLaunch, Emulation, GpuError, GpuOptions, Launch, Pending, Traffic};

/// A GPU, or its emulation. Cloning gives another handle.
#[derive(Clone)]
pub struct Gpu {
    pub(crate) device: Arc<Device>,
    options: Arc<GpuOptions>,
    lists: Arc<Mutex<CachedLists>>,
    all_rows: Arc<Mutex<HashMap<usize, [Tensor; 2]>>>,
    counters: Arc<Mutex<Option<Tensor>>>,
    expert_cache: Option<Arc<ExpertCache>>,
}

/// Lists that are on the GPU already, by their contents.
type CachedLists = HashMap<Vec<u32>, Tensor>;

/// The most lists that are cached: a model of a hundred layers has about a thousand maps of matrices
/// (`tensor_map.rs`).
const MAX_CACHED_LISTS: usize = 4096;

/// The length of [`Gpu::counters`], by which blocks of a kernel find out which of them is the last.
pub const COUNTERS: usize = 1024;

/// The most numbers of rows whose lists are cached.
const MAX_ALL_ROWS: usize = 16;

/// Opening a GPU and asking what it is.
impl Gpu {
    fn new(backend: Backend, options: &GpuOptions) -> Self {
        Self {
            device: Arc::new(Device::new(backend)),
            options: Arc::new(options.clone()),
            lists: Arc::default(),
            all_rows: Arc::default(),
            counters: Arc::default(),
            expert_cache: None,
        }
    }

    /// Returns the number of GPUs that the driver sees.
    ///
    /// # Errors
    ///
    /// [`GpuError::NoDriver`], or the driver's own.
    pub fn count() -> Result<usize, GpuError> {
        nvidia::count()
    }

    /// Opens the GPU with this index.
    ///
    /// # Errors
    ///
    /// The one thing that is missing, in a line.
    pub fn open(index: usize, options: &GpuOptions) -> Result<Self, GpuError> {
        Ok(Self::new(Backend::Nvidia(Nvidia::open(index, options)?), options))
    }

    /// Opens the emulation, for tests. It needs a C++ compiler (`c++`), which compiles all kernels on the first call;
    /// they are cached on disk.
    ///
    /// # Errors
    ///
    /// The reason why the kernels cannot be compiled for the host.
    pub fn emulated(emulation: Emulation, options: &GpuOptions) -> Result<Self, GpuError> {
        Ok(Self::new(Backend::Emulated(Emulated::open(emulation, options)?), options))
    }

    /// Returns the options that the GPU was opened with.
    #[must_use]
    pub fn options(&self) -> &GpuOptions {
        &self.options
    }

    /// Adds an [`ExpertCache`] of `bytes` bytes. The experts of models that are not trained then stay in the host's
    /// memory and are copied to the GPU when tokens choose them. Their weights must not be written to.
    #[must_use]
    pub fn with_expert_cache(mut self, bytes: usize) -> Self {
        self.expert_cache = Some(Arc::new(ExpertCache::new(bytes)));
        self
    }

    /// Returns the cache of experts whose weights stay in the host's memory, if there is one.
    #[must_use]
    pub fn expert_cache(&self) -> Option<&ExpertCache> {
        self.expert_cache.as_deref()
    }

    /// Returns the counts of hits and misses; none without a cache.
    #[must_use]
    pub fn expert_cache_stats(&self) -> Option<ExpertCacheStats> {
        self.expert_cache.as_ref().map(|cache| cache.stats())
    }

    /// Returns the GPU's name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.device.backend.name()
    }

    /// Returns the bytes of the GPU's memory, of which other processes may use some; none for an emulation.
    #[must_use]
    pub fn memory_bytes(&self) -> Option<u64> {
        self.device.backend.memory_bytes()
    }

    /// Returns the number of multiprocessors.
    #[must_use]
    pub fn processors(&self) -> usize {
        self.device.backend.processors()
    }

    /// Returns the number of multiprocessors if kernels made of Hopper's own instructions (`sm_90a`) can run here.
    #[must_use]
    pub fn hopper_processors(&self) -> Option<usize> {
        self.device.backend.hopper_processors()
    }

    /// Returns the most shared memory that a block of a kernel may have, in bytes.
    #[must_use]
    pub fn most_shared(&self) -> usize {
        self.device.backend.most_shared()
    }

    /// Returns whether kernels run on the CPU.
    #[must_use]
    pub fn is_emulated(&self) -> bool {
        matches!(&self.device.backend, Backend::Emulated(_))
    }

    /// Returns the counts of copies and launches by this handle and its clones since it was opened.
    #[must_use]
    pub fn traffic(&self) -> Traffic {
        self.device.meter.traffic()
    }

    /// Returns the bytes of the GPU's memory that tensors hold now.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        self.device.held_bytes()
    }
}

/// Memory.
impl Gpu {
    /// Allocates a tensor with unspecified contents on the GPU.
    #[must_use]
    pub fn empty(&self, pool: &MemoryPool, shape: &[usize], dtype: DType) -> Tensor {
        let elements: usize = shape.iter().product();
        Tensor::from_device(pool, shape, dtype, self.block(elements / dtype.block_len() * dtype.size()))
    }

    /// Returns the list as a tensor that is copied to the GPU once, for lists that recur, such as the tiles of a
    /// product.
    #[must_use]
    pub fn cached_list(&self, pool: &MemoryPool, list: &[u32]) -> Tensor {
        let mut lists = lock(&self.lists);
        if let Some(tensor) = lists.get(list) {
            return tensor.clone();
        }
        if lists.len() == MAX_CACHED_LISTS {
            lists.clear();
        }
        let tensor = Tensor::from_slice(pool, &[list.len()], list);
        lists.insert(list.to_vec(), tensor.clone());
        tensor
    }

    /// Returns the result of `make` for `rows` rows, made once. A process uses few numbers of rows: those of steps
    /// and of batches of texts.
    #[must_use]
    pub fn all_rows(&self, rows: usize, make: impl FnOnce() -> [Tensor; 2]) -> [Tensor; 2] {
        let mut cached = lock(&self.all_rows);
        if cached.len() == MAX_ALL_ROWS && !cached.contains_key(&rows) {
            cached.clear();
        }
        cached.entry(rows).or_insert_with(make).clone()
    }

    /// Returns [`COUNTERS`] numbers that kernels find 0 and leave 0.
    #[must_use]
    pub fn counters(&self, pool: &MemoryPool) -> Tensor {
        let make = || Tensor::from_slice(pool, &[COUNTERS], &[0_u32; COUNTERS]);
        lock(&self.counters).get_or_insert_with(make).clone()
    }

    /// Returns the address of a tensor on the GPU, after copying it there if needed.
    #[must_use]
    pub fn address(&self, tensor: &Tensor) -> u64 {
        tensor.device_address(self.number(), |bytes| self.upload(bytes))
    }

    /// Returns the address for writing; the host's copy becomes invalid.
    fn address_mut(&self, tensor: &mut Tensor) -> u64 {
        tensor.device_address_mut(self.number(), |bytes| self.upload(bytes))
    }

    fn number(&self) -> usize {
        self.device.backend.number()
    }

    fn block(&self, bytes: usize) -> DeviceBlock {
        let block = self.allocated(|| self.device.backend.block(bytes));
        self.device.counted(block, bytes)
    }

    fn upload(&self, bytes: &[u8]) -> DeviceBlock {
        self.device.meter.uploaded(bytes.len());
        let block = self.allocated(|| self.device.backend.upload(bytes));
        self.device.counted(block, bytes.len())
    }

    /// Returns a long-lived tensor of these bytes on the GPU. A prefetch is copied beside everything else that is
    /// queued; its [`PendingCopy`] must be dropped before the tensor is used.
    pub(crate) fn upload_tensor(
        &self,
        pool: &MemoryPool,
        tensor: &UploadedTensor<'_>,
        is_prefetch: bool,
    ) -> (Tensor, Option<PendingCopy>) {
        let UploadedTensor { shape, dtype, bytes } = *tensor;
        let device = match &self.device.backend {
            Backend::Nvidia(device) => device,
            Backend::Emulated(_) => return (Tensor::from_device(pool, shape, dtype, self.upload(bytes)), None),
        };
        self.device.meter.uploaded(bytes.len());
        let (block, pending) = match is_prefetch.then(|| device.upload_async(bytes)) {
            Some(Ok((block, pending))) => (block, Some(pending)),
            _ => (self.allocated(|| device.upload_persistent(bytes)), None),
        };
        (Tensor::from_device(pool, shape, dtype, self.device.counted(block, bytes.len())), pending)
    }

    /// Returns the result of `make`. If there is no memory for it, flushes captured launches, which retain dropped
    /// blocks, and tries again.
    fn allocated<T>(&self, make: impl Fn() -> Result<T, GpuError>) -> T {
        let again = |_| {
            self.device.flush();
            make()
        };
        make().or_else(again).unwrap_or_else(|error| panic_any(error))
    }
}

/// The contents of a tensor that is made on the GPU.
#[derive(Clone, Copy)]
pub(crate) struct UploadedTensor<'a> {
    pub(crate) shape: &'a [usize],
    pub(crate) dtype: DType,
    pub(crate) bytes: &'a [u8],
}

/// Launches.
impl Gpu {
    /// Returns the argument of a kernel that reads `tensor`.
    #[must_use]
    pub fn read<'a>(&self, tensor: &'a Tensor) -> Arg<'a> {
        Arg::pointer(self.address(tensor))
    }

    /// Returns the argument of a kernel that writes `tensor`, which nobody may share.
    #[must_use]
    pub fn write<'a>(&self, tensor: &'a mut Tensor) -> Arg<'a> {
        Arg::pointer(self.address_mut(tensor))
    }

    /// Queues a kernel behind everything that was queued before.
    ///
    /// # Safety
    ///
    /// With these arguments the kernel touches no memory except that of the tensors they were made of, and no tensor
    /// that it writes is also read by another block through another argument.
    pub unsafe fn launch(&self, launch: &Launch<'_>) {
        // SAFETY: the caller's promise.
        unsafe { self.launch_as(launch, None) };
    }

    /// Queues a kernel like [`launch`](Self::launch) and declares its operation. A launcher that comes next may [take
    /// it back](Self::fuse_with_last).
    ///
    /// # Safety
    ///
    /// See [`launch`](Self::launch).
    pub unsafe fn launch_pending(&self, launch: &Launch<'_>, pending: Pending<'_>) {
        // SAFETY: the caller's promise.
        unsafe { self.launch_as(launch, Some(pending)) };
    }

    unsafe fn launch_as(&self, launch: &Launch<'_>, pending: Option<Pending<'_>>) {
        if launch.grid.contains(&0) {
            return;
        }
        let (is_captured, is_full) = {
            let mut capture = self.device.capture();
            (capture.captures(launch, pending), capture.is_full())
        };
        if is_captured {
            if is_full {
                self.device.flush();
            }
            return;
        }
        self.device.meter.launched();
        // SAFETY: the caller's promise.
        unsafe { self.device.backend.launch(launch) }.unwrap_or_else(|error| panic_any(error));
    }

    /// Runs a step that is repeated with the same operations, such as a token of decoding. Its launches are captured
    /// and go to the GPU together, from the second time on as graphs. The GPU begins when the step's first launches
    /// have been put together.
    pub fn capture_replay<R>(&self, step: impl FnOnce() -> R) -> R {
        let capturing = Capturing::begin(&self.device);
        let result = step();
        self.device.flush();
        drop(capturing);
        result
    }

    /// Removes the last captured launch if its operation was declared and `take` returns something for it. The caller
    /// then launches a kernel that does the work of both.
    #[must_use]
    pub fn fuse_with_last<R>(&self, take: impl FnOnce(Pending<'static>) -> Option<R>) -> Option<(R, CapturedLaunch)> {
        self.device.capture().fuse_with_last(take)
    }

    /// Launches what was captured of a step so far.
    pub fn flush(&self) {
        self.device.flush();
    }

    /// Waits until everything that was queued is done.
    pub fn synchronize(&self) {
        self.device.flush();
        self.device.backend.synchronize().unwrap_or_else(|error| panic_any(error));
    }

    /// Returns whether [`dense`](Self::dense) may take products now.
    #[must_use]
    pub fn takes_dense(&self) -> bool {
        self.device.backend.has_blas() && !self.device.capture().is_capturing()
    }

    /// Writes a plain product of `a` and `b` (bf16) to `y` by NVIDIA's library. Returns false, having done nothing,
    /// if there is no library, if it has no kernel for this product, or while a step is captured, which consists of
    /// kernels alone.
    ///
    /// # Panics
    ///
    /// If sizes or types of the tensors are not those of the product.
    #[must_use]
    pub fn dense(&self, product: DenseProduct, [a, b]: [&Tensor; 2], onto: Onto<'_>, y: &mut Tensor) -> bool {
        let DenseProduct { rows, columns, depth, is_rounded, .. } = product;
        let out = if is_rounded { DType::BF16 } else { DType::F32 };
        assert_eq!(
            [a.len(), b.len(), y.len()],
            [rows * depth, columns * depth, rows * columns],
            "a product {product:?}"
        );
        let types_fit = [a, b].iter().all(|x| x.dtype() == DType::BF16) && y.dtype() == out;
        let base_fits = !matches!(onto, Onto::Tensor(base) if base.dtype() != out || base.len() != y.len());
        assert!(types_fit && base_fits, "types of {product:?}");
        if [rows, columns, depth].contains(&0) || !self.takes_dense() {
            return false;
        }
        let (a, b, to) = (self.address(a), self.address(b), self.address_mut(y));
        let base = match onto {
            Onto::Nothing => None,
            Onto::Tensor(base) => Some(self.address(base)),
            Onto::Itself => Some(to),
        };
        let at = Places { a, b, base, y: to };
        // SAFETY: sizes and types were compared, and `y` is borrowed for writing. Work that is queued later comes
        // later.
        let is_taken = unsafe { self.device.backend.dense(product, at) }.unwrap_or_else(|error| panic_any(error));
        if is_taken {
            self.device.meter.took_product();
        }
        is_taken
    }
}
