//! The bounds that a scheduler keeps, and what it refuses.

/// The bounds that a scheduler keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Blocks of keys and values.
    pub num_blocks: usize,
    /// Tokens of a block.
    pub block_len: usize,
    /// Tokens of a turn at most. Sequences that draw come first; prompts share the rest.
    pub turn_tokens: usize,
    /// Sequences that hold blocks at most.
    pub max_running: usize,
    /// Sequences that wait at most; further ones are refused.
    pub max_waiting: usize,
    /// Turns after which a waiting sequence counts as one of the next higher priority, so that none waits for ever.
    pub turns_to_rise: u64,
    /// True if sequences use blocks of others with the same beginning.
    pub has_prefix_cache: bool,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            num_blocks: 1024,
            block_len: 16,
            turn_tokens: 512,
            max_running: 64,
            max_waiting: 1024,
            turns_to_rise: 1000,
            has_prefix_cache: true,
        }
    }
}

impl Limits {
    /// Tokens of a sequence at most: all blocks are its own then.
    #[must_use]
    pub fn max_sequence_tokens(&self) -> usize {
        self.num_blocks.saturating_mul(self.block_len)
    }

    /// Checks that every bound leaves something.
    ///
    /// # Errors
    /// Names the first bound that leaves nothing.
    pub fn check(&self) -> Result<(), LimitsError> {
        let least_one = [
            ("num_blocks", self.num_blocks),
            ("block_len", self.block_len),
            ("turn_tokens", self.turn_tokens),
            ("max_running", self.max_running),
            ("max_waiting", self.max_waiting),
            ("turns_to_rise", usize::try_from(self.turns_to_rise).unwrap_or(usize::MAX)),
        ];
        match least_one.into_iter().find(|(_, value)| *value == 0) {
            Some((name, _)) => Err(LimitsError::Zero { name }),
            None if self.turn_tokens < self.max_running => {
                Err(LimitsError::FewTokens { turn_tokens: self.turn_tokens, max_running: self.max_running })
            }
            None if self.num_blocks > u32::MAX as usize => Err(LimitsError::ManyBlocks { num_blocks: self.num_blocks }),
            None => Ok(()),
        }
    }
}

/// Bounds that no scheduler can keep.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LimitsError {
    /// A bound of 0.
    #[error("{name} = 0: must be at least 1")]
    Zero {
        /// The bound's name.
        name: &'static str,
    },
    /// A turn that cannot give each running sequence a token.
    #[error(
        "turn_tokens = {turn_tokens}: must be at least max_running, {max_running}, so that each sequence gets a token"
    )]
    FewTokens {
        /// Tokens of a turn.
        turn_tokens: usize,
        /// Sequences.
        max_running: usize,
    },
    /// More blocks than can be numbered.
    #[error("num_blocks = {num_blocks}: must be at most {}", u32::MAX)]
    ManyBlocks {
        /// Blocks.
        num_blocks: usize,
    },
}

/// A sequence that a scheduler does not take.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// There is no token to begin with.
    #[error("the prompt is empty: at least one token is needed")]
    EmptyPrompt,
    /// No token is asked for.
    #[error("max_new_tokens = 0: at least one token has to be asked for")]
    NoNewTokens,
    /// The sequence would not fit if it were alone.
    #[error(
        "a prompt of {prompt_len} tokens and {max_new_tokens} new ones need more than the {most} tokens that there is room for"
    )]
    TooLong {
        /// Tokens of the prompt.
        prompt_len: usize,
        /// New tokens at most.
        max_new_tokens: usize,
        /// Tokens of a sequence at most.
        most: usize,
    },
    /// The queue is full.
    #[error("{max_waiting} requests are waiting already, and no more may")]
    QueueFull {
        /// Sequences that may wait.
        max_waiting: usize,
    },
}
