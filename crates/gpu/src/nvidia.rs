//! A device behind NVIDIA's driver, which is loaded at run time (`cudarc`).

mod async_copy;
mod memory;
mod pinned;

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use cudarc::driver::sys::{self, CUdevice_attribute, CUfunction_attribute};
use cudarc::driver::{CudaContext, DriverError, result};

pub(crate) use async_copy::Download;
pub(crate) use memory::PendingCopy;
use memory::Shared;

use crate::blas::{self, Blas, DenseProduct, Places, WORKSPACE_BYTES};
use crate::graph::CapturedLaunch;
use crate::launch::{Launch, pointers};
use crate::nvrtc::{Nvrtc, Target};
use crate::sources::SOURCES;
use crate::tensor_map::{Dimensions, Matrices, TensorMap};
use crate::{GpuError, GpuOptions, Source};

/// The oldest generation that has bf16 products and asynchronous copies (Ampere).
const MIN_CAPABILITY: u32 = 80;
/// The oldest generation whose kernels can wait for earlier ones by themselves (Hopper).
const MIN_WAITING_CAPABILITY: u32 = 90;
/// The oldest driver that has all calls that are made here.
const MIN_VERSION: i32 = 12_000;
/// The oldest driver whose graphs have edges of several kinds.
const MIN_EDGES_VERSION: i32 = 12_030;

pub(crate) struct Nvidia {
    shared: Arc<Shared>,
    name: String,
    target: Target,
    processors: usize,
    /// The most shared memory that a block may have.
    most_shared: usize,
    /// The device reads the host's pageable memory in place.
    reads_host_pages: bool,
    /// The major version of CUDA that the driver knows.
    driver_major: i32,
    /// Kernels have the instruction to wait for those before them, and graphs know of it.
    kernels_wait: bool,
    compiler: Nvrtc,
    options: GpuOptions,
    kernels: Mutex<HashMap<String, Kernel>>,
    modules: Mutex<HashMap<&'static str, Module>>,
    /// The library for plain products; looked for at the first product.
    blas: OnceLock<Option<Blas>>,
}

#[derive(Clone, Copy)]
struct Module(sys::CUmodule);
// SAFETY: the driver's handles may be used from any thread in whose context they are.
unsafe impl Send for Module {}

/// A graph of kernels, one after the other, ready to be launched.
pub(crate) struct Graph {
    graph: sys::CUgraph,
    exec: sys::CUgraphExec,
    nodes: Vec<sys::CUgraphNode>,
}
// SAFETY: as for `Module`; the handles are used by one thread at a time.
unsafe impl Send for Graph {}

impl Graph {
    /// Lets each kernel's blocks start when all blocks of the kernel before have begun; the kernels themselves wait
    /// for its end (CUDA programming guide, "Programmatic Dependent Launch").
    fn overlap(&self) -> Result<(), GpuError> {
        let count = self.nodes.len().saturating_sub(1);
        let (from, to) = (self.nodes[..count].as_ptr(), self.nodes[self.nodes.len() - count..].as_ptr());
        let edge = sys::CUgraphEdgeData {
            from_port: sys::CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC as u8,
            to_port: 0,
            type_: sys::CUgraphDependencyType::CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC as u8,
            reserved: [0; 5],
        };
        let edges = vec![edge; count];
        // SAFETY: the nodes are this graph's; there are as many of each list, and as many edges.
        unsafe { sys::cuGraphAddDependencies_v2(self.graph, from, to, edges.as_ptr(), count) }
            .result()
            .map_err(failed("cuGraphAddDependencies"))
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: the handles are this graph's own, and null if making it failed. Launches in flight are not
        // disturbed ("cuGraphExecDestroy"). An error leaves nothing to give back.
        unsafe {
            if !self.exec.is_null() {
                _ = sys::cuGraphExecDestroy(self.exec);
            }
            if !self.graph.is_null() {
                _ = sys::cuGraphDestroy(self.graph);
            }
        }
    }
}

#[derive(Clone, Copy)]
struct Kernel {
    function: sys::CUfunction,
    /// The dynamic shared memory that it may have.
    shared: usize,
}
// SAFETY: as for `Module`.
unsafe impl Send for Kernel {}

/// Maps the error of a call to ours.
fn failed(call: &str) -> impl FnOnce(DriverError) -> GpuError + '_ {
    move |error| GpuError::Driver { call: call.into(), message: describe(error) }
}

fn describe(error: DriverError) -> String {
    let name = error.error_name().map_or_else(|_| format!("{:?}", error.0), |name| name.to_string_lossy().into_owned());
    error.error_string().map_or(name.clone(), |text| format!("{} ({name})", text.to_string_lossy()))
}

