//! The scheduler: which sequences pass which tokens in the next turn, and in which blocks their keys and values lie.
//!
//! It decides and does nothing: no clock, no threads, no random numbers, so that the same calls give the same turns.
//! Sequences that draw go first, a token each; what is left of a turn's tokens goes to prompts, in pieces (chunked
//! prefill, Agrawal et al., 2308.16369). A sequence gets the blocks for its prompt when it is admitted and one more
//! when it comes to a block's end. If there is none, the sequence that would be served last gives up its blocks and
//! is computed again later.

mod admit;
mod limits;
mod sequence;
mod turn;

use std::collections::{HashMap, HashSet};

pub use limits::{Limits, LimitsError, Refused};
pub use sequence::NewSequence;
use sequence::Sequence;
pub use turn::{BlockCopy, SequenceId, Turn, TurnPart};

use crate::blocks::BlockPool;

/// The sequences that are served, and the blocks of their keys and values.
#[derive(Debug)]
pub struct Scheduler {
    limits: Limits,
    pool: BlockPool,
    sequences: HashMap<SequenceId, Sequence>,
    /// Sequences without blocks.
    waiting: Vec<SequenceId>,
    /// Sequences with blocks; in a turn sorted by rank.
    running: Vec<SequenceId>,
    turn: u64,
    next_id: u64,
    counts: Counts,
}

/// Counts of what a scheduler has and had, for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Sequences that wait.
    pub waiting: usize,
    /// Sequences that hold blocks.
    pub running: usize,
    /// Blocks that no sequence holds.
    pub free_blocks: usize,
    /// Sequences that lost their blocks so far.
    pub preemptions: u64,
    /// Tokens that were looked for in the prefix cache so far.
    pub prefix_queries: u64,
    /// Tokens that were found there so far.
    pub prefix_hits: u64,
}

impl Scheduler {
    /// Makes a scheduler without sequences.
    ///
    /// # Errors
    /// If the limits leave nothing.
    pub fn new(limits: Limits) -> Result<Self, LimitsError> {
        limits.check()?;
        Ok(Self {
            limits,
            pool: BlockPool::new(limits.num_blocks),
            sequences: HashMap::new(),
            waiting: Vec::new(),
            running: Vec::new(),
            turn: 0,
            next_id: 0,
            counts: Counts::default(),
        })
    }

