//! Compiling kernels at run time, for the GPU at hand or for any other.

use std::ffi::{CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{fmt, fs, thread};

use crate::library::Functions;
use crate::{GpuError, GpuOptions, Source, kernel_cache};

/// The target of a compilation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// Ten times the compute capability: 80, 90, 100.
    pub capability: u32,
    /// Uses the instructions that only this capability has (`sm_90a`); from 90 on.
    pub is_specific: bool,
    /// Makes PTX, which the driver compiles further, instead of a cubin: for a device newer than the compiler.
    pub is_virtual: bool,
}

impl Target {
    /// Returns the target of a cubin for exactly this capability.
    #[must_use]
    pub fn real(capability: u32) -> Self {
        Self { capability, is_specific: capability >= 90, is_virtual: false }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.is_virtual { "compute" } else { "sm" };
        write!(f, "{kind}_{}{}", self.capability, if self.is_specific { "a" } else { "" })
    }
}

/// The first version that knows instructions of one capability alone.
const MIN_SPECIFIC_VERSION: (i32, i32) = (12, 0);
/// The first that knows all that kernels for Hopper alone are made of (PTX 8.3).
const MIN_HOPPER_VERSION: (i32, i32) = (12, 3);

/// The compiler, found at run time.
pub struct Nvrtc {
    functions: Functions,
    version: (i32, i32),
    capabilities: Vec<u32>,
    /// The folder of compiled kernels.
    folder: PathBuf,
}

impl Nvrtc {
    /// Finds the library that the options name, or the system's.
    ///
    /// # Errors
    ///
    /// [`GpuError::NoCompiler`] with the loader's message for each place.
    pub fn find(options: &GpuOptions) -> Result<Self, GpuError> {
        Self::find_for(c_int::MAX, options)
    }

    /// Finds the library for a driver that knows this major version of CUDA, since drivers take no code of a newer
    /// one (CUDA Compatibility Guide, "Minor Version Compatibility").
    pub(crate) fn find_for(driver_major: c_int, options: &GpuOptions) -> Result<Self, GpuError> {
        let mut tried = Vec::new();
        for path in Functions::candidates(options) {
            match Self::open(&path, options) {
                Ok(found) if found.version.0 <= driver_major => return Ok(found),
                Ok(found) => {
                    let path = path.display();
                    tried.push(format!(
                        "{path} is of CUDA {}, newer than the driver, which is of CUDA {driver_major}",
                        found.version.0
                    ));
                }
                Err(GpuError::NoCompiler { tried: reasons }) => tried.extend(reasons),
                Err(error) => return Err(error),
            }
        }
        Err(GpuError::NoCompiler { tried })
    }

    /// Opens the library at `path`.
    ///
    /// # Errors
    ///
    /// [`GpuError::NoCompiler`] with the loader's message.
    pub fn open(path: &Path, options: &GpuOptions) -> Result<Self, GpuError> {
        let functions = Functions::open(path).map_err(|error| GpuError::NoCompiler { tried: vec![error] })?;
        Self::new(functions, options.kernel_folder())
    }

    fn new(functions: Functions, folder: PathBuf) -> Result<Self, GpuError> {
        let failed =
            || GpuError::NoCompiler { tried: vec!["the library does not report its version and targets".into()] };
        let (mut major, mut minor, mut count) = (0, 0, 0);
        // SAFETY: each call writes one number to each pointer.
        let status =
            unsafe { (functions.version)(&raw mut major, &raw mut minor) | (functions.num_archs)(&raw mut count) };
        let mut archs = vec![0; usize::try_from(count).map_err(|_| failed())?];
        // SAFETY: the call writes as many numbers as the one before said.
        let status = status | unsafe { (functions.archs)(archs.as_mut_ptr()) };
        let capabilities = archs.into_iter().filter_map(|arch| u32::try_from(arch).ok()).collect();
        if status == 0 { Ok(Self { functions, version: (major, minor), capabilities, folder }) } else { Err(failed()) }
    }

    /// Returns the major and minor version.
    #[must_use]
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// Returns whether kernels made of Hopper's own instructions can be compiled.
    pub(crate) fn knows_hopper(&self) -> bool {
        self.version >= MIN_HOPPER_VERSION
    }

    /// Returns the target for a device of this capability: a cubin if the compiler knows it, else PTX for the newest
    /// capability that it knows.
    #[must_use]
    pub fn target_for(&self, capability: u32) -> Target {
        if self.capabilities.contains(&capability) {
            let target = Target::real(capability);
            return Target { is_specific: target.is_specific && self.version >= MIN_SPECIFIC_VERSION, ..target };
        }
        let newest = self.capabilities.iter().copied().filter(|&known| known < capability).max();
        Target { capability: newest.unwrap_or(80), is_specific: false, is_virtual: true }
    }

