//! What a decoder asks of the tokens that it is given.

use moeworks_ops::head_loss::IGNORE;

use super::Decoder;
use crate::config::PositionKind;
use crate::pass::{BatchError, TokenBatch};

impl Decoder {
    /// Fails if the model is one that can be used but not trained.
    pub fn check_trainable(&self) -> Result<(), BatchError> {
        if self.encoder.is_some() || matches!(self.config.variant.positions, PositionKind::Relative { .. }) {
            return Err(BatchError::NotTrainable("models with an encoder or relative positions are used, not trained"));
        }
        Ok(())
    }

    /// Checks a batch that comes without sources.
    pub(super) fn check_batch(&self, batch: &TokenBatch<'_>) -> Result<(), BatchError> {
        if self.encoder.is_some() { Err(BatchError::NoSource) } else { self.check_shape(batch) }
    }

    pub(crate) fn check_shape(&self, batch: &TokenBatch<'_>) -> Result<(), BatchError> {
        let TokenBatch { inputs, targets, num_sequences, seq_len } = *batch;
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

    /// How many tokens a sequence of `len` can still get; [`usize::MAX`] where positions have no end.
    #[must_use]
    pub fn room(&self, len: usize) -> usize {
        let is_limited = !matches!(self.config.variant.positions, PositionKind::Relative { .. });
        if is_limited { self.config.max_seq_len.saturating_sub(len) } else { usize::MAX }
    }

    pub(crate) fn check_len(&self, len: usize) -> Result<(), BatchError> {
        let max_seq_len = self.config.max_seq_len;
        let is_limited = !matches!(self.config.variant.positions, PositionKind::Relative { .. });
        if is_limited && len > max_seq_len { Err(BatchError::TooLong { len, max_seq_len }) } else { Ok(()) }
    }

    pub(super) fn check_ids(&self, what: &'static str, ids: &[u32]) -> Result<(), BatchError> {
        let vocab_size = self.config.vocab_size;
        match ids.iter().position(|&id| id as usize >= vocab_size) {
            Some(index) => Err(BatchError::Id { what, index, id: ids[index], vocab_size }),
            None => Ok(()),
        }
    }
}
