//! What a decoder asks of the tokens that it is given.

use moeworks_ops::head_loss::IGNORE;

use super::Decoder;
use crate::config::PositionKind;
use crate::encoder::SourceBatch;
use crate::pass::{BatchError, TokenBatch};

impl Decoder {
    /// Fails if the model is one that can be used but not trained as it lies on ranks.
    pub fn check_trainable(&self) -> Result<(), BatchError> {
        let has_more = self.encoder.is_some() || matches!(self.config.variant.positions, PositionKind::Relative { .. });
        if has_more && self.ranks.is_some() {
            let what =
                "a model with an encoder or relative positions is trained on one rank alone (--ep 1 --dp 1 --tp 1)";
            return Err(BatchError::NotTrainable(what));
        }
        Ok(())
    }

    /// Checks a batch, with sources where there is an encoder to read them.
    pub(super) fn check_batch(&self, batch: &TokenBatch<'_>) -> Result<(), BatchError> {
        match (&self.encoder, batch.sources) {
            (Some(_), []) => return Err(BatchError::NoSource),
            (None, [_, ..]) => return Err(BatchError::NoEncoder),
            (None, []) => {}
            (Some(_), _) => self.check_sources(&batch.source_batch())?,
        }
        self.check_shape(batch)?;
        batch.check_segments()?;
        match &self.encoder {
            Some(_) if batch.has_pieces() => {
                Err(BatchError::NoSegments("a model with an encoder answers one source each"))
            }
            None if batch.has_pieces() => Err(BatchError::NoSegments("this version does not compute them yet")),
            _ => Ok(()),
        }
    }

    pub(crate) fn check_sources(&self, sources: &SourceBatch<'_>) -> Result<(), BatchError> {
        let SourceBatch { ids, num_sequences } = *sources;
        let seq_len = ids.len() / num_sequences.max(1);
        match num_sequences.checked_mul(seq_len) {
            Some(len) if len == ids.len() && len > 0 => self.check_ids("sources", ids),
            _ if ids.is_empty() => Err(BatchError::Empty),
            _ => Err(BatchError::Length { what: "sources", len: ids.len(), num_sequences, seq_len }),
        }
    }

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

    /// How many tokens a sequence of `len` can still get; [`usize::MAX`] where positions have no end.
    #[must_use]
    pub fn room(&self, len: usize) -> usize {
        let is_limited = !matches!(self.config.variant.positions, PositionKind::Relative { .. });
        if is_limited { self.config.max_seq_len.saturating_sub(len) } else { usize::MAX }
    }

    /// Refuses a sequence of `len` tokens that is longer than the positions reach.
    pub fn check_len(&self, len: usize) -> Result<(), BatchError> {
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
