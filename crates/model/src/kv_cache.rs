//! What is kept of a sequence from one step of decoding to the next, in every layer: keys and values, or what latent
//! attention makes them of.
//!
//! A layer with a sliding window keeps the tokens that the next one sees, and room for as many again, so that they are moved
//! once in so many steps.

use moeworks_ops::Context;
use moeworks_ops::attention::KEYS_OF_BLOCK;
use moeworks_ops::elementwise::{copy_rows_of_each, copy_some_rows_of_each};
use moeworks_tensor::{DType, Tensor};

use crate::config::ModelConfig;
use crate::layers::EncoderOutput;
use crate::paged_kv_cache::PagedLayer;

/// Rows that a layer's cache has room for at first; without a window it doubles when full.
const FIRST_CAPACITY: usize = 64;

/// What is kept of a sequence in every layer, or of several that are equally long.
pub struct KvCache {
    layers: Vec<LayerCache>,
    num_sequences: usize,
    encoder_output: Option<EncoderOutput>,
}

/// The keys and values of a layer that the tokens of a pass are added to.
pub(crate) enum LayerKv<'a> {
    /// Sequences that grow together.
    Growing(&'a mut LayerCache),
    /// Sequences in blocks, of any lengths.
    Paged(&'a mut PagedLayer),
}

/// What is kept of a sequence in one layer, or of several that are equally long.
pub(crate) struct LayerCache {
    /// Of each token a row in each of these, such as its keys (rotated) and values; `[sequences capacity, ..]` each. None before the
    /// first token.
    kept: Vec<Tensor>,
    num_sequences: usize,
    /// Rows of each sequence in use.
    held: usize,
    /// Tokens before those, which no later one sees.
    dropped: usize,
    /// Tokens that one sees at most, itself included; none: all before it.
    window: Option<usize>,
}

impl KvCache {
    /// An empty cache for a model of `config`.
    #[must_use]
    pub fn new(config: &ModelConfig) -> Self {
        Self::of_sequences(config, 1)
    }

    /// An empty cache for as many sequences, at least one, that go on together, each by as many tokens as the others.
    #[must_use]
    pub fn of_sequences(config: &ModelConfig, num_sequences: usize) -> Self {
        assert!(num_sequences > 0, "a cache of no sequence");
        let layer = |i| LayerCache { kept: Vec::new(), num_sequences, held: 0, dropped: 0, window: config.window(i) };
        Self { layers: (0..config.num_layers).map(layer).collect(), num_sequences, encoder_output: None }
    }

    /// The sequences that go on together.
    #[must_use]
    pub fn num_sequences(&self) -> usize {
        self.num_sequences
    }

    /// An empty cache for a text that answers the source of `encoder_output`.
    #[must_use]
    pub fn with_encoder_output(config: &ModelConfig, encoder_output: EncoderOutput) -> Self {
        Self { encoder_output: Some(encoder_output), ..Self::new(config) }
    }

    /// Tokens of each sequence in the cache.
    #[must_use]
    pub fn len(&self) -> usize {
        self.layers.first().map_or(0, LayerCache::len)
    }

    /// Whether there is no token.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes that the layers' caches take, room for further tokens included.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        self.layers.iter().flat_map(|layer| &layer.kept).map(Tensor::num_bytes).sum()
    }

    /// Forgets all tokens from position `len` on, and returns how many tokens are left. These are `len`, or fewer than that
    /// were there, or none if a layer with a sliding window no longer has what the next token would see.
    pub fn truncate(&mut self, len: usize) -> usize {
        let len = if self.layers.iter().all(|layer| layer.reaches_back_to(len)) { len.min(self.len()) } else { 0 };
        self.layers.iter_mut().for_each(|layer| layer.truncate(len));
        len
    }

    /// The caches of the layers.
    pub(crate) fn layers_mut(&mut self) -> Vec<LayerKv<'_>> {
        self.layers.iter_mut().map(LayerKv::Growing).collect()
    }

    /// The sources that the texts answer, in a model with an encoder.
    pub(crate) fn encoder_output(&self) -> Option<&EncoderOutput> {
        self.encoder_output.as_ref()
    }
}

impl LayerCache {
    /// Tokens of the sequence.
    fn len(&self) -> usize {
        self.dropped + self.held
    }

    /// Tokens that are kept, the last of the sequence.
    pub(crate) fn held(&self) -> usize {
        self.held
    }

    /// Sequences that go on together.
    pub(crate) fn num_sequences(&self) -> usize {
        self.num_sequences
    }

    /// Rows that [`kept`](Self::kept) has for each sequence.
    pub(crate) fn capacity(&self) -> usize {
        self.kept.first().map_or(0, |kept| kept.rows() / self.num_sequences)
    }

    /// The tensors that were appended to, in their order; the first rows are those of the tokens that are kept.
    pub(crate) fn kept(&self) -> &[Tensor] {
        &self.kept
    }

    /// Tokens before a new one that it sees, if there are as many.
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
        self.held = self.held.min(len - self.dropped);
    }

    /// Appends the rows of some new tokens. Tokens that none of the new ones sees may go.
    pub(crate) fn append(&mut self, ctx: &Context, new: &[&Tensor]) {
        let (rows, num_sequences) = (new.first().map_or(0, |new| new.rows()), self.num_sequences);
        let kinds: Vec<_> = new.iter().map(|new| (new.cols(), new.dtype())).collect();
        self.append_with(ctx, rows, &kinds, |kept, held| {
            for (all, new) in kept.iter_mut().zip(new) {
                copy_rows_of_each(ctx, new, all, held, num_sequences);
            }
        });
    }

    /// The same of so many rows of such widths and types: `write` writes them to what is kept, for each sequence from the row on that it
    /// is told.
    pub(crate) fn append_with<R>(
        &mut self,
        ctx: &Context,
        rows: usize,
        kinds: &[(usize, DType)],
        write: impl FnOnce(&mut [Tensor], usize) -> R,
    ) -> R {
        let count = rows / self.num_sequences;
        let mut seen = self.held.min(self.seen_before());
        if ctx.is_batch_invariant() {
            // Attention sums over blocks of keys: the tokens that stay keep their places in them.
            seen = self.held - (self.held - seen) / KEYS_OF_BLOCK * KEYS_OF_BLOCK;
        }
        let wanted = match self.window {
            // Twice what is seen; after many tokens at once less is needed again.
            Some(window) => (2 * window).max(seen + count).max(FIRST_CAPACITY),
            None if self.held + count <= self.capacity() => self.capacity(),
            None => (self.held + count).max(2 * self.capacity()).max(FIRST_CAPACITY),
        };
        if self.held + count > self.capacity() || self.capacity() > wanted {
            self.move_last(ctx, seen, wanted, kinds);
        }
        let result = write(&mut self.kept, self.held);
        self.held += count;
        result
    }

    /// Keeps the last `count` tokens alone, in tensors for `capacity` tokens of these widths and types.
    fn move_last(&mut self, ctx: &Context, count: usize, capacity: usize, kinds: &[(usize, DType)]) {
        let old = std::mem::take(&mut self.kept);
        let moved = |(i, &(width, dtype)): (usize, &(usize, DType))| {
            let mut tensor = ctx.zeros_there(&[self.num_sequences * capacity, width], dtype);
            if let Some(old) = old.get(i) {
                let (first, num_sequences) = (self.held - count, self.num_sequences);
                copy_some_rows_of_each(ctx, old, first, &mut tensor, 0, count, num_sequences);
            }
            tensor
        };
        self.kept = kinds.iter().enumerate().map(moved).collect();
        self.dropped += self.held - count;
        self.held = count;
    }
}
