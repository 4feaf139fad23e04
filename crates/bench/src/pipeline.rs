//! Measured steps of pipelines beside the makespans of their schedules.
//!
//! Two ranks of one core each compute for real. With more ranks than cores each computation is a wait instead, so
//! that ranks do not lend each other cores, and the links inside a stage group are as slow as makes the all-to-alls
//! of a pass take half the time of its computation. Everything else is that of training: messages, exchanges of
//! tokens, turns, and gradients.

use moeworks_comm::{Communicator, RankOptions, Throttled, try_run_ranks};
use moeworks_model::ModelConfig;
use moeworks_moe::{EpOptions, Pace};
use moeworks_plan::{Exchange, Link, Links, ScheduleKind, StageTimes, Times, Wire};
use moeworks_train::TrainError;
use moeworks_train::config::RunConfig;
use moeworks_train::pipeline::{ActionTimes, PipelinePlan, StepTimes, TimedPipeline, time_steps};
use serde_json::{Value, json};

use crate::error::BenchError;
use crate::ranks::TIMEOUT;

/// The schedules that are measured.
pub const SCHEDULES: [ScheduleKind; 6] = [
    ScheduleKind::OneFOneB,
    ScheduleKind::ZbH1,
    ScheduleKind::DualPipe,
    ScheduleKind::DualPipeV,
    ScheduleKind::OneFOneBOverlap,
    ScheduleKind::InterleavedOverlap,
];
/// The numbers of stage groups of two ranks each whose computations are waits.
pub const STAGE_GROUPS: [usize; 2] = [2, 4];
/// The ranks of a stage group, between which tokens are exchanged.
const EXPERT_RANKS: usize = 2;
/// The layers of a rank, half of them a stage where a rank has two.
const LAYERS_A_RANK: usize = 2;
/// The wait for each half, attention or experts, of a layer's F, B or W.
const PART_S: f64 = 0.030;
/// The time of a dispatch or a combine: half of a layer's computation together.
const EXCHANGE_S: f64 = 0.015;
/// The width of the model whose computations are waits, and the tokens of a rank: much more than what ranks agree
/// about, and quick to compute.
const WIDTH: usize = 256;
const TOKENS: usize = 16;

/// A schedule that was measured.
#[derive(Clone, Debug)]
pub struct Measured {
    /// The schedule.
    pub schedule: &'static str,
    /// The number of ranks.
    pub num_ranks: usize,
    /// The microbatches of a step.
    pub num_microbatches: usize,
    /// True if computations were waits.
    pub are_waits: bool,
    /// The makespan of the schedule's own timeline, in seconds.
    pub makespan_s: f64,
    /// The median time of a step.
    pub step_s: f64,
    /// The share of all-to-alls that the timeline hides.
    pub hidden: Option<f64>,
    /// The share of all-to-alls in which no rank waited, on average over ranks.
    pub measured_hidden: Option<f64>,
}

impl Measured {
    /// Returns the measured time over the makespan.
    #[must_use]
    pub fn ratio(&self) -> f64 {
        self.step_s / self.makespan_s
    }

    /// Returns the figures as JSON.
    #[must_use]
    pub fn json(&self) -> Value {
        json!({
            "schedule": self.schedule, "ranks": self.num_ranks, "microbatches": self.num_microbatches,
            "computations": if self.are_waits { "waits" } else { "real" },
            "makespan_s": self.makespan_s, "step_s": self.step_s, "ratio": self.ratio(),
            "hidden": self.hidden, "measured_hidden": self.measured_hidden,
        })
    }
}

