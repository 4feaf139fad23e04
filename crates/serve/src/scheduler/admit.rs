//! Admission of waiting sequences, with the blocks that others computed for the same beginning.

use super::turn::{BlockCopy, SequenceId, Turn};
use super::{Limits, Scheduler};
use crate::blocks::BlockId;

/// The beginning of a sequence that other sequences computed.
#[derive(Debug, Default)]
struct CachedPrefix {
    /// Blocks to share.
    shared: Vec<BlockId>,
    /// A block to copy: all of the sequence is known, but its last token is passed again for the logits behind it.
    copied: Option<BlockId>,
}

impl Scheduler {
    /// Admits waiting sequences in order while there are tokens, places and blocks. The first that does not fit ends
    /// this, so that none is overtaken for ever.
    pub(super) fn admit(&mut self, turn: &mut Turn, budget: &mut usize) {
        self.raise_waiting();
        self.waiting.sort_by_key(|id| self.sequences[id].rank());
        let mut num_admitted = 0;
        while *budget > 0 && self.running.len() < self.limits.max_running {
            let Some(&id) = self.waiting.get(num_admitted) else { break };
            if !self.give_blocks(id, turn) {
                break;
            }
            num_admitted += 1;
            self.running.push(id);
            let sequence = self.sequence_mut(id);
            let part = sequence.pass(sequence.num_pending().min(*budget));
            *budget -= part.tokens.len();
            turn.parts.push(part);
        }
        self.waiting.drain(..num_admitted);
    }

    /// Raises the class of sequences by one for each so many turns that they wait.
    fn raise_waiting(&mut self) {
        for id in &self.waiting {
            if let Some(sequence) = self.sequences.get_mut(id) {
                let waited = (self.turn - sequence.waits_since) / self.limits.turns_to_rise;
                let risen = i64::from(sequence.priority).saturating_sub_unsigned(waited);
                sequence.class = sequence.class.min(risen);
            }
        }
    }

    /// Gives a waiting sequence blocks for all its known tokens, if there are enough and running sequences keep one
    /// each to grow into.
    fn give_blocks(&mut self, id: SequenceId, turn: &mut Turn) -> bool {
        let prefix = self.cached_prefix(id);
        let num_tokens = self.sequences[&id].tokens.len();
        let num_taken = num_tokens.div_ceil(self.limits.block_len) - prefix.shared.len();
        let num_revived = prefix.shared.iter().filter(|&&block| self.pool.num_users(block) == 0).count();
        if num_taken + num_revived + self.running.len() > self.pool.num_free() {
            return false;
        }
        prefix.shared.iter().for_each(|&block| self.pool.share(block));
        let taken: Vec<BlockId> = (0..num_taken).filter_map(|_| self.pool.take()).collect();
        debug_assert_eq!(taken.len(), num_taken, "free blocks were counted");
        if let (Some(from), Some(&to)) = (prefix.copied, taken.first()) {
            // A free block may be taken for its own copy.
            turn.copies.extend((from != to).then_some(BlockCopy { from, to }));
        }
        let (block_len, has_prefix_cache) = (self.limits.block_len, self.limits.has_prefix_cache);
        let sequence = self.sequence_mut(id);
        let num_shared = prefix.shared.len();
        sequence.num_published = num_shared;
        sequence.num_computed = if prefix.copied.is_some() { num_tokens - 1 } else { num_shared * block_len };
        let num_found = sequence.num_computed;
        sequence.num_cached.get_or_insert(num_found);
        sequence.blocks = prefix.shared;
        sequence.blocks.extend(taken);
        if has_prefix_cache && sequence.uses_prefix_cache {
            self.counts.prefix_queries += num_tokens as u64;
            self.counts.prefix_hits += num_found as u64;
        }
        true
    }

    /// Finds the longest beginning of a sequence, in whole blocks, that is computed.
    fn cached_prefix(&mut self, id: SequenceId) -> CachedPrefix {
        let Limits { block_len, has_prefix_cache, .. } = self.limits;
        let Some(sequence) = self.sequences.get_mut(&id) else { return CachedPrefix::default() };
        if !(has_prefix_cache && sequence.uses_prefix_cache) {
            return CachedPrefix::default();
        }
        sequence.hash_full_blocks(block_len);
        let hashes = sequence.hashes[1..].iter();
        let mut shared: Vec<BlockId> = hashes.map_while(|hash| self.pool.find(hash)).collect();
        let is_all = shared.len() * block_len == sequence.tokens.len();
        let copied = if is_all { shared.pop() } else { None };
        CachedPrefix { shared, copied }
    }
}
