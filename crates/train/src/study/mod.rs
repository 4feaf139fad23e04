//! A routing study: the same small model trained with each routing scheme on the same text for the same floating-point
//! operations, and a dense model of the same active size beside it.
//!
//! Every run is an ordinary one, in a folder of its own, with the same seed, the same order of text and the same validation
//! tokens, so that differences come from the routing. A study that is stopped goes on where it was.

mod plot;
mod table;
mod variants;

use std::path::{Path, PathBuf};

use moeworks_model::Tokenizer;
use moeworks_model::account::{Parameters, training_flops_per_token};

use crate::config::{RunConfig, TokenizerChoice};
use crate::error::TrainError;
use crate::metrics::{LayerRecord, METRICS_JSONL, Record, read_records};
use crate::state;
use crate::store::Store;
use crate::trainer::{Event, Outcome, Requests, Trainer};

pub use plot::plot;
pub use table::report;
pub use variants::Variant;

/// Share of the steps, at the end, over which balance and drops are averaged.
const LAST_SHARE: f64 = 0.1;

/// What a study needs to know.
#[derive(Clone, Debug, PartialEq)]
pub struct Study {
    /// The base model and how it is trained; every variant is made of it.
    pub base: RunConfig,
    /// Folder of the runs.
    pub runs_dir: PathBuf,
    /// Every variant is trained with this many seeds, from the base's on.
    pub num_seeds: u64,
    /// Names of the variants to be trained; empty for all.
    pub only: Vec<String>,
}

/// What came of one variant: means over its seeds.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// The variant.
    pub variant: Variant,
    /// Parameters in all, and those that a token passes.
    pub parameters: (u64, u64),
    /// Floating-point operations of its training.
    pub flops: f64,
    /// Last validation loss of each seed, in nats a token.
    pub val_losses: Vec<f64>,
    /// Of the first seed: floating-point operations done and validation loss.
    pub curve: Vec<(f64, f64)>,
    /// Means over MoE layers and the last tenth of the steps; none for a dense model.
    pub balance: Option<Balance>,
    /// Time of the steps, in seconds.
    pub seconds: f64,
}

/// How even a variant's routing was.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Balance {
    /// Coefficient of variation of the load.
    pub cv: f64,
    /// The busiest expert's load in even shares.
    pub max_over_mean: f64,
    /// Choices of a token.
    pub experts_per_token: f64,
    /// Share of the choices dropped.
    pub drop_rate: f64,
    /// Share of the choices rerouted.
    pub reroute_rate: f64,
    /// The last measured specialisation; NaN if there is none.
    pub specialization: f64,
}

impl Finding {
    /// Mean over the seeds of the last validation loss.
    #[must_use]
    pub fn val_loss(&self) -> f64 {
        self.val_losses.iter().sum::<f64>() / self.val_losses.len() as f64
    }

    /// Half the distance from the lowest to the highest seed.
    #[must_use]
    pub fn spread(&self) -> f64 {
        let (low, high) = self
            .val_losses
            .iter()
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), &loss| (low.min(loss), high.max(loss)));
        (high - low) / 2.0
    }
}

/// A unit for this many floating-point operations: its size and its name.
fn flops_unit(flops: f64) -> (f64, &'static str) {
    if flops < 1e15 { (1e12, "TFLOP") } else { (1e15, "PFLOP") }
}

/// Settings of the base model over the defaults: small enough that a study takes an hour on two cores, large enough that
/// experts have something to learn.
///
/// A token's weights add up to K, not to 1: the sum of K experts is then as large as what a dense layer of K times their
/// width gives. Half of it cost the MoE its lead over the dense model (`bench/HISTORY.md`), and so did weights that begin at
/// a deviation of 0.02, a quarter of one over the root of the width.
pub const BASE: [&str; 17] = [
    "model.width=128",
    "model.num_heads=4",
    "model.num_kv_heads=4",
    "model.head_dim=32",
    "model.expert_width=192",
    "model.init_std=0.04",
    "model.router.routed_scale=2.0",
    "train.steps=600",
    "train.batch_size=16",
    "train.seq_len=256",
    "train.lr=3e-3",
    "train.warmup_steps=40",
    "train.eval_every=50",
    "train.eval_batches=16",
    "train.sample_every=0",
    "train.checkpoint_every=100",
    "train.keep_last=1",
];

