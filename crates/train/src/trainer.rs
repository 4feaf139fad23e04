//! The training loop: one step after another, with its records, samples, evaluations and checkpoints.
//!
//! Everything random is a function of (seed, step), and everything else that a step depends on is in a checkpoint, so a
//! resumed run makes the same steps as one that was never stopped, bit for bit.

mod folder;
mod open;
mod run_outputs;
mod step_timing;
mod validation;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use moeworks_infer::data::Batch;
use moeworks_infer::store::Store;
use moeworks_model::account::{routing_flops_per_token, training_flops_per_answer_token, training_flops_per_token};
use moeworks_model::{
    BalanceKind, Decoder, DecoderWeights, LayerDone, ModelConfig, ParamSet, PassOptions, PassStats, RouterLosses,
    RouterNoise, Tokenizer,
};
use moeworks_moe::{EntropyRule, Ramp};
use moeworks_ops::Context;
use moeworks_ops::linear::Write;
use moeworks_tensor::Tensor;

use crate::config::{BalanceChoice, RunConfig};
use crate::cpu_time;
use crate::data::Dataset;
use crate::error::TrainError;
use crate::lr_schedule::LrSchedule;
use crate::metrics::{LayerRecord, MetricsWriter, Record, Sample};
use crate::optimizer::{Optimizer, UpdateScale, clip_scale, global_norm};
use crate::parallel::{Ranks, SumsUnderWay};
use crate::routing::RoutingSample;
use crate::state::Progress;
pub use folder::{IfTaken, RunFolder};
use step_timing::StepTiming;

/// What somebody outside asks of a running trainer. Set from signal handlers or other threads.
#[derive(Clone, Debug, Default)]
pub struct Requests {
    /// Finish the step, write a checkpoint and return.
    pub stop: Arc<AtomicBool>,
    /// Write a checkpoint after this step and go on.
    pub save: Arc<AtomicBool>,
    /// Trainers that are making steps and look at these requests between them.
    num_listening: Arc<AtomicUsize>,
}

impl Requests {
    /// Asks to stop, if a trainer is making steps. Otherwise, before the first step and after the last, nobody would look at it:
    /// returns false, and whoever asks may end the program.
    #[must_use]
    pub fn ask_to_stop(&self) -> bool {
        let is_heard = self.num_listening.load(Ordering::SeqCst) > 0;
        if is_heard {
            self.stop.store(true, Ordering::SeqCst);
        }
        is_heard
    }

    fn listen(&self) -> Listening {
        self.num_listening.fetch_add(1, Ordering::SeqCst);
        Listening { count: Arc::clone(&self.num_listening) }
    }
}

/// A trainer that makes steps, until this is dropped.
struct Listening {
    count: Arc<AtomicUsize>,
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::SeqCst);
    }
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
    schedule: LrSchedule,
    /// What only one rank writes.
    output: Option<Output>,
    peak_flops: f64,
    /// This rank's place, if there are several.
    ranks: Option<Arc<Ranks>>,
}

/// What a run leaves on disk.
struct Output {
    store: Store,
    metrics: MetricsWriter,
    last_checkpoint: Option<PathBuf>,
}

impl Trainer {
    /// Writes what the ranks did so far, and when, to `path` as a trace for Chrome or Perfetto; the root does, and all ranks call
    /// this. A run of one rank has nothing to show.
    pub fn write_trace(&self, path: &Path) -> Result<(), TrainError> {
        self.ranks.as_ref().map_or(Ok(()), |ranks| ranks.write_trace(path))
    }

    /// The newest checkpoint of the run.
    #[must_use]
    pub fn last_checkpoint(&self) -> Option<&Path> {
        self.output.as_ref()?.last_checkpoint.as_deref()
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
        let _listening = requests.listen();
        while self.progress.step < total_steps {
            let mut record = self.step(on_event)?;
            let step = self.progress.step;
            let is_last = step == total_steps;
            let is_planned_checkpoint = is_last || is_due(step, self.config.train.checkpoint_every);
            if is_planned_checkpoint {
                self.compare_routing(&mut record)?;
            }
            if let Some(output) = &mut self.output {
                output.metrics.write(&record)?;
            }
            on_event(Event::Step { record: &record, total_steps, val_loss: self.progress.val_loss });
            if is_due(step, self.config.train.sample_every) || (is_last && self.config.train.sample_every > 0) {
                self.write_sample(on_event)?;
            }
            let [is_stopped, is_asked] = self.agreed(requests)?;
            if is_asked || is_stopped || is_planned_checkpoint {
                let start = Instant::now();
                self.save(on_event)?;
                self.spent("checkpoint", start);
            }
            if is_stopped && !is_last {
                return Ok(Outcome::Stopped);
            }
        }
        Ok(Outcome::Finished)
    }

