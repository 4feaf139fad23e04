//! Trials: some steps with changed settings, from a run's last checkpoint, in a folder of their own. The run is only
//! read.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use moeworks_infer::data::Watch;
use moeworks_infer::store::{CHECKPOINTS_DIR, CONFIG_FILE, Checkpoint, Keep, MANIFEST_FILE, Store};
use moeworks_model::Tokenizer;
use moeworks_model::files::write_whole;
use moeworks_model::hf::{SaveOptions, load_model, save_model};
use moeworks_ops::{Context, MachineOptions};
use moeworks_plan::Placements;

use super::finding::Change;
use super::settings::reach;
use super::{Reach, read};
use crate::config::{ConfigLayers, Override, RunConfig, print_config};
use crate::error::TrainError;
use crate::language_model::{LanguageModel, LanguageModelResume};
use crate::metrics::{METRICS_JSONL, MetricsError};
use crate::parallel::Ranks;
use crate::trainer::{Event, Outcome, Requests};

/// The file of a placement in the folder of a trial.
const PLACEMENT_FILE: &str = "placement.txt";
/// Settings that change a model's weights or their meaning, which a checkpoint's weights cannot take.
const OF_WEIGHTS: [&str; 1] = ["model.router.expert_bias"];

/// The settings of a trial.
#[derive(Clone, Copy, Debug)]
pub struct TrialOptions<'a> {
    /// The run, from whose last checkpoint the trial starts.
    pub run_dir: &'a Path,
    /// The settings of the run.
    pub settings: &'a RunConfig,
    /// The folder of the trial, which must not exist.
    pub dir: &'a Path,
    /// The changed settings; none for the run as it is.
    pub changes: &'a [Change],
    /// The placement of experts, which replaces the value of `parallel.placement`.
    pub placement: Option<&'a Placements>,
    /// The number of steps.
    pub num_steps: u64,
}

/// A trial that can be trained.
#[derive(Clone, Debug)]
pub struct Trial {
    /// Its settings.
    pub config: RunConfig,
    /// Its folder.
    pub dir: PathBuf,
    /// The step of the checkpoint.
    pub first_step: u64,
    /// Its last step.
    pub last_step: u64,
}

/// The figures of a trial: means of its steps without the first, unless others are said. Unknown ones are NaN.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TrialFigures {
    /// The number of steps.
    pub num_steps: usize,
    /// `train/loss`.
    pub loss: f64,
    /// `val/loss` after the last step.
    pub val_loss: f64,
    /// `perf/tokens_per_s`.
    pub tokens_per_s: f64,
    /// The largest `perf/memory_peak_bytes`.
    pub memory_peak_bytes: u64,
    /// `moe/drop_rate`.
    pub drop_rate: f64,
    /// The largest `max_over_mean` of a layer's summed load.
    pub max_over_mean: f64,
    /// The mean of the layers' `router_entropy` as a share of ln E.
    pub entropy_share: f64,
    /// `ranks/waiting_ms`.
    pub waiting_ms: f64,
    /// Skipped updates.
    pub num_skipped: usize,
}

/// Returns whether these settings can be tried from a checkpoint.
#[must_use]
pub fn can_try(changes: &[Change]) -> bool {
    let is_possible = |change: &Change| {
        let setting = change.setting;
        let is_other_data =
            setting.starts_with("data.") || (setting.starts_with("train.") && reach(setting) == Reach::NewRun);
        !OF_WEIGHTS.contains(&setting) && !is_other_data && setting != "train.steps"
    };
    !changes.is_empty() && changes.iter().all(is_possible)
}

impl Trial {
    /// Makes the folder of a trial: the run's last checkpoint with the changed settings.
    ///
    /// # Errors
    /// If the run has no checkpoint, the settings are invalid together, or a file cannot be written.
    pub fn prepare(options: TrialOptions<'_>) -> Result<Self, TrainError> {
        let dir = options.dir;
        let checkpoint = last_checkpoint(options.run_dir)?;
        if dir.exists() {
            let problem = "is there already; name a new folder for the trials".to_owned();
            return Err(TrainError::State { path: dir.to_owned(), problem });
        }
        let trial = Self::from_checkpoint(&options, &checkpoint)?;
        let config = &trial.config;
        fs::create_dir_all(dir).map_err(TrainError::io(dir))?;
        if let Some(placement) = options.placement {
            let path = dir.join(PLACEMENT_FILE);
            write_whole(&path, placement.to_string().as_bytes()).map_err(TrainError::io(&path))?;
        }
        let is_same_model = config.model == options.settings.model;
        Store::open_to_write(dir)?.save(&checkpoint.metadata, Keep::default(), |into| {
            copy(&checkpoint, into).map_err(TrainError::io(&checkpoint.path))?;
            if is_same_model { Ok(()) } else { save_as(&checkpoint.path, config, into) }
        })?;
        let path = dir.join(CONFIG_FILE);
        write_whole(&path, print_config(config).as_bytes()).map_err(TrainError::io(&path))?;
        Ok(trial)
    }

