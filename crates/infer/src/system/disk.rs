//! Disks, and limits on open files and processes.

use std::io;
use std::path::{Path, PathBuf};

use super::System;

/// The file system around a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// Bytes that this user can still write.
    pub free_bytes: u64,
    /// The size in bytes.
    pub total_bytes: u64,
    /// The type, such as ext4, overlay or nfs, if the system tells.
    pub kind: Option<String>,
}

/// Returns the nearest existing parent of `path`, or `path` itself.
fn existing(path: &Path) -> io::Result<PathBuf> {
    let path = std::path::absolute(path)?;
    let found = path.ancestors().find(|folder| folder.exists());
    found.unwrap_or(Path::new("/")).canonicalize()
}

impl System {
    /// Returns the file system that `path` is or would be on.
    ///
    /// # Errors
    /// Fails if the system does not tell.
    #[cfg(unix)]
    pub fn disk(&self, path: &Path) -> io::Result<Disk> {
        let path = existing(path)?;
        let stat = rustix::fs::statvfs(&path)?;
        let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
        Ok(Disk { free_bytes: bytes(stat.f_bavail), total_bytes: bytes(stat.f_blocks), kind: self.mount_kind(&path) })
    }

    /// Unknown on this system.
    ///
    /// # Errors
    /// Always fails.
    #[cfg(not(unix))]
    pub fn disk(&self, path: &Path) -> io::Result<Disk> {
        existing(path)?;
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Returns the type of the file system mounted nearest above `path`, from `/proc/self/mountinfo`.
    pub(super) fn mount_kind(&self, path: &Path) -> Option<String> {
        let text = self.text("proc/self/mountinfo")?;
        // A line is "36 35 98:0 /root /mount/point options [more] - type source options".
        let mount = |line: &str| {
            let (before, after) = line.split_once(" - ")?;
            let point = PathBuf::from(unescaped(before.split(' ').nth(4)?));
            path.starts_with(&point).then(|| (point.components().count(), after.split(' ').next().map(str::to_owned)))
        };
        // Of several mounts at one point the last hides the others.
        text.lines().filter_map(mount).max_by_key(|(depth, _)| *depth)?.1
    }
}

/// Decodes spaces, tabs, line ends and backslashes, which are written there as three octal digits.
fn unescaped(text: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .iter()
        .fold(text.to_owned(), |text, (code, plain)| text.replace(code, plain))
}

/// Returns the number of files that this process may have open, and of processes and threads of this user; `None` for
/// no limit, or if unknown.
#[must_use]
pub fn limits() -> [Option<u64>; 2] {
    #[cfg(unix)]
    {
        use rustix::process::{Resource, getrlimit};
        [Resource::Nofile, Resource::Nproc].map(|resource| getrlimit(resource).current)
    }
    #[cfg(not(unix))]
    [None; 2]
}
