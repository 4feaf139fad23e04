//! A memory pool that keeps freed blocks by size.
//!
//! A training step asks for the same sizes every time, so after the first step nothing is asked of the system. Large
//! blocks are anonymous mappings advised to use 2 MiB pages: a first touch then costs a fraction of what 4 KiB pages
//! cost, and reading them misses the TLB less.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytemuck::{Pod, Zeroable};
use memmap2::MmapMut;

/// Blocks of at least this many bytes are mappings of their own; smaller ones come from the allocator.
const MAPPING_MIN_BYTES: usize = 1 << 20;

/// The unit of small blocks: one cache line, so that vector loads never straddle two.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

enum Block {
    Lines(Vec<Line>),
    Mapping(MmapMut),
}

impl Block {
    fn zeroed(bytes: usize) -> Self {
        if bytes >= MAPPING_MIN_BYTES
            && let Ok(mapping) = MmapMut::map_anon(bytes)
        {
            // Advice only: where huge pages are not available the mapping works all the same.
            #[cfg(target_os = "linux")]
            let _ = mapping.advise(memmap2::Advice::HugePage);
            return Self::Mapping(mapping);
        }
        Self::Lines(vec![Line([0; 64]); bytes.div_ceil(64)])
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Self::Lines(lines) => bytemuck::cast_slice(lines),
            Self::Mapping(mapping) => mapping,
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Lines(lines) => bytemuck::cast_slice_mut(lines),
            Self::Mapping(mapping) => mapping,
        }
    }
}

/// What a pool holds and has asked of the system so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Bytes in blocks that are in use now.
    pub used_bytes: usize,
    /// The largest `used_bytes` there has been, or has been since [`MemoryPool::restart`].
    pub peak_bytes: usize,
    /// Bytes obtained from the system and not given back: in use and kept.
    pub held_bytes: usize,
    /// Blocks obtained from the system since the pool was made. Constant in steady-state training.
    pub system_allocations: u64,
}

#[derive(Default)]
struct Inner {
    free: BTreeMap<usize, Vec<Block>>,
    stats: PoolStats,
}

/// A shared pool of memory blocks. Cloning gives another handle to the same pool.
#[derive(Clone, Default)]
pub struct MemoryPool {
    inner: Arc<Mutex<Inner>>,
}

impl MemoryPool {
    /// An empty pool.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// What the pool holds now.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        self.lock().stats
    }

    /// Gives kept blocks back to the system. Blocks in use are not touched.
    pub fn trim(&self) {
        let mut inner = self.lock();
        let freed: usize = inner.free.iter().map(|(bytes, blocks)| bytes * blocks.len()).sum();
        inner.free.clear();
        inner.stats.held_bytes -= freed;
    }

    /// Gives kept blocks back, and counts the peak from what is in use now: for what comes after a beginning that took more.
    pub fn restart(&self) {
        self.trim();
        let mut inner = self.lock();
        inner.stats.peak_bytes = inner.stats.used_bytes;
    }

    /// A block of at least `bytes` bytes. A fresh block is zero; a recycled one holds what its last owner left.
    pub(crate) fn take(&self, bytes: usize) -> (PooledBytes, bool) {
        let class = size_class(bytes);
        let mut inner = self.lock();
        let kept = inner.free.get_mut(&class).and_then(Vec::pop);
        inner.stats.used_bytes += class;
        inner.stats.peak_bytes = inner.stats.peak_bytes.max(inner.stats.used_bytes);
        let is_fresh = kept.is_none();
        if is_fresh {
            inner.stats.held_bytes += class;
            inner.stats.system_allocations += 1;
        }
        drop(inner);
        let block = kept.unwrap_or_else(|| Block::zeroed(class));
        (PooledBytes { block: Some(block), class, pool: self.clone() }, is_fresh)
    }

    // A thread that panicked while holding the lock left only counters behind: they stay usable.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Rounds up so that at most an eighth is wasted and near sizes share blocks.
fn size_class(bytes: usize) -> usize {
    let bytes = bytes.max(64);
    let step = (bytes.next_power_of_two() / 16).max(64);
    bytes.next_multiple_of(step)
}

/// A block that goes back to its pool when dropped.
pub(crate) struct PooledBytes {
    block: Option<Block>,
    class: usize,
    pool: MemoryPool,
}

impl PooledBytes {
    pub(crate) fn bytes(&self) -> &[u8] {
        self.block.as_ref().map_or(&[], Block::bytes)
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        self.block.as_mut().map_or(&mut [], Block::bytes_mut)
    }
}

impl Drop for PooledBytes {
    fn drop(&mut self) {
        if let Some(block) = self.block.take() {
            let mut inner = self.pool.lock();
            inner.stats.used_bytes -= self.class;
            inner.free.entry(self.class).or_default().push(block);
        }
    }
}

#[cfg(test)]
#[path = "pool_tests.rs"]
mod tests;
