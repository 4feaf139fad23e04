//! The machine that this process runs on: CPUs, memory, container limits and disks. They are read from the files in
//! `/proc` and `/sys` of Linux; on other systems most of it is unknown.

mod cgroup;
mod cpu;
mod disk;
mod memory;

use std::fs;
use std::path::{Path, PathBuf};

pub use cgroup::ContainerLimits;
pub use cpu::Processors;
pub use disk::{Disk, limits};
pub use memory::{HugePages, Memory};

/// The root of the system's files.
#[derive(Clone, Debug)]
pub struct System {
    root: PathBuf,
}

impl Default for System {
    fn default() -> Self {
        Self::from_root(Path::new("/"))
    }
}

impl System {
    /// Makes a system whose `proc` and `sys` are in the folder `root`.
    #[must_use]
    pub fn from_root(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    /// Reads a file, such as `proc/meminfo`, and trims it; `None` if it cannot be read.
    fn text(&self, name: impl AsRef<Path>) -> Option<String> {
        fs::read_to_string(self.root.join(name)).ok().map(|text| text.trim().to_owned())
    }

    /// Returns the memory that this process may use: that of the machine, or the container's limit if that is less.
    #[must_use]
    pub fn usable_memory_bytes(&self) -> Option<u64> {
        let total = self.memory()?.total_bytes;
        Some(self.container_limits().memory_bytes.map_or(total, |limit| limit.min(total)))
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
