//! The start of a language model's training: a new run or a resumed one, on one or several ranks.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use moeworks_infer::data::Watch;
use moeworks_infer::store::{Pick, resolve_run};
use moeworks_model::hf::load_model;
use moeworks_model::{Decoder, DecoderWeights, ParamSet, Tokenizer};
use moeworks_moe::{TableSource, balanced_hash, clustered_hash};
use moeworks_ops::elementwise::cast;
use moeworks_ops::{Context, MachineOptions};
use moeworks_tensor::{DType, Tensor};

use super::corpus::Corpus;
use super::on_ranks::decoder_on_ranks;
use super::options::trainer_settings;
use super::setup::{check_memory, context, vocab_size};
use super::{LanguageModel, LanguageModelTrainer, run_files};
use crate::config::{ConfigError, RunConfig, print_config};
use crate::error::TrainError;
use crate::parallel::{Ranks, placements_in_checkpoint};
use crate::pipeline::{Pipeline, PipelinePlan};
use crate::task::KeepPart;
use crate::trainer::{ResumeOptions, ResumePoint, RunFolder, StartOptions, Trainer, is_root, root_first};

/// The options of a new run of a language model.
pub struct LanguageModelStart<'a> {
    /// The settings.
    pub config: RunConfig,
    /// The folder of the run. It must be empty or missing unless this says otherwise.
    pub folder: RunFolder,
    /// The model folder whose weights the run starts from; none for random weights. The configuration's model must
    /// equal its model, except for settings of training.
    pub from: Option<PathBuf>,
    /// This rank's handle; none for a single rank. All ranks start the run.
    pub ranks: Option<Ranks>,
    /// The options of the machine.
    pub machine: MachineOptions,
    /// A listener for warnings and progress while data is read.
    pub watch: &'a Watch,
}

impl<'a> LanguageModelStart<'a> {
    /// Creates the options of a run on one rank with random weights.
    #[must_use]
    pub fn new(config: RunConfig, folder: impl Into<RunFolder>, watch: &'a Watch) -> Self {
        Self { config, folder: folder.into(), from: None, ranks: None, machine: MachineOptions::default(), watch }
    }
}

/// The options of a resumed run of a language model.
pub struct LanguageModelResume<'a> {
    /// The folder of the run.
    pub run_dir: PathBuf,
    /// The settings, from [`resumed_config`](super::resumed_config).
    pub config: RunConfig,
    /// This rank's handle; none for a single rank. All ranks resume the run, whose checkpoint may be from any number
    /// of ranks.
    pub ranks: Option<Ranks>,
    /// The options of the machine.
    pub machine: MachineOptions,
    /// A listener for warnings and progress while data is read.
    pub watch: &'a Watch,
}

/// A run before its first step: its settings, its ranks and its listener.
struct Run {
    config: RunConfig,
    ranks: Option<Arc<Ranks>>,
    machine: MachineOptions,
    watch: Watch,
}

/// The model of a run, and this rank's place in a pipeline of it.
struct Model {
    decoder: Decoder,
    pipeline: Option<Pipeline>,
}

impl LanguageModel {
    /// Starts a new run. Nothing is written before the whole configuration and the data have been validated.
    ///
    /// # Errors
    /// If the folder is taken, or the configuration or the data is invalid.
    pub fn start(start: LanguageModelStart<'_>) -> Result<LanguageModelTrainer, TrainError> {
        let LanguageModelStart { config, folder, from, ranks, machine, watch } = start;
        if is_root(ranks.as_ref()) {
            folder.check()?;
        }
        let settings = trainer_settings(&config)?;
        let mut run = Run::new(config, ranks, machine, watch);
        let (task, ctx) = run.prepare(from)?;
        Trainer::start(task, StartOptions { folder, settings, ctx, ranks: run.ranks })
    }

    /// Resumes a run from its newest complete checkpoint, or starts it again if it has none.
    ///
    /// # Errors
    /// If the checkpoint is damaged or the data is invalid.
    pub fn resume(resume: LanguageModelResume<'_>) -> Result<LanguageModelTrainer, TrainError> {
        let LanguageModelResume { run_dir, config, ranks, machine, watch } = resume;
        let settings = trainer_settings(&config)?;
        let mut run = Run::new(config, ranks, machine, watch);
        run.check_ranks()?;
        let point = ResumePoint::find(run_dir.clone(), run.ranks.as_deref())?;
        let (task, ctx) = match &point.checkpoint {
            Some(checkpoint) => run.prepare_to_go_on(&checkpoint.path)?,
            None => run.prepare(run_files::read_origin(&run_dir)?)?,
        };
        Trainer::resume_from(task, point, ResumeOptions { run_dir, settings, ctx, ranks: run.ranks })
    }

    /// Loads the weights of the model folder `dir` as f32, in memory of their own, each reduced by `keep`. The folder
    /// must hold this model.
    pub(super) fn weights_from(
        &self,
        ctx: &Context,
        dir: &Path,
        keep: &mut KeepPart<'_>,
    ) -> Result<DecoderWeights, TrainError> {
        let (stored, weights) = load_model(ctx, dir)?;
        if !stored.computes_as(self.decoder.config()) {
            let problem =
                "its weights are of another model than the settings under model.* describe; leave those to it";
            return Err(TrainError::State { path: dir.to_owned(), problem: problem.to_owned() });
        }
        Ok(weights.kept(ctx, self.decoder.weight_table(), keep))
    }

