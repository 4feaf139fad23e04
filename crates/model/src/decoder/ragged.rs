//! Passes over sequences of different lengths with a paged KV cache.

use std::collections::BTreeMap;

use moeworks_moe::{ExpertIds, MoeSaved};
use moeworks_ops::Context;
use moeworks_ops::elementwise::copy_rows;
use moeworks_tensor::{DType, Tensor};

use super::Decoder;
use crate::layers::segments::Segments;
use crate::layers::{ResidualStream, Sequences};
use crate::mode::Mode;
use crate::paged_kv_cache::PagedKvCache;
use crate::pass::{BatchError, SequencePart, WantedLogits};
use crate::stage::{Ids, RoutingHook};
use crate::weights::DecoderWeights;

impl Decoder {
    /// Fails if the model supports only sequences of equal length in a pass.
    pub fn check_ragged(&self) -> Result<(), BatchError> {
        let reason = self.stage.why_not_ragged();
        let reason =
            reason.or_else(|| self.encoder.is_some().then_some("a model with an encoder answers one source each"));
        reason.map_or(Ok(()), |reason| Err(BatchError::NotRagged(reason)))
    }

    /// Passes the next tokens of several sequences, any number of each, and writes their keys and values to their
    /// blocks in `cache`. Returns the logits `[R, V]` f32 of the tokens that ask for them, in the order of the parts;
    /// `[0, V]` if none do. `hook` sees the routing of each MoE layer for the tokens of all parts.
    ///
    /// On a batch-invariant context a sequence gets the bits that it gets alone. With expert parallelism the idle
    /// ranks [serve](Self::serve_inference); with tensor parallelism all ranks of a group pass the same parts.
    ///
    /// # Errors
    /// If a part does not fit the model or the cache, or if two parts would write to the same block. Nothing has been
    /// computed then.
    pub fn forward_ragged(
        &self,
        ctx: &Context,
        weights: &DecoderWeights,
        cache: &mut PagedKvCache,
        parts: &[SequencePart<'_>],
        mut hook: Option<RoutingHook<'_>>,
    ) -> Result<Tensor, BatchError> {
        self.check_parts(cache, parts)?;
        let gathered = self.stage.gathered(ctx, weights);
        let weights = gathered.as_ref().unwrap_or(weights);
        let num_rows = parts.iter().map(SequencePart::num_logits).sum();
        let mut logits = ctx.zeros_on_device(&[num_rows, self.config().vocab_size], DType::F32);
        let mut first_rows = Vec::new();
        let mut next_row = 0;
        for part in parts {
            first_rows.push(next_row);
            next_row += part.num_logits();
        }
        let mut tell = |layer: usize, saved: &MoeSaved| {
            if let Some(hook) = &mut hook {
                hook(layer, saved);
            }
        };
        for indices in self.ragged_groups(parts) {
            let group: Vec<SequencePart<'_>> = indices.iter().map(|&index| parts[index]).collect();
            let found = self.ragged_pass(ctx, weights, cache, &group, Some(&mut tell));
            self.check_ranks()?;
            if indices.len() == parts.len() {
                return Ok(found);
            }
            let mut row = 0;
            for (part, &index) in group.iter().zip(&indices) {
                copy_rows(ctx, &found, row, &mut logits, first_rows[index], part.num_logits());
                row += part.num_logits();
            }
        }
        Ok(logits)
    }

    /// Runs one pass over checked parts of one [group](Self::ragged_groups).
    fn ragged_pass(
        &self,
        ctx: &Context,
        weights: &DecoderWeights,
        cache: &mut PagedKvCache,
        parts: &[SequencePart<'_>],
        hook: Option<RoutingHook<'_>>,
    ) -> Tensor {
        let ids: Vec<u32> = parts.iter().flat_map(|part| part.ids).copied().collect();
        let segments = Segments::paged(parts, cache.block_len());
        let sequences = Sequences::whole(1, ids.len());
        let mut pass = self.pass(ctx, weights, Mode::Infer, sequences, Ids::Known(&ids), None);
        self.stage.set_segments(&mut pass, segments);
        let expert_ids = concat_expert_ids(ctx, parts);
        pass.expert_ids = &expert_ids;
        let stream = ResidualStream { x: self.stage.embed(&pass, weights, Ids::Known(&ids)), router_logits: None };
        let x = self.stage.forward_layers(&pass, weights, stream, Some(cache.layers_mut()), hook).x;
        let num_rows = parts.iter().map(SequencePart::num_logits).sum();
        if num_rows == 0 {
            return ctx.empty(&[0, self.config().vocab_size], DType::F32);
        }
        let mut wanted = ctx.empty_on_device(&[num_rows, self.config().width], DType::F32);
        let (mut end, mut row) = (0, 0);
        for part in parts {
            end += part.ids.len();
            let count = part.num_logits();
            copy_rows(ctx, &x, end - count, &mut wanted, row, count);
            row += count;
        }
        self.stage.head_logits(ctx, weights, &wanted)
    }

    /// Groups the parts, by their indices; each group takes one pass, in this order. Parts below and beyond the
    /// length at which a rotary embedding changes are in different groups; so are parts with and without expert ids.
    /// A hook of [`Self::forward_ragged`] sees tokens in this order.
    #[must_use]
    pub fn ragged_groups(&self, parts: &[SequencePart<'_>]) -> Vec<Vec<usize>> {
        let bound = self.config().variant.rotary.changes_beyond().unwrap_or(usize::MAX);
        let mut groups = BTreeMap::<_, Vec<usize>>::new();
        for (index, part) in parts.iter().enumerate() {
            groups.entry((part.end() > bound, !part.expert_ids.is_empty())).or_default().push(index);
        }
        groups.into_values().collect()
    }

    fn check_parts(&self, cache: &PagedKvCache, parts: &[SequencePart<'_>]) -> Result<(), BatchError> {
        self.check_ragged()?;
        if parts.is_empty() || parts.iter().any(|part| part.ids.is_empty()) {
            return Err(BatchError::Empty);
        }
        for (sequence, part) in parts.iter().enumerate() {
            if let Some(adapter) = part.adapter {
                return Err(BatchError::NoAdapter { sequence, adapter });
            }
            self.stage.check_ids("prompt", part.ids)?;
            self.stage.check_expert_ids(part.ids.len(), part.expert_ids)?;
            self.check_len(part.end())?;
            check_blocks(cache, sequence, part)?;
        }
        check_written(cache, parts)
    }
}

impl SequencePart<'_> {
    /// Returns the position after the last token.
    fn end(&self) -> usize {
        self.start.saturating_add(self.ids.len())
    }

    /// Returns the number of tokens whose logits are wanted.
    fn num_logits(&self) -> usize {
        match self.logits {
            WantedLogits::None => 0,
            WantedLogits::Last => 1,
            WantedLogits::All => self.ids.len(),
        }
    }
}

/// Concatenates the expert ids of all tokens of a pass for each MoE layer; empty if the parts have none.
fn concat_expert_ids(ctx: &Context, parts: &[SequencePart<'_>]) -> Vec<ExpertIds> {
    let num_layers = parts.first().map_or(0, |part| part.expert_ids.len());
    let layer = |layer: usize| {
        let groups: Vec<&ExpertIds> = parts.iter().map(|part| &part.expert_ids[layer]).collect();
        ExpertIds::concat(ctx, &groups)
    };
    (0..num_layers).map(layer).collect()
}

/// Checks that a part has enough blocks and that the cache has them.
fn check_blocks(cache: &PagedKvCache, sequence: usize, part: &SequencePart<'_>) -> Result<(), BatchError> {
    let (num_blocks, block_len) = (cache.num_blocks(), cache.block_len());
    if part.blocks.len().saturating_mul(block_len) < part.end() {
        let (num_blocks, num_tokens) = (part.blocks.len(), part.end());
        return Err(BatchError::FewBlocks { sequence, num_blocks, block_len, num_tokens });
    }
    match part.blocks.iter().find(|&&block| block as usize >= num_blocks) {
        Some(&block) => Err(BatchError::NoBlock { sequence, block, num_blocks }),
        None => Ok(()),
    }
}

/// Checks that no part uses a block that another writes to, and that no part writes twice to the same block.
fn check_written(cache: &PagedKvCache, parts: &[SequencePart<'_>]) -> Result<(), BatchError> {
    let block_len = cache.block_len();
    let used = |part: &SequencePart<'_>| part.end().div_ceil(block_len);
    let mut writers = vec![None; cache.num_blocks()];
    for (sequence, part) in parts.iter().enumerate() {
        for &block in &part.blocks[part.start / block_len..used(part)] {
            if let Some(other) = writers[block as usize].replace(sequence) {
                return Err(BatchError::SharedBlock { sequence, block, other });
            }
        }
    }
    for (other, part) in parts.iter().enumerate() {
        for &block in &part.blocks[..part.start / block_len] {
            if let Some(sequence) = writers[block as usize] {
                return Err(BatchError::SharedBlock { sequence, block, other });
            }
        }
    }
    Ok(())
}
