//! Files mapped read-only into memory.

use std::fs::{self, File};
use std::io;
use std::path::Path;

use memmap2::Mmap;

/// A file mapped read-only. `AsRef<[u8]>` gives its bytes, so that `Tensor::from_foreign` can lend them.
///
/// If another process shortens the file while it is mapped, reading past the new end kills the program with SIGBUS.
/// Files of this project are therefore replaced by renaming, never rewritten in place.
pub struct MappedFile {
    map: Option<Mmap>,
}

impl MappedFile {
    /// Maps the whole of the regular file at `path`. Fails as opening does, and for anything that is no regular file.
    pub fn open(path: &Path) -> io::Result<Self> {
        // Checked before opening, because opening a pipe waits for its other end.
        if !fs::metadata(path)?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        let file = File::open(path)?;
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        if metadata.len() == 0 {
            return Ok(Self { map: None });
        }
        // SAFETY: the mapping is read-only, and the files mapped are written once and replaced by renaming; one that
        // is changed behind our back gives other bytes or a signal, both of which the documentation above states.
        let map = unsafe { Mmap::map(&file)? };
        Ok(Self { map: Some(map) })
    }
}

impl AsRef<[u8]> for MappedFile {
    fn as_ref(&self) -> &[u8] {
        self.map.as_deref().unwrap_or(&[])
    }
}
