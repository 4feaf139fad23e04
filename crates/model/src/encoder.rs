//! Models with an encoder: the encoder reads a source once, the decoder writes a text and attends to what was read (T5,
//! 1910.10683; Switch Transformers, 2101.03961).

use std::borrow::Cow;

use moeworks_moe::{ConfigError, LayerStats, LossGrad, MoeSaved, RouterInput};
use moeworks_ops::Context;
use moeworks_ops::embedding::{embedding, embedding_backward};
use moeworks_ops::linear::Write;
use moeworks_tensor::{DType, Tensor};

use crate::config::ModelConfig;
use crate::decoder::{Decoder, feed_forwards};
use crate::layers::attention::{AttentionBlock, WRONG_KIND};
use crate::layers::feed_forward::FeedForwardBlock;
use crate::layers::norm::Norm;
use crate::layers::relative::Relative;
use crate::layers::stack::Stack;
use crate::layers::training::{Flow, LayerRecord, Training};
use crate::layers::{Memory, Pass};
use crate::pass::{BatchError, PassOptions, TokenBatch};
use crate::weights::{DecoderWeights, EncoderWeights};

/// An encoder: layers that see the whole source, and a norm.
#[derive(Debug)]
pub(crate) struct Encoder {
    config: ModelConfig,
    num_decoder_layers: usize,
    attention: Vec<AttentionBlock>,
    training: Vec<FeedForwardBlock>,
    inference: Vec<FeedForwardBlock>,
}

