//! Limits of the container that this process runs in: control groups of Linux, of both versions.

use std::path::{Path, PathBuf};

use super::System;

/// Version 1 says "no limit" by the largest number of whole pages.
const UNLIMITED: u64 = 1 << 62;

/// The limits of a container; none where there is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ContainerLimits {
    /// Bytes of memory.
    pub memory_bytes: Option<u64>,
    /// Cores, also parts of one.
    pub cores: Option<f64>,
    /// Processes and threads.
    pub num_threads: Option<u64>,
}

impl ContainerLimits {
    /// The tighter of both, limit by limit.
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
    /// The limits of this process's control groups and of those around them.
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
                limits = limits.and(self.along(Path::new("sys/fs/cgroup"), path, Self::of_version_2));
                // Where both versions are in use.
                limits = limits.and(self.along(Path::new("sys/fs/cgroup/unified"), path, Self::of_version_2));
            }
            for controller in controllers.split(',').filter(|name| ["memory", "cpu", "pids"].contains(name)) {
                limits = limits.and(self.along(&Path::new("sys/fs/cgroup").join(controller), path, Self::of_version_1));
            }
        }
        limits
    }

    /// The tightest limits of a group and of those around it. In a container the path may be that outside of it, of
    /// which there is nothing to see inside: what is there counts.
    fn along(&self, mount: &Path, path: &Path, read: fn(&Self, &Path) -> ContainerLimits) -> ContainerLimits {
        let groups = path.ancestors().map(|group| mount.join(group));
        groups.fold(ContainerLimits::default(), |limits, group| limits.and(read(self, &group)))
    }

    fn number(&self, file: PathBuf) -> Option<u64> {
        self.text(file)?.parse::<u64>().ok().filter(|&number| number < UNLIMITED)
    }

    /// "max" in place of a number is no limit.
    fn of_version_2(&self, group: &Path) -> ContainerLimits {
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

    /// A quota of -1 is no limit.
    fn of_version_1(&self, group: &Path) -> ContainerLimits {
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
