//! Scratch memory of a product's tasks.

use std::sync::{Mutex, PoisonError};

use moeworks_tensor::Tensor;

use super::kernel::Tile;
use super::store::Scratch;
use crate::parallel::Lent;

/// Scratch memory for as many tasks as run at a time.
pub(crate) struct ScratchPool<'a> {
    memory: Lent<'a, u32>,
    len: usize,
    free: Mutex<Vec<ScratchSlot>>,
}

/// The state of a slot besides its memory, kept from one task of a product to the next.
#[derive(Default)]
pub(crate) struct ScratchSlot {
    slot: usize,
    scratch: Option<Box<Scratch>>,
    /// The group and the first row of the operand rows that are laid out in the slot's memory.
    pub(crate) rows_of: Option<(usize, usize)>,
}

impl ScratchSlot {
    /// Returns scratch for epilogues.
    pub(crate) fn scratch(&mut self) -> &mut Scratch {
        self.scratch.get_or_insert_with(|| Box::new(Scratch::new()))
    }
}

impl<'a> ScratchPool<'a> {
    /// Divides a tensor into `num_slots` equal parts.
    pub(crate) fn new(tensor: &'a mut Tensor, num_slots: usize) -> Self {
        let memory = tensor.slice_mut::<u32>();
        let len = memory.len() / num_slots;
        let free = (0..num_slots).map(|slot| ScratchSlot { slot, ..ScratchSlot::default() });
        Self { memory: Lent::new(memory), len, free: Mutex::new(free.collect()) }
    }

    /// Calls `run` with a free slot and its memory.
    pub(crate) fn with(&self, run: impl FnOnce(&mut [u32], &mut ScratchSlot)) {
        let lock = || self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let mut held = lock().pop().expect("a slot for each thread");
        let slot = held.slot;
        // SAFETY: a slot is in the list once, so nobody else has it until it is put back below.
        run(unsafe { self.memory.range(slot * self.len..(slot + 1) * self.len) }, &mut held);
        lock().push(held);
    }
}

/// Views memory as tiles. Scratch comes from the pool, whose blocks are aligned for tiles.
#[inline(always)]
pub(crate) fn tile_slice(memory: &mut [u32]) -> &mut [Tile] {
    // SAFETY: every bit pattern is a valid f32, and `align_to_mut` returns only whole tiles at aligned addresses.
    let (before, tiles, _) = unsafe { memory.align_to_mut::<Tile>() };
    debug_assert!(before.is_empty(), "scratch is cut at multiples of a cache line");
    tiles
}
