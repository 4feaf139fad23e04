//! Limits of the container that this process runs in, from control groups of Linux, versions 1 and 2.

use std::path::{Path, PathBuf};

use super::System;

/// The least number that version 1 writes for "no limit": it writes the largest number of whole pages.
const UNLIMITED: u64 = 1 << 62;

/// The limits of a container; `None` for no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ContainerLimits {
    /// Bytes of memory.
    pub memory_bytes: Option<u64>,
    /// Cores, which may be a fraction.
    pub cores: Option<f64>,
    /// Processes and threads.
    pub num_threads: Option<u64>,
}

impl ContainerLimits {
    /// Returns the tighter of both, limit by limit.
    fn and(self, other: Self) -> Self {
        let tighter = |a: Option<u64>, b: Option<u64>| a.into_iter().chain(b).min();
        let cores = self.cores.into_iter().chain(other.cores);
        Self {
            memory_bytes: tighter(self.memory_bytes, other.memory_bytes),
            cores: cores.reduce(f64::min),
            num_threads: tighter(self.num_threads, other.num_threads),
        }
    }
}

impl System {
    /// Returns the limits of this process's control groups and of their parents.
    #[must_use]
    pub fn container_limits(&self) -> ContainerLimits {
        let groups = self.text("proc/self/cgroup").unwrap_or_default();
        let mut limits = ContainerLimits::default();
        // A line is "number:controllers:path"; version 2 has number 0 and no controllers.
        for line in groups.lines() {
            let mut parts = line.splitn(3, ':').skip(1);
            let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
            let path = Path::new(path.trim_start_matches('/'));
            if controllers.is_empty() {
                limits = limits.and(self.along(Path::new("sys/fs/cgroup"), path, Self::read_version_2));
                // This is the mount point if both versions are in use.
                limits = limits.and(self.along(Path::new("sys/fs/cgroup/unified"), path, Self::read_version_2));
            }
            for controller in controllers.split(',').filter(|name| ["memory", "cpu", "pids"].contains(name)) {
                limits =
                    limits.and(self.along(&Path::new("sys/fs/cgroup").join(controller), path, Self::read_version_1));
            }
        }
        limits
    }

    /// Returns the tightest limits of a group and its parents. In a container the path may be one of the host, which
    /// does not exist inside; only folders that exist count.
    fn along(&self, mount: &Path, path: &Path, read: fn(&Self, &Path) -> ContainerLimits) -> ContainerLimits {
        let groups = path.ancestors().map(|group| mount.join(group));
        groups.fold(ContainerLimits::default(), |limits, group| limits.and(read(self, &group)))
    }

    fn number(&self, file: PathBuf) -> Option<u64> {
        self.text(file)?.parse::<u64>().ok().filter(|&number| number < UNLIMITED)
    }

    /// Reads a group of version 2; "max" means no limit.
    fn read_version_2(&self, group: &Path) -> ContainerLimits {
        let cores = || {
            let text = self.text(group.join("cpu.max"))?;
            let (quota, period) = text.split_once(' ')?;
            Some(quota.parse::<f64>().ok()? / period.parse::<f64>().ok().filter(|period| *period > 0.0)?)
        };
        ContainerLimits {
            memory_bytes: self.number(group.join("memory.max")),
            cores: cores(),
            num_threads: self.number(group.join("pids.max")),
        }
    }

    /// Reads a group of version 1; a quota of -1 means no limit.
    fn read_version_1(&self, group: &Path) -> ContainerLimits {
        let cores = || {
            let quota = self.number(group.join("cpu.cfs_quota_us"))? as f64;
            let period = self.number(group.join("cpu.cfs_period_us")).filter(|period| *period > 0)? as f64;
            Some(quota / period)
        };
        ContainerLimits {
            memory_bytes: self.number(group.join("memory.limit_in_bytes")),
            cores: cores(),
            num_threads: self.number(group.join("pids.max")),
        }
    }
}
