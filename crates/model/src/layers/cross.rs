//! Cross-attention: a decoder attends to all of an encoder's output, without positions.

use std::sync::Arc;

use moeworks_ops::Context;
use moeworks_ops::attention::{AttentionShape, ScoreRule, attention, attention_biased, attention_biased_backward};
use moeworks_ops::elementwise::{add_assign, into_type};
use moeworks_ops::linear::{Write, linear_backward_input};
use moeworks_tensor::{DType, Tensor};

use super::attention::WRONG_KIND;
use super::layer::Flow;
use super::norm::{Norm, NormBackward};
use super::projection::{project, project_grads};
use super::{Pass, Sequences};
use crate::config::ModelConfig;
use crate::weights::{CrossWeights, LayerWeights};

/// The encoder's output for sources of equal length, as keys and values of each decoder layer. Clones share it.
#[derive(Clone)]
pub struct EncoderOutput {
    layers: Arc<[KeysAndValues]>,
    pub(crate) num_sequences: usize,
    pub(crate) seq_len: usize,
}

/// The keys `[num_sequences seq_len, G h]` and values `[num_sequences seq_len, G w]` of a layer.
struct KeysAndValues {
    k: Tensor,
    v: Tensor,
}

/// A block of cross-attention.
#[derive(Clone, Debug)]
pub(crate) struct CrossBlock {
    /// The number of its layer in the decoder.
    layer: usize,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    value_dim: usize,
    scale: f32,
    norm: Norm,
}

/// Every query attends to all keys.
const RULE: ScoreRule<'static> = ScoreRule { bias: None, is_causal: false };

/// The activations that backward needs.
pub(crate) struct CrossSaved {
    /// `[T, D]`: the block's input.
    x: Tensor,
    norm: Tensor,
    normed: Tensor,
    q: Tensor,
    o: Tensor,
}

/// The gradients of the block's matrices, still to be computed.
pub(crate) struct CrossGradTask {
    /// The encoder's output.
    encoded: Tensor,
    normed: Tensor,
    o: Tensor,
    dy: Tensor,
    dqkv: [Tensor; 3],
}

impl EncoderOutput {
    /// Returns the number of sources.
    #[must_use]
    pub fn num_sequences(&self) -> usize {
        self.num_sequences
    }

    /// Returns the number of tokens of each source.
    #[must_use]
    pub fn seq_len(&self) -> usize {
        self.seq_len
    }

    /// Computes the keys and values of each of `layers` from the encoder's output `encoded [T, D]`.
    pub(crate) fn new(
        ctx: &Context,
        layers: &[LayerWeights],
        encoded: &Tensor,
        Sequences { count: num_sequences, len: seq_len, .. }: Sequences,
    ) -> Self {
        let of_layer = |w: &CrossWeights| {
            let make = |w| project(ctx, encoded, w, encoded.dtype());
            KeysAndValues { k: make(&w.k), v: make(&w.v) }
        };
        let layers = layers.iter().filter_map(|layer| layer.cross.as_ref()).map(of_layer).collect();
        Self { layers, num_sequences, seq_len }
    }
}

/// The encoder's output and its gradient, in a backward pass.
pub(crate) struct EncodedGrad {
    /// `[S, D]`
    pub(crate) encoded: Tensor,
    /// `[S, D]` f32: the gradient, summed over layers.
    pub(crate) d_encoded: Tensor,
}

impl CrossBlock {
    /// Makes the block of layer `layer`.
    pub(crate) fn new(config: &ModelConfig, layer: usize) -> Self {
        let ModelConfig { num_heads, num_kv_heads, head_dim, norm_eps: eps, .. } = *config;
        let (value_dim, scale) = (config.value_dim(), config.attention_scale());
        Self { layer, num_heads, num_kv_heads, head_dim, value_dim, scale, norm: Norm { eps } }
    }

