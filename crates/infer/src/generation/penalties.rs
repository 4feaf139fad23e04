//! Penalties on tokens that have occurred.
//!
//! The repetition penalty is that of Keskar et al., "CTRL: A Conditional Transformer Language Model for Controllable
//! Generation" (2019), section 4.1, as `transformers` applies it: the logit of a token that has occurred is divided
//! by it if positive, and multiplied if negative. The prompt counts too. Presence and frequency penalties are
//! subtracted from the logits of generated tokens, as in OpenAI's API and vLLM.

use std::collections::HashMap;

/// The penalties on tokens that have occurred.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Penalties {
    /// The divisor of positive logits of tokens in the prompt or the answer, and the factor of negative ones; 1 for
    /// none.
    pub repetition: f32,
    /// The amount subtracted from the logits of generated tokens; 0 for none.
    pub presence: f32,
    /// The amount subtracted from a token's logit for each time that it was generated; 0 for none.
    pub frequency: f32,
    /// The number of last tokens that count; `None` for all.
    pub last: Option<usize>,
}

impl Default for Penalties {
    fn default() -> Self {
        Self { repetition: 1.0, presence: 0.0, frequency: 0.0, last: None }
    }
}

impl Penalties {
    /// Returns whether no penalty changes a logit.
    #[must_use]
    pub fn are_none(&self) -> bool {
        let is_neutral = self.repetition == 1.0 && self.presence == 0.0 && self.frequency == 0.0;
        is_neutral || self.last == Some(0)
    }
}

/// The number of occurrences of a token.
#[derive(Clone, Copy, Debug, Default)]
struct Count {
    /// Occurrences in the prompt and the answer.
    all: u32,
    /// Occurrences in the answer alone.
    generated: u32,
}

/// The counts of the tokens of a sequence so far.
#[derive(Clone, Debug)]
pub(super) struct History {
    penalties: Penalties,
    /// The tokens of prompt and answer, in order.
    ids: Vec<u32>,
    prompt_len: usize,
    /// The occurrences of each token that counts.
    counts: HashMap<u32, Count>,
}

impl History {
    pub(super) fn new(penalties: Penalties) -> Self {
        Self { penalties, ids: Vec::new(), prompt_len: 0, counts: HashMap::new() }
    }

    /// Begins a sequence with its prompt.
    pub(super) fn begin(&mut self, prompt: &[u32]) {
        *self = Self::new(self.penalties);
        self.prompt_len = prompt.len();
        prompt.iter().for_each(|&id| self.push(id));
    }

    /// Adds a token, and drops one that no longer counts.
    pub(super) fn push(&mut self, id: u32) {
        self.ids.push(id);
        self.count_at(self.ids.len() - 1, |count| *count += 1);
        if let Some(left) = self.penalties.last.and_then(|last| (self.ids.len() - 1).checked_sub(last)) {
            self.count_at(left, |count| *count -= 1);
        }
    }

    fn count_at(&mut self, position: usize, change: impl Fn(&mut u32)) {
        let id = self.ids[position];
        let count = self.counts.entry(id).or_default();
        change(&mut count.all);
        if position >= self.prompt_len {
            change(&mut count.generated);
        }
        if count.all == 0 {
            self.counts.remove(&id);
        }
    }

    /// Changes the logits of the tokens that count.
    pub(super) fn apply(&self, logits: &mut [f32]) {
        let Penalties { repetition, presence, frequency, .. } = self.penalties;
        for (&id, count) in &self.counts {
            let Some(logit) = logits.get_mut(id as usize) else { continue };
            *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
            if count.generated > 0 {
                *logit -= presence + frequency * count.generated as f32;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn applied(penalties: Penalties, prompt: &[u32], generated: &[u32]) -> Vec<f32> {
        let mut history = History::new(penalties);
        history.begin(&[3, 3, 3]);
        history.begin(prompt);
        generated.iter().for_each(|&id| history.push(id));
        let mut logits = [2.0, -2.0, 1.0, 4.0];
        history.apply(&mut logits);
        logits.to_vec()
    }

    #[test]
    fn repetition_divides_positive_logits_and_multiplies_negative_ones_once() {
        let penalties = Penalties { repetition: 2.0, ..Penalties::default() };
        // RepetitionPenaltyLogitsProcessor(2.0) of transformers, with input_ids 0, 1, 0, 9.
        assert_eq!(applied(penalties, &[0, 1], &[0, 9]), [1.0, -4.0, 1.0, 4.0]);
        assert_eq!(applied(Penalties { last: Some(1), ..penalties }, &[0, 1], &[3]), [2.0, -2.0, 1.0, 2.0]);
        assert!(Penalties { last: Some(0), ..penalties }.are_none());
    }

    #[test]
    fn presence_and_frequency_count_what_was_generated_alone() {
        let penalties = Penalties { presence: 0.5, frequency: 0.25, ..Penalties::default() };
        assert_eq!(applied(penalties, &[0, 1], &[2, 3, 3]), [2.0, -2.0, 0.25, 3.0]);
    }
}
