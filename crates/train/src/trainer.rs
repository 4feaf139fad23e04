//! The training loop of any [`Task`]: steps with their records, samples, evaluations and checkpoints.
//!
//! All randomness is a function of (seed, step), and everything else that a step depends on is in a checkpoint. A
//! resumed run therefore makes the same steps as an uninterrupted one, bit for bit.

mod folder;
mod gradients;
mod requests;
mod run_outputs;
mod settings;
mod start;
mod step_timing;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use moeworks_infer::store::Store;
use moeworks_model::ParamSet;
use moeworks_ops::Context;

use crate::checkpoint::Progress;
use crate::cpu_time;
use crate::error::TrainError;
use crate::metrics::{LayerRecord, MetricsWriter, NamedFigure, Record};
use crate::optimizer::{Optimizer, UpdateScale, clip_scale};
use crate::parallel::{ExpertState, Ranks};
use crate::rebalance::Rebalancer;
use crate::task::{Evaluation, Metric, ModelView, PassFigures, RecordedStep, Task};
pub use folder::{IfTaken, RunFolder};
pub use requests::{Event, Outcome, Requests};
pub use settings::TrainerSettings;
pub use start::{ResumeOptions, StartOptions};
pub(crate) use start::{ResumePoint, is_root, root_first};
use step_timing::StepTiming;

/// A training run.
pub struct Trainer<T: Task> {
    ctx: Context,
    task: T,
    settings: TrainerSettings,
    run_dir: PathBuf,
    /// f32 weights.
    params: T::Params,
    /// The copy of the weights that GEMMs read; in mixed precision only.
    copy: Option<T::Params>,
    grads: T::Params,
    optimizer: Optimizer,
    progress: Progress,
    /// The files that only one rank writes.
    output: Option<Output>,
    /// The peak of all ranks together in operations a second; for tasks that count their operations.
    peak_flops: f64,
    /// This rank's handle; none for a single rank.
    ranks: Option<Arc<Ranks>>,
    /// The part that moves experts; none where they stay.
    rebalancer: Option<Rebalancer>,
}

/// The files of a run.
struct Output {
    store: Store,
    metrics: MetricsWriter,
    last_checkpoint: Option<PathBuf>,
}

impl<T: Task> Trainer<T> {
    /// Writes a trace of all ranks so far to `path`, for Chrome or Perfetto. All ranks call this and the root writes.
    /// A run of one rank has no trace.
    pub fn write_trace(&self, path: &Path) -> Result<(), TrainError> {
        self.ranks.as_ref().map_or(Ok(()), |ranks| ranks.write_trace(path))
    }

    /// Returns the largest of all ranks' values at each place. All ranks call this, with as many values.
    pub(crate) fn most_of_ranks(&self, own: &[f64]) -> Result<Vec<f64>, TrainError> {
        let Some(ranks) = &self.ranks else { return Ok(own.to_vec()) };
        let all = ranks.all_values(own)?;
        let most = |at: usize| all.iter().skip(at).step_by(own.len()).copied().fold(f64::NAN, f64::max);
        Ok((0..own.len()).map(most).collect())
    }

    /// Returns the newest checkpoint of the run.
    #[must_use]
    pub fn last_checkpoint(&self) -> Option<&Path> {
        self.output.as_ref()?.last_checkpoint.as_deref()
    }

    /// Returns the run's folder.
    #[must_use]
    pub fn run_dir(&self) -> &Path {
        &self.run_dir
    }

    /// Returns the task.
    #[must_use]
    pub fn task(&self) -> &T {
        &self.task
    }

    /// Returns the weights, or this rank's part of them.
    #[must_use]
    pub fn params(&self) -> &T::Params {
        &self.params
    }