    /// Maps `x [T, D]` f32 to `y [T, D]` f32.
    pub(crate) fn forward(&self, pass: &Pass<'_>, weights: &LayerWeights, x: Tensor) -> (Tensor, CrossSaved) {
        let (w, sources) = Self::parts(pass, weights);
        let ctx = pass.ctx;
        let dtype = w.o.weight.dtype().of_activations();
        let (normed, norm) = self.norm.forward(ctx, &w.norm, &x, dtype);
        let q = project(ctx, &normed, &w.q, dtype);
        let KeysAndValues { k, v } = &sources.layers[self.layer];
        let shape = self.shape(pass, sources);
        let o = if pass.sequences.len == 1 && !ctx.is_batch_invariant() {
            // The last query of causal attention sees all keys, and a single query has a faster kernel.
            attention(ctx, &q, k, v, &shape).0
        } else {
            attention_biased(ctx, &q, k, v, &RULE, &shape)
        };
        let mut y = project(ctx, &o, &w.o, DType::F32);
        add_assign(ctx, &mut y, &x);
        (y, CrossSaved { x, norm, normed, q, o })
    }

    /// Returns the block's weights, and the encoder's output.
    fn parts<'a>(pass: &'a Pass<'_>, weights: &'a LayerWeights) -> (&'a CrossWeights, &'a EncoderOutput) {
        let parts = weights.cross.as_ref().zip(pass.encoder_output.as_ref());
        parts.expect(WRONG_KIND)
    }

    /// Takes `flow` backward through the block, and returns the task that computes the matrices' gradients. The
    /// gradient of the norm's weight is written to `grads`; that of the encoder's output is added to the flow's.
    pub(crate) fn backward(
        &self,
        pass: &Pass<'_>,
        weights: &LayerWeights,
        saved: CrossSaved,
        flow: &mut Flow,
        write: Write,
        grads: &mut LayerWeights,
    ) -> CrossGradTask {
        let (w, output) = Self::parts(pass, weights);
        let (ctx, dtype) = (pass.ctx, w.o.weight.dtype());
        let CrossSaved { x, norm, normed, q, o } = saved;
        let sources = flow.sources.as_mut().expect(WRONG_KIND);
        let d_block = into_type(ctx, flow.dx.clone(), dtype);
        let d_o = linear_backward_input(ctx, &d_block, &w.o.weight, dtype);
        let KeysAndValues { k, v } = &output.layers[self.layer];
        let back = attention_biased_backward(ctx, &d_o, &q, k, v, &RULE, &self.shape(pass, output));
        let dqkv = back.qkv.map(|d| into_type(ctx, d, dtype));
        for (d, w) in dqkv[1..].iter().zip([&w.k, &w.v]) {
            add_assign(ctx, &mut sources.d_encoded, &linear_backward_input(ctx, d, &w.weight, DType::F32));
        }
        let d_normed = linear_backward_input(ctx, &dqkv[0], &w.q.weight, DType::F32);
        let d_norm = &mut grads.cross.as_mut().expect(WRONG_KIND).norm;
        let around = NormBackward { x: &x, statistics: &norm, dy: &d_normed, base: Some(&flow.dx) };
        flow.dx = self.norm.backward(ctx, &w.norm, around, write, d_norm);
        CrossGradTask { encoded: sources.encoded.clone(), normed, o, dy: d_block, dqkv }
    }

    fn shape(&self, pass: &Pass<'_>, sources: &EncoderOutput) -> AttentionShape {
        AttentionShape {
            batch: pass.sequences.count,
            seq_len: pass.sequences.len,
            kv_len: sources.seq_len,
            kv_capacity: sources.seq_len,
            num_heads: self.num_heads,
            num_kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
            value_dim: self.value_dim,
            window: None,
            scale: self.scale,
        }
    }
}

impl CrossGradTask {
    /// Writes the gradients of the matrices.
    pub(crate) fn run(self, ctx: &Context, write: Write, grads: &mut CrossWeights) {
        let Self { encoded, normed, o, dy, dqkv: [dq, dk, dv] } = self;
        let compute = dy.dtype();
        project_grads(ctx, &dy, &o, compute, write, &mut grads.o);
        project_grads(ctx, &dq, &normed, compute, write, &mut grads.q);
        project_grads(ctx, &dk, &encoded, compute, write, &mut grads.k);
        project_grads(ctx, &dv, &encoded, compute, write, &mut grads.v);
    }
}
