//! The value that a turn of serving is.

use std::fmt;

use crate::blocks::BlockId;

/// The number of a sequence. Numbers are given in the order in which sequences come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(pub u64);

impl fmt::Display for SequenceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.0)
    }
}

/// A turn: one pass of the model over some tokens of some sequences, with all that it needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Turn {
    /// Counts turns, from 1.
    pub number: u64,
    /// Sequences that lost their blocks to others and will be computed again.
    pub preempted: Vec<SequenceId>,
    /// Blocks that are copied before the pass.
    pub copies: Vec<BlockCopy>,
    /// Tokens to pass.
    pub parts: Vec<TurnPart>,
}

/// A copy of a block that others hold, for a sequence that has to write into it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    /// The block to read.
    pub from: BlockId,
    /// The block to write.
    pub to: BlockId,
}

/// Consecutive tokens of one sequence in a turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TurnPart {
    /// The sequence.
    pub sequence: SequenceId,
    /// The position of the first of the tokens.
    pub start: usize,
    /// The tokens; never empty.
    pub tokens: Vec<u32>,
    /// The blocks of the sequence's keys and values, from position 0 on.
    pub blocks: Vec<BlockId>,
    /// True if a token is drawn behind the last of these.
    pub draws: bool,
    /// The adapter that the sequence is computed with.
    pub adapter: Option<u32>,
}

impl Turn {
    /// Tokens of all parts.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.parts.iter().map(|part| part.tokens.len()).sum()
    }

    /// Returns whether there is nothing to do.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }
}

/// Prints one line, such as `turn 7: #3 0..512, #1 800 draws; preempted #5`.
impl fmt::Display for Turn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "turn {}:", self.number)?;
        for (i, part) in self.parts.iter().enumerate() {
            let comma = if i > 0 { "," } else { "" };
            let (start, end) = (part.start, part.start + part.tokens.len());
            let range = if end == start + 1 { start.to_string() } else { format!("{start}..{end}") };
            write!(f, "{comma} {} {range}{}", part.sequence, if part.draws { " draws" } else { "" })?;
        }
        for (i, sequence) in self.preempted.iter().enumerate() {
            write!(f, "{} {sequence}", if i == 0 { "; preempted" } else { "," })?;
        }
        Ok(())
    }
}
