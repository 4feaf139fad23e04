//! A least-recently-used cache of a model's experts in a GPU's memory, while the host's memory holds all of them.
//! Experts of all layers share it, and those that the next layer will probably need can be prefetched ("Fast
//! Inference of Mixture-of-Experts Language Models with Offloading", 2312.17238).
//!
//! Cached weights must not be written to, because the cache would go on with its copies. Copies go through
//! page-locked memory (`nvidia/pinned.rs`), which the device reads by itself.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};

use moeworks_tensor::{MemoryPool, Tensor};

use crate::Gpu;
use crate::device::lock;
use crate::gpu::UploadedTensor;
use crate::nvidia::PendingCopy;

/// Counts of the experts that were in the cache when tokens needed them, and of those that were not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpertCacheStats {
    /// Experts that were in the cache when tokens needed them.
    pub hits: u64,
    /// Hits on prefetched experts, counted at their first use.
    pub prefetch_hits: u64,
    /// Experts that tokens waited for.
    pub misses: u64,
    /// Experts that were prefetched.
    pub prefetches: u64,
}

/// The two stacks of matrices of a layer's experts, `[E, ..]`.
#[derive(Clone, Copy)]
pub struct ExpertStacks<'a> {
    /// Gate and up projections.
    pub gate_up: &'a Tensor,
    /// Down projections.
    pub down: &'a Tensor,
    /// E: the number of experts.
    pub num_experts: usize,
}

impl ExpertStacks<'_> {
    fn both(&self) -> [&Tensor; 2] {
        [self.gate_up, self.down]
    }

    /// Returns the bytes of an expert.
    fn expert_bytes(&self) -> usize {
        self.both().iter().map(|stack| stack.num_bytes() / self.num_experts).sum()
    }

    /// Returns a number that tells the stacks of a layer from those of others, as long as one of their tensors is
    /// kept.
    fn id(&self) -> usize {
        self.gate_up.parts()[0].bytes().as_ptr().addr()
    }
}

/// An expert in the cache.
struct CachedExpert {
    /// The copies that are still in flight. They are declared before the matrices so that they are dropped first,
    /// which waits for them.
    pending: [Option<PendingCopy>; 2],
    matrices: [Tensor; 2],
    /// Keeps the host's memory alive, so that no other stack can take its address.
    _stack: Tensor,
    bytes: usize,
    /// The time of the last use.
    used: u64,
    is_unused: bool,
}

/// A cache of experts; see the module's documentation.
pub struct ExpertCache {
    bytes: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The experts by stack and index.
    experts: HashMap<(usize, usize), CachedExpert>,
    bytes: usize,
    now: u64,
    stats: ExpertCacheStats,
}

impl ExpertCache {
    pub(crate) fn new(bytes: usize) -> Self {
        Self { bytes, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    pub(crate) fn stats(&self) -> ExpertCacheStats {
        self.state().stats
    }

    /// Returns the number of experts of this size that fit, at least one.
    #[must_use]
    pub fn capacity(&self, stacks: ExpertStacks<'_>) -> usize {
        (self.bytes / stacks.expert_bytes().max(1)).max(1)
    }

    /// Loads the experts that are missing and evicts the least recently used. Returns the addresses `[E]` of gate and
    /// up and of down, as pairs of 32-bit words: those of `experts`, and 0 for all others.
    #[must_use]
    pub fn load(&self, gpu: &Gpu, pool: &MemoryPool, stacks: ExpertStacks<'_>, experts: &[usize]) -> [Vec<u32>; 2] {
        let mut state = self.state();
        state.now += 1;
        let mut addresses = [vec![0; 2 * stacks.num_experts], vec![0; 2 * stacks.num_experts]];
        // None of these experts is evicted for another.
        let now = state.now;
        for &expert in experts {
            if let Some(cached) = state.experts.get_mut(&(stacks.id(), expert)) {
                cached.used = now;
            }
        }
        for &expert in experts {
            let key = (stacks.id(), expert);
            match state.experts.get_mut(&key) {
                Some(cached) => {
                    // Work that is queued from now on waits for the copy.
                    cached.pending = [None, None];
                    let was_prefetched = std::mem::take(&mut cached.is_unused);
                    state.stats.hits += 1;
                    state.stats.prefetch_hits += u64::from(was_prefetched);
                }
                None => {
                    state.evict_for(stacks.expert_bytes(), self.bytes);
                    state.stats.misses += 1;
                    state.insert(gpu, pool, stacks, expert, false);
                }
            }
            for (addresses, matrix) in addresses.iter_mut().zip(&state.experts[&key].matrices) {
                let address = gpu.address(matrix);
                addresses[2 * expert..][..2].copy_from_slice(&[address as u32, (address >> 32) as u32]);
            }
        }
        addresses
    }

    /// Prefetches the experts that are missing, as long as experts other than the last used can be evicted for them.
    pub fn prefetch(&self, gpu: &Gpu, pool: &MemoryPool, stacks: ExpertStacks<'_>, experts: &[usize]) {
        let mut state = self.state();
        for &expert in experts {
            if state.experts.contains_key(&(stacks.id(), expert)) {
                continue;
            }
            if !state.evict_for(stacks.expert_bytes(), self.bytes) {
                return;
            }
            state.stats.prefetches += 1;
            state.insert(gpu, pool, stacks, expert, true);
        }
    }
}

impl State {
    /// Evicts experts, the least recently used first, until `needed` bytes of `all` are free. Returns false if the
    /// experts in use do not leave so much.
    fn evict_for(&mut self, needed: usize, all: usize) -> bool {
        while self.bytes + needed > all {
            let past = self.experts.iter().filter(|(_, cached)| cached.used < self.now);
            let Some(key) = past.min_by_key(|(key, cached)| (cached.used, **key)).map(|(key, _)| *key) else {
                return false;
            };
            self.bytes -= self.experts.remove(&key).map_or(0, |cached| cached.bytes);
        }
        true
    }

    fn insert(&mut self, gpu: &Gpu, pool: &MemoryPool, stacks: ExpertStacks<'_>, expert: usize, is_prefetch: bool) {
        let mut buffer = Vec::new();
        let copies = stacks.both().map(|stack| {
            let bytes = expert_bytes(stack, expert, stacks.num_experts, &mut buffer);
            let shape = &[1, stack.rows() / stacks.num_experts, stack.cols()];
            gpu.upload_tensor(pool, &UploadedTensor { shape, dtype: stack.dtype(), bytes }, is_prefetch)
        });
        let bytes = stacks.expert_bytes();
        self.bytes += bytes;
        let [(first, copy_of_first), (second, copy_of_second)] = copies;
        let cached = CachedExpert {
            pending: [copy_of_first, copy_of_second],
            matrices: [first, second],
            _stack: stacks.gate_up.clone(),
            bytes,
            used: self.now,
            is_unused: is_prefetch,
        };
        self.experts.insert((stacks.id(), expert), cached);
    }
}

/// Returns the bytes of an expert's matrices in a stack, gathered in `buffer` if the stack is in pieces.
fn expert_bytes<'a>(stack: &'a Tensor, expert: usize, num_experts: usize, buffer: &'a mut Vec<u8>) -> &'a [u8] {
    let len = stack.num_bytes() / num_experts;
    match stack.pieces() {
        None => &stack.bytes()[expert * len..][..len],
        Some(_) => {
            buffer.resize(len, 0);
            stack.read_bytes(expert * len, buffer);
            buffer
        }
    }
}
