//! Texts sampled during training. On several ranks all of them take part, each with its part of the model.

use std::ops::ControlFlow;

use moeworks_infer::generation::{
    CachedSequence, GenerateRequest, ModelRef, Sampler, SamplingOptions, TextStream, generate, generate_with,
};
use moeworks_model::{DecoderWeights, KvCache};

use super::LanguageModel;
use crate::config::ConfigError;
use crate::error::TrainError;
use crate::metrics::Sample;
use crate::pipeline::{Pipeline, StageView};
use crate::task::ModelView;

impl LanguageModel {
    /// Returns the model with its weights in the precision that GEMMs read.
    pub(super) fn model<'a>(&'a self, view: &ModelView<'a, DecoderWeights>) -> ModelRef<'a> {
        ModelRef { ctx: view.ctx, decoder: &self.decoder, weights: view.params }
    }

    /// Samples a text; only the root returns it.
    pub(super) fn write_text(
        &self,
        view: &ModelView<'_, DecoderWeights>,
        step: u64,
    ) -> Result<Option<Sample>, TrainError> {
        let model = self.model(view);
        if let (Some(pipeline), Some(ranks)) = (&self.pipeline, view.ranks) {
            return self.write_in_stages(pipeline, StageView { ctx: view.ctx, ranks, weights: view.params }, step);
        }
        let sample = match view.ranks {
            Some(ranks) if !ranks.is_root() => return ranks.follow_text(model).map(|()| None),
            Some(ranks) => {
                let mut cache = KvCache::new(&self.config.model);
                let sample = self.sampled(step, |request, sampler| {
                    let next = |ids: &[u32]| ranks.extend_together(model, &mut cache, ids);
                    Ok(generate_with(next, view.ctx, request, sampler, |_| ControlFlow::Continue(()))?.ids)
                })?;
                ranks.end_text()?;
                sample
            }
            None => self.sampled(step, |request, sampler| {
                let mut sequence = CachedSequence::new(model.decoder.config());
                Ok(generate(model, &mut sequence, request, sampler, |_| ControlFlow::Continue(()))?.ids)
            })?,
        };
        Ok(Some(sample))
    }

    /// A text of a pipeline, on the root. All ranks call this.
    fn write_in_stages(
        &self,
        pipeline: &Pipeline,
        view: StageView<'_>,
        step: u64,
    ) -> Result<Option<Sample>, TrainError> {
        let ranks = view.ranks;
        if !ranks.is_root() {
            return follow_in_stages(pipeline, view).map(|()| None);
        }
        let mut text = pipeline.begin_text();
        let sample = self.sampled(step, |request, sampler| {
            let next = |ids: &[u32]| {
                ranks.tell(ids)?;
                let logits = pipeline.extend(view, &mut text, ids)?;
                ranks.check()?;
                Ok::<_, TrainError>(logits.expect("the root's stage group has the logits"))
            };
            Ok(generate_with(next, view.ctx, request, sampler, |_| ControlFlow::Continue(()))?.ids)
        })?;
        ranks.end_text()?;
        Ok(Some(sample))
    }

    /// Decodes the text whose ids `write` generates.
    fn sampled(
        &self,
        step: u64,
        write: impl FnOnce(&GenerateRequest<'_>, &mut Sampler) -> Result<Vec<u32>, TrainError>,
    ) -> Result<Sample, TrainError> {
        let train = &self.config.train;
        let options = SamplingOptions { temperature: 0.8, top_p: 0.95, seed: train.seed, ..SamplingOptions::default() };
        let mut sampler = Sampler::new(options).map_err(ConfigError::from)?;
        let (tokenizer, has_encoder) = (&self.tokenizer, self.config.model.variant.encoder.is_some());
        let text = &train.sample_prompt;
        let mut prompt =
            if has_encoder { tokenizer.encode_source(text)? } else { tokenizer.encode_prompt(text, false)? };
        prompt.truncate(self.decoder.room(0) / 2);
        let stop_ids = tokenizer.stop_ids(&[]);
        let max_new_tokens = train.sample_tokens.min(self.decoder.room(prompt.len()));
        let request = GenerateRequest { prompt: &prompt, max_new_tokens, stop_ids: &stop_ids };
        let ids = write(&request, &mut sampler)?;
        let mut stream = match has_encoder {
            true => TextStream::with_special(tokenizer),
            false => TextStream::new(tokenizer).after(&prompt),
        };
        let mut text = String::new();
        for &id in ids.iter().filter(|id| !stop_ids.contains(id)) {
            text += &stream.push(id)?;
        }
        text += &stream.finish()?;
        Ok(Sample { step, prompt: train.sample_prompt.clone(), text })
    }
}

/// Takes part in a text of a pipeline until the root ends it.
fn follow_in_stages(pipeline: &Pipeline, view: StageView<'_>) -> Result<(), TrainError> {
    let mut text = pipeline.begin_text();
    loop {
        let ids = view.ranks.told()?;
        if ids.is_empty() {
            return Ok(());
        }
        if view.ranks.passes_with_root() {
            pipeline.extend(view, &mut text, &ids)?;
        } else {
            pipeline.serve(view);
        }
        view.ranks.check()?;
    }
}
