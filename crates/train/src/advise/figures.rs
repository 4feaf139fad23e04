//! The figures of a run as one plain value, of which advice is a pure function.

use moeworks_plan::Placements;

use crate::config::RunConfig;
use crate::metrics::LayerRecord;

/// The figures of a run. Unknown numbers are NaN.
#[derive(Clone, Debug, Default)]
pub struct RunFigures {
    /// The path by which the run was named, for commands.
    pub run: String,
    /// The settings of the run.
    pub settings: RunConfig,
    /// Every step.
    pub course: Course,
    /// The last steps.
    pub window: Window,
    /// The experts of each rank; none where the run has one rank or the file cannot be read.
    pub placements: Option<Placements>,
    /// The trace, if there is one.
    pub trace: Option<TraceFigures>,
    /// The memory of the machine in bytes, if known.
    pub machine_bytes: Option<u64>,
}

/// The course of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Course {
    /// The steps with a record.
    pub points: Vec<Point>,
    /// The evaluations with a finite loss.
    pub evaluations: Vec<Evaluated>,
}

/// One step of the course.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Point {
    /// The step.
    pub step: u64,
    /// `train/loss`.
    pub loss: f64,
    /// `train/lr`.
    pub lr: f64,
    /// `train/grad_norm`.
    pub grad_norm: f64,
    /// `train/is_skipped`.
    pub is_skipped: bool,
    /// `perf/memory_peak_bytes`.
    pub memory_peak_bytes: u64,
}

/// An evaluation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Evaluated {
    /// The step.
    pub step: u64,
    /// `val/loss`.
    pub loss: f64,
}

/// The last steps of a run: means of their figures, and sums of their loads.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Window {
    /// The first step.
    pub first_step: u64,
    /// The last step.
    pub last_step: u64,
    /// The number of records.
    pub num_records: usize,
    /// `train/loss`.
    pub loss: f64,
    /// `perf/tokens_per_s`.
    pub tokens_per_s: f64,
    /// `perf/mfu`.
    pub mfu: f64,
    /// `perf/step_ms`.
    pub step_ms: f64,
    /// `moe/drop_rate`.
    pub drop_rate: f64,
    /// The MoE layers.
    pub layers: Vec<LayerFigures>,
    /// The ranks; none for a single one.
    pub ranks: Option<RankFigures>,
}

/// The figures of an MoE layer over the window.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerFigures {
    /// The summed load, by which balance is judged; its other figures are not set.
    pub load: LayerRecord,
    /// `router_entropy`: the mean.
    pub router_entropy: f64,
    /// `mean_prob_entropy`: the mean.
    pub mean_prob_entropy: f64,
    /// `router_logit_rms`: the mean.
    pub logit_rms: f64,
    /// `drop_rate`: the mean.
    pub drop_rate: f64,
}

impl LayerFigures {
    /// Returns E, the number of experts that tokens can choose.
    #[must_use]
    pub fn num_experts(&self) -> usize {
        self.load.tokens_per_expert.len()
    }

    /// Returns the name of one of its figures in `metrics.jsonl`.
    #[must_use]
    pub fn named(&self, figure: &str) -> String {
        format!("moe/layer_{}/{figure}", self.load.layer)
    }

    /// Returns a token's router entropy as a share of that of an undecided router, ln E.
    #[must_use]
    pub fn entropy_share(&self) -> f64 {
        self.router_entropy / (self.num_experts() as f64).ln()
    }
}

/// The figures of ranks over the window, as means.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RankFigures {
    /// `ranks/imbalance`.
    pub imbalance: f64,
    /// `ranks/waiting_ms`.
    pub waiting_ms: f64,
    /// `ranks/standing_ms_mean`.
    pub standing_ms: f64,
    /// `ranks/node_mb`.
    pub node_mb: f64,
    /// `ranks/cluster_mb`.
    pub cluster_mb: f64,
    /// `ranks/tensor_ms_mean`.
    pub tensor_ms: f64,
    /// The mean of `ranks/gradients_ms`.
    pub gradients_ms: f64,
    /// `ranks/work_ms` of each rank.
    pub work_ms: Vec<f64>,
}

/// The time of a trace by the names of its spans.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TraceFigures {
    /// The milliseconds from the first span of rank 0 to the last one's end.
    pub total_ms: f64,
    /// The spans of rank 0 by name, the longest first.
    pub spans: Vec<SpanTotal>,
}

/// All spans of one name.
#[derive(Clone, Debug, PartialEq)]
pub struct SpanTotal {
    /// The name.
    pub name: String,
    /// Their milliseconds.
    pub ms: f64,
}

impl TraceFigures {
    /// Returns the share of the time in spans of `name`.
    #[must_use]
    pub fn share(&self, name: &str) -> f64 {
        let ms = self.spans.iter().find(|span| span.name == name).map_or(0.0, |span| span.ms);
        if self.total_ms > 0.0 { ms / self.total_ms } else { 0.0 }
    }
}

impl RunFigures {
    /// Returns the share of the run that is done, 0 to 1.
    #[must_use]
    pub fn progress(&self) -> f64 {
        (self.window.last_step as f64 / self.settings.train.steps.max(1) as f64).min(1.0)
    }

    /// Returns E and K of the MoE layers; none for a dense model.
    #[must_use]
    pub fn choices(&self) -> Option<Choices> {
        let num_experts = self.window.layers.first()?.num_experts();
        (num_experts > 1).then(|| Choices { num_experts, top_k: self.settings.model.top_k.clamp(1, num_experts) })
    }
}

/// The choices of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choices {
    /// E: the number of experts.
    pub num_experts: usize,
    /// K: the number of experts a token.
    pub top_k: usize,
}
