//! The block with which a decoder attends to what an encoder made of a source: all of it, without positions.

use moeworks_ops::Context;
use moeworks_ops::attention::{AttentionShape, ScoreRule, attention, attention_biased};
use moeworks_ops::elementwise::add_assign;
use moeworks_tensor::{DType, Tensor};

use super::Pass;
use super::norm::Norm;
use super::projection::project;
use crate::config::ModelConfig;
use crate::weights::{CrossWeights, LayerWeights};

/// What a model's encoder made of some sources of equal length, as the decoder's layers need it.
#[derive(Clone)]
pub struct Memory {
    /// Each layer's keys `[num_sequences seq_len, G h]` and values `[num_sequences seq_len, G w]`.
    pub(crate) layers: Vec<(Tensor, Tensor)>,
    pub(crate) num_sequences: usize,
    pub(crate) seq_len: usize,
}

/// A block of cross-attention. Forward only.
#[derive(Clone, Debug)]
pub(crate) struct CrossBlock {
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    value_dim: usize,
    scale: f32,
    norm: Norm,
}

impl Memory {
    /// Sources.
    #[must_use]
    pub fn num_sequences(&self) -> usize {
        self.num_sequences
    }

    /// Tokens of each.
    #[must_use]
    pub fn seq_len(&self) -> usize {
        self.seq_len
    }

    /// The keys and values of each of `layers` for the encoder's result `encoded [T, D]`.
    pub(crate) fn new(
        ctx: &Context,
        layers: &[LayerWeights],
        encoded: &Tensor,
        (num_sequences, seq_len): (usize, usize),
    ) -> Self {
        let of_layer = |w: &CrossWeights| {
            let make = |w| project(ctx, encoded, w, encoded.dtype());
            (make(&w.k), make(&w.v))
        };
        let layers = layers.iter().filter_map(|layer| layer.cross.as_ref()).map(of_layer).collect();
        Self { layers, num_sequences, seq_len }
    }
}

impl CrossBlock {
    pub(crate) fn new(config: &ModelConfig) -> Self {
        let ModelConfig { num_heads, num_kv_heads, head_dim, norm_eps: eps, .. } = *config;
        let (value_dim, scale) = (config.value_dim(), config.attention_scale());
        Self { num_heads, num_kv_heads, head_dim, value_dim, scale, norm: Norm { eps } }
    }

    /// `x [T, D]` f32 to `y [T, D]` f32, layer `i` of the decoder.
    pub(crate) fn forward(
        &self,
        pass: &Pass<'_>,
        w: &CrossWeights,
        x: &Tensor,
        (memory, i): (&Memory, usize),
    ) -> Tensor {
        let ctx = pass.ctx;
        let dtype = w.o.weight.dtype().of_activations();
        let (normed, _) = self.norm.forward(ctx, &w.norm, x, dtype);
        let q = project(ctx, &normed, &w.q, dtype);
        let (k, v) = &memory.layers[i];
        let shape = AttentionShape {
            batch: pass.num_sequences,
            seq_len: pass.seq_len,
            kv_len: memory.seq_len,
            kv_capacity: memory.seq_len,
            num_heads: self.num_heads,
            num_kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
            value_dim: self.value_dim,
            window: None,
            scale: self.scale,
        };
        let o = if pass.seq_len == 1 {
            // The last query of a causal attention sees everything, and one alone has code of its own.
            attention(ctx, &q, k, v, &shape).0
        } else {
            attention_biased(ctx, (&q, k, v), &ScoreRule { bias: None, is_causal: false }, &shape)
        };
        let mut y = project(ctx, &o, &w.o, DType::F32);
        add_assign(ctx, &mut y, x);
        y
    }
}
