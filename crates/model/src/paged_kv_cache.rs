//! A paged KV cache: keys and values of many sequences in blocks of equal length (PagedAttention, Kwon et al.,
//! 2309.06180, section 4).
//!
//! The cache has blocks, and its owner assigns them to sequences. Sequences with a common prefix may share blocks.

use moeworks_ops::Context;
use moeworks_ops::attention::{KeyRows, RaggedSequence};
use moeworks_ops::elementwise::copy_rows;
use moeworks_ops::quantized::dequantize;
use moeworks_tensor::{DType, Tensor};

use crate::config::ModelConfig;
use crate::kv_cache::{Identity, LayerKv};
use crate::kv_type::KvType;

/// The keys and values of many sequences, in every layer, in blocks.
pub struct PagedKvCache {
    layers: Vec<PagedLayer>,
    num_blocks: usize,
    block_len: usize,
    /// The copies since the last pass, which ranks with other layers still have to make.
    copies: Vec<BlockCopy>,
    identity: Identity,
}

/// A copy of a block to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockCopy {
    pub(crate) from: u32,
    pub(crate) to: u32,
}

/// The blocks of one layer.
pub(crate) struct PagedLayer {
    /// The rotated keys and the values, or the latent vectors: `[num_blocks block_len, ..]` each. Empty before the
    /// first token.
    kept: Vec<Tensor>,
    num_rows: usize,
    kv_type: KvType,
}

/// Consecutive rows of a pass that go to consecutive rows of a paged cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowRun {
    /// The first row in the pass.
    pub(crate) from: usize,
    /// The first row in the cache.
    pub(crate) to: usize,
    /// Rows.
    pub(crate) count: usize,
}

impl PagedKvCache {
    /// Returns an empty cache of `num_blocks` blocks of `block_len` tokens for a model of `config`, in the type of
    /// activations. Memory is allocated at the first token.
    #[must_use]
    pub fn new(config: &ModelConfig, num_blocks: usize, block_len: usize) -> Self {
        let kv_type = KvType::Activations;
        let layer = |_| PagedLayer { kept: Vec::new(), num_rows: num_blocks * block_len, kv_type };
        let layers = (0..config.num_layers).map(layer).collect();
        Self { layers, num_blocks, block_len, copies: Vec::new(), identity: Identity::default() }
    }

    /// Keeps keys and values in this type, which must [fit](KvType::check) the model. On a GPU it must be that of
    /// activations.
    #[must_use]
    pub fn with_type(mut self, kv_type: KvType) -> Self {
        self.layers.iter_mut().for_each(|layer| layer.kv_type = kv_type);
        self
    }

    /// Returns the type of keys and values.
    #[must_use]
    pub fn kv_type(&self) -> KvType {
        self.layers.first().map_or(KvType::Activations, |layer| layer.kv_type)
    }

    /// Returns the number of blocks.
    #[must_use]
    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// Returns the number of tokens of a block.
    #[must_use]
    pub fn block_len(&self) -> usize {
        self.block_len
    }

    /// Returns the bytes of a token in all layers of a model of `config`, with keys and values of type `dtype`.
    #[must_use]
    pub fn bytes_per_token(config: &ModelConfig, dtype: DType) -> usize {
        let numbers = match config.variant.latent {
            Some(latent) => latent.kv_rank + latent.rotary_dim,
            None => config.num_kv_heads * (config.head_dim + config.value_dim()),
        };
        config.num_layers * numbers * dtype.size() / dtype.block_len()
    }

    /// Returns the allocated bytes; 0 before the first token.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        self.layers.iter().flat_map(|layer| &layer.kept).map(Tensor::num_bytes).sum()
    }

    /// Copies block `from` to block `to` in every layer.
    ///
    /// # Panics
    /// Panics if there is no such block.
    pub fn copy_block(&mut self, ctx: &Context, from: u32, to: u32) {
        self.copies.push(BlockCopy { from, to });
        let len = self.block_len;
        for kept in self.layers.iter_mut().flat_map(|layer| &mut layer.kept) {
            let mut block = ctx.empty_on_device(&[len, kept.cols()], kept.dtype());
            copy_kept(ctx, kept, &mut block, &RowRun { from: from as usize * len, to: 0, count: len });
            copy_kept(ctx, &block, kept, &RowRun { from: 0, to: to as usize * len, count: len });
        }
    }

    /// Takes the copies of blocks since the last pass.
    pub(crate) fn take_copies(&mut self) -> Vec<BlockCopy> {
        std::mem::take(&mut self.copies)
    }

    /// Returns what tells this cache from others.
    pub(crate) fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Returns the blocks of the layers.
    pub(crate) fn layers_mut(&mut self) -> Vec<LayerKv<'_>> {
        self.layers.iter_mut().map(LayerKv::Paged).collect()
    }
}

