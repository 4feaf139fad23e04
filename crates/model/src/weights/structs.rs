//! The weights of a decoder: a plain struct of tensors, which also holds gradients and the optimizer's moments.
//!
//! Shape letters: V vocabulary, D width, H query heads, G key and value heads, h head width, E experts, F hidden
//! width of a feed-forward, A = 2 for gated activations (the gate's rows come first) and 1 otherwise.

use std::sync::OnceLock;

use moeworks_moe::MoeWeights;
use moeworks_ops::{Context, quantized};
use moeworks_tensor::{DType, Tensor};

/// The weights of a norm.
#[derive(Clone)]
pub struct NormWeights {
    /// `[W]`.
    pub weight: Tensor,
    /// `[W]`; none in RMSNorm.
    pub bias: Option<Tensor>,
}

/// A matrix with an optional bias.
#[derive(Clone)]
pub struct LinearWeights {
    /// `[out, in]`.
    pub weight: Tensor,
    /// `[out]`.
    pub bias: Option<Tensor>,
}

/// Weights of an attention block.
#[derive(Clone)]
pub struct AttentionWeights {
    /// The projections to queries, keys and values.
    pub inputs: AttentionInputs,
    /// `[D, H w]`, w the width of a head of values.
    pub o: LinearWeights,
    /// `[H]`: attention sinks, one logit per head.
    pub sinks: Option<Tensor>,
}

/// The projections to queries, keys and values.
#[derive(Clone)]
pub enum AttentionInputs {
    /// One matrix each.
    Heads(HeadWeights),
    /// Multi-head latent attention.
    Latent(LatentWeights),
}

/// One matrix each for queries, keys and values.
#[derive(Clone)]
pub struct HeadWeights {
    /// `[H h, D]`.
    pub q: LinearWeights,
    /// `[G h, D]`.
    pub k: LinearWeights,
    /// `[G h, D]`.
    pub v: LinearWeights,
    /// Norm of queries, `[h]` or `[H h]`; none without a norm.
    pub q_norm: Option<Tensor>,
    /// Norm of keys, `[h]` or `[G h]`; none without a norm.
    pub k_norm: Option<Tensor>,
}

/// The projections of multi-head latent attention. Of a head, N elements are not rotated, R are, and w are its
/// value's; Lq and Lkv are the latent widths of queries and of keys and values.
#[derive(Clone)]
pub struct LatentWeights {
    /// The down-projection of queries, if they have one.
    pub q_down: Option<QueryDown>,
    /// `[H (N + R), Lq]` or `[H (N + R), D]`.
    pub q: Tensor,
    /// `[Lkv + R, D]`.
    pub kv_down: LinearWeights,
    /// `[Lkv]`: norm of the first Lkv of its outputs.
    pub kv_norm: Tensor,
    /// `[H (N + w), Lkv]`.
    pub kv: Tensor,
    /// The dequantized `kv`, if it is in blocks.
    pub(crate) kv_numbers: Numbers,
}

/// The down-projection of queries in latent attention.
#[derive(Clone)]
pub struct QueryDown {
    /// `[Lq, D]`.
    pub projection: LinearWeights,
    /// `[Lq]`: norm of its output.
    pub norm: Tensor,
}

/// A dequantized copy of a matrix in blocks, on the CPU, made when a pass first multiplies with it by head. Such a
/// matrix is never changed in place; a clone has a copy of its own.
#[derive(Default)]
pub(crate) struct Numbers(OnceLock<Tensor>);

