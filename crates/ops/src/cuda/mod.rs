//! One NVIDIA GPU: found at run time, its kernels compiled at first use.
//!
//! Nothing of CUDA is needed to build. [`Gpu::open`] looks for the driver and a device, and for NVRTC, which compiles the
//! sources in `kernels/` for the GPU at hand; what it made is kept on disk. [`Gpu::emulated`] runs the very same sources and
//! launches on the host's processor, slowly and for tests: that is how kernels are checked where there is no GPU. With
//! `--device listed-hopper` nothing is computed, and what a GPU would be asked to do is listed: that is how blocks, copies and waits of a
//! pass of full size are counted there.
//!
//! A [`Context`](crate::Context) with a GPU makes every operation that has kernels run there. Tensors are copied to the
//! device when a kernel first reads them and back when the host does, and stay in both until somebody writes; an operation
//! without kernels runs on the host and is correct all the same.
//!
//! Kernels there are for: linear maps and experts with weights in f32, bf16 or blocks of fewer bits, the router's scores, the counting
//! sort, norms, attention, rotary positions, embeddings, the loss of the last projection, AdamW, sums and conversions of elements. Plain
//! products go to cuBLASLt where it is found. The operations' tests have passed on an H100 (bench/HISTORY.md, "On an H100"), where
//! Hopper's kernels are used; all kernels are compiled for three generations of GPUs and checked on the emulation.
//!
//! Work is queued on one stream and memory is taken and freed in its order, so nothing waits for the device but a copy to the
//! host. A step that comes again and again ([`Gpu::repeated`]), as a token of decoding does, is a few graphs, whose kernels
//! overlap from Hopper on: each begins with the instruction to wait for those before it. Operations have no error results: a
//! device that fails ends the operation with a panic whose payload is a [`GpuError`].

mod blas;
mod cache;
mod choice;
mod emulated;
mod error;
mod fetch;
mod launch;
mod library;
mod nvidia;
mod nvrtc;
pub(crate) mod ops;
pub(crate) mod room;
mod sources;
mod steps;
mod tensor_map;
mod traffic;

use std::collections::HashMap;
use std::panic::panic_any;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, OnceLock, PoisonError};

use moeworks_tensor::{DType, DeviceBlock, DeviceMemory, MemoryPool, Tensor};

use self::room::Room;
use self::steps::{Graph, Steps};
use self::traffic::Meter;

pub use blas::CUBLASLT_VARIABLE;
pub(crate) use blas::{DenseProduct, Onto};
pub use choice::{DeviceChoice, UnknownDevice};
pub use emulated::Emulation;
pub use error::GpuError;
pub(crate) use launch::{Arg, Launch};
pub(crate) use nvidia::Copied;
pub use nvrtc::{NVRTC_VARIABLE, Nvrtc, Target};
pub use room::RoomStats;
pub use sources::{SOURCES, Source};
pub(crate) use steps::Node;
pub use tensor_map::NO_TENSOR_COPIES_VARIABLE;
pub(crate) use tensor_map::{BOX_COLUMNS, Matrices};
pub use traffic::Traffic;

/// A GPU, or its emulation. Cloning gives another handle.
#[derive(Clone)]
pub struct Gpu {
    device: Arc<Device>,
    kept: Arc<Mutex<KeptLists>>,
    all_rows: Arc<Mutex<HashMap<usize, [Tensor; 2]>>>,
    counters: Arc<Mutex<Option<Tensor>>>,
    room: Option<Arc<Room>>,
}

/// Lists that are on the GPU already, by what is in them.
type KeptLists = HashMap<Vec<u32>, Tensor>;

/// Lists that are kept at most: a model of a hundred layers has about a thousand maps of matrices (`tensor_map.rs`).
const MAX_KEPT: usize = 4096;

/// Numbers by which blocks of a kernel find out who of them is the last.
pub(crate) const COUNTERS: usize = 1024;

/// Numbers of rows whose lists are kept at most.
const MAX_ALL_ROWS: usize = 16;

enum Backend {
    Nvidia(Arc<nvidia::Nvidia>),
    Emulated(emulated::Emulated),
}

