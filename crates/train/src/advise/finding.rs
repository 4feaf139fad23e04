//! Findings: what holds a run back, with figures and remedies.

use moeworks_plan::Placements;

/// The kind of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Topic {
    /// Losses or gradients were not finite.
    NotFinite,
    /// The training loss rises.
    Diverging,
    /// The training loss jumps.
    Spikes,
    /// The validation loss rises while the training loss falls.
    ValidationRises,
    /// Few experts take most tokens.
    RouterCollapsed,
    /// The router gives every expert almost the same probability.
    RouterUniform,
    /// Choices are dropped because experts are full.
    DroppedTokens,
    /// More experts a token than the router makes use of.
    TopK,
    /// Ranks wait for the slowest one.
    WaitingForRank,
    /// Ranks are blocked in communication.
    Links,
    /// Matrix products have too few rows.
    SmallProducts,
    /// Evaluations, checkpoints or data take much of the time.
    Pauses,
    /// Memory is nearly full.
    Memory,
}

impl Topic {
    /// Returns the name in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::NotFinite => "loss_not_finite",
            Self::Diverging => "loss_diverges",
            Self::Spikes => "loss_spikes",
            Self::ValidationRises => "validation_rises",
            Self::RouterCollapsed => "router_collapsed",
            Self::RouterUniform => "router_uniform",
            Self::DroppedTokens => "dropped_tokens",
            Self::TopK => "top_k",
            Self::WaitingForRank => "waiting_for_rank",
            Self::Links => "links",
            Self::SmallProducts => "small_products",
            Self::Pauses => "pauses",
            Self::Memory => "memory",
        }
    }
}

/// The steps over which a figure was taken, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Over {
    /// The mean over the window.
    WindowMean,
    /// Computed from the window's sums of `tokens_per_expert`.
    WindowLoad,
    /// The last step with a value.
    Last,
    /// The largest value of the run.
    RunMost,
    /// The smallest value of the run.
    RunLeast,
    /// The number of steps of the run where it is 1.
    RunCount,
    /// The value at this step.
    Step(u64),
    /// Computed from a setting or the model's shape.
    Computed,
    /// The trace.
    Trace,
}

impl Over {
    /// Returns a phrase for people.
    #[must_use]
    pub fn describe(self) -> String {
        match self {
            Self::WindowMean => "mean of the window".to_owned(),
            Self::WindowLoad => "load summed over the window".to_owned(),
            Self::Last => "last".to_owned(),
            Self::RunMost => "largest of the run".to_owned(),
            Self::RunLeast => "lowest of the run".to_owned(),
            Self::RunCount => "steps of the run".to_owned(),
            Self::Step(step) => format!("at step {step}"),
            Self::Computed => "computed".to_owned(),
            Self::Trace => "from the trace".to_owned(),
        }
    }
}

/// A figure that shows a finding.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// The name in `metrics.jsonl`, or the name of what was computed.
    pub name: String,
    /// The value.
    pub value: f64,
    /// The steps it was taken over.
    pub over: Over,
}

impl Figure {
    pub(super) fn new(name: impl Into<String>, value: f64, over: Over) -> Self {
        Self { name: name.into(), value, over }
    }

    pub(super) fn mean(name: impl Into<String>, value: f64) -> Self {
        Self::new(name, value, Over::WindowMean)
    }
}

/// A setting with another value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The dotted name.
    pub setting: &'static str,
    /// The value in the run.
    pub now: String,
    /// The value to try, as `--set` takes it.
    pub value: String,
}

/// The way in which changed settings take effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// The run can go on with them (`--resume`).
    Resume,
    /// A new run can start from the run's weights (`--from`).
    FromWeights,
    /// A new run has to start from random weights.
    NewRun,
}

/// Settings to try together.
#[derive(Clone, Debug, PartialEq)]
pub struct Remedy {
    /// The settings; empty where a command or a look at the machine is all that helps.
    pub changes: Vec<Change>,
    /// A command to run first, without the program's name.
    pub command: Option<String>,
    /// The placement that the command would write.
    pub placement: Option<Placements>,
    /// The effect that is expected.
    pub expected: String,
    /// The way in which the settings take effect.
    pub reach: Reach,
}

/// A cause that holds a run back.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// The kind.
    pub topic: Topic,
    /// The finding in a sentence.
    pub summary: String,
    /// An upper bound of what it costs now: a share (0 to 1) of the run's steps, time, choices or experts.
    pub at_stake: f64,
    /// The figures that show it.
    pub figures: Vec<Figure>,
    /// The remedies, the first one first.
    pub remedies: Vec<Remedy>,
}
