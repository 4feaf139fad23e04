//! The block with which a decoder attends to what an encoder made of a source: all of it, without positions.

use moeworks_ops::Context;
use moeworks_ops::attention::{AttentionShape, ScoreRule, attention, attention_biased, attention_biased_backward};
use moeworks_ops::elementwise::{add_assign, into_type};
use moeworks_ops::linear::{Write, linear_backward_input};
use moeworks_tensor::{DType, Tensor};

use super::Pass;
use super::norm::Norm;
use super::projection::{project, project_grads};
use crate::config::ModelConfig;
use crate::weights::{CrossWeights, LayerWeights, NormWeights};

/// What a model's encoder made of some sources of equal length, as the decoder's layers need it.
#[derive(Clone)]
pub struct Memory {
    /// Each layer's keys `[num_sequences seq_len, G h]` and values `[num_sequences seq_len, G w]`.
    pub(crate) layers: Vec<(Tensor, Tensor)>,
    pub(crate) num_sequences: usize,
    pub(crate) seq_len: usize,
}

/// A block of cross-attention.
#[derive(Clone, Debug)]
pub(crate) struct CrossBlock {
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    value_dim: usize,
    scale: f32,
    norm: Norm,
}

/// All keys, wherever they stand.
const RULE: ScoreRule<'static> = ScoreRule { bias: None, is_causal: false };

/// What backward needs of forward, besides the block's input.
pub(crate) struct CrossSaved {
    norm: Tensor,
    normed: Tensor,
    q: Tensor,
    o: Tensor,
}

/// The gradients of the block's matrices, still to be computed.
pub(crate) struct CrossGradTask {
    normed: Tensor,
    o: Tensor,
    dy: Tensor,
    dqkv: [Tensor; 3],
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
    ) -> (Tensor, CrossSaved) {
        let ctx = pass.ctx;
        let dtype = w.o.weight.dtype().of_activations();
        let (normed, norm) = self.norm.forward(ctx, &w.norm, x, dtype);
        let q = project(ctx, &normed, &w.q, dtype);
        let (k, v) = &memory.layers[i];
        let shape = self.shape(pass, memory);
        let o = if pass.seq_len == 1 && !ctx.is_batch_invariant() {
            // The last query of a causal attention sees everything, and one alone has code of its own.
            attention(ctx, &q, k, v, &shape).0
        } else {
            attention_biased(ctx, (&q, k, v), &RULE, &shape)
        };
        let mut y = project(ctx, &o, &w.o, DType::F32);
        add_assign(ctx, &mut y, x);
        (y, CrossSaved { norm, normed, q, o })
    }

    /// The gradient of `x` from that of `y`, and the task that finds the matrices' gradients. That of the norm's weight is
    /// written as `write` says; that of the encoder's result, through this layer's keys and values, is added to `d_encoded`.
    pub(crate) fn backward(
        &self,
        pass: &Pass<'_>,
        w: &CrossWeights,
        (x, saved): (&Tensor, CrossSaved),
        (memory, i, d_encoded): (&Memory, usize, &mut Tensor),
        dy: &Tensor,
        (write, d_norm): (Write, &mut NormWeights),
    ) -> (Tensor, CrossGradTask) {
        let (ctx, dtype) = (pass.ctx, w.o.weight.dtype());
        let CrossSaved { norm, normed, q, o } = saved;
        let d_block = into_type(ctx, dy.clone(), dtype);
        let d_o = linear_backward_input(ctx, &d_block, &w.o.weight, dtype);
        let (k, v) = &memory.layers[i];
        let grads = attention_biased_backward(ctx, &d_o, (&q, k, v), &RULE, &self.shape(pass, memory));
        let dqkv = grads.qkv.map(|d| into_type(ctx, d, dtype));
        for (d, w) in dqkv[1..].iter().zip([&w.k, &w.v]) {
            add_assign(ctx, d_encoded, &linear_backward_input(ctx, d, &w.weight, DType::F32));
        }
        let d_normed = linear_backward_input(ctx, &dqkv[0], &w.q.weight, DType::F32);
        let dx = self.norm.backward_onto(ctx, &w.norm, (x, &norm), (&d_normed, Some(dy)), write, d_norm);
        (dx, CrossGradTask { normed, o, dy: d_block, dqkv })
    }

    fn shape(&self, pass: &Pass<'_>, memory: &Memory) -> AttentionShape {
        AttentionShape {
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
        }
    }
}

impl CrossGradTask {
    /// Writes the gradients of the matrices; `encoded` is what the encoder made.
    pub(crate) fn run(self, ctx: &Context, encoded: &Tensor, write: Write, grads: &mut CrossWeights) {
        let Self { normed, o, dy, dqkv: [dq, dk, dv] } = self;
        let compute = dy.dtype();
        project_grads(ctx, (&dy, &o), compute, write, &mut grads.o);
        project_grads(ctx, (&dq, &normed), compute, write, &mut grads.q);
        project_grads(ctx, (&dk, encoded), compute, write, &mut grads.k);
        project_grads(ctx, (&dv, encoded), compute, write, &mut grads.v);
    }
}