    /// Returns the progress of the run.
    #[must_use]
    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    /// Runs until all steps are done or a stop is requested.
    pub fn run(&mut self, requests: &Requests, on_event: &mut dyn FnMut(Event<'_>)) -> Result<Outcome, TrainError> {
        let total_steps = self.settings.steps;
        let _listening = requests.listen();
        while self.progress.step < total_steps {
            let mut record = self.step(on_event)?;
            let step = self.progress.step;
            let is_last = step == total_steps;
            self.rebalance(&mut record, is_last)?;
            self.ranks.as_ref().map_or(Ok(()), |ranks| ranks.tune_domains(&mut record))?;
            let is_planned_checkpoint = is_last || is_due(step, self.settings.checkpoint_every);
            if is_planned_checkpoint {
                let (task, model) = self.task_and_model();
                task.at_planned_checkpoint(&model, &mut record)?;
            }
            if let Some(output) = &mut self.output {
                output.metrics.write(&record)?;
            }
            on_event(Event::Step { record: &record, total_steps, val_loss: self.progress.val_loss });
            if is_due(step, self.settings.sample_every) || (is_last && self.settings.sample_every > 0) {
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

    /// Lets experts that have moved take their new places after the step of `record`, and decides which move next.
    fn rebalance(&mut self, record: &mut Record, is_last: bool) -> Result<(), TrainError> {
        self.with_rebalancer(|rebalancer, ranks, state| rebalancer.after_step(ranks, state, record, is_last))
    }

    /// Calls `work` with the part that moves experts, where they move.
    fn with_rebalancer(
        &mut self,
        work: impl FnOnce(&mut Rebalancer, &Ranks, &mut ExpertState<'_>) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        let at = self.settings.optimizer_context(&self.ctx);
        let (Some(rebalancer), Some(ranks)) = (&mut self.rebalancer, &self.ranks) else { return Ok(()) };
        let Optimizer { first, second, .. } = &mut self.optimizer;
        let mut state = ExpertState {
            ctx: &self.ctx,
            at: &at,
            params: &mut self.params,
            copy: self.copy.as_mut().map(|copy| copy as &mut dyn ParamSet),
            grads: &mut self.grads,
            moments: [first, second],
        };
        work(rebalancer, ranks, &mut state)
    }

    /// Returns whether this rank or any other was asked to stop, and to write a checkpoint.
    fn agreed(&self, requests: &Requests) -> Result<[bool; 2], TrainError> {
        let own = [requests.stop.load(Ordering::SeqCst), requests.save.swap(false, Ordering::SeqCst)];
        self.ranks.as_ref().map_or(Ok(own), |ranks| ranks.any(own))
    }

    /// Runs one optimizer step and, if one is due, an evaluation.
    fn step(&mut self, on_event: &mut dyn FnMut(Event<'_>)) -> Result<Record, TrainError> {
        let (start, cpu_start) = (Instant::now(), cpu_time::seconds());
        let step = self.progress.step;
        let ranks = self.ranks.clone();
        let mut timing = StepTiming::begin(ranks.as_deref());
        self.record_choices(step + 1)?;
        let (figures, sums) = self.accumulate(step)?;
        timing.passed();
        let (norm, slices) = self.sum_gradients(sums)?;
        timing.summed();
        self.with_rebalancer(Rebalancer::finish_moments)?;
        let loss = figures.mean_loss();
        let lr = self.settings.lr.at(step);
        let is_skipped = !(loss.is_finite() && norm.is_finite());
        if is_skipped {
            self.skip(step, on_event)?;
        } else {
            self.progress.bad_in_a_row = 0;
            let grad_scale = clip_scale(norm, self.settings.clip_norm);
            self.update(UpdateScale { lr, grad_scale }, slices)?;
            self.next_states(&figures);
        }
        timing.updated();
        let ranks = timing.join()?;
        self.progress.step += 1;
        self.progress.tokens += figures.num_targets as u64;
        let (seconds, cpu_seconds) = (start.elapsed().as_secs_f64(), cpu_time::seconds() - cpu_start);
        let recorded = RecordedStep { run_dir: &self.run_dir, step: step + 1, writes: self.output.is_some() };
        self.task.record_loads(recorded, &figures)?;
        let mut record = self.record(&figures, seconds);
        let evaluation = self.evaluate_if_due(&mut record.layers)?;
        record.val_loss = evaluation.as_ref().map(|evaluation| evaluation.loss);
        let evaluated = evaluation.iter().flat_map(|evaluation| &evaluation.metrics);
        record.metrics.extend(evaluated.map(|metric| named("val", metric)));
        let memory_peak_bytes = self.ctx.pool().stats().peak_bytes as u64;
        Ok(Record {
            lr,
            grad_norm: norm,
            processor_ms: cpu_seconds * 1e3,
            memory_peak_bytes,
            is_skipped,
            ranks,
            ..record
        })
    }

    /// Creates the record of a step with these figures, which took `seconds`.
    fn record(&self, figures: &PassFigures, seconds: f64) -> Record {
        let tokens_per_s = figures.num_targets as f64 / seconds;
        let numbers = self.task.moe_layers().into_iter();
        Record {
            step: self.progress.step,
            tokens: self.progress.tokens,
            loss: figures.mean_loss(),
            balance_loss: figures.balance_loss,
            z_loss: figures.z_loss,
            router_losses: figures.router_losses,
            routing_flops_saved: self.task.routing_flops_saved(),
            tokens_per_s,
            mfu: self.task.flops_per_target().map_or(f64::NAN, |flops| tokens_per_s * flops / self.peak_flops),
            step_ms: seconds * 1e3,
            metrics: figures.metrics.iter().map(|metric| named("train", metric)).collect(),
            layers: numbers.zip(&figures.layers).map(|(layer, stats)| LayerRecord::of(layer, stats)).collect(),
            ..Record::default()
        }
    }

    /// Evaluates if that is due after the steps made so far.
    fn evaluate_if_due(&mut self, layers: &mut [LayerRecord]) -> Result<Option<Evaluation>, TrainError> {
        let steps = self.progress.step;
        if !is_due(steps, self.settings.eval_every) && steps != self.settings.steps {
            return Ok(None);
        }
        let start = Instant::now();
        let (task, model) = self.task_and_model();
        let evaluation = task.evaluate(&model, layers)?;
        self.spent("evaluation", start);
        if let Some(evaluation) = &evaluation {
            self.progress.val_loss = Some(evaluation.loss);
        }
        Ok(evaluation)
    }

    /// Lets the task record the routing of some tokens of the coming step.
    fn record_choices(&mut self, step: u64) -> Result<(), TrainError> {
        let run_dir = self.run_dir.clone();
        let recorded = RecordedStep { run_dir: &run_dir, step, writes: self.output.is_some() };
        let (task, model) = self.task_and_model();
        task.record_choices(&model, recorded)
    }

    /// Returns the task, and the model as its passes see it.
    fn task_and_model(&mut self) -> (&mut T, ModelView<'_, T::Params>) {
        let params = self.copy.as_ref().unwrap_or(&self.params);
        (&mut self.task, ModelView { ctx: &self.ctx, ranks: self.ranks.as_deref(), params })
    }

    /// Records in the ranks' meter that `what` took from `start` until now.
    fn spent(&self, what: &'static str, start: Instant) {
        if let Some(ranks) = &self.ranks {
            ranks.meter().record(what, start);
        }
    }

    fn skip(&mut self, step: u64, on_event: &mut dyn FnMut(Event<'_>)) -> Result<(), TrainError> {
        self.progress.bad_in_a_row += 1;
        let in_a_row = self.progress.bad_in_a_row;
        let max_in_a_row = self.settings.max_bad_steps;
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

/// Returns the mean of a metric under its name in records.
fn named(kind: &str, metric: &Metric) -> NamedFigure {
    NamedFigure { name: format!("{kind}/{}", metric.name), value: metric.mean() }
}
