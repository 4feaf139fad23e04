//! The emulation of a GPU: kernels compiled for the host, and the host's memory.

use std::ffi::{CStr, OsStr, c_char, c_void};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use libloading::Library;
use moeworks_tensor::{DeviceBlock, DeviceMemory};

use crate::blas::{self, Blas, DenseProduct, Places, WORKSPACE_BYTES};
use crate::launch::{Launch, pointers};
use crate::library::reason;
use crate::sources::SOURCES;
use crate::tensor_map::{Matrices, TensorMap};
use crate::{GpuError, GpuOptions, kernel_cache};

/// The alignment of memory in bytes, like a GPU's for vectors and tensor copies.
const ALIGN: usize = 256;
/// Bytes before and after a block that no kernel may write.
const GUARD: usize = 256;
/// The value of guards and fresh memory: NaN in every float type.
const FILL: u8 = 0xff;

/// The compiler's options. Like a GPU, they allow a product and a sum to be contracted into one operation.
const OPTIONS: [&str; 6] = ["-std=c++17", "-O2", "-w", "-fPIC", "-pthread", "-D_FORTIFY_SOURCE=0"];

pub(crate) struct Emulated {
    /// The kernels; none if nothing is computed.
    library: Option<&'static Library>,
    kind: Emulation,
    blas: Option<Blas>,
    number: usize,
}

type Entry = unsafe extern "C" fn(*const u32, u32, u32, *mut *mut c_void, *const c_char, u32) -> *const c_char;

/// The kind of GPU that is emulated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Emulation {
    /// The threads of a block run in turn from the last to the first: a result that differs lacks a barrier.
    pub is_reversed: bool,
    /// The GPU has Hopper's instructions, and kernels made of them are used.
    pub is_hopper: bool,
    /// There is a library for plain products: another emulation.
    pub has_library: bool,
    /// Nothing is computed, and memory is all zeros. Each kernel is a line on standard error with its name, blocks,
    /// threads and numbers, and each copy a line with its bytes. So a pass of any size shows where it has too few
    /// blocks, waits or copies.
    pub is_traced: bool,
}

/// The number of the first emulated GPU, above those of all others, because memory of one device is not memory of
/// another.
const FIRST_NUMBER: usize = 1 << 16;
/// The version of CUDA that the emulated library for plain products states.
const BLAS_MAJOR: i32 = 12;
/// The multiprocessors of an emulated GPU: so few that blocks that process many tiles have several.
const PROCESSORS: usize = 3;
/// The multiprocessors of a traced GPU: an H100's.
const TRACED_PROCESSORS: usize = 132;

impl Emulated {
    pub(crate) fn open(kind: Emulation, options: &GpuOptions) -> Result<Self, GpuError> {
        // The library is the same whichever folder it is cached in.
        static LIBRARY: OnceLock<Result<Library, GpuError>> = OnceLock::new();
        static OPENED: AtomicUsize = AtomicUsize::new(FIRST_NUMBER);
        let number = OPENED.fetch_add(1, Ordering::Relaxed);
        if kind.is_traced {
            return Ok(Self { library: None, kind, blas: None, number });
        }
        let library = LIBRARY.get_or_init(|| load(&options.kernel_folder())).as_ref().map_err(Clone::clone)?;
        let mut emulated = Self { library: Some(library), kind, blas: None, number };
        if kind.has_library {
            emulated.blas = Blas::open(library, BLAS_MAJOR, emulated.block(WORKSPACE_BYTES));
        }
        Ok(emulated)
    }

