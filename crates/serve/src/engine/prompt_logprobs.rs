//! The log-probabilities of a prompt's tokens, which come piece by piece.

use moeworks_infer::generation::TokenLogprobs;

use crate::scheduler::TurnPart;

/// The log-probabilities of a prompt's tokens as far as they are known.
pub(super) struct PromptLogprobs {
    prompt: Vec<u32>,
    num_top: usize,
    /// Log-probabilities of the second token and of the ones behind it.
    found: Vec<TokenLogprobs>,
}

impl PromptLogprobs {
    pub(super) fn new(prompt: &[u32], num_top: usize) -> Self {
        Self { prompt: prompt.to_vec(), num_top, found: Vec::with_capacity(prompt.len().saturating_sub(1)) }
    }

    /// Returns whether a part has logits of tokens that are not known yet. A sequence that lost its blocks passes the
    /// others again.
    pub(super) fn needs(&self, part: &TurnPart) -> bool {
        let end = part.start + part.tokens.len();
        self.found.len() + 1 < self.prompt.len() && end > self.found.len()
    }

    /// Adds those of a part, a row of logits for each of its tokens. Returns whether all are numbers.
    pub(super) fn add<'a>(&mut self, part: &TurnPart, rows: impl Iterator<Item = &'a [f32]>) -> bool {
        for (row, place) in rows.zip(part.start + 1..) {
            if place != self.found.len() + 1 || place >= self.prompt.len() {
                continue;
            }
            let found = TokenLogprobs::from_logits(row, self.prompt[place], self.num_top);
            if !found.is_number() {
                return false;
            }
            self.found.push(found);
        }
        true
    }

    pub(super) fn into_found(self) -> Vec<TokenLogprobs> {
        self.found
    }
}
