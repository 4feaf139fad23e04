//! A routing study: the same small model trained with each routing scheme on the same text and with the same number
//! of floating-point operations, and a dense model of the same active size.
//!
//! Every run is an ordinary one, in a folder of its own, with the same seed, the same order of the text and the same
//! validation tokens, so that differences are caused by the routing. A study that was stopped continues where it was.

mod plot;
mod table;
mod variants;

use std::path::{Path, PathBuf};

use moeworks_infer::data::{DataError, Watch};
use moeworks_infer::store::CONFIG_FILE;
use moeworks_model::Tokenizer;
use moeworks_model::model_cost::{Parameters, training_flops_per_token};
use moeworks_ops::MachineOptions;

use crate::config::{RunConfig, TokenizerChoice};
use crate::error::TrainError;
use crate::language_model::{self, LanguageModel, LanguageModelResume, LanguageModelStart};
use crate::metrics::{LayerRecord, METRICS_JSONL, Record, read_records};
use crate::trainer::{Event, Outcome, Requests};

pub use plot::plot;
pub use table::report;
use variants::DENSE;
pub use variants::Variant;

/// The share of the steps, at the end of a run, over which balance and drops are averaged.
const LAST_SHARE: f64 = 0.1;

/// The settings of a study.
#[derive(Clone, Debug, PartialEq)]
pub struct Study {
    /// The base model and its training; every variant is derived from it.
    pub base: RunConfig,
    /// The folder of the runs.
    pub runs_dir: PathBuf,
    /// The number of seeds with which every variant is trained, counted from the base's seed.
    pub num_seeds: u64,
    /// The names of the variants to train; empty for all.
    pub only: Vec<String>,
}

/// The result of one variant, averaged over its seeds.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// The variant.
    pub variant: Variant,
    /// The number of parameters, and the number that a token passes.
    pub parameters: (u64, u64),
    /// The floating-point operations of its training.
    pub flops: f64,
    /// The last validation loss of each seed, in nats per token.
    pub val_losses: Vec<f64>,
    /// The floating-point operations and the validation loss at each evaluation of the first seed.
    pub curve: Vec<(f64, f64)>,
    /// The balance of the routing, averaged over MoE layers and the last tenth of the steps; `None` for a dense
    /// model.
    pub balance: Option<Balance>,
    /// The CPU time of the training steps in seconds; elapsed time where CPU time is not recorded.
    pub seconds: f64,
}

/// The balance of a variant's routing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Balance {
    /// The coefficient of variation of the load.
    pub cv: f64,
    /// The busiest expert's load as a multiple of the even share.
    pub max_over_mean: f64,
    /// The number of experts that a token chooses, on average.
    pub experts_per_token: f64,
    /// The share of the choices that were dropped.
    pub drop_rate: f64,
    /// The share of the choices that were rerouted.
    pub reroute_rate: f64,
    /// The last measured specialisation; NaN if there is none.
    pub specialization: f64,
}

impl Finding {
    /// Returns the mean over the seeds of the last validation loss.
    #[must_use]
    pub fn val_loss(&self) -> f64 {
        self.val_losses.iter().sum::<f64>() / self.val_losses.len() as f64
    }

    /// Returns half the distance between the lowest and the highest validation loss of the seeds.
    #[must_use]
    pub fn spread(&self) -> f64 {
        half_range(&self.val_losses)
    }

    /// Returns the difference of the validation loss to that of `other`: its mean over the seeds and half its range.
    /// Runs with the same seed read the same text in the same order, so that the differences vary less than the
    /// losses.
    #[must_use]
    pub fn above(&self, other: &Self) -> (f64, f64) {
        let pairs = self.val_losses.iter().zip(&other.val_losses);
        let differences: Vec<f64> = pairs.map(|(own, other)| own - other).collect();
        (differences.iter().sum::<f64>() / differences.len() as f64, half_range(&differences))
    }
}

/// Returns half the distance between the lowest and the highest value.
fn half_range(values: &[f64]) -> f64 {
    let ends = |(low, high): (f64, f64), &value: &f64| (low.min(value), high.max(value));
    let (low, high) = values.iter().fold((f64::INFINITY, f64::NEG_INFINITY), ends);
    (high - low) / 2.0
}

/// Chooses a unit for a number of floating-point operations: returns its size and its name.
fn flops_unit(flops: f64) -> (f64, &'static str) {
    if flops < 1e15 { (1e12, "TFLOP") } else { (1e15, "PFLOP") }
}

