//! The record of a training step, and the names of its figures.
//!
//! [`Record`] is a plain value. [`Record::scalars`] is the only place that names its numbers, so that JSON lines, CSV
//! columns and TensorBoard tags agree. Figures of balance are computed from `tokens_per_expert` and never stored
//! beside it, so that they cannot contradict it.

mod lines;
mod loads;
mod ranks;
mod recorded;
mod writer;

pub use moeworks_infer::store::METRICS_JSONL;
use moeworks_model::RouterLosses;
use moeworks_moe::{self as moe, LayerStats};

use crate::routing::Specialization;

pub use lines::{MetricsError, ReadRecords, read_records};
pub use loads::{ExpertLoads, LoadWindow, read_loads};
pub(crate) use ranks::NUM_FIGURES;
pub use ranks::{RankRecord, RanksRecord};
pub use recorded::{RecordedLoads, read_recorded_loads};
pub use writer::{MetricsWriter, Sample, read_last_record, read_samples};

/// The file of the records in a run folder, as a table.
pub const METRICS_CSV: &str = "metrics.csv";
/// The file of sampled texts in a run folder: one JSON object per line.
pub const SAMPLES_JSONL: &str = "samples.jsonl";

/// The record of one training step. An unknown number is `f64::NAN`: `null` in JSON and an empty field in CSV.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Record {
    /// Optimizer steps done, this one included: the first step of a run is 1. 0 is for an evaluation before training.
    pub step: u64,
    /// Tokens trained on since the run began, this step included.
    pub tokens: u64,
    /// Mean cross-entropy of the training tokens of this step, in nats a token; without the auxiliary losses.
    pub loss: f64,
    /// Balance loss, before its coefficient; 0 without MoE layers.
    pub balance_loss: f64,
    /// Router z-loss, before its coefficient; 0 without MoE layers.
    pub z_loss: f64,
    /// The other auxiliary losses, before their coefficients.
    pub router_losses: RouterLosses,
    /// Share (0 to 1) of a flat router's operations that this router saves; 0 for a router that scores every expert.
    pub routing_flops_saved: f64,
    /// Learning rate of this step.
    pub lr: f64,
    /// Global norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Tokens trained on per second.
    pub tokens_per_s: f64,
    /// Model FLOPs utilisation: the share (0 to 1) of the machine's measured peak.
    pub mfu: f64,
    /// Time of the step in milliseconds.
    pub step_ms: f64,
    /// CPU milliseconds of the process in the step, over all of its threads.
    pub processor_ms: f64,
    /// The peak of memory in use since the first step, in bytes.
    pub memory_peak_bytes: u64,
    /// Mean cross-entropy of the validation tokens in nats a token; only on steps followed by an evaluation.
    pub val_loss: Option<f64>,
    /// True if the update was skipped because the loss or the gradient was not finite.
    pub is_skipped: bool,
    /// The metrics of the task, such as `train/accuracy`, and `val/accuracy` on steps followed by an evaluation.
    pub metrics: Vec<NamedFigure>,
    /// The times of the ranks in the step; none for a single rank.
    pub ranks: Option<RanksRecord>,
    /// The MoE layers, in order; empty for a dense model.
    pub layers: Vec<LayerRecord>,
}

/// A figure with its name.
#[derive(Clone, Debug, PartialEq)]
pub struct NamedFigure {
    /// The name.
    pub name: String,
    /// The value.
    pub value: f64,
}

/// The columns of `metrics.csv` that depend on the model and the task.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Columns {
    /// The indices of the MoE layers.
    moe_layers: Vec<usize>,
    /// The names of metrics in records.
    metrics: Vec<String>,
}

impl Columns {
    /// Creates the columns for a model with these MoE layers and a task with these metrics.
    #[must_use]
    pub fn new(moe_layers: &[usize], metrics: &[&str]) -> Self {
        let of = |kind: &'static str| metrics.iter().map(move |name| format!("{kind}/{name}"));
        Self { moe_layers: moe_layers.to_vec(), metrics: of("train").chain(of("val")).collect() }
    }