    /// Draws random weights, each reduced by `keep`. Routers with a table of token ids get it from the training
    /// tokens or from a model's embeddings.
    pub(super) fn random_weights(
        &self,
        ctx: &Context,
        seed: u64,
        keep: &mut KeepPart<'_>,
    ) -> Result<DecoderWeights, TrainError> {
        let mut weights = self.decoder.init(ctx, seed, Some(&mut |spec, tensor| keep(spec, &tensor)));
        let model = self.decoder.config();
        let (num_experts, top_k) = (model.num_experts, model.top_k);
        match model.router.table_source() {
            Some(TableSource::TokenCounts) => {
                let counts = self.dataset.token_counts(model.vocab_size);
                weights.set_hash_tables(&balanced_hash(&counts, num_experts, top_k));
            }
            Some(TableSource::Embeddings) => {
                let embedding = embedding_of(ctx, &self.config.data.hash_embeddings, model.vocab_size)?;
                let (points, width) = (embedding.f32s(), embedding.cols());
                weights.set_hash_tables(&clustered_hash(ctx, points, width, num_experts, top_k, seed));
            }
            None => {}
        }
        Ok(weights)
    }
}

impl Run {
    fn new(config: RunConfig, ranks: Option<Ranks>, machine: MachineOptions, watch: &Watch) -> Self {
        // Only the root reports the progress of reading.
        let watch = if is_root(ranks.as_ref()) { watch.clone() } else { watch.silent() };
        Self { config, ranks: ranks.map(Arc::new), machine, watch }
    }

    /// Refuses ranks with other settings, or a number of ranks that does not match the settings.
    fn check_ranks(&self) -> Result<(), TrainError> {
        let (asked, num_ranks) = (self.config.parallel.num_ranks(), self.ranks.as_ref().map_or(1, |r| r.num_ranks()));
        if asked != num_ranks {
            return Err(TrainError::Ranks { layout: self.config.parallel.layout(), num_ranks });
        }
        let check = |ranks: &Arc<Ranks>| ranks.check_same("configuration", &print_config(&self.config));
        self.ranks.as_ref().map_or(Ok(()), check)
    }

    /// Prepares the model and the data of a new run.
    fn prepare(&mut self, from: Option<PathBuf>) -> Result<(LanguageModel, Context), TrainError> {
        run_files::make_absolute(&mut self.config)?;
        self.check_ranks()?;
        let ranks = self.ranks.as_deref();
        let ctx = context(&self.config, ranks, &self.machine)?;
        let corpus = root_first(ranks, || Corpus::open(&self.config, None, &self.watch))?;
        self.config.model.vocab_size = vocab_size(&self.config, &corpus.tokenizer)?;
        let model = self.model()?;
        check_memory(&ctx, &self.config, ranks)?;
        Ok((self.task(corpus, model, from), ctx))
    }

    /// Prepares the model and the data of a run that is resumed from the checkpoint in `dir`.
    fn prepare_to_go_on(&self, dir: &Path) -> Result<(LanguageModel, Context), TrainError> {
        if let (Some(ranks), Some(placements)) = (&self.ranks, placements_in_checkpoint(&self.config, dir)?) {
            ranks.experts().set_placements(placements);
        }
        let open = || Corpus::open(&self.config, Some(Tokenizer::from_dir(dir)?), &self.watch);
        let corpus = root_first(self.ranks.as_deref(), open)?;
        let ctx = context(&self.config, self.ranks.as_deref(), &self.machine)?;
        let model = self.model()?;
        Ok((self.task(corpus, model, None), ctx))
    }

    fn model(&self) -> Result<Model, TrainError> {
        let (model, table) = (self.config.model.clone(), self.config.weight_table()?);
        let plan = PipelinePlan::new(&self.config)?;
        let (pipeline, decoder) = match (&self.ranks, plan) {
            (None, _) => (None, Decoder::with_table(model, table).map_err(ConfigError::from)?),
            (Some(ranks), None) => (None, decoder_on_ranks(ranks, model, table)?),
            (Some(ranks), Some(plan)) => {
                let (pipeline, decoder) = Pipeline::on_ranks(ranks, &model, table, plan)?;
                (Some(pipeline), decoder)
            }
        };
        decoder.check_trainable()?;
        Ok(Model { decoder, pipeline })
    }

    fn task(&self, corpus: Corpus, model: Model, from: Option<PathBuf>) -> LanguageModel {
        let Corpus { dataset, tokenizer, hash: data_hash } = corpus;
        let (config, Model { decoder, pipeline }) = (self.config.clone(), model);
        LanguageModel { config, decoder, pipeline, tokenizer, dataset, data_hash, from, routing: None, recorder: None }
    }
}

/// Loads the embeddings of the run or model at `path` as f32. It must have `vocab_size` tokens.
fn embedding_of(ctx: &Context, path: &Path, vocab_size: usize) -> Result<Tensor, TrainError> {
    let (stored, weights) = load_model(ctx, &resolve_run(path, Pick::Latest)?.model_dir)?;
    if stored.vocab_size != vocab_size {
        let problem = format!("has embeddings of {} tokens, but this model knows {vocab_size}", stored.vocab_size);
        return Err(TrainError::State { path: path.to_owned(), problem });
    }
    Ok(cast(ctx, &weights.embedding, DType::F32))
}