impl Nvidia {
    /// Opens the device with this index. All callers share one device while any of them has it, because modules and
    /// the library for plain products are made once for each.
    pub(crate) fn open(index: usize, options: &GpuOptions) -> Result<Arc<Self>, GpuError> {
        static OPENED: Mutex<Vec<(usize, Weak<Nvidia>)>> = Mutex::new(Vec::new());
        let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
        opened.retain(|(_, device)| device.strong_count() > 0);
        let mut of_index =
            opened.iter().filter(|(known, _)| *known == index).filter_map(|(_, device)| device.upgrade());
        if let Some(device) = of_index.find(|device| device.options == *options) {
            return Ok(device);
        }
        drop(of_index);
        let device = Arc::new(Self::open_new(index, options)?);
        opened.push((index, Arc::downgrade(&device)));
        Ok(device)
    }

    fn open_new(index: usize, options: &GpuOptions) -> Result<Self, GpuError> {
        let count = count()?;
        let version = driver_version()?;
        if version < MIN_VERSION {
            return Err(GpuError::OldDriver { version });
        }
        if index >= count {
            return Err(GpuError::NoDevice { index, count });
        }
        let context = CudaContext::new(index).map_err(failed("making a context"))?;
        let name = context.name().map_err(failed("cuDeviceGetName"))?;
        let attribute = |attribute| context.attribute(attribute).map_err(failed("cuDeviceGetAttribute"));
        let major = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let capability = (major * 10 + minor) as u32;
        if capability < MIN_CAPABILITY {
            return Err(GpuError::TooOld { name, capability });
        }
        let processors = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?.max(1) as usize;
        let most_shared =
            attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?.max(0) as usize;
        let reads_host_pages = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS)? == 1;
        let driver_major = version / 1000;
        let compiler = Nvrtc::find_for(driver_major, options)?;
        let target = compiler.target_for(capability);
        let kernels_wait = target.capability >= MIN_WAITING_CAPABILITY && version >= MIN_EDGES_VERSION;
        Ok(Self {
            shared: Arc::new(Shared::new(context, index)?),
            name,
            target,
            processors,
            most_shared,
            reads_host_pages,
            driver_major,
            kernels_wait,
            compiler,
            options: options.clone(),
            kernels: Mutex::default(),
            modules: Mutex::default(),
            blas: OnceLock::new(),
        })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the driver's number of the device.
    pub(crate) fn number(&self) -> usize {
        self.shared.number
    }

    /// Returns the most shared memory of a block, in bytes.
    pub(crate) fn most_shared(&self) -> usize {
        self.most_shared
    }

    pub(crate) fn processors(&self) -> usize {
        self.processors
    }

    /// Returns the number of multiprocessors if both the compiler and the device know Hopper's instructions.
    pub(crate) fn hopper_processors(&self) -> Option<usize> {
        (self.target == Target::real(90) && self.compiler.knows_hopper()).then_some(self.processors)
    }