impl Backend {
    /// # Safety
    ///
    /// As of [`Gpu::launch`].
    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), GpuError> {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Self::Nvidia(device) => device.launch(launch),
                Self::Emulated(device) => device.launch(launch),
            }
        }
    }

    /// A graph of these launches, one after the other.
    fn graph(&self, nodes: &[Node]) -> Result<Graph, GpuError> {
        match self {
            Self::Nvidia(device) => device.graph(nodes).map(Graph::Nvidia),
            Self::Emulated(_) => Ok(Graph::Emulated(nodes.to_vec())),
        }
    }

    /// # Safety
    ///
    /// As of [`Gpu::launch`], for each launch with the arguments that it has now.
    unsafe fn run_graph(&self, graph: &Graph) -> Result<(), GpuError> {
        // SAFETY: the caller's promise.
        unsafe {
            match (graph, self) {
                (Graph::Nvidia(graph), Self::Nvidia(device)) => device.run_graph(graph),
                (Graph::Emulated(nodes), Self::Emulated(device)) => {
                    nodes.iter().try_for_each(|node| device.launch(&node.launch()))
                }
                _ => unreachable!("a graph is used by the GPU that made it"),
            }
        }
    }

    /// # Safety
    ///
    /// As of [`Blas::run`](blas::Blas::run).
    unsafe fn dense(&self, product: DenseProduct, at: blas::Places) -> Result<bool, GpuError> {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Self::Nvidia(device) => device.dense(product, at),
                Self::Emulated(device) => device.dense(product, at),
            }
        }
    }

    /// Blocks that nothing uses come to an order in which a step that asks for the same as the one before gets the same.
    fn settle(&self) {
        if let Self::Nvidia(device) = self {
            device.settle();
        }
    }
}

/// What handles of a GPU and blocks of its memory share.
struct Device {
    /// Dropped first: graphs are of the backend's context.
    steps: Mutex<Steps>,
    backend: Backend,
    /// Bytes of blocks that are in use.
    held: AtomicUsize,
    /// Of these handles alone: others of the same GPU have their own.
    meter: Meter,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Device {
    fn steps(&self) -> MutexGuard<'_, Steps> {
        lock(&self.steps)
    }

    /// Makes the launches that were collected.
    fn flush(&self) {
        // SAFETY: what was collected came through `Gpu::launch`; blocks that were dropped since are kept until now.
        unsafe { self.steps().flush(&self.backend, &self.meter) }.unwrap_or_else(|error| panic_any(error));
    }
}

/// A block of a GPU's memory, which stays while launches that were collected may use it.
struct Block {
    device: Arc<Device>,
    inner: Option<DeviceBlock>,
    bytes: usize,
}

impl Block {
    fn inner(&self) -> &DeviceBlock {
        self.inner.as_ref().expect("a block has its memory until it is dropped")
    }
}

impl DeviceMemory for Block {
    fn address(&self) -> u64 {
        self.inner().address()
    }

    fn device(&self) -> usize {
        self.inner().device()
    }

    fn download(&self, to: &mut [u8]) {
        self.device.flush();
        if !to.is_empty() {
            self.device.meter.downloaded(to.len());
        }
        self.inner().download(to);
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.device.held.fetch_sub(self.bytes, Ordering::Relaxed);
        let freed = self.inner.take().and_then(|block| self.device.steps().keeps(block));
        drop(freed);
    }
}

/// A step that is being collected; what is left of one that panicked is forgotten.
struct Collecting<'a>(&'a Device);

impl Drop for Collecting<'_> {
    fn drop(&mut self) {
        let mut steps = self.0.steps();
        steps.end();
        if std::thread::panicking() {
            steps.forget();
        }
    }
}

impl Gpu {
    fn of(backend: Backend) -> Self {
        Self {
            device: Arc::new(Device {
                backend,
                steps: Mutex::default(),
                held: AtomicUsize::new(0),
                meter: Meter::default(),
            }),
            kept: Arc::default(),
            all_rows: Arc::default(),
            counters: Arc::default(),
            room: None,
        }
    }

    /// The same GPU with room for experts of so many bytes: those of models that are only used (not trained) stay in the host's memory,
    /// and come when tokens choose them. Others make way that were chosen longest ago. Their weights must not be written to.
    #[must_use]
    pub fn with_expert_room(mut self, bytes: usize) -> Self {
        self.room = Some(Arc::new(Room::new(bytes)));
        self
    }

    /// Where experts come that stay in the host's memory.
    pub(crate) fn room(&self) -> Option<&Room> {
        self.room.as_deref()
    }