/// Measures a schedule over `pp` stage groups of two ranks, threads of this process, whose computations are waits.
///
/// # Errors
/// [`BenchError`] where a rank fails.
pub fn with_waits(
    kind: ScheduleKind,
    pp: usize,
    num_microbatches: usize,
    num_steps: usize,
) -> Result<Measured, BenchError> {
    let config = config_of_waits(kind, pp, num_microbatches);
    let plan = plan(&config)?;
    let layers_a_stage = plan.parts.iter().map(|part| part.layers.len()).collect::<Vec<_>>();
    let pace = Pace {
        attention_forward_s: PART_S,
        experts_forward_s: PART_S,
        attention_backward_s: PART_S,
        experts_backward_s: PART_S,
        attention_weights_s: PART_S,
        experts_weights_s: PART_S,
        ..Pace::default()
    };
    let options = EpOptions { pace: Some(pace), ..Exchange::plain(Wire::F32).into() };
    let timed = TimedPipeline { config: &config, plan: &plan, options, overlaps_pairs: true, num_steps };
    let times = on_slow_links(&timed)?;
    let exchanges = 4 * num_microbatches * LAYERS_A_RANK * num_steps;
    let shares = times.iter().map(|times| 1.0 - times.exchanges.waited_s / (exchanges as f64 * EXCHANGE_S));
    let measured_hidden = shares.sum::<f64>() / times.len() as f64;
    let stage = |&layers: &usize| {
        let (part, exchange) = (2.0 * PART_S * layers as f64, EXCHANGE_S * layers as f64);
        StageTimes { dispatch: exchange, combine: exchange, ..StageTimes::new(part, part, part) }
    };
    let stages = Times { stages: layers_a_stage.iter().map(stage).collect(), ..Times::uniform(1.0, 1.0, 1.0) };
    let layers: Vec<u16> = layers_a_stage.iter().map(|&layers| layers as u16).collect();
    let own = own_times(&plan, &layers, &stages)?;
    Ok(Measured {
        schedule: kind.name(),
        num_ranks: pp * EXPERT_RANKS,
        num_microbatches,
        are_waits: true,
        makespan_s: own.makespan_s,
        step_s: median(&times[0]),
        hidden: own.hidden,
        measured_hidden: Some(measured_hidden),
    })
}

/// Measures a schedule over two ranks of one thread each that compute. Its timeline takes the median times of the
/// computations in the same steps.
///
/// # Errors
/// [`BenchError`] where a rank fails.
pub fn with_computations(
    kind: ScheduleKind,
    num_microbatches: usize,
    num_steps: usize,
) -> Result<Measured, BenchError> {
    let config = config_of_computations(kind, num_microbatches);
    let plan = plan(&config)?;
    let options = Exchange::plain(Wire::F32).into();
    let timed = TimedPipeline { config: &config, plan: &plan, options, overlaps_pairs: true, num_steps };
    let options = RankOptions::new(2).with_timeout(TIMEOUT);
    let times = try_run_ranks(&options, |comm: &dyn Communicator| {
        moeworks_comm::share_cores(comm, true)?;
        time_steps(comm, &timed)
    })?;
    let stage = |&rank: &u32| {
        let ActionTimes { forward_s, input_grad_s, weight_grad_s, backward_s } = times[rank as usize].actions;
        // A schedule may have both forms of the backward.
        let input_grad = if input_grad_s > 0.0 { input_grad_s } else { backward_s / 2.0 };
        let weight_grad = if backward_s > 0.0 { backward_s - input_grad } else { weight_grad_s };
        StageTimes::new(forward_s, input_grad, weight_grad)
    };
    let stages = plan.schedule.copies[0].stage_ranks.iter().map(stage).collect();
    let own = own_times(&plan, &[], &Times { stages, ..Times::uniform(1.0, 1.0, 1.0) })?;
    Ok(Measured {
        schedule: kind.name(),
        num_ranks: 2,
        num_microbatches,
        are_waits: false,
        makespan_s: own.makespan_s,
        step_s: median(&times[0]),
        hidden: None,
        measured_hidden: None,
    })
}

/// Runs steps on threads whose links inside a stage group are slow.
fn on_slow_links(timed: &TimedPipeline<'_>) -> Result<Vec<StepTimes>, BenchError> {
    let layout = timed.config.parallel.layout();
    let bytes = (EXPERT_RANKS - 1) * TOKENS * WIDTH * size_of::<f32>();
    // Stage groups are nodes here, so that messages between them do not wait for the all-to-alls.
    let links = Links {
        node: Link { latency_s: 0.0, bytes_per_s: bytes as f64 / EXCHANGE_S },
        cluster: Link { latency_s: 0.0, bytes_per_s: 1e12 },
    };
    let num_ranks = layout.num_ranks();
    let nodes: Vec<usize> = (0..num_ranks).map(|rank| rank / EXPERT_RANKS).collect();
    let options = RankOptions::new(num_ranks).with_nodes(&nodes).with_timeout(TIMEOUT);
    Ok(try_run_ranks(&options, |comm: &dyn Communicator| {
        let all = comm.split(Some(0), comm.rank())?.expect("a rank with a color is in a group");
        time_steps(&Throttled::new(all, links), timed)
    })?)
}