/// Floating-point operations of a step.
fn step_flops(config: &RunConfig) -> f64 {
    let mut model = config.model.clone();
    if model.vocab_size == 0 {
        model.vocab_size = match &config.data.tokenizer {
            TokenizerChoice::Bytes => Tokenizer::bytes().vocab_size(),
            TokenizerChoice::Bpe => config.data.bpe_vocab_size,
            // Not known yet: the output projection, which all variants share, is then left out.
            TokenizerChoice::File(_) => 0,
        };
    }
    training_flops_per_token(&model, config.train.seq_len) * config.train.step_tokens() as f64
}

impl Study {
    /// The variants that are to be trained.
    ///
    /// # Errors
    /// If `only` names one that there is not, or a variant's configuration cannot be.
    pub fn variants(&self) -> Result<Vec<Variant>, TrainError> {
        let mut variants = variants::variants(&self.base)?;
        if let Some(name) = self.only.iter().find(|name| variants.iter().all(|variant| variant.name != **name)) {
            let known: Vec<&str> = variants.iter().map(|variant| variant.name).collect();
            return Err(TrainError::Variant { name: name.clone(), known: known.join(", ") });
        }
        variants.retain(|variant| self.only.is_empty() || self.only.iter().any(|name| name == variant.name));
        Ok(variants)
    }

    /// Trains what is not trained yet, and reads what came of it. `on_event` sees the name of a run and its events.
    /// `None` if it was asked to stop.
    pub fn run(
        &self,
        requests: &Requests,
        mut on_event: impl FnMut(&str, Event<'_>),
    ) -> Result<Option<Vec<Finding>>, TrainError> {
        let mut findings = Vec::new();
        for variant in self.variants()? {
            let mut runs = Vec::new();
            for seed in self.base.train.seed..self.base.train.seed + self.num_seeds {
                let mut config = variant.config.clone();
                config.train.seed = seed;
                let name = format!("{}-seed{seed}", variant.name);
                let run_dir = self.runs_dir.join(&name);
                let mut on_event = |event: Event<'_>| on_event(&name, event);
                if train(config, &run_dir, requests, &mut on_event)? == Outcome::Stopped {
                    return Ok(None);
                }
                runs.push(run_dir);
            }
            findings.push(finding(variant, &runs)?);
        }
        Ok(Some(findings))
    }
}

/// Trains a run, goes on with it, or leaves it as it is if it is done.
fn train(
    mut config: RunConfig,
    run_dir: &Path,
    requests: &Requests,
    on_event: &mut dyn FnMut(Event<'_>),
) -> Result<Outcome, TrainError> {
    let is_begun = !Store::open(run_dir).list()?.is_empty();
    let mut trainer = if is_begun {
        state::make_absolute(&mut config)?;
        let stored = state::read_config(run_dir)?;
        config.model.vocab_size = stored.model.vocab_size;
        config.train.threads = stored.train.threads;
        if (&config.model, &config.train, &config.data) != (&stored.model, &stored.train, &stored.data) {
            let problem =
                "holds a run with other settings; remove it, or choose another folder for the runs".to_owned();
            return Err(TrainError::State { path: run_dir.to_owned(), problem });
        }
        Trainer::resume(run_dir.to_owned(), Ok)?
    } else {
        Trainer::start(config, run_dir.to_owned())?
    };
    trainer.run(requests, on_event)
}

fn finding(variant: Variant, runs: &[PathBuf]) -> Result<Finding, TrainError> {
    let mut all = Vec::new();
    for run in runs {
        all.push(read_records(&run.join(METRICS_JSONL))?.collect::<Result<Vec<Record>, _>>()?);
    }
    let stored = state::read_config(&runs[0])?;
    let flops_per_token = training_flops_per_token(&stored.model, stored.train.seq_len);
    let evaluated = |records: &[Record]| -> Vec<(f64, f64)> {
        let point = |record: &Record| Some((record.tokens as f64 * flops_per_token, record.val_loss?));
        records.iter().filter_map(point).collect()
    };
    let last_loss = |records: &Vec<Record>| evaluated(records).last().map_or(f64::NAN, |point| point.1);
    let parameters = Parameters::of(&stored.model);
    let num_runs = all.len() as f64;
    let curve = evaluated(&all[0]);
    Ok(Finding {
        parameters: (parameters.total(), parameters.active()),
        flops: curve.last().map_or(f64::NAN, |point| point.0),
        val_losses: all.iter().map(last_loss).collect(),
        curve,
        balance: balance(&all, stored.train.step_tokens()),
        seconds: all.iter().flatten().map(|record| record.step_ms / 1e3).sum::<f64>() / num_runs,
        variant,
    })
}

/// Means over runs, layers and the last steps.
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
