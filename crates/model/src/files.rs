//! Atomic writing of files: a reader finds the old file or the whole new one.
//!
//! Paths under temporary names are registered while they are written, so that [`remove_unfinished`] can delete them
//! when the program is told to end.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Files and folders that this process is writing under temporary names.
static UNFINISHED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// An error about a file or folder that cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("{}: {source}", path.display())]
pub struct FileError {
    /// The file or folder.
    pub path: PathBuf,
    /// The system's error.
    #[source]
    pub source: io::Error,
}

impl FileError {
    /// Makes the error about `path` from the system's.
    pub fn at(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self { path, source }
    }
}

/// A guard of a file or folder under a temporary name: it is registered until the guard is dropped.
#[derive(Debug)]
pub struct Unfinished {
    path: PathBuf,
}

impl Unfinished {
    /// Registers `path`. Must be called before the file or folder is made.
    #[must_use]
    pub fn note(path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        unfinished().insert(path.clone());
        Self { path }
    }

    /// Returns the path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        unfinished().remove(&self.path);
    }
}

fn unfinished() -> MutexGuard<'static, BTreeSet<PathBuf>> {
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Removes everything that is being written, for a program that is about to end. Other threads that would begin or
/// complete a file block from then on.
pub fn remove_unfinished() {
    let list = unfinished();
    for path in list.iter() {
        // Anything that cannot be removed has a temporary name.
        let _ = remove(path);
    }
    std::mem::forget(list);
}

/// Removes a file, or a folder with its content. A missing one is no error.
fn remove(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(path),
        _ => fs::remove_file(path),
    }
}

/// Writes `path` by way of `path.tmp`: `write` fills the file, which is then synced and renamed. On failure nothing
/// is left behind, and a previous file is unchanged.
pub(crate) fn write_through(path: &Path, write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) -> io::Result<()> {
    let mut name = path.as_os_str().to_owned();
    name.push(".tmp");
    let tmp = Unfinished::note(name);
    let filled = fill(tmp.path(), write).and_then(|()| fs::rename(tmp.path(), path));
    if filled.is_err() {
        let _ = fs::remove_file(tmp.path());
    }
    filled
}

fn fill(tmp: &Path, write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) -> io::Result<()> {
    let mut file = BufWriter::with_capacity(1 << 20, File::create(tmp)?);
    write(&mut file)?;
    file.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()
}

/// Writes `path` with these bytes, synced; on failure a previous file is unchanged.
///
/// # Errors
/// If the file cannot be written, synced or renamed.
pub fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    write_through(path, |file| file.write_all(bytes))
}

#[cfg(test)]
#[path = "files_tests.rs"]
mod tests;