    pub(crate) fn name(&self) -> &'static str {
        match self.kind {
            Emulation { is_traced: true, .. } => "trace of a GPU's launches",
            Emulation { is_hopper: true, .. } => "emulation of Hopper on the host",
            _ => "emulation on the host",
        }
    }

    pub(crate) fn processors(&self) -> usize {
        if self.kind.is_traced { TRACED_PROCESSORS } else { PROCESSORS }
    }

    pub(crate) fn hopper_processors(&self) -> Option<usize> {
        self.kind.is_hopper.then_some(self.processors())
    }

    /// Returns the most shared memory of a block; with threads in reverse as little as on GPUs of capability 8.6 and
    /// 8.9.
    pub(crate) fn most_shared(&self) -> usize {
        if self.kind.is_reversed && !self.kind.is_hopper { 99 << 10 } else { 227 << 10 }
    }

    /// Returns the map for tensor copies as the emulator reads it. With threads in reverse there is none, so that
    /// tests cover both ways of copying.
    pub(crate) fn tensor_map(&self, matrices: &Matrices) -> Option<TensorMap> {
        if !self.kind.is_hopper || self.kind.is_reversed {
            return None;
        }
        let Matrices { address, columns, rows, count, box_rows, box_blocks } = *matrices;
        let mut map: TensorMap = [0; 32];
        map[..2].copy_from_slice(&[address as u32, (address >> 32) as u32]);
        map[2..7].copy_from_slice(&[columns, rows, count, box_rows, box_blocks].map(|size| size as u32));
        Some(map)
    }

    pub(crate) fn number(&self) -> usize {
        self.number
    }

    /// Allocates a block of fresh memory, all NaN.
    pub(crate) fn block(&self, bytes: usize) -> DeviceBlock {
        Box::new(Block::new(bytes, self))
    }

    /// Allocates a block with a copy of `bytes`.
    pub(crate) fn upload(&self, bytes: &[u8]) -> DeviceBlock {
        if self.kind.is_traced {
            eprintln!("to the GPU: {} bytes", bytes.len());
        }
        let mut block = Block::new(bytes.len(), self);
        let start = block.start;
        block.memory[start..start + bytes.len()].copy_from_slice(bytes);
        Box::new(block)
    }

    pub(crate) fn blas(&self) -> Option<&Blas> {
        self.blas.as_ref()
    }

    /// # Safety
    ///
    /// As for [`Blas::run`].
    pub(crate) unsafe fn dense(&self, product: DenseProduct, at: Places) -> Result<bool, GpuError> {
        let Some(blas) = &self.blas else { return Ok(false) };
        // SAFETY: the caller's promise; there is no stream.
        unsafe { blas.run(product, at, ptr::null_mut()) }.map_err(|status| blas::failed(product, status))
    }

    /// # Safety
    ///
    /// As for [`Gpu::launch`](crate::Gpu::launch).
    pub(crate) unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), GpuError> {
        let failed = |message: String| GpuError::Driver { call: format!("kernel {}", launch.kernel), message };
        let Some(library) = self.library else {
            let (grid, numbers) = (launch.grid, launch.numbers());
            eprintln!("{} {grid:?} x {} {numbers:?}", launch.kernel, launch.threads);
            return Ok(());
        };
        if launch.shared > self.most_shared() {
            return Err(failed(format!(
                "{} bytes of shared memory: must be at most {}",
                launch.shared,
                self.most_shared()
            )));
        }
        let name = format!("emulated_{}\0", launch.kernel);
        // SAFETY: every such function of the library has this type (`EMULATED_KERNEL`).
        let entry = unsafe { library.get::<Entry>(name.as_bytes()) }.map_err(|error| failed(reason(error)))?;
        let (mut values, kinds, grid) = (launch.values(), launch.kinds(), launch.blocks());
        let mut args = pointers(&mut values);
        // SAFETY: kinds of arguments are compared with the kernel's parameters before any is read; what the kernel
        // then does is the caller's promise. The message lives until this thread's next launch.
        let message = unsafe {
            let kinds = kinds.as_ptr().cast();
            let (threads, shared) = (launch.threads as u32, launch.shared as u32);
            let message = entry(grid.as_ptr(), threads, shared, args.as_mut_ptr(), kinds, self.kind.is_reversed.into());
            (!message.is_null()).then(|| CStr::from_ptr(message).to_string_lossy().into_owned())
        };
        message.map_or(Ok(()), |message| Err(failed(message)))
    }
}

/// The emulation of the library for plain products.
const BLAS: (&str, &str) = ("blas", include_str!("blas_emulator.cpp"));