impl PagedLayer {
    /// Writes the rows of a pass, one per token in each tensor of `new`, to the rows given by `runs`.
    pub(crate) fn write(&mut self, ctx: &Context, new: &[&Tensor], runs: &[RowRun]) {
        let new: Vec<Tensor> = new.iter().map(|new| self.kv_type.converted(ctx, new)).collect();
        if self.kept.is_empty() {
            self.kept = new.iter().map(|new| ctx.zeros_on_device(&[self.num_rows, new.cols()], new.dtype())).collect();
        }
        for (kept, new) in self.kept.iter_mut().zip(&new) {
            for run in runs {
                copy_kept(ctx, new, kept, run);
            }
        }
    }

    /// Returns true if the tensors have to be [decoded](Self::decoded) before attention reads them.
    pub(crate) fn is_quantized(&self) -> bool {
        self.kept.iter().any(|kept| kept.dtype().is_quantized())
    }

    /// Returns the rows of the keys of `sequences`, one behind the other, as `dtype`.
    pub(crate) fn decoded(&self, ctx: &Context, sequences: &[RaggedSequence<'_>], dtype: DType) -> Vec<Tensor> {
        let num_rows = sequences.iter().map(|sequence| sequence.num_keys).sum();
        let decode = |kept: &Tensor| {
            let mut rows = ctx.empty(&[num_rows, kept.cols()], kept.dtype());
            let mut first = 0;
            for run in sequences.iter().flat_map(key_runs) {
                copy_kept(ctx, kept, &mut rows, &RowRun { to: first, ..run });
                first += run.count;
            }
            dequantize(ctx, &rows, dtype)
        };
        self.kept.iter().map(decode).collect()
    }

    /// Returns the tensors in the order of [`write`](Self::write).
    pub(crate) fn kept(&self) -> &[Tensor] {
        &self.kept
    }
}

/// Copies consecutive rows of any type from `x` to `y`.
fn copy_kept(ctx: &Context, x: &Tensor, y: &mut Tensor, run: &RowRun) {
    let &RowRun { from, to, count } = run;
    if !x.dtype().is_quantized() {
        return copy_rows(ctx, x, from, y, to, count);
    }
    let row = x.cols() / x.dtype().block_len() * x.dtype().size();
    y.bytes_mut()[to * row..][..count * row].copy_from_slice(&x.bytes()[from * row..][..count * row]);
}

/// Returns the rows of a sequence's keys.
fn key_runs(sequence: &RaggedSequence<'_>) -> Vec<RowRun> {
    match sequence.keys {
        KeyRows::Consecutive { first } => vec![RowRun { from: first, to: 0, count: sequence.num_keys }],
        KeyRows::Blocks { blocks, block_len } => {
            // Rows of the cache are those that are read.
            let runs = row_runs(0, 0, sequence.num_keys, blocks, block_len);
            runs.into_iter().map(|run| RowRun { from: run.to, to: run.from, count: run.count }).collect()
        }
    }
}

/// Returns the runs of rows of `count` tokens from position `start` on in the sequence's `blocks`; in the pass they
/// are the rows from `first` on.
pub(crate) fn row_runs(first: usize, start: usize, count: usize, blocks: &[u32], block_len: usize) -> Vec<RowRun> {
    let mut runs: Vec<RowRun> = Vec::new();
    let (mut position, end) = (start, start + count);
    while position < end {
        let (block, offset) = (blocks[position / block_len] as usize, position % block_len);
        let (from, to) = (first + position - start, block * block_len + offset);
        let count = (block_len - offset).min(end - position);
        match runs.last_mut() {
            Some(last) if last.to + last.count == to => last.count += count,
            _ => runs.push(RowRun { from, to, count }),
        }
        position += count;
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_a_pass_go_to_the_rows_of_their_blocks() {
        let run = |from, to, count| RowRun { from, to, count };
        assert_eq!(row_runs(5, 0, 6, &[7, 2], 4), [run(5, 28, 4), run(9, 8, 2)]);
        assert_eq!(row_runs(0, 3, 4, &[1, 2], 4), [run(0, 7, 4)], "blocks that follow each other make one run");
        assert_eq!(row_runs(3, 5, 1, &[0, 9, 1], 4), [run(3, 37, 1)]);
        assert_eq!(row_runs(3, 5, 0, &[], 4), []);
    }
}