    /// Returns the metrics of a record in the order of the columns; NaN for missing ones.
    fn metrics_of(&self, record: &Record) -> Vec<NamedFigure> {
        let value = |name: &String| {
            let found = record.metrics.iter().find(|metric| metric.name == *name);
            NamedFigure { name: name.clone(), value: found.map_or(f64::NAN, |metric| metric.value) }
        };
        self.metrics.iter().map(value).collect()
    }
}

/// The record of one MoE layer in one training step, summed over microbatches.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerRecord {
    /// Index of the layer in the model, from 0, dense layers included.
    pub layer: usize,
    /// `[E]`: choices per expert, dropped ones included.
    pub tokens_per_expert: Vec<u64>,
    /// Choices that were dropped because their expert was full.
    pub num_dropped: u64,
    /// Choices that were rerouted because their expert was full.
    pub num_rerouted: u64,
    /// Mean entropy of a token's router probabilities, in nats: `ln E` for an undecided router.
    pub router_entropy: f64,
    /// Entropy of the mean of these probabilities, in nats: `ln E` if the experts are equally likely over all tokens.
    /// A decided and balanced router has a low entropy per token and a high entropy of the mean.
    pub mean_prob_entropy: f64,
    /// Mean of `logsumexp(logits)^2`: the z-loss of the layer.
    pub router_z: f64,
    /// Root mean square of the router's logits.
    pub router_logit_rms: f64,
    /// The specialisation of experts by token id, on validation tokens; only on steps followed by an evaluation.
    pub specialization: Option<Specialization>,
    /// Agreement with the previous planned checkpoint: the share of equal choices for a fixed sample of validation
    /// tokens; only on steps with such a checkpoint. See [`RoutingSample`](crate::routing::RoutingSample).
    pub checkpoint_agreement: Option<f64>,
}

/// The names of the figures of training and validation that every run has.
const RUN_FIGURES: [&str; 7] =
    ["train/loss", "train/balance_loss", "train/z_loss", "train/lr", "train/grad_norm", "train/is_skipped", "val/loss"];

/// Names, within a layer, of figures that only some steps have. JSON lines of other steps omit them.
const OCCASIONAL: [&str; 3] = ["specialization", "specialization_nats", "checkpoint_agreement"];

/// Returns the name of the figure of an [auxiliary loss](RouterLosses).
pub(crate) fn router_loss_name(loss: &str) -> String {
    format!("moe/{loss}_loss")
}

impl LayerRecord {
    /// Creates the record of layer `layer` from its statistics, merged over microbatches.
    #[must_use]
    pub fn of(layer: usize, stats: &LayerStats) -> Self {
        Self {
            layer,
            tokens_per_expert: stats.tokens_per_expert.iter().copied().map(u64::from).collect(),
            num_dropped: stats.num_dropped as u64,
            num_rerouted: stats.num_rerouted as u64,
            router_entropy: stats.mean_entropy,
            mean_prob_entropy: stats.mean_prob_entropy(),
            router_z: stats.z,
            router_logit_rms: stats.logit_rms(),
            specialization: None,
            checkpoint_agreement: None,
        }
    }

    /// Returns the number of choices of all experts.
    #[must_use]
    pub fn num_choices(&self) -> u64 {
        self.tokens_per_expert.iter().fold(0, |sum, &count| sum.saturating_add(count))
    }

    /// Returns the coefficient of variation of the load ([`moe::cv`]): 0 when even.
    #[must_use]
    pub fn cv(&self) -> f64 {
        moe::cv(&self.tokens_per_expert)
    }

    /// Returns the effective share of experts in use ([`moe::expert_diversity`]): 1 when even, `1/E` when one takes
    /// all.
    #[must_use]
    pub fn expert_diversity(&self) -> f64 {
        moe::expert_diversity(&self.tokens_per_expert)
    }

    /// Returns the share of the experts that no token chose.
    #[must_use]
    pub fn dead_expert_frac(&self) -> f64 {
        moe::dead_expert_frac(&self.tokens_per_expert)
    }

    /// Returns the busiest expert's load in even shares ([`moe::max_over_mean`]): 1 when even.
    #[must_use]
    pub fn max_over_mean(&self) -> f64 {
        moe::max_over_mean(&self.tokens_per_expert)
    }

    /// Returns the busiest expert's excess over the even share ([`moe::e_max_violation`], MaxVio): 0 when even.
    #[must_use]
    pub fn e_max_violation(&self) -> f64 {
        moe::e_max_violation(&self.tokens_per_expert)
    }

