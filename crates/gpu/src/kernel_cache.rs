//! The cache of compiled kernels on disk, each named by a hash of everything that it depends on.

use std::path::{Path, PathBuf};
use std::{fs, process};

use crate::GpuError;

/// Returns the path of a file that `parts` determine, by 128 bits of FNV-1a, which are the same in every build of the
/// program.
pub(crate) fn path(folder: &Path, name: &str, parts: &[&str], ending: &str) -> PathBuf {
    const BASIS: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    // A length before each part, so that no two lists of parts are the same bytes.
    let bytes = parts.iter().flat_map(|part| part.len().to_le_bytes().into_iter().chain(part.bytes()));
    let hash = bytes.fold(BASIS, |hash, byte| (hash ^ u128::from(byte)).wrapping_mul(PRIME));
    folder.join(format!("{name}-{hash:032x}.{ending}"))
}

/// Writes a file in one step: readers find all of it or none. `write` fills the path that it is given.
pub(crate) fn write_whole(path: &Path, write: impl FnOnce(&Path) -> Result<(), GpuError>) -> Result<(), GpuError> {
    let failed = |error: std::io::Error| GpuError::Cache { path: path.into(), reason: error.to_string() };
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder).map_err(failed)?;
    let id = format!("{}-{:?}", process::id(), std::thread::current().id());
    let beside = path.with_extension(format!("{}.partial", id.replace(['(', ')'], "-")));
    let result = write(&beside).and_then(|()| fs::rename(&beside, path).map_err(failed));
    if result.is_err() {
        // A partial file is of no use, and there may be none.
        let _ = fs::remove_file(&beside);
    }
    result
}

#[cfg(test)]
#[path = "kernel_cache_tests.rs"]
mod tests;