/// What an encoder made of the sources of a training pass, and what its backward needs.
pub(crate) struct Encoded<'a> {
    pass: Pass<'a>,
    batch: &'a TokenBatch<'a>,
    options: &'a PassOptions,
    records: Vec<LayerRecord>,
    /// The statistics of the MoE layers.
    pub(crate) stats: Vec<LayerStats>,
    /// The residual stream behind the last layer, and the statistics of its norm.
    last: (Tensor, Tensor),
    /// `[T, D]` in the type of the weights' products.
    pub(crate) result: Tensor,
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
    /// The encoder of `config`, the configuration of its layers, before so many of a decoder.
    pub(crate) fn new(config: ModelConfig, num_decoder_layers: usize) -> Result<Self, ConfigError> {
        let attention = (0..config.num_layers).map(|i| AttentionBlock::new(&config, i, None)).collect();
        let training = feed_forwards(&config, &config.moe(), None, |_| false)?;
        let inference = feed_forwards(&config, &config.inference_moe(), None, |_| false)?;
        Ok(Self { config, num_decoder_layers, attention, training, inference })
    }

    fn stack<'a>(&'a self, feed_forward: &'a [FeedForwardBlock]) -> Stack<'a> {
        let expert_capacity = self.config.variant.expert_capacity;
        Stack { attention: &self.attention, cross: None, feed_forward, expert_capacity }
    }

    /// A pass over `num_sequences` sources in `ids`, and the embedded ids.
    fn begin<'a>(
        &self,
        ctx: &'a Context,
        weights: &DecoderWeights,
        SourceBatch { ids, num_sequences }: SourceBatch<'_>,
    ) -> (Pass<'a>, Tensor) {
        let encoder = of(weights);
        let seq_len = ids.len() / num_sequences;
        let relative = Relative::of(&self.config, encoder.relative.as_ref(), false, [seq_len; 2]);
        let pass = Pass { relative, ..Pass::new(ctx, None, num_sequences, seq_len, 0) };
        let x = embedding(ctx, ids, encoder.embedding.as_ref().unwrap_or(&weights.embedding), DType::F32);
        (pass, x)
    }

    /// The norm behind the last layer of `x`, and its statistics.
    fn end(&self, ctx: &Context, weights: &DecoderWeights, x: &Tensor) -> (Tensor, Tensor) {
        let dtype = weights.compute_dtype().of_activations();
        Norm { eps: self.config.norm_eps }.forward(ctx, &of(weights).final_norm, x, dtype)
    }

    /// What the encoder makes of `ids`, `[T, D]` in the type of the weights' products.
    fn forward(
        &self,
        ctx: &Context,
        weights: &DecoderWeights,
        sources: SourceBatch<'_>,
        watch: impl FnMut(usize, &MoeSaved),
    ) -> Tensor {
        let (pass, x) = self.begin(ctx, weights, sources);
        let input =
            RouterInput { token_ids: sources.ids, is_inference: true, is_forward_only: true, ..RouterInput::default() };
        let layer = |i: usize| Cow::Borrowed(&of(weights).layers[i]);
        let x = self.stack(&self.inference).forward(&pass, layer, x, &input, None, watch);
        self.end(ctx, weights, &x).0
    }

    /// As [`forward`](Self::forward) of a batch's sources by the rules of training.
    pub(crate) fn training_forward<'a>(
        &self,
        ctx: &'a Context,
        weights: &DecoderWeights,
        batch: &'a TokenBatch<'a>,
        options: &'a PassOptions,
    ) -> Encoded<'a> {
        let (pass, mut x) = self.begin(ctx, weights, batch.source_batch());
        let training = self.training(&pass, (batch, options));
        let (mut records, mut stats, mut previous) = (Vec::new(), Vec::new(), None);
        for layer in of(weights).layers.iter().enumerate() {
            let (y, record) = training.forward(layer, x, &mut previous, &mut stats);
            records.push(record);
            x = y;
        }
        stats.extend(records.iter().filter_map(LayerRecord::stats));
        let (result, statistics) = self.end(ctx, weights, &x);
        Encoded { pass, batch, options, records, stats, last: (x, statistics), result }
    }

    fn training<'a>(
        &'a self,
        pass: &'a Pass<'a>,
        (batch, options): (&'a TokenBatch<'a>, &'a PassOptions),
    ) -> Training<'a> {
        let num_layers = self.attention.len() + self.num_decoder_layers;
        let (stack, token_ids) = (self.stack(&self.training), batch.sources);
        Training { stack, pass, token_ids, options, layers_before: 0, num_layers }
    }

    /// Writes the gradients of the encoder's weights, from that of its result; `loss_grads` are those of its routers. Where its
    /// embedding is the decoder's, it is added to what is there.
    pub(crate) fn backward(
        &self,
        weights: &DecoderWeights,
        (encoded, d_result): (Encoded<'_>, &Tensor),
        mut loss_grads: Vec<LossGrad>,
        write: Write,
        grads: &mut DecoderWeights,
    ) {
        let Encoded { pass, batch, options, records, last: (x, statistics), .. } = encoded;
        let (ctx, encoder) = (pass.ctx, of(weights));
        let DecoderWeights { encoder: Some(into), embedding: shared, .. } = grads else { panic!("{WRONG_KIND}") };
        let (norm, d_norm) = (&encoder.final_norm, &mut into.final_norm);
        let norm_of = Norm { eps: self.config.norm_eps };
        let mut flow =
            Flow::new(ctx, norm_of.backward_onto(ctx, norm, (&x, &statistics), (d_result, None), write, d_norm), None);
        let training = self.training(&pass, (batch, options));
        for (i, record) in records.into_iter().enumerate().rev() {
            let layer = (i, &encoder.layers[i]);
            training.backward(layer, record, (&mut flow, &mut loss_grads), write, &mut into.layers[i]);
        }
        pass.relative_backward(&flow, write, into.relative.as_mut());
        if let (Some(own), Write::Replace) = (&mut into.embedding, write) {
            own.f32s_mut().fill(0.0);
        }
        embedding_backward(ctx, batch.sources, &flow.dx, into.embedding.as_mut().unwrap_or(shared));
    }
}

impl Encoded<'_> {
    /// The result as the decoder's layers need it.
    pub(crate) fn memory(&self, weights: &DecoderWeights) -> Memory {
        let Pass { ctx, num_sequences, seq_len, .. } = self.pass;
        Memory::new(ctx, &weights.layers, &self.result, (num_sequences, seq_len))
    }
}

/// The encoder's weights.
fn of(weights: &DecoderWeights) -> &EncoderWeights {
    weights.encoder.as_ref().expect(WRONG_KIND)
}

impl<'a> TokenBatch<'a> {
    /// The sources.
    pub(crate) fn source_batch(&self) -> SourceBatch<'a> {
        SourceBatch { ids: self.sources, num_sequences: self.num_sequences }
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
        self.check_sources(sources)?;
        let encoded = encoder.forward(ctx, weights, *sources, watch);
        let SourceBatch { ids, num_sequences } = *sources;
        Ok(Memory::new(ctx, &weights.layers, &encoded, (num_sequences, ids.len() / num_sequences)))
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
        self.check_shape(&TokenBatch { inputs, targets: inputs, num_sequences, seq_len, ..TokenBatch::default() })?;
        Ok(self.all_logits(ctx, weights, Some(memory), inputs, num_sequences))
    }
}
