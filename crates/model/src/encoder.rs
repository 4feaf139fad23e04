//! Models with an encoder: the encoder reads a source once, and the decoder writes a text while attending to the
//! encoder's output (T5, 1910.10683; Switch Transformers, 2101.03961).

use std::sync::Arc;

use moeworks_moe::{ConfigError, LayerStats, LossGrad, RemoteExperts};
use moeworks_ops::Context;
use moeworks_ops::embedding::{embedding, embedding_backward};
use moeworks_ops::linear::Write;
use moeworks_tensor::{DType, Tensor};

use crate::config::ModelConfig;
use crate::decoder::Decoder;
use crate::layers::attention::WRONG_KIND;
use crate::layers::layer::{Flow, ResidualStream};
use crate::layers::norm::{Norm, NormBackward};
use crate::layers::weight_grads::TaskSink;
use crate::layers::{EncoderOutput, RouterRules, Sequences};
use crate::mode::Mode;
use crate::pass::{BatchError, PassOptions, TokenBatch};
use crate::stage::{RoutingHook, Stage, TrainingPass};
use crate::weights::{DecoderWeights, EncoderWeights, WeightTable};

/// An encoder: a stage whose layers see the whole source, and a final norm.
#[derive(Debug)]
pub(crate) struct Encoder {
    stage: Stage,
}

/// The encoder's output for the sources of a training pass, with the activations that its backward pass needs.
pub(crate) struct Encoded<'a> {
    training: TrainingPass<'a>,
    /// The residual stream after the last layer, and the statistics of its norm.
    last: Tensor,
    norm: Tensor,
    /// The output, `[T, D]`, in the type of the weights' products.
    pub(crate) result: Tensor,
}

/// Sources of equal length.
#[derive(Clone, Copy, Debug)]
pub struct SourceBatch<'a> {
    /// `[num_sequences, seq_len]`: token ids.
    pub ids: &'a [u32],
    /// The number of sources.
    pub num_sequences: usize,
}

impl SourceBatch<'_> {
    /// Returns the sequences of a pass over the sources, of which there must be at least one.
    fn sequences(&self) -> Sequences {
        Sequences::whole(self.num_sequences, self.ids.len() / self.num_sequences)
    }
}

impl Encoder {
    /// Spreads the experts of a model in use over the ranks of `remote`.
    pub(crate) fn set_remote_experts(&mut self, remote: &RemoteExperts) {
        self.stage.set_remote_experts(remote);
    }

    /// Makes the encoder of a model with the weights of `table`. `config` is that of its layers; `num_decoder_layers`
    /// layers of a decoder follow.
    pub(crate) fn new(
        config: ModelConfig,
        table: Arc<WeightTable>,
        num_decoder_layers: usize,
    ) -> Result<Self, ConfigError> {
        Ok(Self { stage: Stage::encoder(config, table, num_decoder_layers)? })
    }

    /// Embeds the ids.
    fn embed(ctx: &Context, weights: &DecoderWeights, ids: &[u32]) -> ResidualStream {
        let table = encoder_weights(weights).embedding.as_ref().unwrap_or(&weights.embedding);
        ResidualStream { x: embedding(ctx, ids, table, DType::F32), router_logits: None }
    }

    fn norm(&self) -> Norm {
        Norm { eps: self.stage.config().norm_eps }
    }

    /// Applies the final norm to `x`; returns the output and the norm's statistics.
    fn end(&self, ctx: &Context, weights: &DecoderWeights, x: &Tensor) -> (Tensor, Tensor) {
        let dtype = weights.compute_dtype().of_activations();
        self.norm().forward(ctx, &encoder_weights(weights).final_norm, x, dtype)
    }

    /// Returns the output `[T, D]` for `sources`, in the type of the weights' products.
    fn forward(
        &self,
        ctx: &Context,
        weights: &DecoderWeights,
        sources: SourceBatch<'_>,
        hook: Option<RoutingHook<'_>>,
    ) -> Tensor {
        let sequences = sources.sequences();
        let rules = RouterRules::plain(sources.ids, &sequences);
        let pass = self.stage.pass(ctx, weights, Mode::Infer, sequences, rules, None);
        let stream = Self::embed(ctx, weights, sources.ids);
        let stream = self.stage.forward_layers(&pass, weights, stream, None, hook);
        self.end(ctx, weights, &stream.x).0
    }