/// The settings of the base model that differ from the defaults. The model is small enough that a run takes a minute
/// and that a dense model soon stops improving, where experts make a difference (`bench/history/routing.md` lists
/// what was tried).
///
/// A token's weights sum to K, not to 1, so that the sum of K experts is as large as the output of a dense layer of K
/// times their width. With a sum of 1, or with weights initialised at a deviation of 0.02, the MoE lost its lead over
/// the dense model (`bench/history/routing.md`).
pub const BASE: [&str; 19] = [
    "model.width=64",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.num_kv_heads=2",
    "model.head_dim=32",
    "model.num_experts=16",
    "model.expert_width=64",
    "model.init_std=0.06",
    "model.router.routed_scale=2.0",
    "train.steps=400",
    "train.batch_size=32",
    "train.seq_len=128",
    "train.lr=6e-3",
    "train.warmup_steps=30",
    "train.eval_every=50",
    "train.eval_batches=32",
    "train.sample_every=0",
    "train.checkpoint_every=200",
    "train.keep_last=1",
];

/// Computes the floating-point operations of a step.
fn step_flops(config: &RunConfig) -> f64 {
    let mut model = config.model.clone();
    if model.vocab_size == 0 {
        model.vocab_size = match &config.data.tokenizer {
            TokenizerChoice::Bytes => Tokenizer::bytes().vocab_size(),
            TokenizerChoice::Bpe => config.data.bpe_vocab_size,
            // The vocabulary is not known yet. The output projection, which all variants share, is not counted then.
            TokenizerChoice::File(_) => 0,
        };
    }
    training_flops_per_token(&model, config.train.seq_len) * config.train.step_tokens() as f64
}

impl Study {
    /// Lists the variants to train.
    ///
    /// # Errors
    /// If `only` names an unknown variant or one whose configuration is invalid with this base. With an empty `only`,
    /// such a variant is skipped with a warning.
    pub fn variants(&self) -> Result<Vec<Variant>, TrainError> {
        let possible = variants::variants(&self.base, &self.run_dir(DENSE, self.base.train.seed));
        if let Some(name) = self.only.iter().find(|name| possible.iter().all(|(known, _)| known != *name)) {
            let known: Vec<&str> = possible.iter().map(|(name, _)| *name).collect();
            return Err(TrainError::Variant { name: name.clone(), known: known.join(", ") });
        }
        let is_named = |name: &str| self.only.iter().any(|only| only == name);
        // The embeddings of a clustered hash come from the dense model, which is trained first.
        let is_dense_needed = possible.iter().any(|(name, variant)| {
            is_named(name) && variant.as_ref().is_ok_and(|variant| variants::needs_embeddings(&variant.config))
        });
        let is_asked = |name| is_named(name) || (name == DENSE && is_dense_needed);
        let mut variants = Vec::new();
        for (name, variant) in possible {
            match variant {
                Ok(variant) if self.only.is_empty() => variants.push(variant),
                Err(error) if self.only.is_empty() => {
                    tracing::warn!("{name} is left out of the study: {error}");
                }
                variant if is_asked(name) => variants.push(variant?),
                _ => {}
            }
        }
        Ok(variants)
    }

    /// Returns the folder of a variant's run with a seed.
    fn run_dir(&self, name: &str, seed: u64) -> PathBuf {
        self.runs_dir.join(format!("{name}-seed{seed}"))
    }

