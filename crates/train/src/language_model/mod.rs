//! The language model as a task of the trainer: tokenised text as batches, sampled texts, and the choices of its
//! routers.

mod corpus;
mod on_ranks;
mod options;
mod pipelined;
mod recording;
mod run_files;
mod samples;
mod setup;
mod start;
mod text_on_ranks;
mod validation;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use moeworks_infer::data::Batch;
use moeworks_infer::routing_record::RoutingRecorder;
use moeworks_model::files::FileError;
use moeworks_model::hf::{self, SaveOptions, StreamedWeights};
use moeworks_model::model_cost::{routing_flops_per_token, training_flops_per_answer_token, training_flops_per_token};
use moeworks_model::{Decoder, DecoderWeights, GradTarget, ParamSet, Tokenizer, WeightSpec, WeightTable};
use moeworks_ops::Context;
use moeworks_tensor::Tensor;

use crate::config::{RunConfig, print_config};
use crate::data::Dataset;
use crate::error::TrainError;
use crate::metrics::{LayerRecord, Record, Sample};
use crate::parallel::Ranks;
use crate::pipeline::Pipeline;
use crate::routing::RoutingSample;
use crate::task::{
    Evaluation, KeepPart, Microbatch, ModelToSave, ModelView, Parallelism, ParamsAndCopy, PassFigures, PassGradients,
    RecordedStep, SaveError, StepGradients, Task,
};
use crate::trainer::Trainer;
pub(crate) use on_ranks::decoder_on_ranks;
pub(crate) use options::pass_options;
pub use run_files::resumed_config;
pub(crate) use run_files::{ORIGIN_FILE, make_absolute, read_config};
pub(crate) use setup::check_memory;
pub use setup::{context, machine_bytes};
pub use start::{LanguageModelResume, LanguageModelStart};

/// A trainer of a language model.
pub type LanguageModelTrainer = Trainer<LanguageModel>;

/// A decoder with its tokenizer and its training text.
pub struct LanguageModel {
    config: RunConfig,
    /// The model; in a pipeline that of all stages, of which this rank has some.
    decoder: Decoder,
    /// This rank's place in a pipeline, if there is one.
    pipeline: Option<Pipeline>,
    tokenizer: Tokenizer,
    dataset: Dataset,
    data_hash: String,
    /// The model folder whose weights a new run starts from.
    from: Option<PathBuf>,
    /// The routers' choices at the newest planned checkpoint. Requested checkpoints do not count, so that an
    /// interrupted run has the same records as an uninterrupted one.
    routing: Option<RoutingSample>,
    /// The record of routing, on the rank that writes it once it is open.
    recorder: Option<RoutingRecorder>,
}

impl LanguageModel {
    /// Returns the effective configuration.
    #[must_use]
    pub fn config(&self) -> &RunConfig {
        &self.config
    }

    /// Returns the data.
    #[must_use]
    pub fn dataset(&self) -> &Dataset {
        &self.dataset
    }
}

impl Task for LanguageModel {
    type Params = DecoderWeights;

    fn table(&self) -> &Arc<WeightTable> {
        self.decoder.weight_table()
    }

    fn build_params(&self, ctx: &Context, make: &mut dyn FnMut(&WeightSpec) -> Tensor) -> DecoderWeights {
        self.decoder.build_weights(ctx, make)
    }

    fn config_text(&self) -> String {
        print_config(&self.config)
    }

    fn parallelism(&self) -> Parallelism {
        Parallelism { tensor: true, sharded_weights: true, pipeline: true }
    }

    fn first_params(
        &mut self,
        ctx: &Context,
        seed: u64,
        keep: &mut KeepPart<'_>,
    ) -> Result<DecoderWeights, TrainError> {
        match &self.from {
            Some(dir) => self.weights_from(ctx, dir, keep),
            None => self.random_weights(ctx, seed, keep),
        }
    }

    fn train_pass(
        &mut self,
        model: &ModelView<'_, DecoderWeights>,
        batch: Microbatch,
        gradients: PassGradients<'_, DecoderWeights>,
    ) -> Result<PassFigures, TrainError> {
        let start = Instant::now();
        let sequences = self.dataset.train_batch(batch.step, batch.index);
        if let Some(ranks) = model.ranks {
            ranks.meter().record("data", start);
        }
        let mut options = options::pass_options(&self.config, self.dataset.targets_of_step(batch.step), batch);
        let sequences = own_share(model.ranks, sequences, &mut options.first_token);
        let PassGradients { write, grads, layer_done } = gradients;
        let mut done = |layer: usize, grads: &mut DecoderWeights| layer_done(layer, grads);
        let target = GradTarget { done: Some(&mut done), ..GradTarget::new(write, grads) };
        let tokens = [sequences.tokens()];
        let mut stats = self.decoder.forward_backward(model.ctx, model.params, &tokens, &options, target)?;
        Ok(stats.remove(0).into())
    }

