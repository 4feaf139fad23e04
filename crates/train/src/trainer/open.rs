//! How a trainer begins: a new run, or one that goes on, on one rank or on several.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use moeworks_infer::data::Watch;
use moeworks_infer::store::{Checkpoint, Pick, Store, resolve_run};
use moeworks_model::hf::load_model;
use moeworks_model::{Decoder, DecoderWeights, ParamSet, Tokenizer, WeightSpec};
use moeworks_moe::{TableSource, balanced_hash, clustered_hash};
use moeworks_ops::elementwise::cast;
use moeworks_ops::{Context, peak};
use moeworks_tensor::{DType, Tensor};

use super::folder::RunFolder;
use super::{Output, Trainer};
use crate::config::{ConfigError, RunConfig, print_config};
use crate::corpus::Corpus;
use crate::error::TrainError;
use crate::optimizer::Optimizer;
use crate::parallel::Ranks;
use crate::routing::RoutingSample;
use crate::setup::{adamw_config, check_memory, context, schedule, vocab_size};
use crate::state::{self, Keep, Progress};

/// What this rank keeps of the tensors of a whole model, each by its name, in their order: all of it, its part, or where `are_shared`
/// says that ranks share these out a slice of that.
fn keeper<'a>(ctx: &'a Context, ranks: Option<&'a Ranks>, are_shared: impl Fn(&Ranks) -> bool) -> Box<Keep<'a>> {
    match ranks {
        None => Box::new(|_: &WeightSpec, tensor: &Tensor| tensor.clone()),
        Some(ranks) => Box::new(ranks.keeper(ctx, are_shared(ranks))),
    }
}

/// f32 weights, in memory of their own, of the model folder `dir`, which must hold a model of `decoder`: what `keep` keeps of them.
fn weights_from(
    ctx: &Context,
    decoder: &Decoder,
    dir: &Path,
    keep: &mut Keep<'_>,
) -> Result<DecoderWeights, TrainError> {
    let (stored, weights) = load_model(ctx, dir)?;
    if !stored.computes_as(decoder.config()) {
        let problem = "its weights are of another model than the settings under model.* describe; leave those to it";
        return Err(TrainError::State { path: dir.to_owned(), problem: problem.to_owned() });
    }
    Ok(weights.kept(ctx, decoder.weight_table(), keep))
}

/// What `keep` keeps of random weights; routers that send ids to experts by a table have that of the training tokens or of a model's embeddings.
fn first_weights(
    ctx: &Context,
    decoder: &Decoder,
    config: &RunConfig,
    corpus: &Corpus,
    keep: &mut Keep<'_>,
) -> Result<DecoderWeights, TrainError> {
    let mut weights = decoder.init_kept(ctx, config.train.seed, |spec, tensor| keep(spec, &tensor));
    let model = decoder.config();
    let (num_experts, top_k) = (model.num_experts, model.top_k);
    match model.router.table_source() {
        Some(TableSource::TokenCounts) => {
            let counts = corpus.dataset.token_counts(model.vocab_size);
            weights.set_hash_tables(&balanced_hash(&counts, num_experts, top_k));
        }
        Some(TableSource::Embeddings) => {
            let embedding = embedding_of(ctx, &config.data.hash_embeddings, model.vocab_size)?;
            let points = (embedding.f32s(), embedding.cols());
            weights.set_hash_tables(&clustered_hash(ctx, points, num_experts, top_k, config.train.seed));
        }
        None => {}
    }
    Ok(weights)
}

/// The embeddings, in f32, of the run or model at `path`, which must have `vocab_size` tokens.
fn embedding_of(ctx: &Context, path: &Path, vocab_size: usize) -> Result<Tensor, TrainError> {
    let (stored, weights) = load_model(ctx, &resolve_run(path, Pick::Latest)?.model_dir)?;
    if stored.vocab_size != vocab_size {
        let problem = format!("has embeddings of {} tokens, but this model knows {vocab_size}", stored.vocab_size);
        return Err(TrainError::State { path: path.to_owned(), problem });
    }
    Ok(cast(ctx, &weights.embedding, DType::F32))
}