    /// Returns the trial in a folder that [`prepare`](Self::prepare) made, or would make, without writing anything.
    ///
    /// # Errors
    /// If the run has no checkpoint, or the settings are invalid together.
    pub fn describe(options: TrialOptions<'_>) -> Result<Self, TrainError> {
        Self::from_checkpoint(&options, &last_checkpoint(options.run_dir)?)
    }

    fn from_checkpoint(options: &TrialOptions<'_>, checkpoint: &Checkpoint) -> Result<Self, TrainError> {
        let first_step = checkpoint.metadata.step;
        let last_step = first_step + options.num_steps;
        Ok(Self { config: config(options, last_step)?, dir: options.dir.to_owned(), first_step, last_step })
    }

    /// Makes the steps. All ranks call this.
    ///
    /// # Errors
    /// The errors of training.
    pub fn train(
        &self,
        ranks: Option<Ranks>,
        machine: MachineOptions,
        watch: &Watch,
        requests: &Requests,
    ) -> Result<Outcome, TrainError> {
        let (run_dir, config) = (self.dir.clone(), self.config.clone());
        let mut trainer = LanguageModel::resume(LanguageModelResume { run_dir, config, ranks, machine, watch })?;
        trainer.run(requests, &mut |event| {
            if let Event::Step { record, .. } = event
                && record.step >= self.last_step
            {
                requests.stop.store(true, Ordering::SeqCst);
            }
        })
    }

    /// Returns the figures of the steps that were made.
    ///
    /// # Errors
    /// If the records cannot be read.
    pub fn figures(&self) -> Result<TrialFigures, MetricsError> {
        read::trial_figures(&self.dir.join(METRICS_JSONL))
    }

    /// Removes the checkpoints of the trial; its settings and records stay.
    ///
    /// # Errors
    /// If they cannot be removed.
    pub fn remove_checkpoints(&self) -> Result<(), TrainError> {
        let path = self.dir.join(CHECKPOINTS_DIR);
        fs::remove_dir_all(&path).map_err(TrainError::io(&path))
    }
}

/// Returns the newest checkpoint of a run.
fn last_checkpoint(run_dir: &Path) -> Result<Checkpoint, TrainError> {
    Store::open(run_dir).latest()?.ok_or_else(|| TrainError::State {
        path: run_dir.to_owned(),
        problem: "has no complete checkpoint, from which settings could be tried".to_owned(),
    })
}

/// Returns the settings of a trial that ends with an evaluation after `last_step`.
fn config(options: &TrialOptions<'_>, last_step: u64) -> Result<RunConfig, TrainError> {
    let mut overrides = Vec::new();
    for change in options.changes {
        let placement = options.placement.filter(|_| change.setting == "parallel.placement");
        overrides.push(match placement {
            Some(_) => {
                let path =
                    std::path::absolute(options.dir.join(PLACEMENT_FILE)).map_err(TrainError::io(options.dir))?;
                Override::new(change.setting, path.display().to_string())
            }
            None => Override::parse(&format!("{}={}", change.setting, change.value))?,
        });
    }
    let layers = ConfigLayers { overrides, ..ConfigLayers::default() };
    let mut config = layers.resolve_over(options.settings.clone())?;
    config.train.steps = config.train.steps.max(last_step);
    config.train.eval_every = last_step;
    config.train.sample_every = 0;
    config.train.checkpoint_every = 0;
    Ok(config)
}

/// Copies the files of a checkpoint but its manifest.
fn copy(checkpoint: &Checkpoint, into: &Path) -> std::io::Result<()> {
    for entry in fs::read_dir(&checkpoint.path)? {
        let entry = entry?;
        let is_content = entry.file_name() != MANIFEST_FILE && entry.file_type()?.is_file();
        if is_content {
            fs::copy(entry.path(), into.join(entry.file_name()))?;
        }
    }
    Ok(())
}

/// Writes the weights of the model folder `from` as those of another configuration's model.
fn save_as(from: &Path, config: &RunConfig, into: &Path) -> Result<(), TrainError> {
    let (_, weights) = load_model(&Context::cpu_all_cores(), from)?;
    let tokenizer = Tokenizer::from_dir(from)?;
    let options = SaveOptions { tokenizer: Some(&tokenizer), ..SaveOptions::default() };
    save_model(into, &config.model, &weights, &options).map_err(|error| TrainError::Task(Box::new(error)))?;
    Ok(())
}