    /// The options of every compilation besides the target. Before 13.2 the compiler takes a lambda inside a device
    /// function for a host function, unless device is the default execution space.
    const OPTIONS: [&'static str; 3] = ["--std=c++17", "-lineinfo", "--device-as-default-execution-space"];

    /// Compiles a source to a cubin, or for a virtual target to PTX. Needs no GPU.
    pub fn compile(&self, source: &Source, target: Target) -> Result<Vec<u8>, GpuError> {
        let (code, log) = self.compile_text(source.name, &source.cuda_text(), target);
        code.ok_or_else(|| GpuError::Compile { source_name: source.name.into(), target: target.to_string(), log })
    }

    /// Returns the code from the cache on disk, or [compiles](Self::compile) it and writes it there. A cache that
    /// cannot be written only costs the next start some time.
    pub fn compile_cached(&self, source: &Source, target: Target) -> Result<Vec<u8>, GpuError> {
        let path = self.cached_at(source, target);
        match fs::read(&path) {
            Ok(code) if is_code(&code) => Ok(code),
            _ => self.compile_anew(source, target),
        }
    }

    /// [Compiles](Self::compile) the source and overwrites its file in the cache.
    pub(crate) fn compile_anew(&self, source: &Source, target: Target) -> Result<Vec<u8>, GpuError> {
        let (path, code) = (self.cached_at(source, target), self.compile(source, target)?);
        let written = kernel_cache::write_whole(&path, |beside| {
            fs::write(beside, &code).map_err(|error| GpuError::Cache { path: beside.into(), reason: error.to_string() })
        });
        drop(written);
        Ok(code)
    }

    /// Returns the path of the code in the cache.
    fn cached_at(&self, source: &Source, target: Target) -> PathBuf {
        let ((major, minor), text) = (self.version, source.cuda_text());
        let (target_name, version) = (target.to_string(), format!("{major}.{minor}"));
        let parts: Vec<&str> = [text.as_str(), &target_name, &version].into_iter().chain(Self::OPTIONS).collect();
        kernel_cache::path(&self.folder, &format!("{}-{target_name}", source.name), &parts, "cubin")
    }

    /// Compiles sources by [`compile_cached`](Self::compile_cached) on as many threads as there are cores: each takes
    /// seconds to a minute.
    #[must_use]
    pub fn compile_all(&self, jobs: &[(&Source, Target)]) -> Vec<Result<Vec<u8>, GpuError>> {
        let results: Vec<OnceLock<_>> = jobs.iter().map(|_| OnceLock::new()).collect();
        let next = AtomicUsize::new(0);
        let work = || {
            while let Some(index) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|&index| index < jobs.len()) {
                let (source, target) = jobs[index];
                results[index].get_or_init(|| self.compile_cached(source, target));
            }
        };
        let threads = thread::available_parallelism().map_or(1, usize::from).min(jobs.len());
        thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
        results.into_iter().filter_map(OnceLock::into_inner).collect()
    }

    /// Compiles a text. Returns its code and the compiler's messages.
    fn compile_text(&self, name: &str, text: &str, target: Target) -> (Option<Vec<u8>>, String) {
        let arch = format!("--gpu-architecture={target}");
        let options = Self::OPTIONS.iter().map(|option| (*option).to_string()).chain([arch]);
        let Ok(options) = options.map(CString::new).collect::<Result<Vec<_>, _>>() else {
            return (None, String::new());
        };
        let (Ok(text), Ok(name)) = (CString::new(text), CString::new(format!("{name}.cu"))) else {
            return (None, "the source has a zero byte".into());
        };
        let mut program = ptr::null_mut();
        let f = &self.functions;
        // SAFETY: strings end with a zero and live through the calls; sizes are those that the library gives; the
        // program is destroyed once, at the end.
        unsafe {
            if (f.create)(&raw mut program, text.as_ptr(), name.as_ptr(), 0, ptr::null(), ptr::null()) != 0 {
                return (None, "nvrtcCreateProgram failed".into());
            }
            let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
            let status = (f.compile)(program, options.len() as c_int, options.as_ptr());
            let log = Self::read(program, f.log_size, f.log).unwrap_or_default();
            let code = (status == 0).then(|| match target.is_virtual {
                true => Self::read(program, f.ptx_size, f.ptx),
                false => Self::read(program, f.cubin_size, f.cubin),
            });
            (f.destroy)(&raw mut program);
            let log = String::from_utf8_lossy(&log).trim_matches(['\0', '\n', ' ']).to_string();
            (code.flatten().filter(|code| !code.is_empty()), log)
        }
    }

    /// Reads a result of a program: its size, then its bytes.
    ///
    /// # Safety
    ///
    /// `program` is one, and the functions are a pair that belongs together.
    unsafe fn read(
        program: *mut std::ffi::c_void,
        size: unsafe extern "C" fn(*mut std::ffi::c_void, *mut usize) -> c_int,
        get: unsafe extern "C" fn(*mut std::ffi::c_void, *mut c_char) -> c_int,
    ) -> Option<Vec<u8>> {
        let mut len = 0;
        // SAFETY: the caller's promise; the buffer is as large as the first call says.
        unsafe {
            if size(program, &raw mut len) != 0 {
                return None;
            }
            let mut bytes = vec![0_u8; len];
            (get(program, bytes.as_mut_ptr().cast()) == 0).then_some(bytes)
        }
    }
}

/// Returns whether bytes begin like a cubin or are PTX. A full disk leaves empty files.
fn is_code(bytes: &[u8]) -> bool {
    bytes.starts_with(b"\x7fELF") || bytes.windows(8).any(|window| window == b".version")
}