fn decoder(config: &RunConfig, ranks: Option<&Arc<Ranks>>) -> Result<Decoder, TrainError> {
    let (model, table) = (config.model.clone(), config.weight_table()?);
    let decoder = match ranks {
        None => Decoder::with_table(model, table).map_err(ConfigError::from)?,
        Some(ranks) => ranks.decoder(model, table)?,
    };
    decoder.check_trainable()?;
    Ok(decoder)
}

/// Does `work`, on several ranks on the root first and then on the others.
fn root_first<R>(ranks: Option<&Ranks>, work: impl FnOnce() -> Result<R, TrainError>) -> Result<R, TrainError> {
    match ranks {
        None => work(),
        Some(ranks) => ranks.root_first(work),
    }
}

/// The watch of this rank's reading: the root alone tells how far it is.
fn watch_of(watch: &Watch, ranks: Option<&Ranks>) -> Watch {
    if is_root(ranks) { watch.clone() } else { watch.silent() }
}

fn is_root(ranks: Option<&Ranks>) -> bool {
    ranks.is_none_or(Ranks::is_root)
}

/// Refuses ranks that were given other settings, or another number of ranks than the settings say.
fn check_ranks(config: &RunConfig, ranks: Option<&Ranks>) -> Result<(), TrainError> {
    let (asked, num_ranks) = (config.parallel.num_ranks(), ranks.map_or(1, Ranks::num_ranks));
    if asked != num_ranks {
        return Err(TrainError::Ranks { layout: config.parallel.layout(), num_ranks });
    }
    ranks.map_or(Ok(()), |ranks| ranks.check_same("configuration", &print_config(config)))
}

/// The optimizer's state before the first update of the `weights` of `decoder` that a rank keeps.
fn first_optimizer(
    ctx: &Context,
    config: &RunConfig,
    ranks: Option<&Ranks>,
    (decoder, weights): (&Decoder, &DecoderWeights),
) -> Optimizer {
    let slices = ranks.filter(|ranks| ranks.shards_optimizer() && !ranks.shards_weights());
    let (adamw, table) = (adamw_config(config), decoder.weight_table());
    match slices {
        Some(ranks) => Optimizer::new(ctx, adamw, table, &ranks.trainable_slices(ctx, weights)),
        None => Optimizer::new(ctx, adamw, table, weights),
    }
}

impl Trainer {
    /// Starts a new run in the folder `run_dir`, which must be empty or not there. Nothing is written before the whole
    /// configuration and the data have proved usable.
    pub fn start(config: RunConfig, run_dir: PathBuf) -> Result<Self, TrainError> {
        Self::start_over(config, run_dir, None, None, &Watch::default())
    }

    /// As [`Trainer::start`], with the weights of the model folder `from` in place of random ones, whose model the
    /// configuration's must be up to settings of training; and as one of several `ranks`, all of which call this. `watch` goes
    /// along while data is read.
    pub fn start_over(
        config: RunConfig,
        folder: impl Into<RunFolder>,
        from: Option<&Path>,
        ranks: Option<Ranks>,
        watch: &Watch,
    ) -> Result<Self, TrainError> {
        let folder = folder.into();
        if is_root(ranks.as_ref()) {
            folder.check()?;
        }
        let ranks = ranks.map(Arc::new);
        let watch = watch_of(watch, ranks.as_deref());
        Self::begin(config, from, ranks, &watch, |config, is_root| {
            if !is_root {
                return Ok((None, folder.path().to_owned()));
            }
            Output::create(&folder, config, from).map(|(output, run_dir)| (Some(output), run_dir))
        })
    }

