//! The measurement of a machine for predictions of training steps, and their check against real steps.

mod configs;
mod fit;
mod measure;
mod parts;
mod probe;
mod steps;

use moeworks_model::ModelConfig;
use moeworks_model::model_cost::{Kept, Parameters, shape};
use moeworks_model::{WeightGroup, WeightTable};
use moeworks_ops::{Context, MachineOptions, peak};
use moeworks_plan::Link;
use moeworks_plan::machine::{LayerSizes, Machine, Overhead, PredictedStep, StepSizes, predict_step};
use moeworks_train::config::RunConfig;
use moeworks_train::{TrainError, machine_bytes};

use crate::collectives;
use crate::error::BenchError;
use crate::machine;
use crate::ranks::{num_cores, on_ranks};
use crate::timing::median;
pub use configs::{BASE, CHECKED, NamedConfig};
use configs::{RANK_REFERENCES, REFERENCES};
use fit::{Constant, MeasuredStep, OF_RANKS, OF_STEPS};
use steps::{Scratch, StepCounts, TimedSteps, time_steps};

/// The memory assumed for a machine that does not report its own.
const UNKNOWN_MEMORY: u64 = 8 << 30;

/// The time that a measurement takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    /// About two minutes.
    Whole,
    /// Less than half a minute, for a rough file.
    Quick,
}

impl Effort {
    /// Returns the least seconds of a part, over all rounds.
    fn part_seconds(self) -> f64 {
        if self == Self::Whole { 0.02 } else { 0.002 }
    }

    /// Returns how often each part and each configuration is timed. The runs lie apart, because other work comes and goes.
    fn rounds(self) -> usize {
        if self == Self::Whole { 3 } else { 1 }
    }

    fn steps(self) -> StepCounts {
        match self {
            Self::Whole => StepCounts { counted: 12, uncounted: 3, uncounted_on_ranks: 14 },
            Self::Quick => StepCounts { counted: 3, uncounted: 1, uncounted_on_ranks: 1 },
        }
    }
}

/// A predicted and a measured step.
#[derive(Clone, Debug)]
pub struct CheckedStep {
    /// The configuration.
    pub name: &'static str,
    /// The prediction.
    pub predicted: PredictedStep,
    /// The median of the measured steps, in seconds.
    pub measured_s: f64,
    /// The speed of the machine during these steps over that when the file was made.
    pub speed: f64,
}

impl CheckedStep {
    /// Returns the error of the prediction as a share of the measured time.
    #[must_use]
    pub fn error(&self) -> f64 {
        self.predicted.total() / self.measured_s - 1.0
    }

    /// Returns the error as a share of the time that the step would have taken at the speed of the file.
    #[must_use]
    pub fn error_at_speed(&self) -> f64 {
        self.predicted.total() / (self.measured_s * self.speed) - 1.0
    }
}

/// Predicts a step of `config`, whose vocabulary size must be set.
///
/// # Errors
/// If its settings of weights are invalid.
pub fn predict(machine: &Machine, config: &RunConfig) -> Result<PredictedStep, TrainError> {
    let train = &config.train;
    let table = config.weight_table()?;
    // Recomputed values pass through memory like kept ones.
    let kept = Kept { precision: train.precision, checkpoint_layers: false };
    let shape = shape(&config.model, &table, train.seq_len, kept);
    let sizes = StepSizes {
        sequences: train.batch_size,
        seq_len: train.seq_len,
        microbatches: train.grad_accumulation,
        precision: train.precision,
        checkpoint_layers: train.checkpoint_layers,
        layers: layer_sizes(&config.model, &table),
    };
    Ok(predict_step(machine, &shape, sizes, &config.parallel.layout()))
}

fn layer_sizes(model: &ModelConfig, table: &WeightTable) -> LayerSizes {
    let parameters = Parameters::from_table(model, table);
    let moe_layers = model.moe_layers().len();
    let each = |group: WeightGroup, num: usize| {
        let parts = parameters.parts.iter().filter(|part| part.group == group);
        parts.map(|part| part.in_products as f64).sum::<f64>() / num.max(1) as f64
    };
    LayerSizes {
        attention_params: each(WeightGroup::Attention, model.num_layers),
        score_elements: (model.num_heads * (model.head_dim + model.value_dim())) as f64,
        head_dim: model.head_dim,
        window: (0..model.num_layers).filter_map(|layer| model.window(layer)).max(),
        expert_width: model.expert_width,
        dense_params: each(WeightGroup::Dense, model.num_layers.saturating_sub(moe_layers)),
        dense_width: model.dense_width,
        shared_params: each(WeightGroup::SharedExperts, moe_layers),
        shared_width: model.shared_width,
        vocabulary: model.vocab_size,
    }
}