    /// Returns the driver's map of matrices for tensor copies; none if it refuses, or if kernels have no such
    /// instruction.
    pub(crate) fn tensor_map(&self, matrices: &Matrices) -> Option<TensorMap> {
        self.hopper_processors()?;
        self.bind().ok()?;
        let Dimensions { sizes, steps, of_box } = matrices.dimensions();
        let every = vec![1; of_box.len()];
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        // SAFETY: the driver writes the map, and reads as many numbers of each list as there are sizes, of `steps`
        // one less; it does not touch the matrices.
        let status = unsafe {
            sys::cuTensorMapEncodeTiled(
                &raw mut map,
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT16,
                sizes.len() as u32,
                matrices.address as *mut c_void,
                sizes.as_ptr(),
                steps.as_ptr(),
                of_box.as_ptr(),
                every.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        status.result().ok()?;
        let mut words: TensorMap = [0; 32];
        for (pair, word) in words.chunks_exact_mut(2).zip(map.opaque) {
            pair.copy_from_slice(&[word as u32, (word >> 32) as u32]);
        }
        Some(words)
    }

    /// Returns the bytes of memory that the driver states.
    pub(crate) fn memory_bytes(&self) -> Option<u64> {
        self.shared.context.total_mem().ok().map(|bytes| bytes as u64)
    }

    /// Prepares for a step: see [`Shared::sort_free_blocks`].
    pub(crate) fn sort_free_blocks(&self) {
        self.shared.sort_free_blocks();
    }

    pub(crate) fn synchronize(&self) -> Result<(), GpuError> {
        self.shared.stream.synchronize().map_err(failed("waiting"))
    }

    /// # Safety
    ///
    /// As for [`Gpu::launch`](crate::Gpu::launch).
    pub(crate) unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), GpuError> {
        self.bind()?;
        let function = self.kernel(launch)?;
        let (mut values, [x, y, z]) = (launch.values(), launch.blocks());
        let mut args = pointers(&mut values);
        let (threads, shared) = ((launch.threads as u32, 1, 1), launch.shared as u32);
        let stream = self.shared.stream.cu_stream();
        // SAFETY: the caller's promise; the driver copies the arguments before it returns.
        unsafe { result::launch_kernel(function, (x, y, z), threads, shared, stream, &mut args) }
            .map_err(|error| GpuError::Driver { call: format!("kernel {}", launch.kernel), message: describe(error) })
    }

    /// The library for plain products, looked for at the first call.
    pub(crate) fn blas(&self) -> Option<&Blas> {
        let open = || {
            self.bind().ok()?;
            Blas::find(&self.options, self.driver_major, || self.block(WORKSPACE_BYTES).ok())
        };
        self.blas.get_or_init(open).as_ref()
    }

    /// # Safety
    ///
    /// As for [`Blas::run`].
    pub(crate) unsafe fn dense(&self, product: DenseProduct, at: Places) -> Result<bool, GpuError> {
        self.bind()?;
        let Some(blas) = self.blas() else { return Ok(false) };
        let stream = self.shared.stream.cu_stream().cast();
        // SAFETY: the caller's promise; the context is current.
        unsafe { blas.run(product, at, stream) }.map_err(|status| blas::failed(product, status))
    }

    /// Makes a graph of these launches, one after the other. Where possible the blocks of each start while the one
    /// before still runs, and wait.
    pub(crate) fn graph(&self, launches: &[CapturedLaunch]) -> Result<Graph, GpuError> {
        let overlapping = if self.kernels_wait { self.graph_with(launches, true).ok() } else { None };
        overlapping.map_or_else(|| self.graph_with(launches, false), Ok)
    }

    fn graph_with(&self, launches: &[CapturedLaunch], is_overlapping: bool) -> Result<Graph, GpuError> {
        self.bind()?;
        let mut graph = Graph { graph: ptr::null_mut(), exec: ptr::null_mut(), nodes: Vec::new() };
        // SAFETY: the driver writes the handle of a new graph, which `Graph` destroys.
        unsafe { sys::cuGraphCreate(&raw mut graph.graph, 0) }.result().map_err(failed("cuGraphCreate"))?;
        for captured in launches {
            let launch = captured.launch();
            let mut values = launch.values();
            let mut args = pointers(&mut values);
            let params = self.params(&launch, &mut args)?;
            let (before, mut added) = (graph.nodes.last().copied().filter(|_| !is_overlapping), ptr::null_mut());
            let (dependencies, count) = before.as_ref().map_or((ptr::null(), 0), |last| (ptr::from_ref(last), 1));
            // SAFETY: the node before is the graph's; the driver copies the arguments before it returns.
            unsafe {
                sys::cuGraphAddKernelNode_v2(&raw mut added, graph.graph, dependencies, count, &raw const params)
            }
            .result()
            .map_err(failed("cuGraphAddKernelNode"))?;
            graph.nodes.push(added);
        }
        if is_overlapping {
            graph.overlap()?;
        }
        // SAFETY: the graph is whole; the driver writes the handle of what can be launched, which `Graph` destroys.
        unsafe { sys::cuGraphInstantiateWithFlags(&raw mut graph.exec, graph.graph, 0) }
            .result()
            .map_err(failed("cuGraphInstantiateWithFlags"))?;
        Ok(graph)
    }

    /// Gives a kernel of the graph other blocks and arguments.
    pub(crate) fn change(&self, graph: &mut Graph, index: usize, to: &CapturedLaunch) -> Result<(), GpuError> {
        self.bind()?;
        let launch = to.launch();
        let mut values = launch.values();
        let mut args = pointers(&mut values);
        let params = self.params(&launch, &mut args)?;
        // SAFETY: the node is one of those that the graph was made of, with the same kernel; the driver copies the
        // arguments.
        unsafe { sys::cuGraphExecKernelNodeSetParams_v2(graph.exec, graph.nodes[index], &raw const params) }
            .result()
            .map_err(failed("cuGraphExecKernelNodeSetParams"))
    }

    /// # Safety
    ///
    /// As for [`Gpu::launch`](crate::Gpu::launch), for each launch with the arguments that it has now.
    pub(crate) unsafe fn run_graph(&self, graph: &Graph) -> Result<(), GpuError> {
        self.bind()?;
        // SAFETY: the caller's promise.
        unsafe { sys::cuGraphLaunch(graph.exec, self.shared.stream.cu_stream()) }
            .result()
            .map_err(failed("cuGraphLaunch"))
    }

    /// Returns the launch in the form that graphs take; `args` are pointers to its values.
    fn params(&self, launch: &Launch<'_>, args: &mut [*mut c_void]) -> Result<sys::CUDA_KERNEL_NODE_PARAMS, GpuError> {
        let [x, y, z] = launch.blocks();
        Ok(sys::CUDA_KERNEL_NODE_PARAMS {
            func: self.kernel(launch)?,
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: launch.threads as u32,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.shared as u32,
            kernelParams: args.as_mut_ptr(),
            extra: ptr::null_mut(),
            kern: ptr::null_mut(),
            ctx: ptr::null_mut(),
        })
    }

    /// Returns the kernel with as much shared memory as it asks for. The first launch compiles and loads it.
    fn kernel(&self, launch: &Launch<'_>) -> Result<sys::CUfunction, GpuError> {
        let mut kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = kernels.get(launch.kernel).filter(|kernel| kernel.shared >= launch.shared) {
            return Ok(kernel.function);
        }
        let module = self.module(launch.source)?;
        let name = CString::new(launch.kernel).unwrap_or_default();
        // SAFETY: modules are never unloaded.
        let function = unsafe { result::module::get_function(module.0, name) }.map_err(|error| GpuError::Driver {
            call: format!("kernel {}", launch.kernel),
            message: describe(error),
        })?;
        // Static shared memory counts as well, so that less than the plain limit may be too much.
        if launch.shared > 0 {
            let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function was just given by the driver.
            unsafe { result::function::set_function_attribute(function, attribute, launch.shared as i32) }
                .map_err(failed("asking for shared memory"))?;
        }
        kernels.insert(launch.kernel.to_string(), Kernel { function, shared: launch.shared });
        Ok(function)
    }

    /// Compiles in parallel all modules that training and generation need and that are not on disk yet. One that
    /// fails is compiled again, and its error reported, when it is needed.
    fn compile_usual(&self) {
        let rare = ["blocks", "e4m3", "grouped_fp8", "peak", "peak_hopper"];
        let is_of_blocks = |source: &Source| source.file == "small_m_gemm" && source.name != "small_m_gemm_bf16";
        let is_rare = |source: &Source| rare.contains(&source.file) || is_of_blocks(source);
        let is_usual = |source: &Source| source.is_for(self.target) && !is_rare(source);
        let jobs: Vec<_> =
            SOURCES.iter().filter(|source| is_usual(source)).map(|source| (*source, self.target)).collect();
        drop(self.compiler.compile_all(&jobs));
    }

    fn module(&self, source: &'static Source) -> Result<Module, GpuError> {
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = modules.get(source.name) {
            return Ok(*module);
        }
        if modules.is_empty() {
            self.compile_usual();
        }
        let load = |mut code: Vec<u8>| {
            code.push(0); // PTX is text that ends with a zero
            // SAFETY: the code is what the compiler made, a whole cubin or PTX, which says how long it is.
            unsafe { result::module::load_data(code.as_ptr().cast()) }
        };
        let cached = self.compiler.compile_cached(source, self.target)?;
        // A file of the cache may be damaged; fresh code is not.
        let module = match load(cached) {
            Err(_) => load(self.compiler.compile_anew(source, self.target)?),
            loaded => loaded,
        };
        let module = Module(module.map_err(|error| GpuError::Driver {
            call: format!("loading the kernels of {}.cu", source.name),
            message: describe(error),
        })?);
        modules.insert(source.name, module);
        Ok(module)
    }

    fn bind(&self) -> Result<(), GpuError> {
        self.shared.context.bind_to_thread().map_err(failed("cuCtxSetCurrent"))
    }
}

/// Returns the number of devices.
pub(crate) fn count() -> Result<usize, GpuError> {
    // SAFETY: it only tries to load the driver's library.
    if !unsafe { sys::is_culib_present() } {
        return Err(GpuError::NoDriver);
    }
    result::init().map_err(failed("cuInit"))?;
    Ok(result::device::get_count().map_err(failed("cuDeviceGetCount"))?.max(0) as usize)
}

/// Returns the driver's version: 1000 times the major one and 10 times the minor one.
fn driver_version() -> Result<i32, GpuError> {
    let mut version = 0;
    // SAFETY: the driver writes a number.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }.result().map_err(failed("cuDriverGetVersion"))?;
    Ok(version)
}