impl Clone for Numbers {
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl Numbers {
    /// Returns `blocks` dequantized to `dtype`; none if the copy is of another type.
    pub(crate) fn get(&self, ctx: &Context, blocks: &Tensor, dtype: DType) -> Option<&Tensor> {
        let numbers = self.0.get_or_init(|| quantized::dequantize(ctx, blocks, dtype));
        (numbers.dtype() == dtype).then_some(numbers)
    }
}

/// The weights of a dense feed-forward: those of a single expert without a router.
#[derive(Clone)]
pub struct DenseWeights {
    /// `[1, A F, D]`.
    pub gate_up: Tensor,
    /// `[1, D, F]`.
    pub down: Tensor,
    /// The biases of both, `[1, A F]` and `[1, D]`, f32.
    pub biases: Option<(Tensor, Tensor)>,
}

/// Weights of a feed-forward block.
#[allow(clippy::large_enum_variant)] // one for each layer: nothing is gained by another allocation
#[derive(Clone)]
pub enum FeedForwardWeights {
    /// Every token takes the same path.
    Dense(DenseWeights),
    /// Every token is routed to some experts.
    Moe(MoeWeights),
}

/// The weights of a decoder layer's cross-attention.
#[derive(Clone)]
pub struct CrossWeights {
    /// `[D]`: norm of the decoder's side.
    pub norm: NormWeights,
    /// `[H h, D]`.
    pub q: LinearWeights,
    /// `[G h, D]`, applied to the encoder's output.
    pub k: LinearWeights,
    /// `[G w, D]`, applied to the encoder's output.
    pub v: LinearWeights,
    /// `[D, H w]`.
    pub o: LinearWeights,
}

/// Weights of one layer.
#[derive(Clone)]
pub struct LayerWeights {
    /// `[D]`: norm before attention.
    pub attention_norm: NormWeights,
    /// Attention.
    pub attention: AttentionWeights,
    /// Cross-attention, in a decoder with an encoder.
    pub cross: Option<CrossWeights>,
    /// `[D]`: norm before the feed-forward.
    pub feed_forward_norm: NormWeights,
    /// Feed-forward.
    pub feed_forward: FeedForwardWeights,
}

/// The weights of an encoder.
#[derive(Clone)]
pub struct EncoderWeights {
    /// `[V, D]`; none if it is the decoder's.
    pub embedding: Option<Tensor>,
    /// `[buckets, H]`: the relative position bias.
    pub relative: Option<Tensor>,
    /// The layers, first to last.
    pub layers: Vec<LayerWeights>,
    /// `[D]`: norm after the last layer.
    pub final_norm: NormWeights,
}

/// All weights of a decoder. The same struct holds gradients and optimizer moments, which are all f32.
///
/// Norm weights, biases, sinks and routers are f32. The type of the matrices, f32 or bf16, is the precision of
/// products; for inference they may also be f16 or in blocks of small integers. There is no `Clone`, so that no copy
/// shares memory by accident: copies are made with [`DecoderWeights::compute_copy`].
pub struct DecoderWeights {
    /// The encoder, if there is one.
    pub encoder: Option<EncoderWeights>,
    /// `[V, D]`.
    pub embedding: Tensor,
    /// `[max_seq_len, D]`: learned positions.
    pub positions: Option<Tensor>,
    /// `[buckets, H]`: the relative position bias.
    pub relative: Option<Tensor>,
    /// The layers, first to last.
    pub layers: Vec<LayerWeights>,
    /// `[D]`: norm before the output projection.
    pub final_norm: NormWeights,
    /// `[V, D]`: output projection; none if it is the embedding.
    pub head: Option<Tensor>,
    /// `[V]`: bias of the output projection.
    pub head_bias: Option<Tensor>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_blocks_are_worked_out_once_and_anew_for_a_clone() {
        let ctx = Context::cpu(1);
        let mut x = ctx.zeros(&[4, 32], DType::F32);
        x.f32s_mut()[33] = 127.0;
        let blocks = quantized::quantize(&ctx, &x, DType::Q8);
        let numbers = Numbers::default();
        let first = numbers.get(&ctx, &blocks, DType::F32).expect("numbers").f32s().as_ptr();
        let again = numbers.get(&ctx, &blocks, DType::F32).expect("numbers");
        assert_eq!((again.f32s().as_ptr(), again.f32s()[33]), (first, 127.0));
        assert!(numbers.get(&ctx, &blocks, DType::BF16).is_none(), "of one type");
        let clone = numbers.clone();
        assert_eq!(clone.get(&ctx, &blocks, DType::BF16).map(Tensor::dtype), Some(DType::BF16));
    }
}
