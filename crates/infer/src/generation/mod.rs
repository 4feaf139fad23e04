//! Generation: one sequence, token by token, with a cache of keys and values.

mod answer;
mod answer_text;
mod defaults;
mod files;
mod limit;
mod logit_rules;
mod logprobs;
mod penalties;
mod resolve;
mod sampler;
mod stop_texts;
mod stream;

use std::ops::ControlFlow;

use moeworks_model::{BatchError, Decoder, DecoderWeights, KvCache, ModelConfig, SourceBatch};
use moeworks_moe::MoeSaved;
use moeworks_ops::Context;
use moeworks_ops::sampling::Drawn;
use moeworks_tensor::Tensor;

use crate::routing_record::{PassTokens, RecordError, RoutingRecorder, Run};

pub use answer::{Answer, End, answer, prompt_ids};
pub use answer_text::AnswerText;
pub use defaults::SamplingDefaults;
pub use files::sampling_defaults;
pub use limit::{DEFAULT_TOKENS, TokenLimit, TokenLimits, max_new_tokens};
pub use logit_rules::{LogitRules, TokenBias};
pub use logprobs::{TokenLogprob, TokenLogprobs};
pub use penalties::Penalties;
pub use resolve::{ResolvedSampling, SamplingSettings};
pub use sampler::{Sampler, SamplingOptions};
pub use stop_texts::StopTexts;
pub use stream::TextStream;

/// A decoder with its weights and compute context.
#[derive(Clone, Copy)]
pub struct ModelRef<'a> {
    /// The compute context.
    pub ctx: &'a Context,
    /// The layers.
    pub decoder: &'a Decoder,
    /// The weights in the format of the products.
    pub weights: &'a DecoderWeights,
}

/// A request for new tokens.
#[derive(Clone, Copy, Debug)]
pub struct GenerateRequest<'a> {
    /// The ids to continue or, in a model with an encoder, of the source; at least one.
    pub prompt: &'a [u32],
    /// The most ids to generate.
    pub max_new_tokens: usize,
    /// Ids that end the text.
    pub stop_ids: &'a [u32],
}

/// The reason why generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// One of the stop ids was drawn; it is the last of the ids.
    StopId,
    /// `max_new_tokens` ids were generated.
    MaxTokens,
    /// `on_token` asked for it.
    Asked,
    /// The text has the form that the sampler holds it to, and can do nothing but end.
    HasForm,
    /// No token continues the form that the sampler holds the text to ([`Sampler::failure`]).
    NoToken,
}

/// Ids that were generated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generated {
    /// The new ids, including the stop id.
    pub ids: Vec<u32>,
    /// The reason why there are no more.
    pub reason: StopReason,
}

/// A sequence with its KV cache, so that the next prompt costs only its new part.
pub struct CachedSequence {
    cache: KvCache,
    /// The ids in the cache.
    ids: Vec<u32>,
    recording: Option<Recording>,
}

/// The record of the experts of a sequence's tokens.
struct Recording {
    recorder: RoutingRecorder,
    /// The MoE layers of an encoder, which are numbered before the decoder's.
    num_encoder_layers: usize,
    /// The error that ended the recording.
    failure: Option<RecordError>,
}

impl CachedSequence {
    /// Makes an empty sequence for a model of `config`.
    #[must_use]
    pub fn new(config: &ModelConfig) -> Self {
        Self { cache: KvCache::new(config), ids: Vec::new(), recording: None }
    }

    /// Makes an empty sequence that records the experts of each of its tokens. A step then waits for the device.
    #[must_use]
    pub fn recorded(config: &ModelConfig, recorder: RoutingRecorder) -> Self {
        let num_encoder_layers = config.num_encoder_layers();
        Self { recording: Some(Recording { recorder, num_encoder_layers, failure: None }), ..Self::new(config) }
    }

    /// Ends the recording and returns the recorder, if there is one.
    ///
    /// # Errors
    /// If the record could not be written.
    pub fn end_recording(&mut self) -> Result<Option<RoutingRecorder>, RecordError> {
        match self.recording.take() {
            Some(Recording { failure: Some(failure), .. }) => Err(failure),
            recording => Ok(recording.map(|recording| recording.recorder)),
        }
    }

    /// Appends `ids` and returns the logits behind them.
    fn append(&mut self, model: ModelRef<'_>, ids: &[u32]) -> Result<Tensor, BatchError> {
        let ModelRef { ctx, decoder, weights } = model;
        let Self { cache, ids: known, recording } = self;
        let Some(recording) = recording else {
            let logits = decoder.forward_cached(ctx, weights, cache, ids, None)?;
            known.extend(ids);
            return Ok(logits);
        };
        let before = recording.num_encoder_layers;
        let mut tell = |layer: usize, saved: &MoeSaved| recording.recorder.tell(before + layer, saved);
        let logits = decoder.forward_cached(ctx, weights, cache, ids, Some(&mut tell))?;
        recording.finish_pass(known.len(), ids);
        known.extend(ids);
        Ok(logits)
    }

    /// Returns the ids in the cache.
    #[must_use]
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Keeps the common beginning with `prompt`, at most all but its last id. Returns the number of ids kept.
    fn keep(&mut self, prompt: &[u32]) -> usize {
        let same = self.ids.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        let kept = self.cache.truncate(same.min(prompt.len().saturating_sub(1)));
        self.ids.truncate(kept);
        kept
    }
}

impl Recording {
    /// Writes the choices for `ids`, which follow `position` other tokens. After a failure nothing more is written.
    fn finish_pass(&mut self, position: usize, ids: &[u32]) {
        let runs = [Run { id: 0, position: position as u32, len: ids.len() as u32 }];
        if self.failure.is_none() {
            self.failure = self.recorder.finish_pass(PassTokens { runs: &runs, token_ids: ids }).err();
        }
    }
}