    /// A run before its first step: with random weights, or those of the model folder `from`. `output` makes what the root of several
    /// ranks writes to, and says where that is.
    fn begin(
        mut config: RunConfig,
        from: Option<&Path>,
        ranks: Option<Arc<Ranks>>,
        watch: &Watch,
        output: impl FnOnce(&RunConfig, bool) -> Result<(Option<Output>, PathBuf), TrainError>,
    ) -> Result<Self, TrainError> {
        state::make_absolute(&mut config)?;
        check_ranks(&config, ranks.as_deref())?;
        let ctx = context(&config, ranks.as_deref())?;
        let corpus = root_first(ranks.as_deref(), || Corpus::open(&config, None, watch))?;
        config.model.vocab_size = vocab_size(&config, &corpus.tokenizer)?;
        let decoder = decoder(&config, ranks.as_ref())?;
        check_memory(&ctx, &config, ranks.as_deref())?;
        let mut keep = keeper(&ctx, ranks.as_deref(), Ranks::shards_weights);
        let weights = match from {
            Some(dir) => weights_from(&ctx, &decoder, dir, &mut keep)?,
            None => first_weights(&ctx, &decoder, &config, &corpus, &mut keep)?,
        };
        drop(keep);
        let optimizer = first_optimizer(&ctx, &config, ranks.as_deref(), (&decoder, &weights));
        let (output, run_dir) = output(&config, is_root(ranks.as_deref()))?;
        let progress = Progress { data_hash: corpus.hash.clone(), ..Progress::default() };
        let routing = None;
        Self::new(Parts { ctx, config, run_dir, decoder, corpus, weights, optimizer, progress, routing, output, ranks })
    }

    /// Goes on from the newest whole checkpoint of the run in `run_dir`, or begins it again if it has none yet. `change` may change
    /// settings, but not those that would make the model or its data others.
    pub fn resume(
        run_dir: PathBuf,
        change: impl FnOnce(RunConfig) -> Result<RunConfig, ConfigError>,
    ) -> Result<Self, TrainError> {
        let config = state::resumed_config(&run_dir, change)?;
        Self::resume_over(run_dir, config, None, &Watch::default())
    }

    /// As [`Trainer::resume`], with the settings of [`resumed_config`](crate::resumed_config), as one of several `ranks`, all of
    /// which call this. The checkpoint may be one of any number of ranks.
    pub fn resume_over(
        run_dir: PathBuf,
        config: RunConfig,
        ranks: Option<Ranks>,
        watch: &Watch,
    ) -> Result<Self, TrainError> {
        let ranks = ranks.map(Arc::new);
        check_ranks(&config, ranks.as_deref())?;
        let watch = &watch_of(watch, ranks.as_deref());
        let (store, checkpoint) = root_first(ranks.as_deref(), || newest(&run_dir, is_root(ranks.as_deref())))?;
        match checkpoint {
            Some(checkpoint) => Self::go_on((store, checkpoint), run_dir, config, ranks, watch),
            None => Self::begin_again(store, run_dir, config, ranks, watch),
        }
    }

    /// Begins a run again that was stopped before its first checkpoint.
    fn begin_again(
        store: Option<Store>,
        run_dir: PathBuf,
        config: RunConfig,
        ranks: Option<Arc<Ranks>>,
        watch: &Watch,
    ) -> Result<Self, TrainError> {
        if store.is_some() {
            tracing::warn!("{}: has no checkpoint yet, and begins again", run_dir.display());
        }
        let from = state::read_origin(&run_dir)?;
        Self::begin(config, from.as_deref(), ranks, watch, |config, _| {
            let output = store.map(|store| Output::begin(store, &run_dir, config)).transpose()?;
            Ok((output, run_dir.clone()))
        })
    }

