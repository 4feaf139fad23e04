//! Checks of the tokens that a stage is given.

use moeworks_moe::{ExpertIds, MoeLayer};
use moeworks_ops::Context;
use moeworks_ops::head_loss::IGNORE;

use super::Stage;
use crate::config::PositionKind;
use crate::pass::{BatchError, ExpertIdShape, TokenBatch};

impl Stage {
    /// Checks a batch's sequences, segments, expert ids and targets.
    pub(crate) fn check_batch(&self, batch: &TokenBatch<'_>) -> Result<(), BatchError> {
        self.check_shape(batch)?;
        self.check_expert_ids(batch.inputs.len(), batch.expert_ids)?;
        batch.check_segments()?;
        match self.why_not_ragged().filter(|_| batch.has_pieces()) {
            Some(reason) => Err(BatchError::NoSegments(reason)),
            None => Ok(()),
        }
    }

    /// Checks a batch's sequences and targets.
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

    /// Checks lists of expert ids to use in [`TokenBatch::expert_ids`]: `[num_tokens, K]` for each MoE layer of the
    /// decoder, in order.
    ///
    /// # Errors
    /// If the number of lists is not that of the MoE layers, or if a layer does not accept its list
    /// ([`MoeLayer::expert_ids`](moeworks_moe::MoeLayer::expert_ids)).
    pub(crate) fn expert_ids(
        &self,
        ctx: &Context,
        num_tokens: usize,
        lists: &[Vec<u32>],
    ) -> Result<Vec<ExpertIds>, BatchError> {
        let moe_layers: Vec<_> =
            self.layers.iter().filter_map(|layer| Some((layer.index, layer.feed_forward.moe.as_ref()?))).collect();
        if lists.len() != moe_layers.len() {
            return Err(BatchError::ExpertIdLayers { found: lists.len(), expected: moe_layers.len() });
        }
        let checked = |((layer, moe), ids): ((usize, &MoeLayer), &Vec<u32>)| {
            moe.expert_ids(ctx, num_tokens, ids).map_err(|error| BatchError::ExpertIds { layer, error })
        };
        moe_layers.into_iter().zip(lists).map(checked).collect()
    }

    /// Checks that `expert_ids` are for the MoE layers of the decoder and for `num_tokens` tokens, unless they are
    /// empty.
    pub(crate) fn check_expert_ids(&self, num_tokens: usize, expert_ids: &[ExpertIds]) -> Result<(), BatchError> {
        if expert_ids.is_empty() {
            return Ok(());
        }
        let moe_layers: Vec<usize> = (0..self.config.num_layers).filter(|&i| self.config.is_moe_layer(i)).collect();
        if expert_ids.len() != moe_layers.len() {
            return Err(BatchError::ExpertIdLayers { found: expert_ids.len(), expected: moe_layers.len() });
        }
        let expected = ExpertIdShape { num_tokens, num_experts: self.config.moe().num_choosable() };
        for (layer, ids) in moe_layers.into_iter().zip(expert_ids) {
            let found = ExpertIdShape { num_tokens: ids.num_tokens(), num_experts: ids.num_experts() };
            if found != expected {
                return Err(BatchError::ExpertIdShape { layer, found, expected });
            }
        }
        Ok(())
    }

    /// Returns the reason why the stage cannot pass sequences of different lengths; none if it can.
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

    /// Returns true if positions are limited.
    fn is_limited(&self) -> bool {
        !matches!(self.config.variant.positions, PositionKind::Relative { .. })
    }

    /// Returns the number of tokens that a sequence of `len` can still get; [`usize::MAX`] if positions are
    /// unlimited.
    pub(crate) fn room(&self, len: usize) -> usize {
        if self.is_limited() { self.config.max_seq_len.saturating_sub(len) } else { usize::MAX }
    }

    /// Fails if a sequence of `len` tokens is longer than positions allow.
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
