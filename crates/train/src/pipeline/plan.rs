//! A pipeline as two values: its schedule, and the part of the model that each stage has.

use std::fs;
use std::path::Path;

use moeworks_model::model_cost::layer_flops;
use moeworks_model::{StagePart, WeightSpec};
use moeworks_plan::{Schedule, ScheduleKind, ScheduleRequest, StageTimes, Times, split_layers};

use crate::config::{ConfigError, RunConfig, wrong};

const PP: &str = "parallel.pp";
const SCHEDULE: &str = "parallel.schedule";
const STAGES: &str = "parallel.stages";

/// A pipeline: a schedule that can be carried out, and the part of the model that each of its stages has. The ranks
/// of the schedule are the pp indices of the layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PipelinePlan {
    /// The schedule.
    pub schedule: Schedule,
    /// The part of each stage, first to last.
    pub parts: Vec<StagePart>,
}

/// Returns whether a value of `parallel.schedule` is the path of a file, and not a name.
#[must_use]
pub fn is_schedule_file(schedule: &str) -> bool {
    schedule.parse::<ScheduleKind>().is_err() && (schedule.contains(['/', '\\', '.']) || Path::new(schedule).exists())
}

impl PipelinePlan {
    /// The pipeline that `config` asks for; none where `parallel.pp` is 1. Where layers are shared out by cost, the
    /// vocabulary counts with the size that is set.
    ///
    /// # Errors
    /// If there is no such schedule, it cannot be carried out, or it does not fit the model and the layout.
    pub fn new(config: &RunConfig) -> Result<Option<Self>, ConfigError> {
        let parallel = &config.parallel;
        if parallel.pp == 1 {
            return Ok(None);
        }
        let given = layers_by_hand(config)?;
        let plan = if is_schedule_file(&parallel.schedule) {
            let schedule = read_schedule(config)?;
            let counts = layer_counts(config, given, schedule.num_stages())?;
            Self { schedule, parts: parts(&counts) }
        } else {
            Self::generated(config, given)?
        };
        let refused = |problem: String| Err(wrong(SCHEDULE, quoted(&parallel.schedule), problem));
        if let Err(error) = plan.schedule.check() {
            return refused(error.to_string());
        }
        match (0..parallel.pp).find(|&pp_rank| plan.stages_of(pp_rank).is_empty()) {
            Some(pp_rank) => refused(format!("rank {pp_rank} holds no stage: each must hold one")),
            None => Ok(Some(plan)),
        }
    }

    /// The pipeline of a schedule that is named.
    fn generated(config: &RunConfig, given: Option<Vec<usize>>) -> Result<Self, ConfigError> {
        let (pp, name) = (config.parallel.pp, &config.parallel.schedule);
        let refused = |error: &dyn std::fmt::Display| wrong(SCHEDULE, quoted(name), error.to_string());
        let unknown = |error| refused(&format!("{error}, or the path of a file"));
        let kind: ScheduleKind = name.parse().map_err(unknown)?;
        let virtual_stages = kind.virtual_stages(stages_a_rank(given.as_deref(), pp)?);
        let virtual_stages = virtual_stages.map_err(|error| refused(&error))?;
        let counts = layer_counts(config, given, pp.saturating_mul(virtual_stages))?;
        let parts = parts(&counts);
        let times = times(config, &parts);
        let request = ScheduleRequest {
            virtual_stages: Some(virtual_stages),
            ..ScheduleRequest::new(pp, config.train.grad_accumulation, &times)
        };
        let schedule = kind.generate(&request).map_err(|error| {
            refused(&format!("{error} (ranks are parallel.pp, microbatches train.grad_accumulation)"))
        })?;
        Ok(Self { schedule, parts })
    }

    /// Returns the pp indices of the ranks that hold the tensor of `spec`, ascending. Where the output projection is
    /// the embedding (`is_tied`), both ends hold that.
    #[must_use]
    pub fn pp_ranks(&self, spec: &WeightSpec, is_tied: bool) -> Vec<usize> {
        let stages = self.schedule.copies.iter().flat_map(|copy| copy.stage_ranks.iter().zip(&self.parts));
        let holding = stages.filter(|(_, part)| part.holds(spec, is_tied));
        let mut pp_ranks: Vec<usize> = holding.map(|(&pp_rank, _)| pp_rank as usize).collect();
        pp_ranks.sort_unstable();
        pp_ranks.dedup();
        pp_ranks
    }

    /// Returns the numbers of the stages that the ranks of a pp index hold, of any copy of the weights, ascending.
    #[must_use]
    pub fn stages_of(&self, pp_rank: usize) -> Vec<usize> {
        let mut stages: Vec<usize> =
            self.schedule.stages_of(pp_rank).into_iter().map(|(_, stage)| stage as usize).collect();
        stages.sort_unstable();
        stages.dedup();
        stages
    }
}