    /// What is asked of this rank or, if there are several, of any: to stop, and to write a checkpoint.
    fn agreed(&self, requests: &Requests) -> Result<[bool; 2], TrainError> {
        let own = [requests.stop.load(Ordering::SeqCst), requests.save.swap(false, Ordering::SeqCst)];
        self.ranks.as_ref().map_or(Ok(own), |ranks| ranks.any(own))
    }

    /// One optimizer step and, where one is due, an evaluation.
    fn step(&mut self, on_event: &mut dyn FnMut(Event<'_>)) -> Result<Record, TrainError> {
        let (start, cpu_start) = (Instant::now(), cpu_time::seconds());
        let step = self.progress.step;
        let ranks = self.ranks.clone();
        let mut timing = StepTiming::begin(ranks.as_deref());
        let (stats, sums) = self.accumulate(step)?;
        timing.passed();
        let (norm, slices) = self.sum_gradients(sums)?;
        timing.summed();
        let loss = stats.loss_sum / stats.num_targets as f64;
        let lr = self.schedule.at(step);
        let is_skipped = !(loss.is_finite() && norm.is_finite());
        if is_skipped {
            self.skip(step, on_event)?;
        } else {
            let grad_scale = clip_scale(norm, self.config.train.clip_norm);
            self.learn(&stats, UpdateScale { lr, grad_scale }, slices)?;
        }
        timing.updated();
        let ranks = timing.join()?;
        self.progress.step += 1;
        self.progress.tokens += stats.num_targets as u64;
        let (seconds, cpu_seconds) = (start.elapsed().as_secs_f64(), cpu_time::seconds() - cpu_start);
        let tokens_per_s = stats.num_targets as f64 / seconds;
        let mut layers = layer_records(&self.config, &stats);
        let val_loss = self.evaluate_if_due(&mut layers)?;
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
            mfu: tokens_per_s * self.flops_per_target() / self.peak_flops,
            step_ms: seconds * 1e3,
            processor_ms: cpu_seconds * 1e3,
            memory_peak_bytes: self.ctx.pool().stats().peak_bytes as u64,
            val_loss,
            is_skipped,
            ranks,
            layers,
        })
    }

    /// Operations of a step for each token that has a loss.
    fn flops_per_target(&self) -> f64 {
        let model = &self.config.model;
        match self.dataset.span_lengths() {
            None => training_flops_per_token(model, self.config.train.seq_len),
            Some(lengths) => training_flops_per_answer_token(model, (lengths.source, lengths.answer)),
        }
    }

    /// Moves the weights against their gradients, and the routers' states on, after a step that is not skipped.
    fn learn(&mut self, stats: &PassStats, scale: UpdateScale, slices: Option<Vec<Tensor>>) -> Result<(), TrainError> {
        self.progress.bad_in_a_row = 0;
        self.update(scale, slices)?;
        let moe = self.config.model.moe();
        let progress = self.progress.step as f64 / self.config.train.steps as f64;
        self.weights.next_states(&self.ctx, &moe, &stats.layers, progress, self.compute.as_mut());
        Ok(())
    }

    /// The validation loss, where one is due after the steps made so far.
    fn evaluate_if_due(&mut self, layers: &mut [LayerRecord]) -> Result<Option<f64>, TrainError> {
        let steps = self.progress.step;
        if !is_due(steps, self.config.train.eval_every) && steps != self.config.train.steps {
            return Ok(None);
        }
        let start = Instant::now();
        let loss = self.validate(layers)?;
        self.spent("evaluation", start);
        if loss.is_some() {
            self.progress.val_loss = loss;
        }
        Ok(loss)
    }

    /// Makes of the gradients of this rank's sequences those of all: their norm, and this rank's slices of them where that is all
    /// that it updates.
    fn sum_gradients(&mut self, under_way: SumsUnderWay) -> Result<(f64, Option<Vec<Tensor>>), TrainError> {
        let Some(ranks) = &self.ranks else { return Ok((self.own_norm(), None)) };
        ranks.check()?;
        if ranks.shards_optimizer() {
            let slices = ranks.sum_to_slices(&self.ctx, &self.grads, under_way)?;
            return Ok((ranks.norm_of_slices(&self.ctx, &slices)?, Some(slices)));
        }
        ranks.sum_gradients(&mut self.grads, under_way)?;
        Ok((ranks.global_norm(&self.ctx, &self.grads)?, None))
    }

    /// The norm of the gradients of a run on one rank.
    fn own_norm(&self) -> f64 {
        global_norm(&self.ctx, self.decoder.weight_table(), &self.grads)
    }

    /// Moves the weights at a rate and by gradients times a scale: by all of them, or by `slices` of them on each rank.
    fn update(&mut self, scale: UpdateScale, slices: Option<Vec<Tensor>>) -> Result<(), TrainError> {
        let ctx = self.config.train.optimizer_context(&self.ctx);
        let (Some(ranks), Some(grads)) = (&self.ranks, slices) else {
            let compute = self.compute.as_mut().map(|copy| copy as &mut dyn ParamSet);
            self.optimizer.update(&ctx, scale, &mut self.weights, &self.grads, compute);
            return Ok(());
        };
        if ranks.shards_weights() {
            let compute = self.compute.as_mut().map(|copy| copy as &mut dyn ParamSet);
            self.optimizer.update(&ctx, scale, &mut self.weights, &grads, compute);
            return Ok(());
        }
        let mut params = ranks.trainable_slices(&ctx, &self.weights);
        self.optimizer.update(&ctx, scale, &mut params, &grads, None);
        ranks.join_slices(&params, &mut self.weights)?;
        if let Some(compute) = &mut self.compute {
            self.weights.update_copy(&ctx, compute);
        }
        Ok(())
    }

    /// Loss and gradient of all micro-batches of `step`, summed into `self.grads` as of the mean over all targets. On several ranks
    /// the sums of a layer's gradients over them begin in the last micro-batch, as soon as the layer is done; where ranks share
    /// gradients out, in each.
    fn accumulate(&mut self, step: u64) -> Result<(PassStats, SumsUnderWay), TrainError> {
        let num_micro = self.config.train.grad_accumulation;
        let mut sum: Option<PassStats> = None;
        let begin = |ranks: &Arc<Ranks>| ranks.begin_sums(&self.ctx);
        let mut sums = self.ranks.as_ref().map_or_else(SumsUnderWay::default, begin);
        for micro in 0..num_micro {
            let stats = self.pass(step, micro, &mut sums)?;
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
        Ok((stats, sums))
    }

    /// One micro-batch of `step`.
    fn pass(&mut self, step: u64, micro: usize, sums: &mut SumsUnderWay) -> Result<PassStats, TrainError> {
        let is_last = micro + 1 == self.config.train.grad_accumulation;
        let start = Instant::now();
        let batch = self.dataset.train_batch(step, micro);
        self.spent("data", start);
        let mut options = self.pass_options(step, micro);
        let batch = self.own_share(batch, &mut options.first_token);
        // Gradients that are shared out are added up elsewhere.
        let write = if micro == 0 || sums.slices.is_some() { Write::Replace } else { Write::Add };
        let ranks = self.ranks.as_deref();
        if let (Some(ranks), Some(slices)) = (ranks, &sums.slices) {
            slices.begin_pass(ranks, &self.ctx, &mut self.grads);
        }
        let is_whole = |ranks: &&Ranks| ranks.shards_gradients() || (is_last && !ranks.shards_optimizer());
        let summing = ranks.filter(is_whole);
        let mut done = |layer, grads: &mut DecoderWeights| {
            if let Some(ranks) = summing {
                ranks.start_sums(&self.ctx, layer, grads, sums);
            }
        };
        let weights = self.compute.as_ref().unwrap_or(&self.weights);
        let (ctx, tokens, write) = (&self.ctx, batch.tokens(), (write, &mut done as LayerDone<'_>));
        let stats = self.decoder.forward_backward_watched(ctx, weights, &tokens, &options, write, &mut self.grads)?;
        if let (Some(ranks), Some(slices)) = (ranks, &mut sums.slices) {
            slices.end_pass(ranks, &self.ctx, &self.grads);
        }
        Ok(stats)
    }

    /// The sequences of `batch` that this rank passes, and the position of their first token among all.
    fn own_share(&self, mut batch: Batch, first_token: &mut usize) -> Batch {
        if let Some(ranks) = &self.ranks {
            let share = ranks.share(batch.num_sequences);
            *first_token = share.start * batch.seq_len;
            batch.keep(share);
        }
        batch
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
        };
        let most = (self.config.model.moe().num_choosable().max(1) as f64).ln();
        PassOptions {
            balance,
            balance_coef: if train.balance == BalanceChoice::None { 0.0 } else { share(&train.balance_coef) },
            device_coef: share(&train.device_coef),
            communication_coef: share(&train.communication_coef),
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
            first_token: 0,
            noise: Some(RouterNoise { seed: train.seed, step: step * num_micro as u64 + micro as u64 }),
            checkpoint_layers: train.checkpoint_layers,
            grad_scale: 1.0 / (train.batch_size * self.dataset.targets_per_sequence() * num_micro) as f32,
        }
    }

    /// Tells the account of ranks what was done from `start` until now.
    fn spent(&self, what: &'static str, start: Instant) {
        if let Some(ranks) = &self.ranks {
            ranks.meter().record(what, start);
        }
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
    let numbers = config.model.moe_layer_numbers().into_iter();
    numbers.zip(&stats.layers).map(|(layer, stats)| LayerRecord::of(layer, stats)).collect()
}

/// The share of the routing's operations that a router takes less than one that scores every expert.
fn routing_flops_saved(config: &ModelConfig) -> f64 {
    let (taken, flat) = routing_flops_per_token(config);
    if flat == 0 { 0.0 } else { 1.0 - taken.min(flat) as f64 / flat as f64 }
}
