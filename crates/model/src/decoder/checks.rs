//! What a decoder asks of the tokens that it is given.

use super::Decoder;
use crate::config::PositionKind;
use crate::encoder::SourceBatch;
use crate::pass::{BatchError, TokenBatch};

impl Decoder {
    /// Fails if the model is one that can be used but not trained as it lies on ranks.
    pub fn check_trainable(&self) -> Result<(), BatchError> {
        let has_relative = matches!(self.config().variant.positions, PositionKind::Relative { .. });
        if (self.encoder.is_some() || has_relative) && self.stage.ranks.is_some() {
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
        self.stage.check_batch(batch)
    }

    pub(crate) fn check_sources(&self, sources: &SourceBatch<'_>) -> Result<(), BatchError> {
        let SourceBatch { ids, num_sequences } = *sources;
        let seq_len = ids.len() / num_sequences.max(1);
        match num_sequences.checked_mul(seq_len) {
            Some(len) if len == ids.len() && len > 0 => self.stage.check_ids("sources", ids),
            _ if ids.is_empty() => Err(BatchError::Empty),
            _ => Err(BatchError::Length { what: "sources", len: ids.len(), num_sequences, seq_len }),
        }
    }

    /// Tokens that a sequence of `len` can still get; [`usize::MAX`] where positions have no end.
    #[must_use]
    pub fn room(&self, len: usize) -> usize {
        self.stage.room(len)
    }

    /// Refuses the ids of a prompt that the vocabulary does not have.
    pub fn check_prompt(&self, ids: &[u32]) -> Result<(), BatchError> {
        self.stage.check_ids("prompt", ids)
    }

    /// Refuses a sequence of `len` tokens that is longer than the positions reach.
    pub fn check_len(&self, len: usize) -> Result<(), BatchError> {
        self.stage.check_len(len)
    }
}