fn quoted(text: &str) -> String {
    format!("{text:?}")
}

/// The layers of each stage that `parallel.stages` says, if it says any.
fn layers_by_hand(config: &RunConfig) -> Result<Option<Vec<usize>>, ConfigError> {
    let text = &config.parallel.stages;
    if text.is_empty() {
        return Ok(None);
    }
    let num_layers = config.model.num_layers;
    let expected = || {
        let form = "must be a number of layers, at least 1, for each stage, with commas between";
        wrong(STAGES, quoted(text), format!("{form}; their sum must be model.num_layers, {num_layers}"))
    };
    let counts: Result<Vec<usize>, _> = text.split(',').map(|count| count.trim().parse()).collect();
    let counts = counts.map_err(|_| expected())?;
    let total = counts.iter().try_fold(0_usize, |sum, &count| sum.checked_add(count));
    if total == Some(num_layers) && !counts.contains(&0) { Ok(Some(counts)) } else { Err(expected()) }
}

/// The stages of a rank where they are counted by hand.
fn stages_a_rank(given: Option<&[usize]>, pp: usize) -> Result<Option<usize>, ConfigError> {
    let Some(counts) = given else { return Ok(None) };
    if counts.len().is_multiple_of(pp) {
        return Ok(Some(counts.len() / pp));
    }
    let text = counts.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
    let expected = format!("must be of as many stages as parallel.pp, {pp}, or a multiple of that");
    Err(wrong(STAGES, quoted(&text), expected))
}

/// The layers of each of `num_stages` stages: `given`, or shared out so that the costliest stage costs least.
fn layer_counts(config: &RunConfig, given: Option<Vec<usize>>, num_stages: usize) -> Result<Vec<usize>, ConfigError> {
    let num_layers = config.model.num_layers;
    if num_stages > num_layers {
        let (pp, schedule) = (config.parallel.pp, &config.parallel.schedule);
        let expected = format!(
            "makes {num_stages} stages with parallel.schedule = {schedule:?}, but must not make more than model.num_layers, {num_layers}"
        );
        return Err(wrong(PP, pp, expected));
    }
    match given {
        Some(counts) if counts.len() == num_stages => Ok(counts),
        Some(_) => {
            let expected = format!("must be of {num_stages} stages, those of parallel.schedule");
            Err(wrong(STAGES, quoted(&config.parallel.stages), expected))
        }
        None => {
            let mut costs = layer_flops(&config.model, &config.weight_table()?, config.train.seq_len);
            if let Some(last) = costs.layers.last_mut() {
                *last += costs.head;
            }
            Ok(split_layers(&costs.layers, num_stages))
        }
    }
}

/// The parts of stages with so many layers each.
fn parts(counts: &[usize]) -> Vec<StagePart> {
    let ends = counts.iter().scan(0, |end, &count| {
        *end += count;
        Some(*end)
    });
    let ends: Vec<usize> = ends.collect();
    let Some((&num_layers, cuts)) = ends.split_last() else { return Vec::new() };
    StagePart::cut(num_layers, cuts)
}

/// Times of the stages in proportion to their operations, for the schedules that go by times: B and W take as long
/// as F each.
fn times(config: &RunConfig, parts: &[StagePart]) -> Times {
    let mut times = Times::uniform(1.0, 1.0, 1.0);
    let Ok(table) = config.weight_table() else { return times };
    let costs = layer_flops(&config.model, &table, config.train.seq_len);
    let of_part = |part: &StagePart| {
        let layers: f64 = costs.layers[part.layers.clone()].iter().sum();
        layers + if part.has_head { costs.head } else { 0.0 }
    };
    let costs: Vec<f64> = parts.iter().map(of_part).collect();
    let mean = costs.iter().sum::<f64>() / costs.len().max(1) as f64;
    if mean > 0.0 {
        times.stages = costs.iter().map(|cost| cost / mean).map(|time| StageTimes::new(time, time, time)).collect();
    }
    times
}

/// The schedule of a file.
fn read_schedule(config: &RunConfig) -> Result<Schedule, ConfigError> {
    let path = &config.parallel.schedule;
    let refused = |problem: String| wrong(SCHEDULE, quoted(path), problem);
    let text = fs::read_to_string(path).map_err(|error| refused(format!("cannot be read: {error}")))?;
    let schedule: Schedule = text.parse().map_err(|error: moeworks_plan::ScheduleError| refused(error.to_string()))?;
    let (pp, num_microbatches) = (config.parallel.pp, config.train.grad_accumulation);
    for (what, has, setting, wanted) in [
        ("ranks", schedule.num_ranks(), PP, pp),
        ("microbatches", schedule.num_microbatches(), "train.grad_accumulation", num_microbatches),
    ] {
        if has != wanted {
            return Err(refused(format!("is of {has} {what}, but {setting} is {wanted}")));
        }
    }
    Ok(schedule)
}
