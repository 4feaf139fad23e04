//! Models with an encoder: the encoder reads a source once, the decoder writes a text and attends to what was read (T5,
//! 1910.10683; Switch Transformers, 2101.03961). They are used here and not trained.

use std::borrow::Cow;

use moeworks_moe::{ConfigError, MoeSaved, RouterInput};
use moeworks_ops::Context;
use moeworks_ops::embedding::embedding;
use moeworks_tensor::{DType, Tensor};

use crate::blocks::attention::AttentionBlock;
use crate::blocks::feed_forward::FeedForwardBlock;
use crate::blocks::norm::Norm;
use crate::blocks::relative::Relative;
use crate::blocks::stack::Stack;
use crate::blocks::{Memory, Pass};
use crate::config::ModelConfig;
use crate::decoder::{Decoder, feed_forwards};
use crate::pass::{BatchError, PassStats, TokenBatch};
use crate::weights::DecoderWeights;

/// An encoder: layers that see the whole source, and a norm.
#[derive(Debug)]
pub(crate) struct Encoder {
    config: ModelConfig,
    attention: Vec<AttentionBlock>,
    feed_forward: Vec<FeedForwardBlock>,
}

/// Sources of equal length.
#[derive(Clone, Copy, Debug)]
pub struct SourceBatch<'a> {
    /// `[num_sequences, seq_len]`: token ids.
    pub ids: &'a [u32],
    /// Sources.
    pub num_sequences: usize,
}

impl Encoder {
    /// The encoder of `config`, the configuration of its layers.
    pub(crate) fn new(config: ModelConfig) -> Result<Self, ConfigError> {
        let attention = (0..config.num_layers).map(|i| AttentionBlock::new(&config, i, None)).collect();
        Ok(Self { attention, feed_forward: feed_forwards(&config, &config.inference_moe(), None)?, config })
    }

    /// What the encoder makes of `ids`, `[T, D]` in the type of the weights' products.
    fn forward(
        &self,
        ctx: &Context,
        weights: &DecoderWeights,
        (ids, num_sequences): (&[u32], usize),
        watch: impl FnMut(usize, &MoeSaved),
    ) -> Tensor {
        let encoder = weights.encoder.as_ref().expect("the weights are of another configuration than the model");
        let seq_len = ids.len() / num_sequences;
        let relative = Relative::of(&self.config, encoder.relative.as_ref(), false, [seq_len; 2]);
        let pass = Pass { relative, ..Pass::new(ctx, None, num_sequences, seq_len, 0) };
        let x = embedding(ctx, ids, encoder.embedding.as_ref().unwrap_or(&weights.embedding), DType::F32);
        let stack = Stack {
            attention: &self.attention,
            cross: None,
            feed_forward: &self.feed_forward,
            expert_capacity: self.config.variant.expert_capacity,
        };
        let input = RouterInput { token_ids: ids, is_inference: true, ..RouterInput::default() };
        let x = stack.forward(&pass, |i| Cow::Borrowed(&encoder.layers[i]), x, &input, None, watch);
        let dtype = weights.compute_dtype().of_activations();
        Norm { eps: self.config.norm_eps }.forward(ctx, &encoder.final_norm, &x, dtype).0
    }
}

impl Decoder {
    /// Reads `sources`, once for however much the decoder writes. Fails if the model has no encoder.
    pub fn encode(
        &self,
        ctx: &Context,
        weights: &DecoderWeights,
        sources: &SourceBatch<'_>,
    ) -> Result<Memory, BatchError> {
        self.encode_watched(ctx, weights, sources, |_, _| ())
    }

    /// As [`encode`](Self::encode), showing `watch` what each MoE layer of the encoder decided, with the layer's index.
    pub fn encode_watched(
        &self,
        ctx: &Context,
        weights: &DecoderWeights,
        sources: &SourceBatch<'_>,
        watch: impl FnMut(usize, &MoeSaved),
    ) -> Result<Memory, BatchError> {
        let encoder = self.encoder().ok_or(BatchError::NoEncoder)?;
        let SourceBatch { ids, num_sequences } = *sources;
        let seq_len = ids.len() / num_sequences.max(1);
        self.check_shape(&TokenBatch { inputs: ids, targets: ids, num_sequences, seq_len })?;
        let encoded = encoder.forward(ctx, weights, (ids, num_sequences), watch);
        Ok(Memory::new(ctx, &weights.layers, &encoded, (num_sequences, seq_len)))
    }

    /// As [`logits`](Self::logits), for texts that answer the sources in `memory`, in their order. Every text begins with
    /// the encoder's `start_id`.
    pub fn logits_given(
        &self,
        ctx: &Context,
        weights: &DecoderWeights,
        memory: &Memory,
        inputs: &[u32],
    ) -> Result<Tensor, BatchError> {
        let num_sequences = memory.num_sequences;
        let seq_len = inputs.len() / num_sequences.max(1);
        self.check_shape(&TokenBatch { inputs, targets: inputs, num_sequences, seq_len })?;
        Ok(self.all_logits(ctx, weights, Some(memory), inputs, num_sequences))
    }

    /// As [`evaluate`](Self::evaluate), for texts that answer `sources`, in their order: the loss of the answers. The MoE
    /// layers of the encoder come first, as in [`ModelConfig::moe_layers`].
    pub fn evaluate_given(
        &self,
        ctx: &Context,
        weights: &DecoderWeights,
        sources: &SourceBatch<'_>,
        batch: &TokenBatch<'_>,
    ) -> Result<PassStats, BatchError> {
        let mut layers = Vec::new();
        let memory = self.encode_watched(ctx, weights, sources, |_, saved| layers.push(saved.stats()))?;
        if memory.num_sequences != batch.num_sequences {
            let (len, num_sequences, seq_len) = (sources.ids.len(), batch.num_sequences, memory.seq_len);
            return Err(BatchError::Length { what: "sources", len, num_sequences, seq_len });
        }
        self.check_shape(batch)?;
        Ok(self.evaluate_pass(ctx, weights, batch, (Some(&memory), layers), |_, _| ()))
    }
}
