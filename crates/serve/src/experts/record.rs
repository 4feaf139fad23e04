//! The experts of each token whose keys and values are kept.

use std::ops::Range;

use crate::blocks::BlockId;

/// The experts of consecutive tokens in each MoE layer: `[N, L, K]` ids, a token's first choice first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RoutedExperts {
    /// L: MoE layers.
    pub num_layers: usize,
    /// K: experts of a token in a layer at most.
    pub top_k: usize,
    /// The ids; -1 where a token has fewer than K experts.
    pub ids: Vec<i32>,
}

impl RoutedExperts {
    /// N: tokens.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.ids.len() / (self.num_layers * self.top_k).max(1)
    }

    /// Adds the tokens behind these.
    pub fn extend(&mut self, next: &Self) {
        if self.ids.is_empty() {
            self.clone_from(next);
        } else {
            self.ids.extend_from_slice(&next.ids);
        }
    }
}

/// The places of a pass's tokens in the record, in the order of its rows.
#[derive(Clone, Debug, Default)]
pub(crate) struct Slots(Vec<usize>);

impl Slots {
    /// Adds the places of consecutive tokens of a sequence with these blocks.
    pub(crate) fn add(&mut self, blocks: &[BlockId], positions: Range<usize>, block_len: usize) {
        self.0.extend(positions.map(|position| slot(blocks, position, block_len)));
    }

    pub(crate) fn rows(&self, first: usize, count: usize) -> &[usize] {
        &self.0[first..first + count]
    }
}

/// The experts of each place that a token's keys and values may have.
pub(crate) struct ExpertRecord {
    num_layers: usize,
    top_k: usize,
    num_slots: usize,
    /// `[S, L, K]`: ids and 1, 0 for none. Memory that was never written is not taken from the system.
    ids: Vec<u16>,
}

impl ExpertRecord {
    pub(crate) fn new(num_layers: usize, top_k: usize, num_slots: usize) -> Self {
        let top_k = top_k.max(1);
        Self { num_layers, top_k, num_slots, ids: vec![0; num_slots * num_layers * top_k] }
    }

    /// Writes the choices `[T, K]` of a layer for tokens with these places.
    pub(crate) fn write(&mut self, layer: usize, slots: &[usize], expert_ids: &[u32], top_k: usize) {
        if top_k > self.top_k {
            self.widen(top_k);
        }
        for (&slot, ids) in slots.iter().zip(expert_ids.chunks_exact(top_k.max(1))) {
            let start = (slot * self.num_layers + layer) * self.top_k;
            let row = &mut self.ids[start..start + self.top_k];
            row.fill(0);
            for (place, &id) in row.iter_mut().zip(ids) {
                // An id beyond 16 bits is none: no model has as many experts.
                *place = u16::try_from(id).ok().and_then(|id| id.checked_add(1)).unwrap_or(0);
            }
        }
    }

    /// Makes room for more experts of a token: some schemes give it as many as they like.
    fn widen(&mut self, top_k: usize) {
        let mut ids = vec![0; self.num_slots * self.num_layers * top_k];
        for (new, old) in ids.chunks_exact_mut(top_k).zip(self.ids.chunks_exact(self.top_k)) {
            new[..old.len()].copy_from_slice(old);
        }
        (self.ids, self.top_k) = (ids, top_k);
    }

    /// Copies what a block has to another.
    pub(crate) fn copy_block(&mut self, from: BlockId, to: BlockId, block_len: usize) {
        let size = block_len * self.num_layers * self.top_k;
        let from = from as usize * size;
        self.ids.copy_within(from..from + size, to as usize * size);
    }

    /// Reads the experts of consecutive tokens of a sequence with these blocks.
    pub(crate) fn read(&self, blocks: &[BlockId], positions: Range<usize>, block_len: usize) -> RoutedExperts {
        let size = self.num_layers * self.top_k;
        let rows = positions.map(|position| slot(blocks, position, block_len) * size);
        let ids = rows.flat_map(|start| &self.ids[start..start + size]).map(|&id| i32::from(id) - 1).collect();
        RoutedExperts { num_layers: self.num_layers, top_k: self.top_k, ids }
    }
}

fn slot(blocks: &[BlockId], position: usize, block_len: usize) -> usize {
    blocks[position / block_len] as usize * block_len + position % block_len
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sequence_finds_the_experts_of_its_tokens_in_its_blocks() {
        let mut record = ExpertRecord::new(2, 1, 8);
        let mut slots = Slots::default();
        slots.add(&[3, 1], 1..4, 2);
        assert_eq!(slots.rows(0, 3), [7, 2, 3]);
        record.write(0, slots.rows(0, 3), &[5, 6, 7], 1);
        record.write(1, slots.rows(1, 2), &[8, 0, u32::MAX, 9], 2);
        let read = |record: &ExpertRecord, blocks: &[u32]| record.read(blocks, 1..4, 2).ids;
        let expected = [5, -1, -1, -1, 6, -1, 8, 0, 7, -1, -1, 9];
        assert_eq!(read(&record, &[3, 1]), expected);
        record.copy_block(1, 0, 2);
        assert_eq!(read(&record, &[3, 0]), expected);
    }
}
