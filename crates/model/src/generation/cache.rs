//! The keys and values of a sequence, kept from one step of decoding to the next.

use moeworks_ops::Context;
use moeworks_tensor::Tensor;

use crate::blocks::Memory;
use crate::config::ModelConfig;

/// Rows that a layer's cache has at first; it doubles when full.
const FIRST_CAPACITY: usize = 64;

/// The keys and values of one sequence in every layer.
pub struct KvCache {
    layers: Vec<LayerCache>,
    memory: Option<Memory>,
}

/// The keys (rotated) and values of one sequence in one layer.
#[derive(Default)]
pub(crate) struct LayerCache {
    /// Keys and values, `[capacity, G h]` each; none before the first token.
    kv: Option<(Tensor, Tensor)>,
    len: usize,
}

impl KvCache {
    /// An empty cache for a model of `config`.
    #[must_use]
    pub fn new(config: &ModelConfig) -> Self {
        Self { layers: (0..config.num_layers).map(|_| LayerCache::default()).collect(), memory: None }
    }

    /// An empty cache for a text that answers the source in `memory`.
    #[must_use]
    pub fn answering(config: &ModelConfig, memory: Memory) -> Self {
        Self { memory: Some(memory), ..Self::new(config) }
    }

    /// Tokens in the cache.
    #[must_use]
    pub fn len(&self) -> usize {
        self.layers.first().map_or(0, |layer| layer.len)
    }

    /// Whether there is no token.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Forgets all tokens from position `len` on.
    pub fn truncate(&mut self, len: usize) {
        for layer in &mut self.layers {
            layer.len = layer.len.min(len);
        }
    }

    /// The layers' caches, and what they attend to besides.
    pub(crate) fn parts(&mut self) -> (&mut [LayerCache], Option<&Memory>) {
        (&mut self.layers, self.memory.as_ref())
    }
}

impl LayerCache {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn capacity(&self) -> usize {
        self.kv.as_ref().map_or(0, |(k, _)| k.rows())
    }

    pub(crate) fn keys(&self) -> &Tensor {
        &self.kv.as_ref().expect("a cache is read after it was appended to").0
    }

    pub(crate) fn values(&self) -> &Tensor {
        &self.kv.as_ref().expect("a cache is read after it was appended to").1
    }

    /// Appends the rows of `k` and `v`.
    pub(crate) fn append(&mut self, ctx: &Context, k: &Tensor, v: &Tensor) {
        let needed = self.len + k.rows();
        if needed > self.capacity() {
            let capacity = needed.max(2 * self.capacity()).max(FIRST_CAPACITY);
            let old = self.kv.take();
            let grown = |new: &Tensor, old: Option<&Tensor>| {
                let mut tensor = ctx.zeros(&[capacity, new.cols()], new.dtype());
                if let Some(old) = old {
                    let kept = self.len * new.cols() * new.dtype().size();
                    tensor.bytes_mut()[..kept].copy_from_slice(&old.bytes()[..kept]);
                }
                tensor
            };
            self.kv = Some((grown(k, old.as_ref().map(|kv| &kv.0)), grown(v, old.as_ref().map(|kv| &kv.1))));
        }
        if let Some((keys, values)) = &mut self.kv {
            for (all, new) in [(keys, k), (values, v)] {
                let start = self.len * new.cols() * new.dtype().size();
                all.bytes_mut()[start..start + new.num_bytes()].copy_from_slice(new.bytes());
            }
        }
        self.len = needed;
    }
}
