//! The emulation: kernels compiled for the host, memory that is the host's.

use std::ffi::{CStr, c_char, c_void};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use libloading::Library;
use moeworks_tensor::{DeviceBlock, DeviceMemory};

use super::launch::{Launch, pointers};
use super::library::reason;
use super::sources::{SOURCES, Source};
use super::traffic::Meter;
use super::{GpuError, cache};

/// Memory is aligned as a GPU's is for vectors and tensor copies.
const ALIGN: usize = 256;
/// Bytes before and after a block that nobody may write.
const GUARD: usize = 256;
/// What guards and fresh memory hold: NaN in every float type.
const FILL: u8 = 0xff;

/// The compiler's options. Contraction is that of a GPU: a product and a sum may be one operation.
const OPTIONS: [&str; 7] = ["-std=c++17", "-O2", "-w", "-fPIC", "-shared", "-pthread", "-D_FORTIFY_SOURCE=0"];

pub(super) struct Emulated {
    library: &'static Library,
    kind: Emulation,
    meter: Meter,
}

type Entry = unsafe extern "C" fn(*const u32, u32, u32, *mut *mut c_void, *const c_char, u32) -> *const c_char;

/// What is emulated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Emulation {
    /// The threads of a block take turns from the last to the first: a result that differs lacks a barrier.
    pub is_reversed: bool,
    /// The GPU has Hopper's instructions, and kernels that are made of them are taken.
    pub is_hopper: bool,
}

/// Multiprocessors of an emulated GPU: a few, so that blocks that stay for many tiles have several.
const PROCESSORS: usize = 3;

impl Emulated {
    pub(super) fn open(kind: Emulation) -> Result<Self, GpuError> {
        static LIBRARY: OnceLock<Result<Library, GpuError>> = OnceLock::new();
        let library = LIBRARY.get_or_init(load).as_ref().map_err(Clone::clone)?;
        Ok(Self { library, kind, meter: Meter::default() })
    }

    pub(super) fn name(&self) -> &'static str {
        if self.kind.is_hopper { "emulation of Hopper on the host" } else { "emulation on the host" }
    }

    pub(super) fn hopper_processors(&self) -> Option<usize> {
        self.kind.is_hopper.then_some(PROCESSORS)
    }

    pub(super) fn meter(&self) -> &Meter {
        &self.meter
    }

    /// Fresh memory, of NaN.
    pub(super) fn block(&self, bytes: usize) -> DeviceBlock {
        Box::new(Block::new(bytes, &self.meter))
    }

    /// A copy of `bytes`.
    pub(super) fn upload(&self, bytes: &[u8]) -> DeviceBlock {
        self.meter.uploaded(bytes.len());
        let mut block = Block::new(bytes.len(), &self.meter);
        let start = block.start;
        block.memory[start..start + bytes.len()].copy_from_slice(bytes);
        Box::new(block)
    }

    /// # Safety
    ///
    /// As of [`Gpu::launch`](super::Gpu::launch).
    pub(super) unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), GpuError> {
        let failed = |message: String| GpuError::Driver { call: format!("kernel {}", launch.kernel), message };
        let name = format!("emulated_{}\0", launch.kernel);
        // SAFETY: every such function of the library has this type (`EMULATED_KERNEL`).
        let entry = unsafe { self.library.get::<Entry>(name.as_bytes()) }.map_err(|error| failed(reason(error)))?;
        let (mut values, kinds, grid) = (launch.values(), launch.kinds(), launch.blocks());
        let mut args = pointers(&mut values);
        // SAFETY: kinds of arguments are compared with the kernel's parameters before any is read; what the kernel then does
        // is the caller's promise. The message lives until this thread's next launch.
        let message = unsafe {
            let kinds = kinds.as_ptr().cast();
            let (threads, shared) = (launch.threads as u32, launch.shared as u32);
            let message = entry(grid.as_ptr(), threads, shared, args.as_mut_ptr(), kinds, self.kind.is_reversed.into());
            (!message.is_null()).then(|| CStr::from_ptr(message).to_string_lossy().into_owned())
        };
        message.map_or(Ok(()), |message| Err(failed(message)))
    }
}

fn load() -> Result<Library, GpuError> {
    let texts: Vec<String> = SOURCES.iter().map(|source| source.emulated_text()).collect();
    let parts: Vec<&str> = texts.iter().map(String::as_str).chain(OPTIONS).collect();
    let path = cache::path(&cache::folder(), "emulated", &parts, "so");
    if !path.exists() {
        cache::put(&path, |beside| compile(SOURCES, &texts, beside))?;
    }
    // SAFETY: the library is made of this program's own sources and has no initialisers.
    unsafe { Library::new(&path) }.map_err(|error| GpuError::NoEmulation { reason: reason(error) })
}

/// Writes the texts into a folder beside `to`, compiles them there and removes it.
fn compile(sources: &[&Source], texts: &[String], to: &Path) -> Result<(), GpuError> {
    let failed = |reason: String| GpuError::NoEmulation { reason };
    let folder = to.with_extension("sources");
    fs::create_dir_all(&folder).map_err(|error| failed(format!("{}: {error}", folder.display())))?;
    let mut command = Command::new("c++");
    command.args(OPTIONS).arg("-o").arg(to).current_dir(&folder);
    for (source, text) in sources.iter().zip(texts) {
        let name = format!("{}.cpp", source.name);
        fs::write(folder.join(&name), text).map_err(|error| failed(format!("{name}: {error}")))?;
        command.arg(name);
    }
    let output = command.output().map_err(|error| failed(format!("c++: {error}")));
    // Only sources are in it; they cost nothing if they stay.
    let _ = fs::remove_dir_all(&folder);
    let output = output?;
    if output.status.success() {
        return Ok(());
    }
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(GpuError::Compile { source_name: "*".into(), target: "the host".into(), log })
}

/// A block of the host's memory between two guards.
struct Block {
    meter: Meter,
    memory: Vec<u8>,
    start: usize,
    bytes: usize,
}

impl Block {
    fn new(bytes: usize, meter: &Meter) -> Self {
        let memory = vec![FILL; bytes + ALIGN + 2 * GUARD];
        let start = (memory.as_ptr().addr() + GUARD).next_multiple_of(ALIGN) - memory.as_ptr().addr();
        Self { meter: meter.clone(), memory, start, bytes }
    }
}

impl DeviceMemory for Block {
    fn address(&self) -> u64 {
        self.memory.as_ptr().addr() as u64 + self.start as u64
    }

    fn download(&self, to: &mut [u8]) {
        self.meter.downloaded(to.len());
        to.copy_from_slice(&self.memory[self.start..self.start + to.len()]);
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let (before, rest) = self.memory.split_at(self.start);
        let is_whole = before.iter().chain(&rest[self.bytes..]).all(|&byte| byte == FILL);
        assert!(is_whole || std::thread::panicking(), "a kernel wrote outside of a tensor of {} bytes", self.bytes);
    }
}
