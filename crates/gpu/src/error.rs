//! The error type of GPUs.

use std::path::PathBuf;

/// The reason why there is no GPU, or why it stopped. Each says in one line what is missing or went wrong.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum GpuError {
    /// `libcuda` cannot be loaded.
    #[error("no NVIDIA driver (libcuda.so.1) was found: install the driver of the GPU")]
    NoDriver,
    /// The driver sees too few devices.
    #[error("GPU {index} is out of range: the driver sees {count}")]
    NoDevice {
        /// The index asked for.
        index: usize,
        /// Devices there are.
        count: usize,
    },
    /// A device that the kernels were not written for.
    #[error("{name} has compute capability {}.{}: must be at least 8.0", capability / 10, capability % 10)]
    TooOld {
        /// The device's name.
        name: String,
        /// Ten times the major version and the minor one.
        capability: u32,
    },
    /// A driver without what graphs and tensor copies ask for.
    #[error("the GPU's driver knows CUDA {}.{}: must be at least 12.0, so install a newer driver", version / 1000, version % 1000 / 10)]
    OldDriver {
        /// 1000 times the major version and 10 times the minor one.
        version: i32,
    },
    /// NVRTC cannot be loaded, or what there is makes code that the driver does not take.
    #[error(
        "NVRTC, which compiles the kernels, was not found ({}): `pip install nvidia-cuda-nvrtc` (`nvidia-cuda-nvrtc-cu12` for a driver of CUDA 12) and set {} to its libnvrtc.so.13 (libnvrtc.so.12), or install the CUDA toolkit",
        tried.join("; "),
        crate::NVRTC_VARIABLE
    )]
    NoCompiler {
        /// The loader's message for each place looked at.
        tried: Vec<String>,
    },
    /// A kernel source does not compile for a device.
    #[error("the kernels of {source_name}.cu do not compile for {target}: {log}")]
    Compile {
        /// The source.
        source_name: String,
        /// The target of the compilation.
        target: String,
        /// The compiler's messages.
        log: String,
    },
    /// A call of the driver failed.
    #[error("{call} failed on the GPU: {message}")]
    Driver {
        /// The call.
        call: String,
        /// The driver's message.
        message: String,
    },
    /// The emulation cannot be made.
    #[error("the kernels cannot be compiled for the host: {reason}")]
    NoEmulation {
        /// The reason.
        reason: String,
    },
    /// A folder of compiled kernels cannot be written.
    #[error("{}: {reason}", path.display())]
    Cache {
        /// The file or folder.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
}
