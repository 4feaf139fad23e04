//! The operations that change the disk, one by one, so that a test can stop or fail between any two.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

/// A hook called before each change with its name and path. If it returns an error the change is not made and fails.
type Hook = Box<dyn Fn(&'static str, &Path) -> io::Result<()> + Send + Sync>;

/// The operations, with an optional hook.
#[derive(Default)]
pub(super) struct Disk {
    hook: Option<Hook>,
}

impl std::fmt::Debug for Disk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Disk")
    }
}

impl Disk {
    #[cfg(test)]
    pub(super) fn with_hook(hook: impl Fn(&'static str, &Path) -> io::Result<()> + Send + Sync + 'static) -> Self {
        Self { hook: Some(Box::new(hook)) }
    }

    fn before(&self, operation: &'static str, path: &Path) -> io::Result<()> {
        self.hook.as_ref().map_or(Ok(()), |hook| hook(operation, path))
    }

    pub(super) fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.before("create_dir", path)?;
        fs::create_dir(path)
    }

    /// Writes a new file.
    pub(super) fn write(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        self.before("create", path)?;
        let mut file = File::create_new(path)?;
        self.before("write", path)?;
        file.write_all(bytes)
    }

    /// Waits until a file is on the disk.
    pub(super) fn sync(&self, path: &Path) -> io::Result<()> {
        self.before("sync", path)?;
        // Windows can sync only files that are open for writing.
        File::options().read(true).append(cfg!(windows)).open(path)?.sync_all()
    }

    /// Waits until a folder's entries are on the disk. Windows has no such thing and needs none.
    pub(super) fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.before("sync_dir", path)?;
        if cfg!(unix) { File::open(path)?.sync_all() } else { Ok(()) }
    }

    pub(super) fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.before("rename", from)?;
        fs::rename(from, to)
    }

    /// Removes a folder with its contents; links are removed as links. A missing folder is fine.
    pub(super) fn remove_tree(&self, path: &Path) -> io::Result<()> {
        if fs::symlink_metadata(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
            return Ok(());
        }
        self.before("remove", path)?;
        fs::remove_dir_all(path)
    }
}