    /// Runs the forward pass of training over a batch's sources.
    pub(crate) fn training_forward<'a>(
        &'a self,
        ctx: &'a Context,
        weights: &DecoderWeights,
        batch: &TokenBatch<'a>,
        options: &PassOptions,
    ) -> Encoded<'a> {
        let sources = batch.source_batch();
        let rules = self.stage.training_rules(sources.ids, options);
        let pass = self.stage.pass(ctx, weights, Mode::Train, sources.sequences(), rules, None);
        let stream = Self::embed(ctx, weights, sources.ids);
        let mut training = TrainingPass::new(&self.stage, pass, stream, options);
        for (index, layer) in encoder_weights(weights).layers.iter().enumerate() {
            training.forward(index, layer);
        }
        let last = training.finish_forward().x;
        let (result, norm) = self.end(ctx, weights, &last);
        Encoded { training, last, norm, result }
    }

    /// Computes the gradients of the encoder's weights from that of its output; `loss_grads` are those of its
    /// routers. The gradient of an embedding that is shared with the decoder is added to the decoder's.
    pub(crate) fn backward(
        &self,
        weights: &DecoderWeights,
        encoded: Encoded<'_>,
        d_result: &Tensor,
        loss_grads: Vec<LossGrad>,
        write: Write,
        grads: &mut DecoderWeights,
    ) {
        let Encoded { mut training, last, norm, .. } = encoded;
        let (ctx, encoder) = (training.pass.ctx, encoder_weights(weights));
        let DecoderWeights { encoder: Some(into), embedding: shared, .. } = grads else { panic!("{WRONG_KIND}") };
        let around = NormBackward { x: &last, statistics: &norm, dy: d_result, base: None };
        let dx = self.norm().backward(ctx, &encoder.final_norm, around, write, &mut into.final_norm);
        drop(last);
        let mut flow = Flow::new(dx, loss_grads);
        for (index, layer) in encoder.layers.iter().enumerate().rev() {
            training.backward(index, layer, &mut flow, &mut TaskSink::Run(write), &mut into.layers[index]);
        }
        let pass = &training.pass;
        pass.relative_backward(&flow, write, into.relative.as_mut());
        if let (Some(own), Write::Replace) = (&mut into.embedding, write) {
            own.f32s_mut().fill(0.0);
        }
        embedding_backward(ctx, pass.token_ids(), &flow.dx, into.embedding.as_mut().unwrap_or(shared));
    }
}

impl Encoded<'_> {
    /// Returns the statistics of the MoE layers.
    pub(crate) fn stats(&self) -> &[LayerStats] {
        self.training.stats()
    }

    /// Prepares the output for the decoder's cross-attention.
    pub(crate) fn output(&self, weights: &DecoderWeights) -> EncoderOutput {
        let pass = &self.training.pass;
        EncoderOutput::new(pass.ctx, &weights.layers, &self.result, pass.sequences)
    }
}

/// Returns the encoder's weights. Panics if there is no encoder.
fn encoder_weights(weights: &DecoderWeights) -> &EncoderWeights {
    weights.encoder.as_ref().expect(WRONG_KIND)
}

impl<'a> TokenBatch<'a> {
    /// Returns the batch's sources.
    pub(crate) fn source_batch(&self) -> SourceBatch<'a> {
        SourceBatch { ids: self.sources, num_sequences: self.num_sequences }
    }
}

impl Decoder {
    /// Encodes `sources`, once for everything that the decoder writes. `hook` sees the routing of each MoE layer of
    /// the encoder. Fails if the model has no encoder.
    pub fn encode(
        &self,
        ctx: &Context,
        weights: &DecoderWeights,
        sources: &SourceBatch<'_>,
        hook: Option<RoutingHook<'_>>,
    ) -> Result<EncoderOutput, BatchError> {
        let encoder = self.encoder().ok_or(BatchError::NoEncoder)?;
        self.check_sources(sources)?;
        let encoded = encoder.forward(ctx, weights, *sources, hook);
        self.check_ranks()?;
        Ok(EncoderOutput::new(ctx, &weights.layers, &encoded, sources.sequences()))
    }
}
