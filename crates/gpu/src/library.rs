//! Libraries that are found at run time: their possible places, and tables of the functions that are used.

use std::ffi::{c_char, c_int, c_void};
use std::fs;
use std::path::{Path, PathBuf};

use libloading::Library;

use crate::GpuOptions;

/// Names that the system's loader may know, the newest first.
const NAMES: [&str; 4] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so", "/usr/local/cuda/lib64/libnvrtc.so"];

type Status = c_int;
type Program = *mut c_void;

/// Declares a table of a library's functions and the constructor that fills it.
macro_rules! functions {
    ($(#[$docs:meta])* $table:ident: $($field:ident = $name:literal: fn($($arg:ty),*) -> $result:ty;)*) => {
        $(#[$docs])*
        pub(crate) struct $table {
            $(pub(crate) $field: unsafe extern "C" fn($($arg),*) -> $result,)*
        }

        impl $table {
            pub(crate) fn new(library: &'static libloading::Library) -> Result<Self, libloading::Error> {
                // SAFETY: the types are those of the library's header, the same in every version from 11.3 on; the
                // library is never unloaded.
                unsafe { Ok(Self { $($field: *library.get(concat!($name, "\0").as_bytes())?,)* }) }
            }
        }
    };
}
pub(crate) use functions;

functions! {
    /// The functions, as `nvrtc.h` declares them.
    Functions:
    version = "nvrtcVersion": fn(*mut c_int, *mut c_int) -> Status;
    num_archs = "nvrtcGetNumSupportedArchs": fn(*mut c_int) -> Status;
    archs = "nvrtcGetSupportedArchs": fn(*mut c_int) -> Status;
    create = "nvrtcCreateProgram": fn(*mut Program, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char) -> Status;
    compile = "nvrtcCompileProgram": fn(Program, c_int, *const *const c_char) -> Status;
    log_size = "nvrtcGetProgramLogSize": fn(Program, *mut usize) -> Status;
    log = "nvrtcGetProgramLog": fn(Program, *mut c_char) -> Status;
    cubin_size = "nvrtcGetCUBINSize": fn(Program, *mut usize) -> Status;
    cubin = "nvrtcGetCUBIN": fn(Program, *mut c_char) -> Status;
    ptx_size = "nvrtcGetPTXSize": fn(Program, *mut usize) -> Status;
    ptx = "nvrtcGetPTX": fn(Program, *mut c_char) -> Status;
    destroy = "nvrtcDestroyProgram": fn(*mut Program) -> Status;
}

impl Functions {
    /// The libraries to try in order: the one that the environment names, or those that the system may find.
    pub(crate) fn candidates(options: &GpuOptions) -> Vec<PathBuf> {
        match &options.nvrtc_library {
            Some(path) => vec![path.clone()],
            None => NAMES.iter().map(PathBuf::from).collect(),
        }
    }

    /// Opens the library at `path`; the error is the loader's message.
    pub(crate) fn open(path: &Path) -> Result<Self, String> {
        // The compiler loads its built-in functions by name alone; those beside it are found only if they are loaded
        // already.
        for beside in path.parent().into_iter().flat_map(fs::read_dir).flatten().flatten() {
            if beside.file_name().to_string_lossy().starts_with("libnvrtc-builtins.so") {
                // One that does not load is no loss: the compiler says so when it needs it.
                _ = load(&beside.path());
            }
        }
        Self::new(load(path)?).map_err(reason)
    }
}

/// Loads the library at `path`; the error is the loader's message.
pub(crate) fn load(path: &Path) -> Result<&'static Library, String> {
    // SAFETY: the initialisers of NVIDIA's libraries have no preconditions.
    let library = unsafe { Library::new(path) }.map_err(reason)?;
    // The library stays loaded until the process ends, as its functions are used until then.
    Ok(Box::leak(Box::new(library)))
}

/// Returns the loader's message, which is in the error's source.
pub(crate) fn reason(error: libloading::Error) -> String {
    std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string)
}
