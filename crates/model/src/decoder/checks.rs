//! Checks of the tokens that a decoder is given.

use super::Decoder;
use crate::config::PositionKind;
use crate::encoder::SourceBatch;
use crate::pass::{BatchError, TokenBatch};

impl Decoder {
    /// Fails if the model can be used but not trained on its ranks.
    pub fn check_trainable(&self) -> Result<(), BatchError> {
        if self.rest.is_some() {
            return Err(BatchError::NotTrainable("its layers are on several ranks, for use"));
        }
        let has_relative = matches!(self.config().variant.positions, PositionKind::Relative { .. });
        if (self.encoder.is_some() || has_relative) && self.stage.ranks.is_some() {
            let what =
                "a model with an encoder or relative positions is trained on one rank alone (--ep 1 --dp 1 --tp 1)";
            return Err(BatchError::NotTrainable(what));
        }
        Ok(())
    }

    /// Checks a batch, and its sources if the model has an encoder.
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

    /// Returns the number of tokens that a sequence of `len` can still get; [`usize::MAX`] if positions are
    /// unlimited.
    #[must_use]
    pub fn room(&self, len: usize) -> usize {
        self.stage.room(len)
    }

    /// Fails if an id of a prompt is not in the vocabulary.
    pub fn check_prompt(&self, ids: &[u32]) -> Result<(), BatchError> {
        self.stage.check_ids("prompt", ids)
    }

    /// Fails if a sequence of `len` tokens is longer than positions allow.
    pub fn check_len(&self, len: usize) -> Result<(), BatchError> {
        self.stage.check_len(len)
    }
}