/// The figures of a schedule's timeline.
struct Own {
    makespan_s: f64,
    hidden: Option<f64>,
}

/// The timeline of a schedule, with its all-to-alls written out where stages have MoE layers on several ranks.
fn own_times(plan: &PipelinePlan, moe_layers: &[u16], times: &Times) -> Result<Own, BenchError> {
    let unexpected = |error: &dyn std::fmt::Display| BenchError::Request(error.to_string());
    let checked = plan.schedule.check().map_err(|error| unexpected(&error))?;
    let expanded = match moe_layers {
        [] => plan.schedule.clone(),
        layers => checked.with_all_to_alls(layers).map_err(|error| unexpected(&error))?,
    };
    let checked = expanded.check().map_err(|error| unexpected(&error))?;
    let timeline = checked.timeline(times).map_err(|error| unexpected(&error))?;
    Ok(Own { makespan_s: timeline.makespan, hidden: timeline.hidden() })
}

fn plan(config: &RunConfig) -> Result<PipelinePlan, BenchError> {
    let plan = PipelinePlan::new(config).map_err(TrainError::from)?;
    plan.ok_or_else(|| BenchError::Request("a pipeline of one stage group is none".to_owned()))
}

fn median(times: &StepTimes) -> f64 {
    let mut steps = times.steps_s.clone();
    steps.sort_unstable_by(f64::total_cmp);
    steps[steps.len() / 2]
}

fn config_of_waits(kind: ScheduleKind, pp: usize, num_microbatches: usize) -> RunConfig {
    let model = ModelConfig {
        vocab_size: 64,
        width: WIDTH,
        num_layers: pp * LAYERS_A_RANK,
        num_heads: 4,
        num_kv_heads: 4,
        head_dim: WIDTH / 4,
        moe_every: 1,
        num_experts: EXPERT_RANKS,
        // Every token goes to every expert, so that all exchanges take the same time.
        top_k: EXPERT_RANKS,
        expert_width: 8,
        shared_width: 0,
        max_seq_len: TOKENS,
        ..ModelConfig::default()
    };
    let mut config = RunConfig { model, ..RunConfig::default() };
    config.train.seq_len = TOKENS;
    config.train.batch_size = EXPERT_RANKS;
    config.parallel.ep = EXPERT_RANKS;
    of_schedule(config, kind, pp, num_microbatches)
}

fn config_of_computations(kind: ScheduleKind, num_microbatches: usize) -> RunConfig {
    let model = ModelConfig {
        vocab_size: 256,
        width: 256,
        num_layers: 4,
        num_heads: 4,
        num_kv_heads: 4,
        head_dim: 64,
        moe_every: 1,
        num_experts: 8,
        top_k: 2,
        expert_width: 256,
        shared_width: 0,
        max_seq_len: 256,
        ..ModelConfig::default()
    };
    let mut config = RunConfig { model, ..RunConfig::default() };
    config.train.seq_len = 256;
    config.train.batch_size = 2;
    of_schedule(config, kind, 2, num_microbatches)
}

fn of_schedule(mut config: RunConfig, kind: ScheduleKind, pp: usize, num_microbatches: usize) -> RunConfig {
    config.parallel.pp = pp;
    kind.name().clone_into(&mut config.parallel.schedule);
    let num_layers = config.model.num_layers;
    let num_stages = pp * kind.virtual_stages(None).unwrap_or(1);
    let counts = vec![(num_layers / num_stages).to_string(); num_stages];
    config.parallel.stages = counts.join(",");
    config.train.grad_accumulation = num_microbatches;
    config
}