/// Measures this machine. `progress` is told what is measured.
///
/// # Errors
/// If a rank fails, or a file cannot be written.
pub fn measure(
    options: &MachineOptions,
    effort: Effort,
    progress: &mut dyn FnMut(&str),
) -> Result<Machine, BenchError> {
    let cores = num_cores();
    let ctx = Context::cpu(cores).on_machine(options);
    progress("memory and links");
    let memory_bytes_per_s = peak::measure(&ctx).read_bytes_per_s;
    let assumed = Link { latency_s: 5e-6, bytes_per_s: memory_bytes_per_s / 4.0 };
    let link = on_ranks(cores.max(2), |comm| collectives::links(comm).map(|links| links.node))?.unwrap_or(assumed);
    let mut measured = Machine {
        name: machine::name(&ctx),
        cores,
        memory_bytes: machine_bytes().unwrap_or(UNKNOWN_MEMORY) as f64,
        memory_bytes_per_s,
        probe_s: None,
        link,
        overhead: Overhead::default(),
        products: Vec::new(),
        experts: Vec::new(),
        attention: Vec::new(),
        output_layers: Vec::new(),
        updates: Vec::new(),
    };
    progress("parts of steps");
    measure::measure_parts(&mut measured, options, effort);
    let fit = Fit { options, effort, scratch: Scratch::new()? };
    progress("reference steps");
    measured.overhead = fit.constants(&measured, &REFERENCES, &OF_STEPS)?;
    progress("reference steps on two ranks");
    measured.overhead = fit.constants(&measured, &RANK_REFERENCES, &OF_RANKS)?;
    Ok(measured)
}

/// The settings with which constants are fitted.
struct Fit<'a> {
    options: &'a MachineOptions,
    effort: Effort,
    scratch: Scratch,
}

impl Fit<'_> {
    /// Fits `constants` on steps of `references`.
    fn constants(
        &self,
        machine: &Machine,
        references: &[NamedConfig],
        constants: &[Constant],
    ) -> Result<Overhead, BenchError> {
        let timed = time_in_rounds(references, &self.scratch, self.options, self.effort)?;
        let step = |timed: TimedSteps| {
            let seconds = machine.probe_s.map_or(timed.seconds, |probe_s| timed.probes * probe_s);
            MeasuredStep { config: timed.config, seconds }
        };
        Ok(fit::fit(machine, constants, &timed.into_iter().map(step).collect::<Vec<_>>())?)
    }
}

/// Times steps of all configurations, several times one after the other, and returns the medians of each.
fn time_in_rounds(
    configs: &[NamedConfig],
    scratch: &Scratch,
    options: &MachineOptions,
    effort: Effort,
) -> Result<Vec<TimedSteps>, BenchError> {
    let mut rounds = Vec::new();
    for _ in 0..effort.rounds() {
        let round = configs.iter().map(|named| time_steps(named, scratch, options, effort.steps()));
        rounds.push(round.collect::<Result<Vec<_>, _>>()?);
    }
    let middle = |index: usize| {
        let of = |value: fn(&TimedSteps) -> f64| median(rounds.iter().map(|round| value(&round[index])).collect());
        let config = rounds[0][index].config.clone();
        TimedSteps { config, seconds: of(|timed| timed.seconds), probes: of(|timed| timed.probes) }
    };
    Ok((0..configs.len()).map(middle).collect())
}

/// Compares predicted with real steps of [`CHECKED`] configurations, up to `most` of them.
///
/// # Errors
/// If a step cannot be made.
pub fn check(machine: &Machine, options: &MachineOptions, most: usize) -> Result<Vec<CheckedStep>, BenchError> {
    let scratch = Scratch::new()?;
    let configs = &CHECKED[..most.min(CHECKED.len())];
    let timed = time_in_rounds(configs, &scratch, options, Effort::Whole)?;
    let step = |(named, timed): (&NamedConfig, TimedSteps)| {
        let speed = machine.probe_s.map_or(1.0, |probe_s| timed.probes * probe_s / timed.seconds);
        let predicted = predict(machine, &timed.config)?;
        Ok(CheckedStep { name: named.name, predicted, measured_s: timed.seconds, speed })
    };
    configs.iter().zip(timed).map(step).collect()
}
