//! Some real steps in a layout, in a folder of their own.

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use moeworks_infer::data::Watch;
use moeworks_ops::MachineOptions;

use super::{Candidate, Measured};
use crate::advise::Change;
use crate::advise::trial::{Trial, TrialOptions};
use crate::config::RunConfig;
use crate::error::TrainError;
use crate::language_model::{LanguageModel, LanguageModelResume, LanguageModelStart};
use crate::metrics::{METRICS_JSONL, NamedFigure, RankRecord, Record, read_records};
use crate::parallel::Ranks;
use crate::trainer::{Event, Outcome, Requests, RunFolder};

/// Steps of a probe; the first one, which also fills caches and pools, does not count.
const STEPS: u64 = 4;

/// A layout that makes some steps: from the first weights of a new run, or from the last checkpoint of another.
#[derive(Clone, Debug)]
pub struct Probe {
    config: RunConfig,
    dir: PathBuf,
    /// The model that a new run starts from.
    from: Option<PathBuf>,
    is_resumed: bool,
    last_step: u64,
}

impl Probe {
    /// Creates the probe of a new run, which starts from the model `from` if there is one, in the folder `dir`.
    #[must_use]
    pub fn new_run(candidate: &Candidate, dir: &Path, from: Option<&Path>) -> Self {
        let mut config = candidate.config.clone();
        // The vocabulary is that of the tokenizer, which is made when the run starts.
        config.train.eval_every = 0;
        config.train.sample_every = 0;
        config.train.checkpoint_every = 0;
        config.train.steps = config.train.steps.max(STEPS + 1);
        Self { config, dir: dir.to_owned(), from: from.map(Path::to_owned), is_resumed: false, last_step: STEPS }
    }

    /// Writes the folder `dir` of the probe that goes on from the last checkpoint of the run in `run_dir`, whose
    /// settings are `settings`. The run is only read.
    ///
    /// # Errors
    /// If the run has no checkpoint, or a file cannot be written.
    pub fn write(candidate: &Candidate, dir: &Path, run_dir: &Path, settings: &RunConfig) -> Result<(), TrainError> {
        on_trial(candidate, dir, run_dir, settings, |options| Trial::prepare(options).map(drop))
    }

    /// Creates the probe in the folder `dir` that [`write`](Self::write) wrote. Every rank calls this.
    ///
    /// # Errors
    /// If the run has no checkpoint.
    pub fn of_run(candidate: &Candidate, dir: &Path, run_dir: &Path, settings: &RunConfig) -> Result<Self, TrainError> {
        let Trial { config, dir, last_step, .. } = on_trial(candidate, dir, run_dir, settings, Trial::describe)?;
        Ok(Self { config, dir, from: None, is_resumed: true, last_step })
    }

    /// Returns the settings with which the steps are made.
    #[must_use]
    pub fn config(&self) -> &RunConfig {
        &self.config
    }

    /// Makes the steps. All ranks call this. Returns the milliseconds of each step on its slowest rank, or `None` if
    /// a stop was asked for before they were made.
    ///
    /// # Errors
    /// The errors of training.
    pub fn train(
        &self,
        ranks: Option<Ranks>,
        machine: MachineOptions,
        watch: &Watch,
        requests: &Requests,
    ) -> Result<Option<Vec<f64>>, TrainError> {
        let (config, from) = (self.config.clone(), self.from.clone());
        let mut trainer = if self.is_resumed {
            LanguageModel::resume(LanguageModelResume { run_dir: self.dir.clone(), config, ranks, machine, watch })?
        } else {
            let folder = RunFolder::from(self.dir.clone());
            LanguageModel::start(LanguageModelStart { config, folder, from, ranks, machine, watch })?
        };
        let mut times = Vec::new();
        let outcome = trainer.run(requests, &mut |event| {
            let Event::Step { record, .. } = event else { return };
            times.push(record.step_ms);
            if record.step >= self.last_step {
                requests.stop.store(true, Ordering::SeqCst);
            }
        })?;
        let is_made = outcome == Outcome::Finished || trainer.progress().step >= self.last_step;
        is_made.then(|| trainer.most_of_ranks(&times)).transpose()
    }

