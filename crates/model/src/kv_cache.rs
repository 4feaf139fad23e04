//! The KV cache of sequences that grow together: in every layer keys and values, or the latent vectors of latent
//! attention.
//!
//! A layer with a sliding window keeps the tokens in sight of the next one and has capacity for as many more, so that
//! rows are moved only once per window.

use std::ops::Range;
use std::sync::Arc;

use moeworks_ops::Context;
use moeworks_ops::attention::KEYS_OF_BLOCK;
use moeworks_ops::elementwise::{copy_rows_of_each, copy_some_rows_of_each};
use moeworks_tensor::{DType, Tensor};

use crate::config::ModelConfig;
use crate::layers::EncoderOutput;
use crate::paged_kv_cache::PagedLayer;

/// The initial capacity of a layer's cache in rows; without a window it doubles when full.
const FIRST_CAPACITY: usize = 64;

/// The KV cache of a sequence, or of several of equal length.
pub struct KvCache {
    layers: Vec<LayerCache>,
    num_sequences: usize,
    encoder_output: Option<EncoderOutput>,
    identity: Identity,
}

/// The identity of a cache, by which other ranks that hold layers of a model know it. It ends with the cache.
pub(crate) type Identity = Arc<()>;

/// The keys and values of a layer, to which the tokens of a pass are appended.
pub(crate) enum LayerKv<'a> {
    /// Sequences that grow together.
    Growing(&'a mut LayerCache),
    /// Sequences of any lengths in blocks.
    Paged(&'a mut PagedLayer),
}

/// The cache of one layer.
pub(crate) struct LayerCache {
    /// The tensors with a row per token, such as rotated keys, and values; `[sequences capacity, ..]` each. Empty
    /// before the first token.
    kept: Vec<Tensor>,
    num_sequences: usize,
    /// The number of rows in `kept` per sequence. Counted also if another rank has them.
    capacity: usize,
    /// The number of rows in use per sequence.
    held: usize,
    /// The number of tokens before these, which no later token sees.
    dropped: usize,
    /// The number of tokens that one sees at most, itself included; none: all before it.
    window: Option<usize>,
}

/// The width and the type of a tensor's rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowType {
    pub(crate) width: usize,
    pub(crate) dtype: DType,
}

impl RowType {
    /// Returns the type of the rows of `x`.
    pub(crate) fn new(x: &Tensor) -> Self {
        Self { width: x.cols(), dtype: x.dtype() }
    }
}

impl KvCache {
    /// Returns an empty cache for a model of `config`.
    #[must_use]
    pub fn new(config: &ModelConfig) -> Self {
        Self::with_sequences(config, 1)
    }

    /// Returns an empty cache for `num_sequences` sequences, at least one, that grow by equal numbers of tokens.
    #[must_use]
    pub fn with_sequences(config: &ModelConfig, num_sequences: usize) -> Self {
        assert!(num_sequences > 0, "a cache of no sequence");
        let layer = |i| LayerCache::new(num_sequences, config.window(i));
        let layers = (0..config.num_layers).map(layer).collect();
        Self { layers, num_sequences, encoder_output: None, identity: Identity::default() }
    }

    /// Returns the number of sequences.
    #[must_use]
    pub fn num_sequences(&self) -> usize {
        self.num_sequences
    }

    /// Returns an empty cache for a text that answers the source of `encoder_output`.
    #[must_use]
    pub fn with_encoder_output(config: &ModelConfig, encoder_output: EncoderOutput) -> Self {
        Self { encoder_output: Some(encoder_output), ..Self::new(config) }
    }

    /// Returns the number of tokens of each sequence.
    #[must_use]
    pub fn len(&self) -> usize {
        self.layers.first().map_or(0, LayerCache::len)
    }

    /// Returns true if there are no tokens.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the allocated bytes, including spare capacity.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        self.layers.iter().flat_map(|layer| &layer.kept).map(Tensor::num_bytes).sum()
    }

    /// Removes all tokens from position `len` on, and returns the number of tokens that are left: `len`, or all if
    /// there were fewer, or 0 if a layer with a sliding window no longer has the tokens that the next one would see.
    pub fn truncate(&mut self, len: usize) -> usize {
        let len = if self.layers.iter().all(|layer| layer.reaches_back_to(len)) { len.min(self.len()) } else { 0 };
        self.layers.iter_mut().for_each(|layer| layer.truncate(len));
        len
    }

    /// Returns the caches of the layers.
    pub(crate) fn layers_mut(&mut self) -> Vec<LayerKv<'_>> {
        self.layers.iter_mut().map(LayerKv::Growing).collect()
    }

    /// Returns what tells this cache from others.
    pub(crate) fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Counts `count` new tokens per sequence in `layers`, whose keys and values another rank has appended.
    pub(crate) fn append_elsewhere(&mut self, ctx: &Context, layers: Range<usize>, count: usize) {
        let rows = count * self.num_sequences;
        self.layers[layers].iter_mut().for_each(|layer| layer.append_with(ctx, rows, &[], |_, _| ()));
    }

    /// Removes the tokens of `layers` from position `len` on, which these layers can go back to.
    pub(crate) fn truncate_layers(&mut self, layers: Range<usize>, len: usize) {
        self.layers[layers].iter_mut().for_each(|layer| layer.truncate(len));
    }

    /// Returns the encoder's output that the texts answer, in a model with an encoder.
    pub(crate) fn encoder_output(&self) -> Option<&EncoderOutput> {
        self.encoder_output.as_ref()
    }
}

