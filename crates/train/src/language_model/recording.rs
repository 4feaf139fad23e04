//! The record of routing that a run keeps: loads of steps, and the choices for some of their tokens.
//!
//! Loads are those of all tokens of the step, after and before capacity. Choices are those that the model made for
//! the first sequences of the step, in a forward pass of its own with the weights that the step began with, by the
//! rules of training without noise. (On several ranks they are those before capacity.)

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use moeworks_infer::data::Batch;
use moeworks_infer::generation::ModelRef;
use moeworks_infer::routing_record::{
    Block, LayerLoads, LoadBlock, PassTokens, RecordHeader, RecordOptions, RecordSource, RecordWriter, RoutingRecorder,
    Run,
};
use moeworks_infer::store::ROUTING_RECORD;
use moeworks_model::{DecoderWeights, Mode};
use moeworks_moe::{LayerStats, MoeSaved};

use super::LanguageModel;
use crate::error::TrainError;
use crate::parallel::Ranks;
use crate::routing::RoutingSample;
use crate::task::{ModelView, PassFigures, RecordedStep};

impl LanguageModel {
    fn is_recorded(&self, step: u64) -> bool {
        let every = self.config.train.record_routing;
        every > 0 && step.is_multiple_of(every) && !self.config.model.moe_layer_numbers().is_empty()
    }

    /// Opens the record in the run's folder, to go on behind the steps before this one.
    fn open_record(&mut self, view: &ModelView<'_, DecoderWeights>, step: RecordedStep<'_>) -> Result<(), TrainError> {
        if self.recorder.is_some() || !step.writes {
            return Ok(());
        }
        let model = step.run_dir.file_name().unwrap_or_default().to_string_lossy();
        let mut header = RecordHeader::new(RecordSource::Train, &model, self.decoder.config())?;
        header.placement = view.ranks.map(|ranks| ranks.experts().placements().to_string());
        let path = step.run_dir.join(ROUTING_RECORD);
        let keep = |block: &Block| match block {
            Block::Loads(loads) => loads.step < step.step,
            Block::Tokens(tokens) => tokens.runs.iter().all(|run| run.id < step.step),
        };
        let writer = RecordWriter::resume(&path, header, keep)?;
        let options = RecordOptions { token_ids: true, weights: true };
        self.recorder = Some(RoutingRecorder::new(writer, options));
        Ok(())
    }

    /// Records the choices for the first tokens of a step, before its passes.
    pub(super) fn record_choices_of(
        &mut self,
        view: &ModelView<'_, DecoderWeights>,
        step: RecordedStep<'_>,
    ) -> Result<(), TrainError> {
        if !self.is_recorded(step.step) {
            return Ok(());
        }
        self.open_record(view, step)?;
        let num_tokens = self.config.train.record_tokens;
        if num_tokens == 0 || self.pipeline.is_some() || self.config.model.variant.encoder.is_some() {
            return Ok(());
        }
        let mut batch = self.dataset.train_batch(step.step - 1, 0);
        let num_sequences = (num_tokens / batch.seq_len.max(1)).clamp(1, batch.num_sequences.max(1));
        batch.keep(0..num_sequences.min(batch.num_sequences));
        match view.ranks {
            None => self.record_alone(view, &batch, step),
            Some(ranks) => self.record_on_ranks(view, &batch, step, ranks),
        }
    }

    fn record_alone(
        &mut self,
        view: &ModelView<'_, DecoderWeights>,
        batch: &Batch,
        step: RecordedStep<'_>,
    ) -> Result<(), TrainError> {
        let Some(mut recorder) = self.recorder.take() else { return Ok(()) };
        let ModelRef { ctx, decoder, weights } = self.model(view);
        let tell = &mut |layer: usize, saved: &MoeSaved| recorder.tell(layer, saved);
        decoder.route(ctx, weights, &batch.tokens(), Mode::TrainForward, tell)?;
        recorder.finish_pass(PassTokens { runs: &runs(batch, step.step), token_ids: &batch.inputs })?;
        self.recorder = Some(recorder);
        Ok(())
    }

    /// Routes the tokens on all ranks; the root writes.
    fn record_on_ranks(
        &mut self,
        view: &ModelView<'_, DecoderWeights>,
        batch: &Batch,
        step: RecordedStep<'_>,
        ranks: &Ranks,
    ) -> Result<(), TrainError> {
        let mut sample = RoutingSample::new(batch.inputs.clone());
        let ModelRef { ctx, decoder, weights } = self.model(view);
        if ranks.passes_with_root() {
            let tell = &mut |layer: usize, saved: &MoeSaved| sample.add(layer, saved.routing());
            decoder.route(ctx, weights, &batch.tokens(), Mode::Infer, tell)?;
        } else {
            decoder.serve_inference(ctx, weights);
        }
        ranks.check()?;
        let layers = self.config.model.moe_layer_numbers();
        let whole = sample.joined(layers, |own| ranks.all_values(own))?;
        if let Some(recorder) = &mut self.recorder {
            whole.layers().for_each(|(layer, choices)| recorder.tell_choices(layer, choices));
            recorder.finish_pass(PassTokens { runs: &runs(batch, step.step), token_ids: &batch.inputs })?;
        }
        Ok(())
    }

    /// Records the loads of a step, after its passes.
    pub(super) fn record_loads_of(&mut self, step: RecordedStep<'_>, figures: &PassFigures) -> Result<(), TrainError> {
        if !self.is_recorded(step.step) {
            return Ok(());
        }
        let Some(recorder) = &mut self.recorder else { return Ok(()) };
        let writer = recorder.writer();
        let num_layers = writer.header().layers.len();
        // A rank of a pipeline may not have the figures of all layers.
        if figures.layers.len() != num_layers {
            return Ok(());
        }
        let time_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as u64);
        let layers = figures.layers.iter().map(loads).collect();
        let num_tokens = figures.layers.first().map_or(0, |layer| layer.num_tokens as u64);
        let block = LoadBlock { time_ms, step: step.step, num_tokens, first_layer: 0, layers };
        writer.write(&Block::Loads(block))?;
        Ok(())
    }
}

fn loads(stats: &LayerStats) -> LayerLoads {
    let importance = stats.importance.iter().map(|&sum| sum as f32).collect::<Vec<f32>>();
    LayerLoads {
        chosen: stats.tokens_per_expert.clone(),
        kept: whole(&stats.kept_per_expert, stats.num_experts()),
        importance: (importance.len() == stats.num_experts()).then_some(importance),
    }
}

/// Fills the counts of experts that compute up to those of all experts.
fn whole(counts: &[u32], num_experts: usize) -> Vec<u32> {
    let mut counts = counts.to_vec();
    counts.resize(num_experts, 0);
    counts
}

/// The sequences of a batch as runs of a step: positions go on from sequence to sequence.
fn runs(batch: &Batch, step: u64) -> Vec<Run> {
    let run =
        |sequence: usize| Run { id: step, position: (sequence * batch.seq_len) as u32, len: batch.seq_len as u32 };
    (0..batch.num_sequences).map(run).collect()
}

/// Removes the record of an earlier run from the folder of a new one.
pub(super) fn remove_record(run_dir: &Path) -> Result<(), TrainError> {
    let path = run_dir.join(ROUTING_RECORD);
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(TrainError::io(&path)(error)),
        _ => Ok(()),
    }
}