    /// Goes on from a checkpoint; `store` is that of the rank that writes.
    fn go_on(
        (store, checkpoint): (Option<Store>, Checkpoint),
        run_dir: PathBuf,
        config: RunConfig,
        ranks: Option<Arc<Ranks>>,
        watch: &Watch,
    ) -> Result<Self, TrainError> {
        let open = || Corpus::open(&config, Some(Tokenizer::from_dir(&checkpoint.path)?), watch);
        let corpus = root_first(ranks.as_deref(), open)?;
        let ctx = context(&config, ranks.as_deref())?;
        let decoder = decoder(&config, ranks.as_ref())?;
        let of_weights = || keeper(&ctx, ranks.as_deref(), Ranks::shards_weights);
        let of_moments = || keeper(&ctx, ranks.as_deref(), Ranks::shards_optimizer);
        let stored = state::load(&ctx, &decoder, &checkpoint)?;
        let table = decoder.weight_table();
        let weights = stored.weights.kept(&ctx, table, of_weights());
        let moment = |name| stored.moment(&ctx, table, name, of_moments());
        let moments = [moment("first")?, moment("second")?];
        let optimizer = Optimizer::from_moments(adamw_config(&config), table, moments, stored.progress.updates);
        let progress = stored.progress;
        let routing = RoutingSample::load(&checkpoint.path)?;
        if progress.data_hash != corpus.hash {
            tracing::warn!("the data is not what this run began with: its steps will not be those of an unbroken run");
        }
        let output = match store {
            Some(store) => Some(Output::go_on(store, &run_dir, &config, checkpoint)?),
            None => None,
        };
        Self::new(Parts { ctx, config, run_dir, decoder, corpus, weights, optimizer, progress, routing, output, ranks })
    }

    fn new(parts: Parts) -> Result<Self, TrainError> {
        let Parts { ctx, config, run_dir, decoder, corpus, weights, optimizer, progress, routing, output, ranks } =
            parts;
        let is_bf16 = config.train.precision.has_bf16_copies();
        let compute = is_bf16.then(|| weights.compute_copy(&config.train.optimizer_context(&ctx), DType::BF16));
        let peak_flops = if output.is_some() { peak_flops(&ctx, is_bf16, ranks.as_deref()) } else { 1.0 };
        let grads = match &ranks {
            Some(ranks) => ranks.first_grads(&ctx, &weights),
            None => weights.gradients(&ctx, decoder.weight_table(), config.train.expert_gradients.dtype()),
        };
        let trainer = Self {
            grads,
            schedule: schedule(&config),
            ctx,
            config,
            run_dir,
            decoder,
            dataset: corpus.dataset,
            tokenizer: corpus.tokenizer,
            weights,
            compute,
            optimizer,
            progress,
            routing,
            output,
            peak_flops,
            ranks,
        };
        trainer.ctx.pool().restart();
        trainer.ranks.as_ref().map_or(Ok(()), |ranks| ranks.begin_steps())?;
        Ok(trainer)
    }
}

/// The newest checkpoint of a run that is gone on with, none where it has not come to one, and its store where this rank writes.
fn newest(run_dir: &Path, is_root: bool) -> Result<(Option<Store>, Option<Checkpoint>), TrainError> {
    let store = if is_root { Store::open_to_write(run_dir)? } else { Store::open(run_dir) };
    let checkpoint = store.latest()?;
    if checkpoint.is_none() && !store.is_empty()? {
        let problem = "the run has no complete checkpoint to go on from".to_owned();
        return Err(TrainError::State { path: run_dir.to_owned(), problem });
    }
    Ok((is_root.then_some(store), checkpoint))
}

/// Operations a second of all ranks: this one's times their number, but no more than the cores of a node.
fn peak_flops(ctx: &Context, is_bf16: bool, ranks: Option<&Ranks>) -> f64 {
    let own = peak::measure(ctx).flops(if is_bf16 { DType::BF16 } else { DType::F32 });
    ranks.map_or(own, |ranks| {
        own * ranks.num_ranks() as f64 * (ranks.num_cores() / ctx.threads().count() as f64).min(1.0)
    })
}

/// What a trainer is put together from.
struct Parts {
    ctx: Context,
    config: RunConfig,
    run_dir: PathBuf,
    decoder: Decoder,
    corpus: Corpus,
    weights: DecoderWeights,
    optimizer: Optimizer,
    progress: Progress,
    routing: Option<RoutingSample>,
    output: Option<Output>,
    ranks: Option<Arc<Ranks>>,
}
