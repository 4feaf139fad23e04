//! The options of GPUs, which a program reads once and passes to what opens them.

use std::env::temp_dir;
use std::ffi::OsString;
use std::path::PathBuf;

/// The variable with the path of an NVRTC library to use in place of the system's.
pub const NVRTC_VARIABLE: &str = "MOEWORKS_NVRTC_LIBRARY";

/// The variable with the path of a cuBLASLt library to use in place of the system's; empty to use none.
pub const CUBLASLT_VARIABLE: &str = "MOEWORKS_CUBLASLT_LIBRARY";

/// The variable with a folder for compiled kernels, in place of the user's cache folder.
pub const KERNEL_CACHE_VARIABLE: &str = "MOEWORKS_KERNEL_CACHE";

/// The variable that turns tensor copies off: see [`GpuOptions::without_tensor_copies`].
pub const NO_TENSOR_COPIES_VARIABLE: &str = "MOEWORKS_NO_TENSOR_COPIES";

/// The variable that turns pacing off: see [`GpuOptions::without_pace`].
pub const NO_PACE_VARIABLE: &str = "MOEWORKS_NO_PACE";

/// Options of GPUs: the places of libraries and compiled kernels, and parts that may be left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuOptions {
    /// The NVRTC library; none for the system's.
    pub nvrtc_library: Option<PathBuf>,
    /// The cuBLASLt library; none for one beside the named NVRTC or the system's, an empty path for no library.
    pub cublaslt_library: Option<PathBuf>,
    /// The folder of compiled kernels; none for one among temporary files.
    pub kernel_folder: Option<PathBuf>,
    /// Leaves out tensor copies (TMA): weights are copied 16 bytes a thread, like rows of activations. For
    /// comparisons, and for drivers that have trouble with them.
    pub without_tensor_copies: bool,
    /// Lets the blocks of Hopper's products drift apart. For comparisons.
    pub without_pace: bool,
}

impl GpuOptions {
    /// Makes the options that environment variables name. `value` returns the value of a variable.
    pub fn from_variables(value: impl Fn(&str) -> Option<OsString>) -> Self {
        let path = |name: &str| value(name).map(PathBuf::from);
        let cache = || path("XDG_CACHE_HOME").or_else(|| Some(path("HOME")?.join(".cache")));
        Self {
            nvrtc_library: path(NVRTC_VARIABLE),
            cublaslt_library: path(CUBLASLT_VARIABLE),
            kernel_folder: path(KERNEL_CACHE_VARIABLE).or_else(|| Some(cache()?.join("moeworks/kernels"))),
            without_tensor_copies: value(NO_TENSOR_COPIES_VARIABLE).is_some(),
            without_pace: value(NO_PACE_VARIABLE).is_some(),
        }
    }

    /// Returns the folder of compiled kernels.
    pub(crate) fn kernel_folder(&self) -> PathBuf {
        self.kernel_folder.clone().unwrap_or_else(|| temp_dir().join("moeworks/kernels"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(set: &[(&str, &str)]) -> GpuOptions {
        GpuOptions::from_variables(|name| {
            set.iter().find(|(known, _)| *known == name).map(|(_, value)| OsString::from(value))
        })
    }

    #[test]
    fn without_variables_nothing_is_named_or_left_out() {
        assert_eq!(options(&[]), GpuOptions::default());
        assert_eq!(GpuOptions::default().kernel_folder(), temp_dir().join("moeworks/kernels"));
    }

    #[test]
    fn compiled_kernels_are_in_the_named_folder_or_the_users_cache() {
        let home = ("HOME", "/home/a");
        assert_eq!(options(&[home]).kernel_folder(), PathBuf::from("/home/a/.cache/moeworks/kernels"));
        let cache = ("XDG_CACHE_HOME", "/cache");
        assert_eq!(options(&[home, cache]).kernel_folder(), PathBuf::from("/cache/moeworks/kernels"));
        assert_eq!(options(&[home, cache, (KERNEL_CACHE_VARIABLE, "k")]).kernel_folder(), PathBuf::from("k"));
    }

    #[test]
    fn an_empty_variable_counts_as_set() {
        let found = options(&[(CUBLASLT_VARIABLE, ""), (NO_PACE_VARIABLE, ""), (NO_TENSOR_COPIES_VARIABLE, "1")]);
        assert_eq!(found.cublaslt_library, Some(PathBuf::new()));
        assert!(found.without_pace && found.without_tensor_copies);
    }
}