    /// Whether experts stay in the host's memory, and how often they were where they were wanted.
    #[must_use]
    pub fn expert_room_stats(&self) -> Option<RoomStats> {
        self.room.as_ref().map(|room| room.stats())
    }

    /// Runs a step that comes again and again with the same operations, such as a token of decoding: its kernels go to the GPU
    /// together, from the second time on as graphs. The GPU begins when the step's first launches have been put together.
    pub fn repeated<R>(&self, step: impl FnOnce() -> R) -> R {
        if self.device.steps().begin() {
            self.device.backend.settle();
        }
        let collecting = Collecting(&self.device);
        let result = step();
        self.device.flush();
        drop(collecting);
        result
    }

    /// How many GPUs the driver sees.
    pub fn count() -> Result<usize, GpuError> {
        nvidia::count()
    }

    /// The GPU with this index, or in one line what is missing.
    pub fn open(index: usize) -> Result<Self, GpuError> {
        Ok(Self::of(Backend::Nvidia(nvidia::Nvidia::open(index)?)))
    }

    /// The emulation, for tests: needs a C++ compiler (`c++`), which compiles all kernels on the first call in a process, and
    /// keeps them in the cache.
    pub fn emulated(emulation: Emulation) -> Result<Self, GpuError> {
        Ok(Self::of(Backend::Emulated(emulated::Emulated::open(emulation)?)))
    }

    /// What tests of operations run on besides the processor, each with a name: the emulation in both orders and with Hopper's
    /// kernels, and the first GPU. Says once what is not there. `MOEWORKS_NO_EMULATION` leaves the emulation out.
    #[must_use]
    pub fn for_tests() -> Vec<(&'static str, Self)> {
        static SKIPPED: Once = Once::new();
        // A device that nobody has is closed, and takes a second to open again.
        static KEPT: OnceLock<Result<Gpu, GpuError>> = OnceLock::new();
        let _ = KEPT.get_or_init(|| Self::open(0));
        let emulation = |is_reversed, is_hopper| match std::env::var_os("MOEWORKS_NO_EMULATION") {
            Some(_) => Err(GpuError::NoEmulation { reason: "MOEWORKS_NO_EMULATION is set".into() }),
            None => Self::emulated(Emulation { is_reversed, is_hopper, ..Emulation::default() }),
        };
        let all = [
            ("emulated GPU", emulation(false, false)),
            ("emulated GPU in reverse", emulation(true, false)),
            ("emulated Hopper", emulation(false, true)),
            ("emulated Hopper in reverse", emulation(true, true)),
            ("GPU", Self::open(0)),
        ];
        // A compiler that is missing is no failure, one that finds an error is.
        for (name, gpu) in &all {
            if let Err(error @ GpuError::Compile { .. }) = gpu {
                panic!("{name}: {error}");
            }
        }
        let (there, missing): (Vec<_>, Vec<_>) = all.into_iter().partition(|(_, gpu)| gpu.is_ok());
        SKIPPED.call_once(|| {
            for (name, error) in missing.iter().filter_map(|(name, gpu)| Some((name, gpu.as_ref().err()?))) {
                eprintln!("SKIPPED: the operations' tests on the {name}: {error}");
            }
        });
        there.into_iter().filter_map(|(name, gpu)| Some((name, gpu.ok()?))).collect()
    }

    /// What a test runs on that needs a GPU, whichever: the first one, or else the emulation.
    pub fn for_a_test() -> Result<Self, GpuError> {
        Self::open(0).or_else(|_| Self::emulated(Emulation::default()))
    }

    /// What the GPU is called.
    #[must_use]
    pub fn name(&self) -> &str {
        match &self.device.backend {
            Backend::Nvidia(device) => device.name(),
            Backend::Emulated(device) => device.name(),
        }
    }

    /// Bytes of the GPU's memory, of which other processes may have some; none of an emulation.
    #[must_use]
    pub fn memory_bytes(&self) -> Option<u64> {
        match &self.device.backend {
            Backend::Nvidia(device) => device.memory_bytes(),
            Backend::Emulated(_) => None,
        }
    }

    /// Multiprocessors.
    pub(crate) fn processors(&self) -> usize {
        match &self.device.backend {
            Backend::Nvidia(device) => device.processors(),
            Backend::Emulated(device) => device.processors(),
        }
    }