/// Continues a prompt, or answers it if the model has an encoder. Draws ids with `sampler` until a stop id, the
/// limit, or a break by `on_token`, which is called with each id as it is drawn.
///
/// `sequence` is reused as far as it begins like the prompt. Afterwards it holds the prompt and the new ids except
/// the last one.
///
/// # Errors
/// Fails before anything is computed if prompt and new tokens together do not fit in the model's `max_seq_len`, if
/// that is a limit: the window does not slide, because the keys of a cache carry their positions. Fails at the first
/// logits that are not numbers ([`DecoderWeights::first_not_finite`] may say why).
pub fn generate(
    model: ModelRef<'_>,
    sequence: &mut CachedSequence,
    request: &GenerateRequest<'_>,
    sampler: &mut Sampler,
    on_token: impl FnMut(u32) -> ControlFlow<()>,
) -> Result<Generated, BatchError> {
    let ModelRef { ctx, decoder, weights } = model;
    let prompt = request.prompt;
    decoder.check_len(prompt.len().saturating_add(request.max_new_tokens))?;
    let config = decoder.config();
    let first = match &config.variant.encoder {
        None => {
            sampler.begin(prompt);
            &prompt[sequence.keep(prompt)..]
        }
        Some(encoder) => {
            let source = SourceBatch { ids: prompt, num_sequences: 1 };
            let recording = &mut sequence.recording;
            let mut tell = |layer: usize, saved: &MoeSaved| {
                if let Some(recording) = recording {
                    recording.recorder.tell(layer, saved);
                }
            };
            let output = decoder.encode(ctx, weights, &source, Some(&mut tell))?;
            sequence.cache = KvCache::with_encoder_output(config, output);
            sequence.ids.clear();
            sampler.begin(&[encoder.start_id]);
            &[encoder.start_id][..]
        }
    };
    let request = GenerateRequest { prompt: first, ..*request };
    // A step that turns out to be one too many is taken back, which a cache of a sliding window may not be able to.
    let is_ahead = decoder.can_run_ahead(ctx) && !sampler.counts_tokens();
    if is_ahead && config.variant.window == 0 && sequence.recording.is_none() {
        return generate_ahead(model, sequence, &request, sampler, on_token);
    }
    generate_with(|ids| sequence.append(model, ids), ctx, &request, sampler, on_token)
}

/// Generates with each step started before the host knows its input token.
fn generate_ahead(
    ModelRef { ctx, decoder, weights }: ModelRef<'_>,
    sequence: &mut CachedSequence,
    request: &GenerateRequest<'_>,
    sampler: &mut Sampler,
    mut on_token: impl FnMut(u32) -> ControlFlow<()>,
) -> Result<Generated, BatchError> {
    let GenerateRequest { prompt, max_new_tokens, stop_ids } = *request;
    let mut ids = Vec::new();
    let mut logits = decoder.forward_cached(ctx, weights, &mut sequence.cache, prompt, None)?;
    sequence.ids.extend(prompt);
    let mut reason = StopReason::MaxTokens;
    while ids.len() < max_new_tokens {
        let drawn = sampler.sample_each(ctx, &logits, 1);
        let is_last = ids.len() + 1 == max_new_tokens;
        if !is_last {
            logits = decoder.step_async(ctx, weights, &mut sequence.cache, &drawn)?;
        }
        let Drawn { id, has_nan } = drawn.wait()[0];
        if has_nan {
            sequence.cache.truncate(sequence.ids.len());
            return Err(BatchError::NotANumber);
        }
        ids.push(id);
        let is_asked = on_token(id).is_break();
        if is_asked || stop_ids.contains(&id) {
            reason = if is_asked { StopReason::Asked } else { StopReason::StopId };
            break;
        }
        if !is_last {
            sequence.ids.push(id);
        }
    }
    sequence.cache.truncate(sequence.ids.len());
    Ok(Generated { ids, reason })
}

/// Generates from the logits that `next` returns for the ids that it is given, which follow all ids given before. The
/// first call gets the whole prompt, whose length is not limited here; each later call gets one id.
pub fn generate_with<E: From<BatchError>>(
    mut next: impl FnMut(&[u32]) -> Result<Tensor, E>,
    ctx: &Context,
    request: &GenerateRequest<'_>,
    sampler: &mut Sampler,
    mut on_token: impl FnMut(u32) -> ControlFlow<()>,
) -> Result<Generated, E> {
    let GenerateRequest { prompt, max_new_tokens, stop_ids } = *request;
    let mut ids = Vec::new();
    let mut logits = next(prompt)?;
    while ids.len() < max_new_tokens {
        let Drawn { id, has_nan } = sampler.sample(ctx, &logits);
        if has_nan {
            return Err(E::from(BatchError::NotANumber));
        }
        if sampler.failure().is_some() {
            return Ok(Generated { ids, reason: StopReason::NoToken });
        }
        ids.push(id);
        let reason = match on_token(id) {
            ControlFlow::Break(()) => Some(StopReason::Asked),
            ControlFlow::Continue(()) if stop_ids.contains(&id) => Some(StopReason::StopId),
            ControlFlow::Continue(()) => sampler.is_complete().then_some(StopReason::HasForm),
        };
        if let Some(reason) = reason {
            return Ok(Generated { ids, reason });
        }
        if ids.len() < max_new_tokens {
            logits = next(&[id])?;
        }
    }
    Ok(Generated { ids, reason: StopReason::MaxTokens })
}
