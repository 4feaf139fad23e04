//! Memory of the machine.

use super::System;

/// The memory of a machine, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// All memory.
    pub total_bytes: u64,
    /// Memory that programs can get without swapping.
    pub available_bytes: u64,
    /// Swap on disk.
    pub swap_bytes: u64,
}

/// The programs that get transparent huge pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HugePages {
    /// Every program.
    Always,
    /// Programs that ask with `madvise`.
    Madvise,
    /// No program.
    Never,
}

impl System {
    /// Reads the memory from `/proc/meminfo`.
    #[must_use]
    pub fn memory(&self) -> Option<Memory> {
        let text = self.text("proc/meminfo")?;
        let bytes = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
        };
        let total_bytes = bytes("MemTotal")?;
        // Kernels before 3.14 have no MemAvailable.
        let available_bytes = bytes("MemAvailable").or_else(|| bytes("MemFree")).unwrap_or(0);
        Some(Memory { total_bytes, available_bytes, swap_bytes: bytes("SwapTotal").unwrap_or(0) })
    }

    /// Returns the mode of transparent huge pages, if the system has them.
    #[must_use]
    pub fn huge_pages(&self) -> Option<HugePages> {
        let text = self.text("sys/kernel/mm/transparent_hugepage/enabled")?;
        // In "always [madvise] never" the brackets mark the mode.
        let chosen = text.split_once('[')?.1.split_once(']')?.0;
        match chosen {
            "always" => Some(HugePages::Always),
            "madvise" => Some(HugePages::Madvise),
            "never" => Some(HugePages::Never),
            _ => None,
        }
    }
}