    /// Trains the runs that are not finished and reads the results. `on_event` gets the name of each run and its
    /// events; `watch` reports progress while data is read. Returns `None` if a stop was requested.
    pub fn run(
        &self,
        machine: &MachineOptions,
        requests: &Requests,
        watch: &Watch,
        mut on_event: impl FnMut(&str, Event<'_>),
    ) -> Result<Option<Vec<Finding>>, TrainError> {
        let mut findings = Vec::new();
        for variant in self.variants()? {
            let mut runs = Vec::new();
            for seed in self.base.train.seed..self.base.train.seed + self.num_seeds {
                let mut config = variant.config.clone();
                config.train.seed = seed;
                if variants::needs_embeddings(&config) && self.base.data.hash_embeddings.as_os_str().is_empty() {
                    config.data.hash_embeddings = self.run_dir(DENSE, seed);
                }
                let run_dir = self.run_dir(variant.name, seed);
                let name = run_dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
                let mut on_event = |event: Event<'_>| on_event(&name, event);
                if train(config, &run_dir, machine.clone(), requests, watch, &mut on_event)? == Outcome::Stopped {
                    return Ok(None);
                }
                runs.push(run_dir);
            }
            findings.push(finding(variant, &runs)?);
        }
        Ok(Some(findings))
    }
}

/// Starts a run, or continues it; a finished one is left as it is.
fn train(
    mut config: RunConfig,
    run_dir: &Path,
    machine: MachineOptions,
    requests: &Requests,
    watch: &Watch,
    on_event: &mut dyn FnMut(Event<'_>),
) -> Result<Outcome, TrainError> {
    let is_begun = run_dir.join(CONFIG_FILE).is_file();
    let opened = if is_begun {
        language_model::make_absolute(&mut config)?;
        let stored = language_model::read_config(run_dir)?;
        config.model.vocab_size = stored.model.vocab_size;
        config.train.threads = stored.train.threads;
        if (&config.model, &config.train, &config.data) != (&stored.model, &stored.train, &stored.data) {
            let problem =
                "holds a run with other settings; remove it, or choose another folder for the runs".to_owned();
            return Err(TrainError::State { path: run_dir.to_owned(), problem });
        }
        let run_dir = run_dir.to_owned();
        LanguageModel::resume(LanguageModelResume { run_dir, config: stored, ranks: None, machine, watch })
    } else {
        let start = LanguageModelStart::new(config, run_dir.to_owned(), watch);
        LanguageModel::start(LanguageModelStart { machine, ..start })
    };
    match opened {
        Ok(mut trainer) => trainer.run(requests, on_event),
        Err(TrainError::Data(DataError::Stopped)) => Ok(Outcome::Stopped),
        Err(error) => Err(error),
    }
}

fn finding(variant: Variant, runs: &[PathBuf]) -> Result<Finding, TrainError> {
    let mut all = Vec::new();
    for run in runs {
        all.push(read_records(&run.join(METRICS_JSONL))?.collect::<Result<Vec<Record>, _>>()?);
    }
    let stored = language_model::read_config(&runs[0])?;
    let flops_per_token = training_flops_per_token(&stored.model, stored.train.seq_len);
    let evaluated = |records: &[Record]| -> Vec<(f64, f64)> {
        let point = |record: &Record| Some((record.tokens as f64 * flops_per_token, record.val_loss?));
        records.iter().filter_map(point).collect()
    };
    let last_loss = |records: &Vec<Record>| evaluated(records).last().map_or(f64::NAN, |point| point.1);
    let parameters = Parameters::new(&stored.model);
    let curve = evaluated(&all[0]);
    Ok(Finding {
        parameters: (parameters.total(), parameters.active()),
        flops: curve.last().map_or(f64::NAN, |point| point.0),
        val_losses: all.iter().map(last_loss).collect(),
        curve,
        balance: balance(&all, stored.train.step_tokens()),
        seconds: seconds(&all),
        variant,
    })
}

/// Averages the CPU time over the runs that recorded it; the elapsed time if none did.
fn seconds(runs: &[Vec<Record>]) -> f64 {
    let mean = |of: fn(&Record) -> f64| {
        let sums = runs.iter().map(|records| records.iter().map(of).sum::<f64>() / 1e3);
        let known: Vec<f64> = sums.filter(|seconds| seconds.is_finite()).collect();
        known.iter().sum::<f64>() / known.len() as f64
    };
    let processor = mean(|record| record.processor_ms);
    if processor.is_finite() { processor } else { mean(|record| record.step_ms) }
}

/// Averages the balance over runs, layers and the last steps.
fn balance(runs: &[Vec<Record>], step_tokens: usize) -> Option<Balance> {
    let recent = |records: &Vec<Record>| {
        let num = ((records.len() as f64 * LAST_SHARE).ceil() as usize).max(1);
        records[records.len().saturating_sub(num)..].to_vec()
    };
    let layers: Vec<LayerRecord> = runs.iter().flat_map(recent).flat_map(|record| record.layers).collect();
    if layers.is_empty() {
        return None;
    }
    let mean = |figure: fn(&LayerRecord) -> f64| layers.iter().map(figure).sum::<f64>() / layers.len() as f64;
    let last = runs.iter().filter_map(|records| records.last()).flat_map(|record| &record.layers);
    let measured: Vec<f64> = last.filter_map(|layer| Some(layer.specialization?.share)).collect();
    let num_choices: u64 = layers.iter().map(LayerRecord::num_choices).sum();
    Some(Balance {
        experts_per_token: num_choices as f64 / (layers.len() * step_tokens) as f64,
        cv: mean(LayerRecord::cv),
        max_over_mean: mean(LayerRecord::max_over_mean),
        drop_rate: mean(LayerRecord::drop_rate),
        reroute_rate: mean(LayerRecord::reroute_rate),
        specialization: measured.iter().sum::<f64>() / measured.len() as f64,
    })
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