    /// Returns the share of the choices that were dropped.
    #[must_use]
    pub fn drop_rate(&self) -> f64 {
        moe::share(self.num_dropped, self.num_choices())
    }

    /// Returns the share of the choices that were rerouted.
    #[must_use]
    pub fn reroute_rate(&self) -> f64 {
        moe::share(self.num_rerouted, self.num_choices())
    }

    fn scalars(&self) -> [(&'static str, f64); 14] {
        let specialization = self.specialization.unwrap_or(Specialization { nats: f64::NAN, share: f64::NAN });
        [
            ("cv", self.cv()),
            ("expert_diversity", self.expert_diversity()),
            ("dead_expert_frac", self.dead_expert_frac()),
            ("max_over_mean", self.max_over_mean()),
            ("e_max_violation", self.e_max_violation()),
            ("drop_rate", self.drop_rate()),
            ("reroute_rate", self.reroute_rate()),
            ("router_entropy", self.router_entropy),
            ("mean_prob_entropy", self.mean_prob_entropy),
            ("router_z", self.router_z),
            ("router_logit_rms", self.router_logit_rms),
            ("specialization", specialization.share),
            ("specialization_nats", specialization.nats),
            ("checkpoint_agreement", self.checkpoint_agreement.unwrap_or(f64::NAN)),
        ]
    }
}

impl Record {
    /// Returns the share of all layers' choices that were dropped; 0 for a dense model.
    #[must_use]
    pub fn drop_rate(&self) -> f64 {
        self.share_of_choices(|layer| layer.num_dropped)
    }

    /// Returns the share of all layers' choices that were rerouted; 0 for a dense model.
    #[must_use]
    pub fn reroute_rate(&self) -> f64 {
        self.share_of_choices(|layer| layer.num_rerouted)
    }

    fn share_of_choices(&self, count: fn(&LayerRecord) -> u64) -> f64 {
        let sum = |count: fn(&LayerRecord) -> u64| self.layers.iter().fold(0, |n: u64, l| n.saturating_add(count(l)));
        moe::share(sum(count), sum(LayerRecord::num_choices))
    }

    /// Returns every number with its name, in the order of the CSV columns. `val/loss` is NaN on steps without
    /// evaluation.
    #[must_use]
    pub fn scalars(&self) -> Vec<(String, f64)> {
        let run = [
            ("train/loss", self.loss),
            ("train/balance_loss", self.balance_loss),
            ("train/z_loss", self.z_loss),
            ("train/lr", self.lr),
            ("train/grad_norm", self.grad_norm),
            ("train/is_skipped", f64::from(u8::from(self.is_skipped))),
            ("val/loss", self.val_loss.unwrap_or(f64::NAN)),
            ("perf/tokens_per_s", self.tokens_per_s),
            ("perf/mfu", self.mfu),
            ("perf/step_ms", self.step_ms),
            ("perf/processor_ms", self.processor_ms),
            ("perf/memory_peak_bytes", self.memory_peak_bytes as f64),
            ("moe/drop_rate", self.drop_rate()),
            ("moe/reroute_rate", self.reroute_rate()),
            ("moe/routing_flops_saved", self.routing_flops_saved),
        ];
        let run = run.into_iter().map(|(name, value)| (name.to_owned(), value));
        let metrics = self.metrics.iter().map(|metric| (metric.name.clone(), metric.value));
        let losses = self.router_losses.named().into_iter();
        let losses = losses.map(|(name, value)| (router_loss_name(name), value.unwrap_or(f64::NAN)));
        let layers = self.layers.iter().flat_map(|layer| {
            layer.scalars().into_iter().map(|(name, value)| (format!("moe/layer_{}/{name}", layer.layer), value))
        });
        let ranks = self.ranks.as_ref().map_or([f64::NAN; RanksRecord::SCALARS.len()], RanksRecord::scalars);
        let ranks = RanksRecord::SCALARS.into_iter().zip(ranks).map(|(name, value)| (format!("ranks/{name}"), value));
        run.chain(metrics).chain(losses).chain(ranks).chain(layers).collect()
    }
}

#[cfg(test)]
#[path = "metrics_tests.rs"]
mod tests;
