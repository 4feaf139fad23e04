//! Room for some of a model's experts in a GPU's memory, while those of all are in the host's: those that tokens chose last stay, in all
//! layers together, and those that the next layer will probably want can come ahead ("Fast Inference of Mixture-of-Experts Language
//! Models with Offloading", 2312.17238).
//!
//! Weights that a room knows must not be written to: it would go on with what it copied. What comes goes by way of memory that the device
//! reads by itself (`nvidia/staging.rs`): the host is done with it when it lies there.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use moeworks_tensor::{MemoryPool, Tensor};

use super::{Copied, Gpu};

/// How often experts were where they were wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoomStats {
    /// Experts that were there when tokens came to them.
    pub found: u64,
    /// Those of them that had been sent ahead, when tokens first came to them.
    pub foreseen: u64,
    /// Experts that tokens waited for.
    pub fetched: u64,
    /// Experts that were sent ahead.
    pub sent_ahead: u64,
}

/// The experts' two stacks of matrices, `[E, ..]`.
#[derive(Clone, Copy)]
pub(crate) struct Stacks<'a> {
    pub(crate) gate_up: &'a Tensor,
    pub(crate) down: &'a Tensor,
    pub(crate) num_experts: usize,
}

impl Stacks<'_> {
    fn both(&self) -> [&Tensor; 2] {
        [self.gate_up, self.down]
    }

    /// Bytes of an expert.
    pub(crate) fn expert_bytes(&self) -> usize {
        self.both().iter().map(|stack| stack.num_bytes() / self.num_experts).sum()
    }

    /// What tells the stacks of a layer from those of others, while a tensor of them is kept.
    fn id(&self) -> usize {
        self.gate_up.parts()[0].bytes().as_ptr().addr()
    }
}

/// An expert that is there.
struct Held {
    /// The copy under way that it comes by; dropped before the memory, it is waited for.
    copy: [Option<Copied>; 2],
    matrices: [Tensor; 2],
    /// Keeps the host's memory, so that no other stack can be where this one was.
    _stack: Tensor,
    bytes: usize,
    /// When it was last wanted.
    used: u64,
    is_unused: bool,
}

pub(crate) struct Room {
    bytes: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    held: HashMap<(usize, usize), Held>,
    bytes: usize,
    now: u64,
    stats: RoomStats,
}

impl Room {
    pub(super) fn new(bytes: usize) -> Self {
        Self { bytes, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn stats(&self) -> RoomStats {
        self.state().stats
    }

    /// As many experts of one kind as there is room for at a time, at least one.
    pub(crate) fn capacity(&self, stacks: Stacks<'_>) -> usize {
        (self.bytes / stacks.expert_bytes().max(1)).max(1)
    }

    /// The addresses `[E]` of gate and up and of down, as pairs of 32-bit words, where those of `experts` are there from now on and the
    /// others 0. Experts that were wanted longest ago make way.
    pub(crate) fn take(&self, gpu: &Gpu, pool: &MemoryPool, stacks: Stacks<'_>, experts: &[usize]) -> [Vec<u32>; 2] {
        let mut state = self.state();
        state.now += 1;
        let mut addresses = [vec![0; 2 * stacks.num_experts], vec![0; 2 * stacks.num_experts]];
        // None of them makes way for another.
        let now = state.now;
        for &expert in experts {
            if let Some(held) = state.held.get_mut(&(stacks.id(), expert)) {
                held.used = now;
            }
        }
        for &expert in experts {
            let key = (stacks.id(), expert);
            match state.held.get_mut(&key) {
                Some(held) => {
                    // Whoever comes after waits for the copy.
                    held.copy = [None, None];
                    let was_foreseen = std::mem::take(&mut held.is_unused);
                    state.stats.found += 1;
                    state.stats.foreseen += u64::from(was_foreseen);
                }
                None => {
                    state.make_way(self.bytes, stacks.expert_bytes());
                    state.stats.fetched += 1;
                    state.hold(gpu, pool, (stacks, expert), false);
                }
            }
            for (addresses, matrix) in addresses.iter_mut().zip(&state.held[&key].matrices) {
                let address = gpu.address(matrix);
                addresses[2 * expert..][..2].copy_from_slice(&[address as u32, (address >> 32) as u32]);
            }
        }
        addresses
    }

    /// Sends experts ahead that are not there, as far as others than those wanted last can make way.
    pub(crate) fn send_ahead(&self, gpu: &Gpu, pool: &MemoryPool, stacks: Stacks<'_>, experts: &[usize]) {
        let mut state = self.state();
        for &expert in experts {
            if state.held.contains_key(&(stacks.id(), expert)) {
                continue;
            }
            if !state.make_way(self.bytes, stacks.expert_bytes()) {
                return;
            }
            state.stats.sent_ahead += 1;
            state.hold(gpu, pool, (stacks, expert), true);
        }
    }
}

impl State {
    /// Drops experts, those that were wanted longest ago first, until `needed` bytes of `all` are free; false if those that are wanted
    /// now do not leave as much.
    fn make_way(&mut self, all: usize, needed: usize) -> bool {
        while self.bytes + needed > all {
            let past = self.held.iter().filter(|(_, held)| held.used < self.now);
            let Some(key) = past.min_by_key(|(key, held)| (held.used, **key)).map(|(key, _)| *key) else {
                return false;
            };
            self.bytes -= self.held.remove(&key).map_or(0, |held| held.bytes);
        }
        true
    }

    fn hold(&mut self, gpu: &Gpu, pool: &MemoryPool, (stacks, expert): (Stacks<'_>, usize), is_ahead: bool) {
        let mut buffer = Vec::new();
        let copies = stacks.both().map(|stack| {
            let bytes = expert_bytes(stack, (expert, stacks.num_experts), &mut buffer);
            let shape = [1, stack.rows() / stacks.num_experts, stack.cols()];
            gpu.upload_tensor(pool, &shape, stack.dtype(), bytes, is_ahead)
        });
        let bytes = stacks.expert_bytes();
        self.bytes += bytes;
        let [(first, copy_of_first), (second, copy_of_second)] = copies;
        let held = Held {
            copy: [copy_of_first, copy_of_second],
            matrices: [first, second],
            _stack: stacks.gate_up.clone(),
            bytes,
            used: self.now,
            is_unused: is_ahead,
        };
        self.held.insert((stacks.id(), expert), held);
    }
}

/// The bytes of an expert's matrices in a stack, gathered in `buffer` where they lie apart.
fn expert_bytes<'a>(stack: &'a Tensor, (expert, count): (usize, usize), buffer: &'a mut Vec<u8>) -> &'a [u8] {
    let len = stack.num_bytes() / count;
    match stack.pieces() {
        None => &stack.bytes()[expert * len..][..len],
        Some(_) => {
            buffer.resize(len, 0);
            stack.read_bytes(expert * len, buffer);
            buffer
        }
    }
}
