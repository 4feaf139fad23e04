//! The training loop: one step after another, with its records, samples, evaluations and checkpoints.
//!
//! Everything random is a function of (seed, step), and everything else that a step depends on is in a checkpoint, so a
//! resumed run makes the same steps as one that was never stopped, bit for bit.

mod observe;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use moeworks_model::account::{routing_flops_per_token, training_flops_per_token};
use moeworks_model::generation::{GenerateRequest, Sampler, SamplingOptions, TextStream, generate};
use moeworks_model::hf::load_model;
use moeworks_model::{
    BalanceKind, Decoder, DecoderWeights, ModelConfig, PassOptions, PassStats, RouterLosses, RouterNoise, TokenBatch,
    Tokenizer,
};
use moeworks_moe::{EntropyRule, Ramp};
use moeworks_ops::linear::Write;
use moeworks_ops::{Context, peak};
use moeworks_tensor::DType;

use crate::config::{BalanceChoice, ConfigError, Precision, RunConfig};
use crate::corpus::Corpus;
use crate::data::{Batch, Dataset};
use crate::error::TrainError;
use crate::metrics::{LayerRecord, MetricsWriter, Record, Sample};
use crate::optimizer::{Optimizer, clip_scale, global_norm};
use crate::routing::RoutingSample;
use crate::schedule::Schedule;
use crate::setup::{adamw_config, check_memory, context, moe_layers, schedule, vocab_size};
use crate::state::{self, Progress};
use crate::store::{CONFIG_FILE, Keep, Store};

/// What somebody outside asks of a running trainer. Set from signal handlers or other threads.
#[derive(Clone, Debug, Default)]
pub struct Requests {
    /// Finish the step, write a checkpoint and return.
    pub stop: Arc<AtomicBool>,
    /// Write a checkpoint after this step and go on.
    pub save: Arc<AtomicBool>,
}

