//! The weights of a decoder: a plain struct of tensors, which also holds gradients and the optimizer's moments.
//!
//! Shape letters: V vocabulary, D width, H query heads, G key and value heads, h head width, E experts, F hidden width of
//! a feed-forward, A = 2 for gated activations (the gate's rows come first) and 1 otherwise.

use std::sync::OnceLock;

use moeworks_moe::MoeWeights;
use moeworks_ops::{Context, quantized};
use moeworks_tensor::{DType, Tensor};

/// The weights of a norm.
#[derive(Clone)]
pub struct NormWeights {
    /// `[W]`.
    pub weight: Tensor,
    /// `[W]`; none in an RMS norm.
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
    /// The maker of queries, keys and values.
    pub inputs: AttentionInputs,
    /// `[D, H w]`, w elements of a head of values.
    pub o: LinearWeights,
    /// `[H]`: a score for each head that has no value.
    pub sinks: Option<Tensor>,
}

/// The maker of queries, keys and values.
#[derive(Clone)]
pub enum AttentionInputs {
    /// A matrix for each.
    Heads(HeadWeights),
    /// Multi-head latent attention.
    Latent(LatentWeights),
}

/// A matrix for queries, keys and values each.
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

/// Multi-head latent attention: N elements of a head that are not rotated, R that are, w of its values; L ranks.
#[derive(Clone)]
pub struct LatentWeights {
    /// `[Lq, D]` and the norm of its output `[Lq]`; none where queries are made directly.
    pub q_down: Option<(LinearWeights, Tensor)>,
    /// `[H (N + R), Lq]` or `[H (N + R), D]`.
    pub q: Tensor,
    /// `[Lkv + R, D]`.
    pub kv_down: LinearWeights,
    /// `[Lkv]`: norm of the first Lkv of its outputs.
    pub kv_norm: Tensor,
    /// `[H (N + w), Lkv]`.
    pub kv: Tensor,
    /// The numbers that `kv` stands for, if it is in blocks.
    pub(crate) kv_numbers: Numbers,
}

/// The numbers that a matrix in blocks stands for, on the CPU, worked out when a step first multiplies with it by head. Nothing changes
/// such a matrix in its place; a clone works them out for itself.
#[derive(Default)]
pub(crate) struct Numbers(OnceLock<Tensor>);

impl Clone for Numbers {
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl Numbers {
    /// The numbers of `blocks` as `dtype`; none if they were asked for as another type before.
    pub(crate) fn of(&self, ctx: &Context, blocks: &Tensor, dtype: DType) -> Option<&Tensor> {
        let numbers = self.0.get_or_init(|| quantized::dequantize(ctx, blocks, dtype));
        (numbers.dtype() == dtype).then_some(numbers)
    }
}

/// Weights of a dense feed-forward: an expert without a router.
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
    /// Every token takes the same way.
    Dense(DenseWeights),
    /// Every token goes to some experts.
    Moe(MoeWeights),
}

/// Weights of a decoder layer's attention to what an encoder made of a source.
#[derive(Clone)]
pub struct CrossWeights {
    /// `[D]`: norm of the decoder's side.
    pub norm: NormWeights,
    /// `[H h, D]`.
    pub q: LinearWeights,
    /// `[G h, D]`, of the encoder's result.
    pub k: LinearWeights,
    /// `[G w, D]`, of the encoder's result.
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
    /// Attention to an encoder's result, in a decoder that has one.
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
    /// `[buckets, H]`: what is added to scores by distance.
    pub relative: Option<Tensor>,
    /// The layers, first to last.
    pub layers: Vec<LayerWeights>,
    /// `[D]`: norm behind the last layer.
    pub final_norm: NormWeights,
}

/// All weights of a decoder. The same struct holds gradients and optimizer moments, all f32 then.
///
/// Norm weights, biases, sinks and routers are f32; the matrices are f32 or bf16, and their type is the precision of the
/// products; for inference they may be f16 or in blocks of small integers. Cloning shares no memory by accident: there is no
/// `Clone`, copies are made with [`DecoderWeights::compute_copy`].
pub struct DecoderWeights {
    /// The encoder, if there is one.
    pub encoder: Option<EncoderWeights>,
    /// `[V, D]`.
    pub embedding: Tensor,
    /// `[max_seq_len, D]`: learned positions.
    pub positions: Option<Tensor>,
    /// `[buckets, H]`: what is added to scores by distance.
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
        let first = numbers.of(&ctx, &blocks, DType::F32).expect("numbers").f32s().as_ptr();
        let again = numbers.of(&ctx, &blocks, DType::F32).expect("numbers");
        assert_eq!((again.f32s().as_ptr(), again.f32s()[33]), (first, 127.0));
        assert!(numbers.of(&ctx, &blocks, DType::BF16).is_none(), "of one type");
        let clone = numbers.clone();
        assert_eq!(clone.of(&ctx, &blocks, DType::BF16).map(Tensor::dtype), Some(DType::BF16));
    }
}
