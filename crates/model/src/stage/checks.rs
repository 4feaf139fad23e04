//! Checks of the tokens that a stage is given.

use moeworks_ops::head_loss::IGNORE;

use super::Stage;
use crate::config::PositionKind;
use crate::pass::{BatchError, TokenBatch};

impl Stage {
    /// Checks the sequences of a batch, their pieces and their targets.
    pub(crate) fn check_batch(&self, batch: &TokenBatch<'_>) -> Result<(), BatchError> {
        self.check_shape(batch)?;
        batch.check_segments()?;
        match self.why_not_ragged().filter(|_| batch.has_pieces()) {
            Some(reason) => Err(BatchError::NoSegments(reason)),
            None => Ok(()),
        }
    }

    /// Checks the sequences of a batch and their targets.
    pub(crate) fn check_shape(&self, batch: &TokenBatch<'_>) -> Result<(), BatchError> {
        let TokenBatch { inputs, targets, num_sequences, seq_len, .. } = *batch;
        for (what, len) in [("inputs", inputs.len()), ("targets", targets.len())] {
            if num_sequences.checked_mul(seq_len) != Some(len) {
                return Err(BatchError::Length { what, len, num_sequences, seq_len });
            }
        }
        if inputs.is_empty() && self.ranks.is_none() {
            return Err(BatchError::Empty);
        }
        self.check_len(seq_len)?;
        self.check_ids("inputs", inputs)?;
        let vocab_size = self.config.vocab_size;
        match targets.iter().position(|&id| id != IGNORE && id as usize >= vocab_size) {
            Some(index) => Err(BatchError::Id { what: "targets", index, id: targets[index], vocab_size }),
            None => Ok(()),
        }
    }

    /// The reason why the stage's passes cannot hold sequences of different lengths; none if they can.
    pub(crate) fn why_not_ragged(&self) -> Option<&'static str> {
        let variant = &self.config.variant;
        if variant.encoder.is_some() {
            return Some("a model with an encoder answers one source each");
        }
        if !self.is_limited() {
            return Some("relative positions are those of sequences that are equally long");
        }
        (variant.expert_capacity > 0).then_some("the model's experts take a share of each sequence, all equally long")
    }

    /// Whether the positions of a sequence have an end.
    fn is_limited(&self) -> bool {
        !matches!(self.config.variant.positions, PositionKind::Relative { .. })
    }

    /// Tokens that a sequence of `len` can still get; [`usize::MAX`] where positions have no end.
    pub(crate) fn room(&self, len: usize) -> usize {
        if self.is_limited() { self.config.max_seq_len.saturating_sub(len) } else { usize::MAX }
    }

    /// Refuses a sequence of `len` tokens that is longer than the positions reach.
    pub(crate) fn check_len(&self, len: usize) -> Result<(), BatchError> {
        let max_seq_len = self.config.max_seq_len;
        if self.is_limited() && len > max_seq_len { Err(BatchError::TooLong { len, max_seq_len }) } else { Ok(()) }
    }

    pub(crate) fn check_ids(&self, what: &'static str, ids: &[u32]) -> Result<(), BatchError> {
        let vocab_size = self.config.vocab_size;
        match ids.iter().position(|&id| id as usize >= vocab_size) {
            Some(index) => Err(BatchError::Id { what, index, id: ids[index], vocab_size }),
            None => Ok(()),
        }
    }
}
