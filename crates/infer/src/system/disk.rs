//! Disks and what a process may open.

use std::io;
use std::path::{Path, PathBuf};

use super::System;

/// The file system around a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// Bytes that this user can still write.
    pub free_bytes: u64,
    /// Bytes in all.
    pub total_bytes: u64,
    /// Its kind, such as ext4, overlay or nfs, where the system says.
    pub kind: Option<String>,
}

/// The nearest folder around `path` that is there.
fn existing(path: &Path) -> io::Result<PathBuf> {
    let path = std::path::absolute(path)?;
    let found = path.ancestors().find(|folder| folder.exists());
    found.unwrap_or(Path::new("/")).canonicalize()
}

impl System {
    /// The file system that `path` is on, or would be.
    ///
    /// # Errors
    /// If the system does not say.
    #[cfg(unix)]
    pub fn disk(&self, path: &Path) -> io::Result<Disk> {
        let path = existing(path)?;
        let stat = rustix::fs::statvfs(&path)?;
        let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
        Ok(Disk { free_bytes: bytes(stat.f_bavail), total_bytes: bytes(stat.f_blocks), kind: self.mount_kind(&path) })
    }

    /// Not known here.
    ///
    /// # Errors
    /// Always.
    #[cfg(not(unix))]
    pub fn disk(&self, path: &Path) -> io::Result<Disk> {
        existing(path)?;
        Err(io::ErrorKind::Unsupported.into())
    }

    /// The kind of the file system that is mounted nearest above `path`, as `/proc/self/mountinfo` has it.
    pub(super) fn mount_kind(&self, path: &Path) -> Option<String> {
        let text = self.text("proc/self/mountinfo")?;
        // "36 35 98:0 /root /mount/point options [more] - kind source options"
        let mount = |line: &str| {
            let (before, after) = line.split_once(" - ")?;
            let point = PathBuf::from(unescaped(before.split(' ').nth(4)?));
            path.starts_with(&point).then(|| (point.components().count(), after.split(' ').next().map(str::to_owned)))
        };
        // Of several at one point the last hides the others.
        text.lines().filter_map(mount).max_by_key(|(depth, _)| *depth)?.1
    }
}

/// Spaces, tabs, line ends and backslashes are three octal digits there.
fn unescaped(text: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .iter()
        .fold(text.to_owned(), |text, (code, plain)| text.replace(code, plain))
}

/// The files that this process may have open, and the processes and threads of this user; none for no limit, or where
/// it is not known.
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