    /// Multiprocessors, if kernels made of Hopper's own instructions (`sm_90a`) can run here.
    pub(crate) fn hopper_processors(&self) -> Option<usize> {
        match &self.device.backend {
            Backend::Nvidia(device) => device.hopper_processors(),
            Backend::Emulated(device) => device.hopper_processors(),
        }
    }

    pub(crate) fn is_emulated(&self) -> bool {
        matches!(&self.device.backend, Backend::Emulated(_))
    }

    /// What was copied to and from the GPU by this handle and its clones since it was opened.
    #[must_use]
    pub fn traffic(&self) -> Traffic {
        self.device.meter.traffic()
    }

    /// Bytes of the GPU's memory that tensors hold now.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        self.device.held.load(Ordering::Relaxed)
    }

    /// Waits until everything that was asked of the GPU is done.
    pub fn synchronize(&self) {
        self.device.flush();
        if let Backend::Nvidia(device) = &self.device.backend {
            device.synchronize().unwrap_or_else(|error| panic_any(error));
        }
    }

    /// A tensor with unspecified contents on the GPU.
    pub(crate) fn empty(&self, pool: &MemoryPool, shape: &[usize], dtype: DType) -> Tensor {
        let elements: usize = shape.iter().product();
        Tensor::from_device(pool, shape, dtype, self.block(elements / dtype.block_len() * dtype.size()))
    }

    /// A list that comes again and again, such as the tiles of a product of so many rows: it is copied to the GPU once.
    pub(crate) fn kept(&self, pool: &MemoryPool, list: &[u32]) -> Tensor {
        let mut kept = lock(&self.kept);
        if let Some(tensor) = kept.get(list) {
            return tensor.clone();
        }
        if kept.len() == MAX_KEPT {
            kept.clear();
        }
        let tensor = Tensor::from_slice(pool, &[list.len()], list);
        kept.insert(list.to_vec(), tensor.clone());
        tensor
    }

    /// What `make` gives for so many rows, of which a process knows few numbers: those of steps and of batches of texts.
    pub(crate) fn all_rows(&self, rows: usize, make: impl FnOnce() -> [Tensor; 2]) -> [Tensor; 2] {
        let mut kept = lock(&self.all_rows);
        if kept.len() == MAX_ALL_ROWS && !kept.contains_key(&rows) {
            kept.clear();
        }
        kept.entry(rows).or_insert_with(make).clone()
    }

    /// The argument of a kernel that reads `tensor`.
    pub(crate) fn read<'a>(&self, tensor: &'a Tensor) -> Arg<'a> {
        Arg::pointer(self.address(tensor))
    }

    /// The argument of a kernel that writes `tensor`, which nobody may share.
    pub(crate) fn write<'a>(&self, tensor: &'a mut Tensor) -> Arg<'a> {
        Arg::pointer(tensor.device_address_mut(self.number(), |bytes| self.upload(bytes)))
    }

    /// Runs a kernel after what was asked of the GPU before.
    ///
    /// # Safety
    ///
    /// With these arguments the kernel touches no memory but that of the tensors they were made of, and no tensor that it
    /// writes is also read by another block through another argument.
    pub(crate) unsafe fn launch(&self, launch: &Launch<'_>) {
        if launch.grid.contains(&0) {
            return;
        }
        let (is_collected, is_full) = {
            let mut steps = self.device.steps();
            (steps.collects(launch), steps.is_full())
        };
        if is_collected {
            if is_full {
                self.device.flush();
            }
            return;
        }
        self.device.meter.launched();
        // SAFETY: the caller's promise.
        unsafe { self.device.backend.launch(launch) }.unwrap_or_else(|error| panic_any(error));
    }

    /// The last launch of a step that is being collected, if there is one and it is as `is_wanted` says. It will not be made: whoever asks
    /// for it launches a kernel that does what it would have done, with its arguments.
    pub(crate) fn take_last(&self, is_wanted: impl FnOnce(&Node) -> bool) -> Option<Node> {
        self.device.steps().take_last(is_wanted)
    }

    /// Memory for [`COUNTERS`] numbers that kernels find 0 and leave 0.
    pub(crate) fn counters(&self, pool: &MemoryPool) -> Tensor {
        let make = || Tensor::from_slice(pool, &[COUNTERS], &[0_u32; COUNTERS]);
        lock(&self.counters).get_or_insert_with(make).clone()
    }

    /// Whether [`dense`](Self::dense) may take products now.
    pub(crate) fn takes_dense(&self) -> bool {
        let is_there = match &self.device.backend {
            Backend::Nvidia(device) => device.blas().is_some(),
            Backend::Emulated(device) => device.blas().is_some(),
        };
        is_there && !self.device.steps().is_collecting()
    }

    /// Writes a plain product of `a` and `b` (bf16) to `y` by NVIDIA's own library. False where there is none, where it has nothing for
    /// this product, or in a step that is being collected, which is of kernels alone: nothing was done then. The tensors' sizes are those
    /// that the product says.
    pub(crate) fn dense(&self, product: DenseProduct, [a, b]: [&Tensor; 2], onto: Onto<'_>, y: &mut Tensor) -> bool {
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
        let (a, b, to) =
            (self.address(a), self.address(b), y.device_address_mut(self.number(), |bytes| self.upload(bytes)));
        let base = match onto {
            Onto::Nothing => None,
            Onto::Tensor(base) => Some(self.address(base)),
            Onto::Itself => Some(to),
        };
        let at = blas::Places { a, b, base, y: to };
        // SAFETY: sizes and types were compared, and `y` is borrowed for writing. What is asked of the device later comes later.
        let is_taken = unsafe { self.device.backend.dense(product, at) }.unwrap_or_else(|error| panic_any(error));
        if is_taken {
            self.device.meter.took_product();
        }
        is_taken
    }

    fn block(&self, bytes: usize) -> DeviceBlock {
        let block = self.allocated(|| match &self.device.backend {
            Backend::Nvidia(device) => device.block(bytes),
            Backend::Emulated(device) => Ok(device.block(bytes)),
        });
        self.counted(block, bytes)
    }

    fn upload(&self, bytes: &[u8]) -> DeviceBlock {
        self.device.meter.uploaded(bytes.len());
        let block = self.allocated(|| match &self.device.backend {
            Backend::Nvidia(device) => device.upload(bytes),
            Backend::Emulated(device) => Ok(device.upload(bytes)),
        });
        self.counted(block, bytes.len())
    }

    /// A tensor of these bytes on the GPU; with `is_ahead` beside everything else that is asked of it.
    pub(crate) fn upload_tensor(
        &self,
        pool: &MemoryPool,
        shape: &[usize],
        dtype: DType,
        bytes: &[u8],
        is_ahead: bool,
    ) -> (Tensor, Option<Copied>) {
        let device = match &self.device.backend {
            Backend::Nvidia(device) => device,
            Backend::Emulated(_) => return (Tensor::from_device(pool, shape, dtype, self.upload(bytes)), None),
        };
        self.device.meter.uploaded(bytes.len());
        let (block, copied) = match is_ahead.then(|| device.upload_ahead(bytes)) {
            Some(Ok((block, copied))) => (self.counted(block, bytes.len()), Some(copied)),
            _ => (self.counted(self.allocated(|| device.upload_to_stay(bytes)), bytes.len()), None),
        };
        (Tensor::from_device(pool, shape, dtype, block), copied)
    }

    /// What `make` gives. Where there is no memory for it, what a step that is being collected keeps of blocks that were dropped makes way.
    fn allocated<T>(&self, make: impl Fn() -> Result<T, GpuError>) -> T {
        let again = |_| {
            self.device.flush();
            make()
        };
        make().or_else(again).unwrap_or_else(|error| panic_any(error))
    }

    /// The most shared memory that a block of a kernel may have, in bytes.
    pub(crate) fn most_shared(&self) -> usize {
        match &self.device.backend {
            Backend::Nvidia(device) => device.most_shared(),
            Backend::Emulated(device) => device.most_shared(),
        }
    }

    /// The device's number, by which tensors know where they are.
    fn number(&self) -> usize {
        match &self.device.backend {
            Backend::Nvidia(device) => device.number(),
            Backend::Emulated(device) => device.number(),
        }
    }

    /// Where a tensor is.
    pub(crate) fn address(&self, tensor: &Tensor) -> u64 {
        tensor.device_address(self.number(), |bytes| self.upload(bytes))
    }

    /// Lets the GPU begin with what was collected of a step.
    pub(crate) fn flush(&self) {
        self.device.flush();
    }

    fn counted(&self, inner: DeviceBlock, bytes: usize) -> DeviceBlock {
        self.device.held.fetch_add(bytes, Ordering::Relaxed);
        Box::new(Block { device: Arc::clone(&self.device), inner: Some(inner), bytes })
    }
}