    /// Reads the figures of the steps, which took `times` milliseconds each on the slowest rank.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn measured(&self, candidate: &Candidate, times: &[f64]) -> Result<Measured, TrainError> {
        let records = read_records(&self.dir.join(METRICS_JSONL))?.collect::<Result<Vec<Record>, _>>()?;
        let counted = &records[1.min(records.len())..];
        let step_ms = median(times[1.min(times.len())..].to_vec());
        let mut figures = figures(counted);
        figures.insert(0, named("slowest rank, step_ms", step_ms));
        figures.insert(1, named("perf/step_ms", median(counted.iter().map(|record| record.step_ms).collect())));
        figures.extend(estimated(candidate));
        Ok(Measured { layout: candidate.layout(), step_ms, figures })
    }
}

/// Calls `work` with the options of the trial that goes on from a run in the layout of a candidate.
fn on_trial<R>(
    candidate: &Candidate,
    dir: &Path,
    run_dir: &Path,
    settings: &RunConfig,
    work: impl FnOnce(TrialOptions<'_>) -> R,
) -> R {
    let parallel = &candidate.config.parallel;
    let sizes = [
        ("parallel.dp", parallel.dp),
        ("parallel.ep", parallel.ep),
        ("parallel.tp", parallel.tp),
        ("parallel.pp", parallel.pp),
    ];
    let change =
        |(setting, value): (&'static str, usize)| Change { setting, now: String::new(), value: value.to_string() };
    work(TrialOptions {
        run_dir,
        settings: &RunConfig { parallel: parallel.clone(), ..settings.clone() },
        dir,
        changes: &sizes.map(change),
        placement: None,
        num_steps: STEPS,
    })
}

/// Returns the median; NaN of nothing.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn named(name: &str, value: f64) -> NamedFigure {
    NamedFigure { name: name.to_owned(), value }
}

/// Returns the mean of each figure over the records.
fn figures(records: &[Record]) -> Vec<NamedFigure> {
    let mean = |figure: &dyn Fn(&Record) -> f64| records.iter().map(figure).sum::<f64>() / records.len() as f64;
    let of_ranks = |figure: fn(&RankRecord) -> f64| {
        mean(&|record: &Record| {
            record
                .ranks
                .as_ref()
                .map_or(0.0, |ranks| ranks.ranks.iter().map(figure).sum::<f64>() / ranks.ranks.len().max(1) as f64)
        })
    };
    let scalar =
        |name: &'static str| mean(&|record: &Record| record.ranks.as_ref().map_or(0.0, |ranks| ranks.scalar(name)));
    let busiest = |record: &Record| record.layers.iter().map(|layer| layer.max_over_mean()).fold(1.0, f64::max);
    let peak = records.iter().map(|record| record.memory_peak_bytes).max().unwrap_or(0);
    vec![
        named("perf/tokens_per_s", mean(&|record| record.tokens_per_s)),
        named("perf/mfu", mean(&|record| record.mfu)),
        named("perf/processor_ms", mean(&|record| record.processor_ms)),
        named("perf/memory_peak_bytes", peak as f64),
        named("train/loss", mean(&|record| record.loss)),
        named("moe/drop_rate", mean(&Record::drop_rate)),
        named("max_over_mean, busiest layer", mean(&busiest)),
        named("ranks/work_ms", of_ranks(|rank| rank.work_ms)),
        named("ranks/imbalance", scalar("imbalance")),
        named("ranks/waiting_ms", scalar("waiting_ms")),
        named("ranks/standing_ms", of_ranks(|rank| rank.standing_ms)),
        named("ranks/gradients_ms", of_ranks(|rank| rank.gradients_ms)),
        named("ranks/update_ms", of_ranks(|rank| rank.update_ms)),
        named("ranks/tensor_ms", of_ranks(|rank| rank.tensor_ms)),
        named("ranks/node_bytes", of_ranks(|rank| rank.node_bytes as f64)),
        named("ranks/cluster_bytes", of_ranks(|rank| rank.cluster_bytes as f64)),
        named("ranks/tensor_bytes", of_ranks(|rank| rank.tensor_bytes as f64)),
    ]
}

/// Returns the planner's figures of the candidate.
fn estimated(candidate: &Candidate) -> Vec<NamedFigure> {
    let Some(estimate) = &candidate.estimate else { return Vec::new() };
    vec![
        named("planned/step_ms", 1e3 * estimate.time.total()),
        named("planned/compute_ms", 1e3 * estimate.time.compute),
        named("planned/all_to_all_ms", 1e3 * estimate.time.all_to_all),
        named("planned/all_reduce_ms", 1e3 * estimate.time.all_reduce),
        named("planned/memory_bytes", estimate.memory.total()),
    ]
}