    /// The bounds.
    #[must_use]
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Counts of what there is and was.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let (waiting, running) = (self.waiting.len(), self.running.len());
        Counts { waiting, running, free_blocks: self.pool.num_free(), ..self.counts }
    }

    /// Returns whether there are sequences.
    #[must_use]
    pub fn has_sequences(&self) -> bool {
        !self.sequences.is_empty()
    }

    /// The tokens of a sequence, the prompt's first; none if it is not here.
    #[must_use]
    pub fn tokens(&self, id: SequenceId) -> Option<&[u32]> {
        self.sequences.get(&id).map(|sequence| sequence.tokens.as_slice())
    }

    /// Tokens of a sequence that the prefix cache had when it was admitted; 0 before that.
    #[must_use]
    pub fn num_cached(&self, id: SequenceId) -> usize {
        self.sequences.get(&id).and_then(|sequence| sequence.num_cached).unwrap_or(0)
    }

    /// Returns whether a sequence has all tokens that it may have, so that no turn takes it any more; none if it is
    /// not here.
    #[must_use]
    pub fn is_full(&self, id: SequenceId) -> Option<bool> {
        self.sequences.get(&id).map(Sequence::is_full)
    }

    /// Adds a sequence to those that wait.
    ///
    /// # Errors
    /// If it is empty, could never fit, or too many wait.
    pub fn add(&mut self, new: NewSequence) -> Result<SequenceId, Refused> {
        let (prompt_len, max_new_tokens) = (new.prompt.len(), new.max_new_tokens);
        let (most, max_waiting) = (self.limits.max_sequence_tokens(), self.limits.max_waiting);
        if prompt_len == 0 {
            return Err(Refused::EmptyPrompt);
        }
        if max_new_tokens == 0 {
            return Err(Refused::NoNewTokens);
        }
        // The last token is drawn and not computed.
        if prompt_len.saturating_add(max_new_tokens - 1) > most {
            return Err(Refused::TooLong { prompt_len, max_new_tokens, most: most.saturating_add(1) });
        }
        if self.waiting.len() >= max_waiting {
            return Err(Refused::QueueFull { max_waiting });
        }
        let id = SequenceId(self.next_id);
        self.next_id += 1;
        self.sequences.insert(id, Sequence::new(id, new, self.turn));
        self.waiting.push(id);
        Ok(id)
    }

    /// Takes a sequence out that is finished or no longer wanted; its blocks are free at once. Returns whether it was
    /// here.
    pub fn remove(&mut self, id: SequenceId) -> bool {
        let is_here = self.sequences.contains_key(&id);
        if is_here {
            self.release_blocks(id);
            self.waiting.retain(|&other| other != id);
            self.running.retain(|&other| other != id);
            self.sequences.remove(&id);
        }
        is_here
    }

    /// Decides the next turn. It is empty only if no sequence has a token to pass.
    pub fn next_turn(&mut self) -> Turn {
        self.turn += 1;
        let mut turn = Turn { number: self.turn, ..Turn::default() };
        let mut budget = self.limits.turn_tokens;
        self.running.sort_by_key(|id| self.sequences[id].rank());
        self.go_on_drawing(&mut turn, &mut budget);
        self.go_on_with_prompts(&mut turn, &mut budget);
        if turn.preempted.is_empty() {
            self.admit(&mut turn, &mut budget);
        }
        turn
    }

    /// Takes in what a turn did: its blocks have their content, and the tokens that were drawn, by their sequences.
    /// Sequences that were removed in the meantime are passed over.
    pub fn complete(&mut self, turn: &Turn, drawn: &[(SequenceId, u32)]) {
        for part in &turn.parts {
            self.publish_full_blocks(part.sequence);
        }
        for &(id, token) in drawn {
            if let Some(sequence) = self.sequences.get_mut(&id).filter(|sequence| !sequence.is_full()) {
                sequence.tokens.push(token);
            }
        }
    }

    /// Gives each running sequence with one token to pass its place, and a block where it needs one.
    fn go_on_drawing(&mut self, turn: &mut Turn, budget: &mut usize) {
        let mut index = 0;
        while *budget > 0 && index < self.running.len() {
            let id = self.running[index];
            let sequence = &self.sequences[&id];
            if sequence.num_pending() == 1 && !sequence.is_full() {
                if !self.grow(id, turn) {
                    // It was the last, and gave its own blocks up.
                    break;
                }
                turn.parts.push(self.sequence_mut(id).pass(1));
                *budget -= 1;
            }
            index += 1;
        }
    }

    /// Gives running sequences whose prompts are not computed yet what is left of the turn. They have their blocks.
    fn go_on_with_prompts(&mut self, turn: &mut Turn, budget: &mut usize) {
        for &id in &self.running {
            let Some(sequence) = self.sequences.get_mut(&id) else { continue };
            let count = sequence.num_pending().min(*budget);
            if count > 0 && sequence.num_pending() > 1 {
                turn.parts.push(sequence.pass(count));
                *budget -= count;
            }
        }
    }

    /// Makes room for the next token of a running sequence, if need be by preempting those behind it. False if it had
    /// to give up its own blocks.
    fn grow(&mut self, id: SequenceId, turn: &mut Turn) -> bool {
        let (block_len, num_computed) = (self.limits.block_len, self.sequences[&id].num_computed);
        while self.sequences[&id].blocks.len() * block_len <= num_computed {
            if let Some(block) = self.pool.take() {
                self.sequence_mut(id).blocks.push(block);
                continue;
            }
            let last = self.running[self.running.len() - 1];
            self.preempt(last);
            turn.preempted.push(last);
            if last == id {
                return false;
            }
        }
        true
    }

    /// Sends the running sequence of the last rank back to those that wait.
    fn preempt(&mut self, id: SequenceId) {
        self.release_blocks(id);
        self.running.retain(|&other| other != id);
        self.waiting.push(id);
        self.counts.preemptions += 1;
    }

    /// Gives up all blocks of a sequence, the last first: what others may share longest is taken last.
    fn release_blocks(&mut self, id: SequenceId) {
        let sequence = self.sequence_mut(id);
        let blocks = std::mem::take(&mut sequence.blocks);
        (sequence.num_computed, sequence.num_published) = (0, 0);
        blocks.into_iter().rev().for_each(|block| self.pool.release(block));
    }

    /// Names the blocks of a sequence that are full of computed tokens, for others with the same beginning.
    fn publish_full_blocks(&mut self, id: SequenceId) {
        let (block_len, has_cache) = (self.limits.block_len, self.limits.has_prefix_cache);
        let Some(sequence) = self.sequences.get_mut(&id).filter(|_| has_cache) else { return };
        sequence.hash_full_blocks(block_len);
        while (sequence.num_published + 1) * block_len <= sequence.num_computed {
            let index = sequence.num_published;
            self.pool.publish(sequence.blocks[index], sequence.hashes[index + 1]);
            sequence.num_published += 1;
        }
    }

    fn sequence_mut(&mut self, id: SequenceId) -> &mut Sequence {
        self.sequences.get_mut(&id).expect("a sequence that waits or runs is kept")
    }

    /// Checks what must always hold: each block has as many users as sequences hold it; what is still to be written
    /// has one; waiting sequences hold none; running ones have blocks for what is computed.
    ///
    /// # Errors
    /// The first thing that does not hold.
    pub fn check(&self) -> Result<(), String> {
        self.pool.check()?;
        let mut users = vec![0; self.pool.num_blocks()];
        let listed: HashSet<_> = self.waiting.iter().chain(&self.running).collect();
        if listed.len() != self.sequences.len() || self.waiting.len() + self.running.len() != listed.len() {
            return Err(format!("{} sequences, {} listed", self.sequences.len(), listed.len()));
        }
        for id in &self.waiting {
            if !self.sequences[id].blocks.is_empty() {
                return Err(format!("{id} waits and holds blocks"));
            }
        }
        for sequence in self.sequences.values() {
            let id = sequence.id;
            let own: HashSet<_> = sequence.blocks.iter().collect();
            if own.len() != sequence.blocks.len() {
                return Err(format!("{id} holds a block twice"));
            }
            if sequence.blocks.len() * self.limits.block_len < sequence.num_computed {
                return Err(format!("{id} has {} computed tokens in {} blocks", sequence.num_computed, own.len()));
            }
            if sequence.blocks[sequence.num_published..].iter().any(|&block| self.pool.num_users(block) != 1) {
                return Err(format!("{id} writes into a block of others"));
            }
            sequence.blocks.iter().for_each(|&block| users[block as usize] += 1);
        }
        match users.iter().enumerate().find(|&(block, &count)| self.pool.num_users(block as u32) != count) {
            Some((block, count)) => Err(format!("block {block} is held {count} times and counts another number")),
            None => Ok(()),
        }
    }
}