    fn train_step(
        &mut self,
        model: &ModelView<'_, DecoderWeights>,
        first: Microbatch,
        gradients: StepGradients<'_, DecoderWeights>,
    ) -> Result<Option<PassFigures>, TrainError> {
        self.pipelined_step(model, first, gradients)
    }

    fn evaluate(
        &mut self,
        model: &ModelView<'_, DecoderWeights>,
        layers: &mut [LayerRecord],
    ) -> Result<Option<Evaluation>, TrainError> {
        let loss = self.validate(model, layers)?;
        Ok(loss.map(|loss| Evaluation { loss, metrics: Vec::new() }))
    }

    fn next_states(
        &mut self,
        ctx: &Context,
        params: ParamsAndCopy<'_, DecoderWeights>,
        figures: &PassFigures,
        progress: f64,
    ) {
        params.params.next_states(ctx, &self.config.model.moe(), &figures.layers, progress, params.copy);
    }

    fn save_model(&self, dir: &Path, model: &ModelToSave<'_, DecoderWeights>) -> Result<(), SaveError> {
        let tokenizer = Some(&self.tokenizer);
        match *model {
            ModelToSave::Whole(weights) => {
                let options = SaveOptions { tokenizer, ..SaveOptions::default() };
                hf::save_model(dir, self.decoder.config(), weights, &options)?;
            }
            ModelToSave::Streamed { part, next } => {
                let weights = StreamedWeights { shapes: self.decoder.tensor_shapes(), states: part.states(), next };
                hf::save_streamed(dir, self.decoder.config(), &weights, tokenizer)?;
            }
        }
        let routing = self.routing.as_ref().map_or(Ok(()), |sample| sample.save(dir));
        Ok(routing.map_err(FileError::at(dir))?)
    }

    fn load_model(&mut self, ctx: &Context, dir: &Path, keep: &mut KeepPart<'_>) -> Result<DecoderWeights, TrainError> {
        let (config, weights) = hf::load_model(ctx, dir)?;
        if config != *self.decoder.config() {
            let problem = "the model's shape is not that of the run's config.toml".to_owned();
            return Err(TrainError::State { path: dir.to_owned(), problem });
        }
        self.routing = RoutingSample::load(dir)?;
        Ok(weights.kept(ctx, self.table(), keep))
    }

    fn begin_run(&self, run_dir: &Path) -> Result<(), TrainError> {
        recording::remove_record(run_dir)?;
        run_files::write_origin(run_dir, self.from.as_deref())
    }

    fn data_hash(&self) -> String {
        self.data_hash.clone()
    }

    fn moe_layers(&self) -> Vec<usize> {
        self.config.model.moe_layer_numbers()
    }

    fn flops_per_target(&self) -> Option<f64> {
        let model = &self.config.model;
        Some(match self.dataset.span_lengths() {
            None => training_flops_per_token(model, self.config.train.seq_len),
            Some(lengths) => training_flops_per_answer_token(model, lengths.source, lengths.answer),
        })
    }

    fn routing_flops_saved(&self) -> f64 {
        let (taken, flat) = routing_flops_per_token(&self.config.model);
        if flat == 0 { 0.0 } else { 1.0 - taken.min(flat) as f64 / flat as f64 }
    }

    fn at_planned_checkpoint(
        &mut self,
        model: &ModelView<'_, DecoderWeights>,
        record: &mut Record,
    ) -> Result<(), TrainError> {
        self.compare_routing(model, record)
    }

    fn record_choices(
        &mut self,
        model: &ModelView<'_, DecoderWeights>,
        step: RecordedStep<'_>,
    ) -> Result<(), TrainError> {
        self.record_choices_of(model, step)
    }

    fn record_loads(&mut self, step: RecordedStep<'_>, figures: &PassFigures) -> Result<(), TrainError> {
        self.record_loads_of(step, figures)
    }

    fn sample(&mut self, model: &ModelView<'_, DecoderWeights>, step: u64) -> Result<Option<Sample>, TrainError> {
        self.write_text(model, step)
    }
}

/// Reduces `batch` to this rank's share of its sequences, and sets `first_token` to the index of the share's first
/// token in the whole batch.
fn own_share(ranks: Option<&Ranks>, mut batch: Batch, first_token: &mut usize) -> Batch {
    if let Some(ranks) = ranks {
        let share = ranks.share(batch.num_sequences);
        *first_token = share.start * batch.seq_len;
        batch.keep(share);
    }
    batch
}
