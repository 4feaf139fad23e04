//! A memory pool that keeps freed blocks by size.
//!
//! A training step asks for the same sizes every time, so that after the first step nothing is allocated from the
//! system. Large blocks are anonymous mappings advised to use 2 MiB pages: their first touch costs a fraction of that
//! of 4 KiB pages, and reading them causes fewer TLB misses.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytemuck::{Pod, Zeroable};
use memmap2::MmapMut;

/// The size from which blocks are mappings of their own, in bytes; smaller ones come from the allocator.
const MAPPING_MIN_BYTES: usize = 1 << 20;

/// The unit of small blocks: a cache line, so that vector loads never straddle two.
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
            // The advice may fail; without huge pages the mapping works as well.
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

/// The statistics of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// The bytes of blocks in use.
    pub used_bytes: usize,
    /// The largest `used_bytes` so far, or since [`MemoryPool::restart`].
    pub peak_bytes: usize,
    /// The bytes obtained from the system and not returned: in use and kept.
    pub held_bytes: usize,
    /// The number of blocks obtained from the system so far. Constant in steady-state training.
    pub system_allocations: u64,
}

#[derive(Default)]
struct Inner {
    free: BTreeMap<usize, Vec<Block>>,
    stats: PoolStats,
}

/// A shared pool of memory blocks. Clones are handles to the same pool.
#[derive(Clone, Default)]
pub struct MemoryPool {
    inner: Arc<Mutex<Inner>>,
}

impl MemoryPool {
    /// Returns an empty pool.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the pool's statistics.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        self.lock().stats
    }

    /// Returns kept blocks to the system. Blocks in use are not touched.
    pub fn trim(&self) {
        let mut inner = self.lock();
        let freed: usize = inner.free.iter().map(|(bytes, blocks)| bytes * blocks.len()).sum();
        inner.free.clear();
        inner.stats.held_bytes -= freed;
    }

    /// Returns kept blocks to the system, and restarts the peak from the bytes in use, after a start that took more.
    pub fn restart(&self) {
        self.trim();
        let mut inner = self.lock();
        inner.stats.peak_bytes = inner.stats.used_bytes;
    }

    /// Returns a block of at least `bytes` bytes, and true if it is fresh. A fresh block is zero; a recycled one has
    /// its last contents.
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

    // A thread that panicked while it held the lock has left only counters, which stay usable.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Rounds up to a size class, so that at most an eighth is wasted and similar sizes share blocks.
fn size_class(bytes: usize) -> usize {
    let bytes = bytes.max(64);
    let step = (bytes.next_power_of_two() / 16).max(64);
    bytes.next_multiple_of(step)
}

/// A block that returns to its pool when dropped.
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