/// What happens during training, for whoever shows it.
pub enum Event<'a> {
    /// A step is done.
    Step {
        /// Its record.
        record: &'a Record,
        /// Steps of the whole run.
        total_steps: u64,
        /// The newest validation loss.
        val_loss: Option<f64>,
    },
    /// The model wrote a text.
    Sample(&'a Sample),
    /// A step's update was skipped: the loss or a gradient was not finite.
    Skipped {
        /// The step, counted from 1.
        step: u64,
        /// Skipped steps in a row, this one included.
        in_a_row: u64,
        /// How many in a row end the run.
        max_in_a_row: u64,
    },
    /// A checkpoint was written.
    Saved(&'a Path),
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All steps are done.
    Finished,
    /// It was asked to stop, and wrote a checkpoint.
    Stopped,
}

/// A run in the making.
pub struct Trainer {
    ctx: Context,
    config: RunConfig,
    run_dir: PathBuf,
    decoder: Decoder,
    tokenizer: Tokenizer,
    dataset: Dataset,
    /// f32 weights.
    weights: DecoderWeights,
    /// In bf16 precision: the copy that products read.
    compute: Option<DecoderWeights>,
    grads: DecoderWeights,
    optimizer: Optimizer,
    progress: Progress,
    /// What the newest planned checkpoint's routers chose. Checkpoints that somebody asked for do not count, so that a run
    /// that was stopped has the records of one that was not.
    routing: Option<RoutingSample>,
    schedule: Schedule,
    store: Store,
    metrics: MetricsWriter,
    peak_flops: f64,
    last_checkpoint: Option<PathBuf>,
}

/// f32 weights, in memory of their own, of the model folder `dir`, which must hold a model of `config`.
fn weights_from(ctx: &Context, config: &ModelConfig, dir: &Path) -> Result<DecoderWeights, TrainError> {
    let (stored, weights) = load_model(ctx, dir)?;
    if !stored.computes_as(config) {
        let problem = "its weights are of another model than the settings under model.* describe; leave those to it";
        return Err(TrainError::State { path: dir.to_owned(), problem: problem.to_owned() });
    }
    Ok(weights.compute_copy(ctx, DType::F32))
}

impl Trainer {
    /// Starts a new run in the folder `run_dir`, in which there must be no run yet. Nothing is written before the whole
    /// configuration and the data have proved usable.
    pub fn start(config: RunConfig, run_dir: PathBuf) -> Result<Self, TrainError> {
        Self::start_from(config, run_dir, None)
    }

    /// As [`Trainer::start`], with the weights of the model folder `from` in place of random ones. The configuration's model
    /// must be the folder's, up to settings of training.
    pub fn start_from(mut config: RunConfig, run_dir: PathBuf, from: Option<&Path>) -> Result<Self, TrainError> {
        if run_dir.join(CONFIG_FILE).exists() {
            let problem = "holds a run already; go on with it by --resume, or choose another folder".to_owned();
            return Err(TrainError::State { path: run_dir, problem });
        }
        let ctx = context(&config);
        state::make_absolute(&mut config)?;
        let corpus = Corpus::open(&config, None)?;
        config.model.vocab_size = vocab_size(&config, &corpus.tokenizer)?;
        let decoder = Decoder::new(config.model.clone()).map_err(ConfigError::from)?;
        decoder.check_trainable()?;
        check_memory(&config)?;
        let weights = match from {
            Some(dir) => weights_from(&ctx, decoder.config(), dir)?,
            None => decoder.init(&ctx, config.train.seed),
        };
        let optimizer = Optimizer::new(&ctx, adamw_config(&config), &weights);
        let store = Store::open_to_write(&run_dir)?;
        let metrics = MetricsWriter::create(&run_dir, &moe_layers(&config))?;
        state::write_config(&run_dir, &config)?;
        let progress = Progress { data_hash: corpus.hash.clone(), ..Progress::default() };
        let (routing, last_checkpoint) = (None, None);
        Ok(Self::new(Parts {
            ctx,
            config,
            run_dir,
            decoder,
            corpus,
            weights,
            optimizer,
            progress,
            routing,
            store,
            metrics,
            last_checkpoint,
        }))
    }

    /// Goes on from the newest whole checkpoint of the run in `run_dir`. `change` may change settings, but not those that
    /// would make the model or its data others.
    pub fn resume(
        run_dir: PathBuf,
        change: impl FnOnce(RunConfig) -> Result<RunConfig, ConfigError>,
    ) -> Result<Self, TrainError> {
        let stored = state::read_config(&run_dir)?;
        let mut config = change(stored.clone())?;
        state::make_absolute(&mut config)?;
        state::check_resumable(&run_dir, &stored, &config)?;
        let store = Store::open_to_write(&run_dir)?;
        let Some(checkpoint) = store.latest()? else {
            let problem = "the run has no complete checkpoint to go on from".to_owned();
            return Err(TrainError::State { path: run_dir, problem });
        };
        let ctx = context(&config);
        let corpus = Corpus::open(&config, Some(Tokenizer::from_dir(&checkpoint.path)?))?;
        let decoder = Decoder::new(config.model.clone()).map_err(ConfigError::from)?;
        let (weights, optimizer, progress) = state::load(&ctx, &decoder, adamw_config(&config), &checkpoint)?;
        let routing = RoutingSample::load(&checkpoint.path)?;
        if progress.data_hash != corpus.hash {
            tracing::warn!("the data is not what this run began with: its steps will not be those of an unbroken run");
        }
        store.discard_after(progress.step)?;
        state::write_config(&run_dir, &config)?;
        let metrics = MetricsWriter::resume(&run_dir, &moe_layers(&config), progress.step)?;
        let last_checkpoint = Some(checkpoint.path);
        Ok(Self::new(Parts {
            ctx,
            config,
            run_dir,
            decoder,
            corpus,
            weights,
            optimizer,
            progress,
            routing,
            store,
            metrics,
            last_checkpoint,
        }))
    }

    fn new(parts: Parts) -> Self {
        let Parts {
            ctx,
            config,
            run_dir,
            decoder,
            corpus,
            weights,
            optimizer,
            progress,
            routing,
            store,
            metrics,
            last_checkpoint,
        } = parts;
        let is_bf16 = config.train.precision == Precision::Bf16;
        let compute = is_bf16.then(|| weights.compute_copy(&ctx, DType::BF16));
        let peak_flops = peak::measure(&ctx).flops(if is_bf16 { DType::BF16 } else { DType::F32 });
        Self {
            grads: weights.zeros_like(&ctx),
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
            store,
            metrics,
            peak_flops,
            last_checkpoint,
        }
    }

    /// The newest checkpoint of the run.
    #[must_use]
    pub fn last_checkpoint(&self) -> Option<&Path> {
        self.last_checkpoint.as_deref()
    }

    /// The run's folder.
    #[must_use]
    pub fn run_dir(&self) -> &Path {
        &self.run_dir
    }

    /// The effective configuration.
    #[must_use]
    pub fn config(&self) -> &RunConfig {
        &self.config
    }

    /// How far the run is.
    #[must_use]
    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    /// The data.
    #[must_use]
    pub fn dataset(&self) -> &Dataset {
        &self.dataset
    }

    /// Runs until all steps are done or somebody asks to stop.
    pub fn run(&mut self, requests: &Requests, on_event: &mut dyn FnMut(Event<'_>)) -> Result<Outcome, TrainError> {
        let total_steps = self.config.train.steps;
        while self.progress.step < total_steps {
            let mut record = self.step(on_event)?;
            let step = self.progress.step;
            let is_last = step == total_steps;
            let is_planned_checkpoint = is_last || is_due(step, self.config.train.checkpoint_every);
            if is_planned_checkpoint {
                self.compare_routing(&mut record)?;
            }
            self.metrics.write(&record)?;
            on_event(Event::Step { record: &record, total_steps, val_loss: self.progress.val_loss });
            if is_due(step, self.config.train.sample_every) || (is_last && self.config.train.sample_every > 0) {
                let sample = self.sample()?;
                self.metrics.write_sample(&sample)?;
                on_event(Event::Sample(&sample));
            }
            let is_stopped = requests.stop.load(Ordering::SeqCst);
            let is_asked = requests.save.swap(false, Ordering::SeqCst);
            if is_asked || is_stopped || is_planned_checkpoint {
                on_event(Event::Saved(&self.save()?));
            }
            if is_stopped && !is_last {
                return Ok(Outcome::Stopped);
            }
        }
        Ok(Outcome::Finished)
    }

    /// One optimizer step and, where one is due, an evaluation.
    fn step(&mut self, on_event: &mut dyn FnMut(Event<'_>)) -> Result<Record, TrainError> {
        let start = Instant::now();
        let step = self.progress.step;
        let stats = self.accumulate(step)?;
        let norm = global_norm(&self.ctx, &self.grads);
        let loss = stats.loss_sum / stats.num_targets as f64;
        let lr = self.schedule.at(step);
        let is_skipped = !(loss.is_finite() && norm.is_finite());
        if is_skipped {
            self.skip(step, on_event)?;
        } else {
            self.progress.bad_in_a_row = 0;
            let scale = clip_scale(norm, self.config.train.clip_norm);
            self.optimizer.update(&self.ctx, (lr, scale), &mut self.weights, &self.grads, self.compute.as_mut());
            let moe = self.config.model.moe();
            self.weights.next_states(&self.ctx, &moe, &stats.layers, self.compute.as_mut());
        }
        self.progress.step += 1;
        self.progress.tokens += stats.num_targets as u64;
        let seconds = start.elapsed().as_secs_f64();
        let tokens_per_s = stats.num_targets as f64 / seconds;
        let mut layers = layer_records(&self.config, &stats);
        let is_evaluated = is_due(step + 1, self.config.train.eval_every) || step + 1 == self.config.train.steps;
        let val_loss = if is_evaluated { self.validate(&mut layers)? } else { None };
        if val_loss.is_some() {
            self.progress.val_loss = val_loss;
        }
        Ok(Record {
            step: step + 1,
            tokens: self.progress.tokens,
            loss,
            balance_loss: stats.balance_loss,
            z_loss: stats.z_loss,
            router_losses: stats.router_losses,
            routing_flops_saved: routing_flops_saved(&self.config.model),
            lr,
            grad_norm: norm,
            tokens_per_s,
            mfu: tokens_per_s * training_flops_per_token(&self.config.model, self.config.train.seq_len)
                / self.peak_flops,
            step_ms: seconds * 1e3,
            memory_peak_bytes: self.ctx.pool().stats().peak_bytes as u64,
            val_loss,
            is_skipped,
            layers,
        })
    }

    /// Loss and gradient of all micro-batches of `step`, summed into `self.grads` as of the mean over all targets.
    fn accumulate(&mut self, step: u64) -> Result<PassStats, TrainError> {
        let train = &self.config.train;
        let num_micro = train.grad_accumulation;
        let mut sum: Option<PassStats> = None;
        for micro in 0..num_micro {
            let batch = self.dataset.train_batch(step, micro);
            let options = self.pass_options(step, micro);
            let write = if micro == 0 { Write::Replace } else { Write::Add };
            let weights = self.compute.as_ref().unwrap_or(&self.weights);
            let tokens = token_batch(&batch);
            let stats = self.decoder.forward_backward(&self.ctx, weights, &tokens, &options, write, &mut self.grads)?;
            match &mut sum {
                Some(sum) => add(sum, &stats),
                None => sum = Some(stats),
            }
        }
        let mut stats = sum.unwrap_or_default();
        stats.balance_loss /= num_micro as f64;
        stats.z_loss /= num_micro as f64;
        let sum = std::mem::replace(&mut stats.router_losses, RouterLosses::from_names(|_| Some(0.0)));
        stats.router_losses.add(&sum, 1.0 / num_micro as f64);
        Ok(stats)
    }

    /// The settings of a training pass.
    fn pass_options(&self, step: u64, micro: usize) -> PassOptions {
        let train = &self.config.train;
        let num_micro = train.grad_accumulation;
        let progress = step as f64 / train.steps as f64;
        let share = |coefficient: &Ramp| (coefficient.at(progress) / num_micro as f64) as f32;
        let balance = match train.balance {
            BalanceChoice::Layer => BalanceKind::Layer,
            BalanceChoice::Pooled | BalanceChoice::None => BalanceKind::Pooled,
            BalanceChoice::Gshard => BalanceKind::Gshard,
            BalanceChoice::Groups => BalanceKind::Groups,
        };
        let most = (self.config.model.moe().num_choosable().max(1) as f64).ln();
        PassOptions {
            balance,
            balance_coef: if train.balance == BalanceChoice::None { 0.0 } else { share(&train.balance_coef) },
            sequence_coef: share(&train.sequence_coef),
            importance_coef: share(&train.importance_coef),
            load_coef: share(&train.load_coef),
            entropy: EntropyRule {
                local: share(&train.local_entropy_coef),
                global: share(&train.global_entropy_coef),
                min_entropy: if train.min_entropy == 0.0 { most } else { train.min_entropy },
            },
            l1_scale: 1.0 / num_micro as f32,
            z_coef: share(&train.z_coef),
            progress,
            noise: Some(RouterNoise { seed: train.seed, step: step * num_micro as u64 + micro as u64 }),
            checkpoint_layers: train.checkpoint_layers,
            grad_scale: 1.0 / (train.batch_size * train.seq_len * num_micro) as f32,
        }
    }

    /// Writes a checkpoint and returns its folder.
    fn save(&mut self) -> Result<PathBuf, TrainError> {
        self.metrics.sync()?;
        self.progress.updates = self.optimizer.updates;
        let keep = Keep { last: self.config.train.keep_last, best: true };
        let checkpoint = self.store.save(&state::metadata(&self.progress), keep, |dir| {
            state::save(dir, &self.decoder, &self.weights, &self.tokenizer, &self.optimizer, self.routing.as_ref())
        })?;
        self.last_checkpoint = Some(checkpoint.path.clone());
        Ok(checkpoint.path)
    }

    /// Lets the model write a text.
    fn sample(&self) -> Result<Sample, TrainError> {
        let train = &self.config.train;
        let weights = self.compute.as_ref().unwrap_or(&self.weights);
        let options = SamplingOptions { temperature: 0.8, top_p: 0.95, seed: train.seed, ..SamplingOptions::default() };
        let mut sampler = Sampler::new(options).map_err(ConfigError::from)?;
        let mut prompt = self.tokenizer.encode(&train.sample_prompt)?;
        if prompt.is_empty() {
            prompt.extend(self.tokenizer.eos_id());
        }
        let room = self.config.model.max_seq_len;
        prompt.truncate(room / 2);
        let stop_ids: Vec<u32> = self.tokenizer.eos_id().into_iter().collect();
        let max_new_tokens = train.sample_tokens.min(room - prompt.len());
        let request = GenerateRequest { prompt: &prompt, max_new_tokens, stop_ids: &stop_ids };
        let (ids, _) =
            generate(&self.decoder, &self.ctx, weights, &request, &mut sampler, |_| ControlFlow::Continue(()))?;
        let mut stream = TextStream::new(&self.tokenizer);
        let mut text = String::new();
        for &id in ids.iter().filter(|id| !stop_ids.contains(id)) {
            text += &stream.push(id)?;
        }
        text += &stream.finish()?;
        Ok(Sample { step: self.progress.step, prompt: train.sample_prompt.clone(), text })
    }

    fn skip(&mut self, step: u64, on_event: &mut dyn FnMut(Event<'_>)) -> Result<(), TrainError> {
        self.progress.bad_in_a_row += 1;
        let in_a_row = self.progress.bad_in_a_row;
        let max_in_a_row = self.config.train.max_bad_steps;
        on_event(Event::Skipped { step: step + 1, in_a_row, max_in_a_row });
        if in_a_row >= max_in_a_row {
            return Err(TrainError::Diverged { step: step + 1, in_a_row });
        }
        Ok(())
    }
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
    store: Store,
    metrics: MetricsWriter,
    last_checkpoint: Option<PathBuf>,
}

fn is_due(step: u64, every: u64) -> bool {
    every > 0 && step.is_multiple_of(every)
}

/// Adds the statistics of another micro-batch.
fn add(sum: &mut PassStats, other: &PassStats) {
    sum.loss_sum += other.loss_sum;
    sum.num_targets += other.num_targets;
    sum.num_correct += other.num_correct;
    sum.balance_loss += other.balance_loss;
    sum.z_loss += other.z_loss;
    sum.router_losses.add(&other.router_losses, 1.0);
    for (layer, other) in sum.layers.iter_mut().zip(&other.layers) {
        layer.merge(other);
    }
}

fn layer_records(config: &RunConfig, stats: &PassStats) -> Vec<LayerRecord> {
    moe_layers(config).into_iter().zip(&stats.layers).map(|(layer, stats)| LayerRecord::of(layer, stats)).collect()
}

/// The share of the routing's operations that a router takes less than one that scores every expert.
fn routing_flops_saved(config: &ModelConfig) -> f64 {
    let (taken, flat) = routing_flops_per_token(config);
    if flat == 0 { 0.0 } else { 1.0 - taken.min(flat) as f64 / flat as f64 }
}

fn token_batch(batch: &Batch) -> TokenBatch<'_> {
    TokenBatch {
        inputs: &batch.inputs,
        targets: &batch.targets,
        num_sequences: batch.num_sequences,
        seq_len: batch.seq_len,
    }
}