/// Loads the kernels for the host, compiled if they are not in `folder` yet.
fn load(folder: &Path) -> Result<Library, GpuError> {
    let kernels = SOURCES.iter().map(|source| (source.name, source.emulated_text()));
    let texts: Vec<(&str, String)> = kernels.chain([(BLAS.0, BLAS.1.to_string())]).collect();
    let parts: Vec<&str> = texts.iter().map(|(_, text)| text.as_str()).chain(OPTIONS).collect();
    let path = kernel_cache::path(folder, "emulated", &parts, "so");
    if !path.exists() {
        kernel_cache::write_whole(&path, |beside| compile(&texts, beside))?;
    }
    // SAFETY: the library is made of this program's own sources and has no initialisers.
    unsafe { Library::new(&path) }.map_err(|error| GpuError::NoEmulation { reason: reason(error) })
}

/// Writes the sources into a folder beside `to`, compiles them there and removes it.
fn compile(texts: &[(&str, String)], to: &Path) -> Result<(), GpuError> {
    let failed = |reason: String| GpuError::NoEmulation { reason };
    let folder = to.with_extension("sources");
    fs::create_dir_all(&folder).map_err(|error| failed(format!("{}: {error}", folder.display())))?;
    let run = |args: &[&OsStr], files: &[String]| {
        let output = Command::new("c++").args(OPTIONS).args(args).args(files).current_dir(&folder).output();
        let output = output.map_err(|error| failed(format!("c++: {error}")))?;
        let log = || String::from_utf8_lossy(&output.stderr).into_owned();
        let error = || GpuError::Compile { source_name: "*".into(), target: "the host".into(), log: log() };
        output.status.success().then_some(()).ok_or_else(error)
    };
    let file = |name: &str, ending: &str| format!("{name}.{ending}");
    for (name, text) in texts {
        let name = file(name, "cpp");
        fs::write(folder.join(&name), text).map_err(|error| failed(format!("{name}: {error}")))?;
    }
    // Each core compiles an equal share of the files.
    let count = std::thread::available_parallelism().map_or(1, usize::from);
    let of_core = |first: usize| texts.iter().skip(first).step_by(count).map(|(name, _)| file(name, "cpp")).collect();
    let parts: Vec<Vec<String>> = (0..count.min(texts.len())).map(of_core).collect();
    let compiled = std::thread::scope(|scope| {
        let all: Vec<_> = parts.iter().map(|part| scope.spawn(|| run(&["-c".as_ref()], part))).collect();
        all.into_iter().try_for_each(|one| one.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    });
    let objects: Vec<String> = texts.iter().map(|(name, _)| file(name, "o")).collect();
    let result = compiled.and_then(|()| run(&["-shared".as_ref(), "-o".as_ref(), to.as_os_str()], &objects));
    // The folder holds only sources and objects; nothing is lost if it stays.
    let _ = fs::remove_dir_all(&folder);
    result
}

/// A block of the host's memory between two guards.
struct Block {
    is_traced: bool,
    memory: Vec<u8>,
    start: usize,
    bytes: usize,
    device: usize,
}

impl Block {
    fn new(bytes: usize, on: &Emulated) -> Self {
        let Emulated { kind: Emulation { is_traced, .. }, number, .. } = on;
        let len = bytes + ALIGN + 2 * GUARD;
        let memory = if *is_traced { vec![0; len] } else { vec![FILL; len] };
        let start = (memory.as_ptr().addr() + GUARD).next_multiple_of(ALIGN) - memory.as_ptr().addr();
        Self { is_traced: *is_traced, memory, start, bytes, device: *number }
    }
}

impl DeviceMemory for Block {
    fn address(&self) -> u64 {
        self.memory.as_ptr().addr() as u64 + self.start as u64
    }

    fn device(&self) -> usize {
        self.device
    }

    fn download(&self, to: &mut [u8]) {
        if self.is_traced {
            eprintln!("to the host: {} bytes", to.len());
        }
        to.copy_from_slice(&self.memory[self.start..self.start + to.len()]);
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let (before, rest) = self.memory.split_at(self.start);
        let is_whole = before.iter().chain(&rest[self.bytes..]).all(|&byte| byte == FILL);
        assert!(
            is_whole || self.is_traced || std::thread::panicking(),
            "a kernel wrote outside of a tensor of {} bytes",
            self.bytes
        );
    }
}
