//! Passes over sequences of different lengths with a paged KV cache.

use std::collections::BTreeMap;

use moeworks_moe::ExpertIds;
use moeworks_ops::Context;
use moeworks_ops::elementwise::copy_rows;
use moeworks_tensor::{DType, Tensor};

use super::Decoder;
use super::stages::{CHOSEN_BY_ROUTERS, CacheMut, Layered};
use crate::layers::Sequences;
use crate::layers::segments::Segments;
use crate::mode::Mode;
use crate::paged_kv_cache::PagedKvCache;
use crate::pass::{BatchError, SequencePart, WantedLogits};
use crate::remote_stages::RemoteStages;
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
        let passes = self.ragged_passes(ctx, parts);
        let mut copies = cache.take_copies();
        let mut begun = Vec::with_capacity(passes.len());
        // Stages on other ranks compute a pass while this rank computes the next.
        for pass in &passes {
            let cache = CacheMut::Paged { cache, copies: std::mem::take(&mut copies) };
            begun.push(self.begin_ragged(ctx, weights, cache, pass, reborrow(&mut hook))?);
        }
        let is_one = passes.len() == 1;
        let num_rows = parts.iter().map(SequencePart::num_logits).sum();
        let mut logits = if is_one { None } else { Some(self.no_logits(ctx, num_rows)) };
        for (pass, layered) in passes.iter().zip(begun) {
            let x = self.end_layers(ctx, layered, reborrow(&mut hook))?;
            self.check_ranks()?;
            let found = self.ragged_logits(ctx, weights, pass, &x);
            let Some(logits) = &mut logits else { return Ok(found) };
            let mut row = 0;
            for piece in pass {
                let count = piece.part.num_logits();
                copy_rows(ctx, &found, row, logits, piece.first_row, count);
                row += count;
            }
        }
        Ok(logits.unwrap_or_else(|| self.no_logits(ctx, 0)))
    }

    fn no_logits(&self, ctx: &Context, num_rows: usize) -> Tensor {
        ctx.zeros_on_device(&[num_rows, self.config().vocab_size], DType::F32)
    }

    /// Divides checked parts into passes: one for each [group](Self::ragged_groups). On a batch-invariant context
    /// groups with many tokens are divided further, so that stages on several ranks compute at the same time.
    fn ragged_passes<'p>(&self, ctx: &Context, parts: &[SequencePart<'p>]) -> Vec<Vec<Piece<'p>>> {
        let mut first_rows = Vec::new();
        let mut next_row = 0;
        for part in parts {
            first_rows.push(next_row);
            next_row += part.num_logits();
        }
        let piece = |&index: &usize| Piece { part: parts[index], first_row: first_rows[index] };
        let most = self.rest.as_ref().filter(|_| ctx.is_batch_invariant()).map_or(1, RemoteStages::num_stages);
        let passes = self.ragged_groups(parts).into_iter().flat_map(|group| {
            let pieces: Vec<Piece<'p>> = group.iter().map(piece).collect();
            let num_tokens: usize = pieces.iter().map(|piece| piece.part.ids.len()).sum();
            divide(&pieces, (num_tokens / MIN_DIVIDED_TOKENS).clamp(1, most))
        });
        passes.collect()
    }

    /// Takes the tokens of a pass through the layers of this rank.
    fn begin_ragged(
        &self,
        ctx: &Context,
        weights: &DecoderWeights,
        cache: CacheMut<'_>,
        pieces: &[Piece<'_>],
        hook: Option<RoutingHook<'_>>,
    ) -> Result<Layered, BatchError> {
        let parts: Vec<SequencePart<'_>> = pieces.iter().map(|piece| piece.part).collect();
        let ids: Vec<u32> = parts.iter().flat_map(|part| part.ids).copied().collect();
        let block_len = match &cache {
            CacheMut::Paged { cache, .. } => cache.block_len(),
            CacheMut::Growing(_) | CacheMut::None => 0,
        };
        let segments = Segments::paged(&parts, block_len);
        let sequences = Sequences::whole(1, ids.len());
        let mut pass = self.pass(ctx, weights, Mode::Infer, sequences, Ids::Known(&ids), None);
        self.stage.set_segments(&mut pass, segments);
        let expert_ids = concat_expert_ids(ctx, &parts);
        pass.expert_ids = &expert_ids;
        self.begin_layers(&pass, weights, Ids::Known(&ids), cache, hook)
    }

    /// Returns the logits `[R, V]` of the tokens of a pass that ask for them; `x` is the stream after its last layer.
    fn ragged_logits(&self, ctx: &Context, weights: &DecoderWeights, pieces: &[Piece<'_>], x: &Tensor) -> Tensor {
        let num_rows = pieces.iter().map(|piece| piece.part.num_logits()).sum();
        if num_rows == 0 {
            return ctx.empty(&[0, self.config().vocab_size], DType::F32);
        }
        let mut wanted = ctx.empty_on_device(&[num_rows, self.config().width], DType::F32);
        let (mut end, mut row) = (0, 0);
        for Piece { part, .. } in pieces {
            end += part.ids.len();
            let count = part.num_logits();
            copy_rows(ctx, x, end - count, &mut wanted, row, count);
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
        if self.rest.is_some() && parts.iter().any(|part| !part.expert_ids.is_empty()) {
            return Err(BatchError::OnStages(CHOSEN_BY_ROUTERS));
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

/// The fewest tokens of a pass for which it is worth to divide a larger one: each reads all weights.
const MIN_DIVIDED_TOKENS: usize = 64;

/// A part in a pass.
#[derive(Clone, Copy)]
struct Piece<'a> {
    part: SequencePart<'a>,
    /// The first of its rows among all logits.
    first_row: usize,
}

impl Piece<'_> {
    /// Cuts the piece after `len` tokens.
    fn cut(self, len: usize) -> (Self, Self) {
        let Self { part, first_row } = self;
        let (ids, behind) = part.ids.split_at(len);
        let logits = if part.logits == WantedLogits::All { WantedLogits::All } else { WantedLogits::None };
        let first = SequencePart { ids, logits, ..part };
        let second = SequencePart { ids: behind, start: part.start + len, ..part };
        let second_row = first_row + first.num_logits();
        (Self { part: first, first_row }, Self { part: second, first_row: second_row })
    }
}

/// Divides a pass into `count` passes with equally many tokens, in the same order.
fn divide<'a>(pieces: &[Piece<'a>], count: usize) -> Vec<Vec<Piece<'a>>> {
    let num_tokens: usize = pieces.iter().map(|piece| piece.part.ids.len()).sum();
    let (mut passes, mut pass, mut num_taken) = (Vec::new(), Vec::new(), 0);
    for &piece in pieces {
        let mut rest = piece;
        loop {
            let left = num_tokens * (passes.len() + 1) / count - num_taken;
            if rest.part.ids.len() < left {
                num_taken += rest.part.ids.len();
                pass.push(rest);
                break;
            }
            num_taken += left;
            let is_all = rest.part.ids.len() == left;
            let (first, behind) = if is_all { (rest, rest) } else { rest.cut(left) };
            pass.push(first);
            passes.push(std::mem::take(&mut pass));
            if is_all {
                break;
            }
            rest = behind;
        }
    }
    passes
}

fn reborrow<'b>(hook: &'b mut Option<RoutingHook<'_>>) -> Option<RoutingHook<'b>> {
    hook.as_mut().map(|hook| &mut **hook as RoutingHook<'b>)
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
