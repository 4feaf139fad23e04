//! Rules that change the logits of single tokens.

/// Rules that change the logits of single tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LogitRules {
    /// Logits that become larger or smaller.
    pub biases: Vec<TokenBias>,
    /// Tokens that end a text; they do not come before the text has `min_tokens`.
    pub end_ids: Vec<u32>,
    /// Tokens that a text has at least before one of `end_ids` comes.
    pub min_tokens: u64,
}

/// A number that is added to a token's logit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenBias {
    /// The token.
    pub id: u32,
    /// The number.
    pub bias: f32,
}

impl LogitRules {
    /// Whether no logit changes.
    #[must_use]
    pub fn are_none(&self) -> bool {
        self.biases.is_empty() && (self.min_tokens == 0 || self.end_ids.is_empty())
    }

    /// Changes the logits of the token behind `sequence_len` tokens that were drawn.
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
