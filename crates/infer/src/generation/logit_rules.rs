//! Rules that change the logits of single tokens.

/// Rules that change the logits of single tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LogitRules {
    /// Biases added to the logits of tokens.
    pub biases: Vec<TokenBias>,
    /// Tokens that end a text; they are excluded until the text has `min_tokens`.
    pub end_ids: Vec<u32>,
    /// The least number of tokens before one of `end_ids`.
    pub min_tokens: u64,
}

/// A bias added to one token's logit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenBias {
    /// The token.
    pub id: u32,
    /// The number.
    pub bias: f32,
}

impl LogitRules {
    /// Returns whether there is no rule.
    #[must_use]
    pub fn are_none(&self) -> bool {
        self.biases.is_empty() && (self.min_tokens == 0 || self.end_ids.is_empty())
    }

    /// Changes the logits of the token that follows `sequence_len` drawn tokens.
    pub(super) fn apply(&self, logits: &mut [f32], sequence_len: u64) {
        for &TokenBias { id, bias } in &self.biases {
            if let Some(logit) = logits.get_mut(id as usize) {
                *logit += bias;
            }
        }
        for &id in self.end_ids.iter().filter(|_| sequence_len < self.min_tokens) {
            if let Some(logit) = logits.get_mut(id as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
    }
}
