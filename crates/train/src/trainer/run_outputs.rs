//! What a run writes while it goes: checkpoints and samples of text. Of several ranks the root writes both. For a checkpoint it
//! puts the model together tensor by tensor, since the whole may be more than one rank has memory for; a text is written by all ranks,
//! each with its part of the model.

use std::cell::RefCell;
use std::io;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use moeworks_infer::generation::{
    CachedSequence, GenerateRequest, ModelRef, Sampler, SamplingOptions, TextStream, generate, generate_with,
};
use moeworks_infer::store::Keep;
use moeworks_model::KvCache;
use moeworks_model::files::FileError;
use moeworks_model::safetensors::TensorBytes;

use super::{Event, Output, Trainer};
use crate::config::ConfigError;
use crate::error::TrainError;
use crate::metrics::Sample;
use crate::state::{self, WriteError};

impl Trainer {
    /// Writes a checkpoint.
    pub(super) fn save(&mut self, on_event: &mut dyn FnMut(Event<'_>)) -> Result<(), TrainError> {
        self.progress.updates = self.optimizer.updates;
        self.ranks.as_ref().map_or(Ok(()), |ranks| ranks.check_copies(&self.weights))?;
        let Some(mut output) = self.output.take() else { return self.help_to_save() };
        let result = self.save_to(&mut output);
        self.output = Some(output);
        self.give_back();
        on_event(Event::Saved(&result?));
        Ok(())
    }

    /// Gives memory back that a checkpoint took and no step does.
    fn give_back(&self) {
        if self.ranks.as_ref().is_some_and(|ranks| ranks.shards_optimizer()) {
            self.ctx.pool().trim();
        }
    }

    /// Gives the root this rank's part of the model, and then of the moments.
    fn help_to_save(&self) -> Result<(), TrainError> {
        let Some(ranks) = &self.ranks else { return Ok(()) };
        ranks.patiently(|| {
            ranks.give_tensors(&self.ctx, ranks.held_weights(&self.weights))?;
            state::moments(&self.optimizer)
                .into_iter()
                .try_for_each(|(_, moments)| ranks.give_tensors(&self.ctx, ranks.held_moments(moments)))
        })
    }

    fn save_to(&self, output: &mut Output) -> Result<PathBuf, TrainError> {
        let Some(ranks) = &self.ranks else {
            let moments = state::lent_moments(&self.optimizer);
            let write = |dir: &Path| state::save_model(dir, &self.decoder, &self.weights, &self.tokenizer);
            return self.write_checkpoint(output, &moments, write);
        };
        let whole = |held, prefix| ranks.whole_tensors(&self.ctx, held, prefix);
        let moments = state::moments(&self.optimizer).into_iter();
        let moments: Vec<_> =
            moments.flat_map(|(prefix, moments)| whole(ranks.held_moments(moments), prefix)).collect();
        ranks.patiently(|| {
            self.write_checkpoint(output, &moments, |dir| {
                let weights = ranks.whole_one_by_one(&self.ctx, ranks.held_weights(&self.weights));
                let weights = RefCell::new(weights);
                let next = || weights.borrow_mut().next().unwrap_or_else(|| Err(io::Error::other("no more tensors")));
                state::save_coming(dir, &self.decoder, (&self.weights, &next), &self.tokenizer)
            })
        })
    }

    /// Writes a checkpoint: what `write_model` makes of its folder, `moments`, and what is known of routing.
    fn write_checkpoint(
        &self,
        output: &mut Output,
        moments: &[TensorBytes<'_>],
        write_model: impl FnOnce(&Path) -> Result<(), WriteError>,
    ) -> Result<PathBuf, TrainError> {
        output.metrics.sync()?;
        let keep = Keep { last: self.config.train.keep_last, best: true };
        let checkpoint = output.store.save(&state::metadata(&self.progress), keep, |dir| {
            write_model(dir)?;
            state::save_moments(dir, moments)?;
            let routing = self.routing.as_ref().map_or(Ok(()), |sample| sample.save(dir));
            routing.map_err(FileError::at(dir)).map_err(WriteError::from)
        })?;
        output.last_checkpoint = Some(checkpoint.path.clone());
        Ok(checkpoint.path)
    }

    /// Lets the model write a text and records it.
    pub(super) fn write_sample(&mut self, on_event: &mut dyn FnMut(Event<'_>)) -> Result<(), TrainError> {
        let sample = match &self.ranks {
            Some(ranks) if !ranks.is_root() => return ranks.follow_text(self.model_for_products()),
            Some(ranks) => {
                let mut cache = KvCache::new(&self.config.model);
                let model = self.model_for_products();
                let sample = self.sample(|request, sampler| {
                    let next = |ids: &[u32]| ranks.extend_together(model, &mut cache, ids);
                    Ok(generate_with(next, &self.ctx, request, sampler, |_| ControlFlow::Continue(()))?.ids)
                })?;
                ranks.end_text()?;
                sample
            }
            None => self.sample(|request, sampler| {
                let model = self.model_for_products();
                let mut sequence = CachedSequence::new(model.decoder.config());
                Ok(generate(model, &mut sequence, request, sampler, |_| ControlFlow::Continue(()))?.ids)
            })?,
        };
        if let Some(output) = &mut self.output {
            output.metrics.write_sample(&sample)?;
            on_event(Event::Sample(&sample));
        }
        Ok(())
    }

    /// The model with its weights as products take them.
    pub(super) fn model_for_products(&self) -> ModelRef<'_> {
        let weights = self.compute.as_ref().unwrap_or(&self.weights);
        ModelRef { ctx: &self.ctx, decoder: &self.decoder, weights }
    }

    /// A text of which `write` finds the ids.
    fn sample(
        &self,
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
        Ok(Sample { step: self.progress.step, prompt: train.sample_prompt.clone(), text })
    }
}
