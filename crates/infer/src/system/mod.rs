//! The machine that this process runs on: CPUs, memory, limits of a container, disks. Read from the files under
//! `/proc` and `/sys` of Linux; elsewhere most of it is not known.

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

/// The files of the system.
#[derive(Clone, Debug)]
pub struct System {
    root: PathBuf,
}

impl Default for System {
    fn default() -> Self {
        Self::at(Path::new("/"))
    }
}

impl System {
    /// The system whose `proc` and `sys` are in the folder `root`.
    #[must_use]
    pub fn at(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    /// The text of a file, such as `proc/meminfo`, without space around it; none where it cannot be read.
    fn text(&self, name: impl AsRef<Path>) -> Option<String> {
        fs::read_to_string(self.root.join(name)).ok().map(|text| text.trim().to_owned())
    }

    /// Memory that this process may use in all: that of the machine, or of its container where that is less.
    #[must_use]
    pub fn usable_memory_bytes(&self) -> Option<u64> {
        let total = self.memory()?.total_bytes;
        Some(self.container_limits().memory_bytes.map_or(total, |limit| limit.min(total)))
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
