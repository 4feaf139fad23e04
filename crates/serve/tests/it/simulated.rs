//! An executor that computes nothing: of each place in a block it keeps what the keys and values there would depend
//! on.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use moeworks_serve::{Scheduler, SequenceId, Turn};

/// A hash of all that keys and values depend on: the salt, the adapter and all tokens up to theirs.
type Content = u64;

/// The blocks' content, and what each sequence was given.
pub(crate) struct Simulated {
    block_len: usize,
    places: Vec<Option<Content>>,
    /// The content before the first token of each sequence.
    roots: HashMap<SequenceId, Content>,
    /// The content behind each computed token of each sequence.
    chains: HashMap<SequenceId, Vec<Content>>,
}

fn next(content: Content, token: u32) -> Content {
    let mut hasher = DefaultHasher::new();
    (content, token).hash(&mut hasher);
    hasher.finish()
}

impl Simulated {
    pub(crate) fn new(scheduler: &Scheduler) -> Self {
        let limits = scheduler.limits();
        let places = vec![None; limits.num_blocks * limits.block_len];
        Self { block_len: limits.block_len, places, roots: HashMap::new(), chains: HashMap::new() }
    }

    /// Tells of a sequence with a salt that says whose blocks it may share.
    pub(crate) fn add(&mut self, id: SequenceId, salt: u8) {
        self.roots.insert(id, Content::from(salt));
    }

    pub(crate) fn remove(&mut self, id: SequenceId) {
        self.roots.remove(&id);
        self.chains.remove(&id);
    }

    /// Carries out a turn, and checks that each part finds the content of all tokens before it in its blocks.
    pub(crate) fn carry_out(&mut self, turn: &Turn, scheduler: &Scheduler) {
        for copy in &turn.copies {
            let [from, to] = [copy.from, copy.to].map(|block| block as usize * self.block_len);
            self.places.copy_within(from..from + self.block_len, to);
        }
        for part in &turn.parts {
            let tokens = scheduler.tokens(part.sequence).expect("a part of a sequence that is served");
            let (start, end) = (part.start, part.start + part.tokens.len());
            assert_eq!(part.tokens, tokens[start..end], "{turn}");
            assert_eq!(part.draws, end == tokens.len(), "{turn}");
            let chain = self.chain(part.sequence, tokens, end);
            for (position, content) in chain[..end].iter().enumerate() {
                let block = part.blocks[position / self.block_len] as usize;
                let place = &mut self.places[block * self.block_len + position % self.block_len];
                if position < start {
                    assert_eq!(*place, Some(*content), "position {position} of {} in {turn}", part.sequence);
                } else {
                    *place = Some(*content);
                }
            }
        }
    }

    fn chain(&mut self, id: SequenceId, tokens: &[u32], len: usize) -> Vec<Content> {
        let root = self.roots[&id];
        let chain = self.chains.entry(id).or_default();
        for &token in &tokens[chain.len().min(len)..len] {
            chain.push(next(chain.last().copied().unwrap_or(root), token));
        }
        chain.clone()
    }
}