impl LayerCache {
    fn new(num_sequences: usize, window: Option<usize>) -> Self {
        Self { kept: Vec::new(), num_sequences, capacity: 0, held: 0, dropped: 0, window }
    }

    /// Returns the number of tokens of the sequence.
    fn len(&self) -> usize {
        self.dropped + self.held
    }

    /// Returns the number of tokens that are kept, the last of the sequence.
    pub(crate) fn held(&self) -> usize {
        self.held
    }

    /// Returns the number of sequences.
    pub(crate) fn num_sequences(&self) -> usize {
        self.num_sequences
    }

    /// Returns the number of rows that [`kept`](Self::kept) has per sequence.
    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Returns the tensors in the order of [`append`](Self::append); their first rows are those of the kept tokens.
    pub(crate) fn kept(&self) -> &[Tensor] {
        &self.kept
    }

    /// Returns the number of tokens before a new one that it sees at most.
    fn seen_before(&self) -> usize {
        self.window.map_or(usize::MAX, |window| window - 1)
    }

    fn reaches_back_to(&self, len: usize) -> bool {
        self.dropped == 0 || len >= self.len() || len >= self.dropped.saturating_add(self.seen_before())
    }

    fn truncate(&mut self, len: usize) {
        if len == 0 {
            self.dropped = 0;
        }
        self.held = self.held.min(len.saturating_sub(self.dropped));
    }

    /// Appends the rows of new tokens. Tokens that none of the new ones sees may be dropped.
    pub(crate) fn append(&mut self, ctx: &Context, new: &[&Tensor]) {
        let (rows, num_sequences) = (new.first().map_or(0, |new| new.rows()), self.num_sequences);
        let types: Vec<_> = new.iter().map(|new| RowType::new(new)).collect();
        self.append_with(ctx, rows, &types, |kept, held| {
            for (all, new) in kept.iter_mut().zip(new) {
                copy_rows_of_each(ctx, new, all, held, num_sequences);
            }
        });
    }

    /// Appends `rows` rows of tensors with these widths and types. `write` writes the rows of each sequence, from the
    /// row that it is given.
    pub(crate) fn append_with<R>(
        &mut self,
        ctx: &Context,
        rows: usize,
        types: &[RowType],
        write: impl FnOnce(&mut [Tensor], usize) -> R,
    ) -> R {
        let count = rows / self.num_sequences;
        let mut seen = self.held.min(self.seen_before());
        if ctx.is_batch_invariant() {
            // Attention sums over blocks of keys: tokens that stay must keep their position in a block.
            seen = self.held - (self.held - seen) / KEYS_OF_BLOCK * KEYS_OF_BLOCK;
        }
        let wanted = match self.window {
            // Twice the window; after a pass over many tokens less is needed again.
            Some(window) => (2 * window).max(seen + count).max(FIRST_CAPACITY),
            None if self.held + count <= self.capacity() => self.capacity(),
            None => (self.held + count).max(2 * self.capacity()).max(FIRST_CAPACITY),
        };
        if self.held + count > self.capacity() || self.capacity() > wanted {
            self.move_last(ctx, seen, wanted, types);
        }
        let result = write(&mut self.kept, self.held);
        self.held += count;
        result
    }

    /// Moves the last `count` tokens to new tensors with capacity for `capacity` tokens of these widths and types,
    /// and drops the others.
    fn move_last(&mut self, ctx: &Context, count: usize, capacity: usize, types: &[RowType]) {
        let old = std::mem::take(&mut self.kept);
        let moved = |(i, &RowType { width, dtype }): (usize, &RowType)| {
            let mut tensor = ctx.zeros_on_device(&[self.num_sequences * capacity, width], dtype);
            if let Some(old) = old.get(i) {
                let (first, num_sequences) = (self.held - count, self.num_sequences);
                copy_some_rows_of_each(ctx, old, first, &mut tensor, 0, count, num_sequences);
            }
            tensor
        };
        self.kept = types.iter().enumerate().map(moved).collect();
        self.capacity = capacity;
        self.dropped += self.held - count;
        self.held = count;
    }
}
