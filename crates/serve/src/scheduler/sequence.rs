//! A sequence as the scheduler knows it.

use super::turn::{SequenceId, TurnPart};
use crate::blocks::BlockId;
use crate::hash::BlockHash;

/// A sequence to serve.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NewSequence {
    /// The tokens to go on from; at least one.
    pub prompt: Vec<u32>,
    /// Tokens to draw at most; at least one.
    pub max_new_tokens: usize,
    /// Lower ones are served first, as in vLLM; 0 is usual.
    pub priority: i32,
    /// Sequences of different salts share no blocks, so that nobody learns from the time that an answer takes what
    /// others asked.
    pub salt: Vec<u8>,
    /// The adapter that it is computed with.
    pub adapter: Option<u32>,
    /// True if blocks of others may stand for the beginning. False where something is wanted of every token of the
    /// prompt, such as its log-probability.
    pub uses_prefix_cache: bool,
}

/// A sequence that waits or runs.
#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) id: SequenceId,
    /// The prompt and the tokens drawn so far.
    pub(super) tokens: Vec<u32>,
    /// Tokens that it may come to have.
    pub(super) max_len: usize,
    pub(super) priority: i32,
    /// The priority that it has come to by waiting, never above `priority`.
    pub(super) class: i64,
    pub(super) adapter: Option<u32>,
    pub(super) uses_prefix_cache: bool,
    /// The hash before the first block, then those behind each full block so far; the first alone without a prefix
    /// cache.
    pub(super) hashes: Vec<BlockHash>,
    pub(super) blocks: Vec<BlockId>,
    /// Tokens whose keys and values are in the blocks, or will be after the turn under way.
    pub(super) num_computed: usize,
    /// Blocks, from the first on, that are full and have their hash.
    pub(super) num_published: usize,
    /// Tokens that the prefix cache had when it was first admitted.
    pub(super) num_cached: Option<usize>,
    /// The turn since which it waits.
    pub(super) waits_since: u64,
}

impl Sequence {
    pub(super) fn new(id: SequenceId, new: NewSequence, turn: u64) -> Self {
        let NewSequence { prompt, max_new_tokens, priority, salt, adapter, uses_prefix_cache } = new;
        Self {
            id,
            max_len: prompt.len() + max_new_tokens,
            tokens: prompt,
            priority,
            class: i64::from(priority),
            adapter,
            uses_prefix_cache,
            hashes: vec![BlockHash::root(&salt, adapter)],
            blocks: Vec::new(),
            num_computed: 0,
            num_published: 0,
            num_cached: None,
            waits_since: turn,
        }
    }

    /// The order of sequences: by class, then by arrival.
    pub(super) fn rank(&self) -> Rank {
        Rank { class: self.class, id: self.id }
    }

    /// Tokens that are known and not computed.
    pub(super) fn num_pending(&self) -> usize {
        self.tokens.len() - self.num_computed
    }

    /// Returns whether it has all tokens that it may have.
    pub(super) fn is_full(&self) -> bool {
        self.tokens.len() >= self.max_len
    }

    /// Hashes all blocks that are full of known tokens.
    pub(super) fn hash_full_blocks(&mut self, block_len: usize) {
        for tokens in self.tokens.chunks_exact(block_len).skip(self.hashes.len() - 1) {
            let last = self.hashes[self.hashes.len() - 1];
            self.hashes.push(last.of_next(tokens));
        }
    }

    /// Makes the next `count` tokens a part of a turn. They count as computed from now on.
    pub(super) fn pass(&mut self, count: usize) -> TurnPart {
        let (start, end) = (self.num_computed, self.num_computed + count);
        self.num_computed = end;
        TurnPart {
            sequence: self.id,
            start,
            tokens: self.tokens[start..end].to_vec(),
            blocks: self.blocks.clone(),
            draws: end == self.tokens.len(),
            adapter: self.adapter,
        }
    }
}

/// The order in which sequences are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    class: i64,
    id: SequenceId,
}
