//! A training step of a described model on a described cluster, as it is simulated: what its stages compute, what
//! they keep, and what passes the links.
//!
//! ```
//! use moeworks_plan::{Cluster, Layout, Model, ScheduleKind, ScheduleRequest, StepRequest};
//!
//! let (model, cluster) = (Model::named("mixtral-8x22b")?, Cluster::named("h100")?);
//! let layout = Layout::new(1, 8, 1).with_pipeline(4);
//! let request = StepRequest::new(&model, &cluster, layout, 4096);
//! let step = request.costs(4)?;
//! let schedule = ScheduleKind::ZbH1.generate(&ScheduleRequest::new(4, 16, step.times()))?;
//! let schedule = step.written_out(&schedule)?;
//! let report = step.simulate(&schedule.check()?)?;
//! assert!(report.hidden.is_some() && report.mfu < 1.0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod memory;
mod stages;
mod transfers;

use crate::network::{ExpertShares, Places};
use crate::schedule::{CheckError, Checked, Entry, PairTime, Simulation, TimesError};
use crate::{Cluster, Exchange, Layout, Model, Nodes, Placement, Precision, Schedule, Times, Wire};

use self::stages::Stage;

/// Actions that a schedule with its all-to-alls may have at most.
const MAX_ACTIONS: usize = 1 << 26;
/// Actions of a MoE layer and microbatch.
const ACTIONS_OF_LAYER: usize = 10;
/// The most chunks of a layer's all-to-alls.
const MAX_CHUNKS: usize = 64;

/// A step to simulate.
#[derive(Clone, Debug)]
pub struct StepRequest<'a> {
    /// The model.
    pub model: &'a Model,
    /// The cluster, of which the layout uses the first ranks.
    pub cluster: &'a Cluster,
    /// The layout; its stage groups are the ranks of the schedule.
    pub layout: Layout,
    /// The exchange of tokens with experts. Its wire format compresses rows to experts; results and their gradients
    /// come back in no less than two bytes a number. Chunks are simulated one by one on their links.
    pub exchange: Exchange,
    /// T, the tokens of each rank in a microbatch.
    pub tokens: usize,
    /// The number format of products.
    pub precision: Precision,
    /// The ZeRO stage, 0 to 3.
    pub zero: u8,
    /// True if only the inputs of layers are kept, and the rest is computed again in backward.
    pub checkpoint_layers: bool,
    /// The placement of a layer's experts on the ranks that hold them between them; none for neighbouring experts on
    /// each.
    pub placement: Option<&'a Placement>,
    /// The rows that each expert of a layer gets, of any sum; none if all get the same.
    pub expert_loads: Option<&'a [f64]>,
    /// The number of units of the outermost level that fetch each other's experts, so that tokens stay among them
    /// (HybridEP); 1 for none.
    pub domain: usize,
    /// The ranks that share a sequence and pass keys and values around (context parallelism): neighbours among the
    /// `dp` x `ep` ranks with tokens of their own. The trainer has none.
    pub context: usize,
    /// The factor by which experts that are fetched are compressed (HybridEP's shared expert and residuals: up to
    /// 50).
    pub expert_compression: f64,
}

/// A step that cannot be simulated.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum StepError {
    /// A value out of range.
    #[error("{what} = {given}: {right}")]
    Value {
        /// The value's name.
        what: &'static str,
        /// The value.
        given: String,
        /// The values that would be right.
        right: String,
    },
    /// Times that do not fit the schedule.
    #[error(transparent)]
    Times(#[from] TimesError),
    /// A schedule that cannot be written out or carried out.
    #[error(transparent)]
    Check(#[from] CheckError),
}

fn wrong(what: &'static str, given: impl std::fmt::Display, right: impl Into<String>) -> StepError {
    StepError::Value { what, given: given.to_string(), right: right.into() }
}

impl<'a> StepRequest<'a> {
    /// Makes a request in bf16 with the optimizer's state cut among ranks, and experts that are used alike.
    #[must_use]
    pub fn new(model: &'a Model, cluster: &'a Cluster, layout: Layout, tokens: usize) -> Self {
        Self {
            model,
            cluster,
            layout,
            exchange: Exchange::plain(Wire::Bf16),
            tokens,
            precision: Precision::Bf16,
            zero: 1,
            checkpoint_layers: false,
            placement: None,
            expert_loads: None,
            domain: 1,
            context: 1,
            expert_compression: 1.0,
        }
    }

    /// Returns what the step costs in a pipeline of `num_stages` stages. Fails on sizes that do not fit each other.
    pub fn costs(&self, num_stages: usize) -> Result<StepCosts<'_>, StepError> {
        self.check(num_stages)?;
        let places = Places::new(self.cluster, self.layout.num_ranks());
        let shares = self.expert_shares(&places)?;
        let stages = self.stages(num_stages, shares.hottest, &places);
        let times =
            Times { stages: stages.iter().map(|stage| stage.times).collect(), message: 0.0, pair: PairTime::Sum };
        Ok(StepCosts { request: self, stages, times, shares })
    }

    fn check(&self, num_stages: usize) -> Result<(), StepError> {
        let Layout { dp, ep, tp, pp, .. } = self.layout;
        for (what, given) in [("dp", dp), ("ep", ep), ("tp", tp), ("pp", pp), ("tokens", self.tokens)] {
            if given == 0 || given > 1 << 30 {
                return Err(wrong(what, given, format!("must be from 1 to {}", 1 << 30)));
            }
        }
        let ranks = [ep, tp, pp].into_iter().try_fold(dp, usize::checked_mul).unwrap_or(usize::MAX);
        let most = self.cluster.num_ranks();
        if ranks > most {
            let given = format!("dp {dp} x ep {ep} x tp {tp} x pp {pp} = {ranks}");
            return Err(wrong("ranks", given, format!("cluster {} has {most}", self.cluster.name)));
        }
        let model = &self.model.name;
        let num_layers = self.model.layers(self.precision).len();
        if num_stages > num_layers {
            let right = format!("{model} has {num_layers} layers, and a stage needs one");
            return Err(wrong("stages", num_stages, right));
        }
        let shape = self.model.shape(self.precision);
        if tp > shape.max_tp {
            return Err(wrong("tp", tp, format!("{model} is cut over at most {} ranks", shape.max_tp)));
        }
        match shape.num_experts {
            0 if ep > 1 => return Err(wrong("ep", ep, format!("{model} has no experts: must be 1"))),
            experts if experts > 0 && ep * tp > experts => {
                let right = format!("times tp {tp} must be at most the {experts} experts of {model}");
                return Err(wrong("ep", ep, right));
            }
            _ => {}
        }
        self.check_exchange()
    }

    fn check_exchange(&self) -> Result<(), StepError> {
        if self.zero > 3 {
            return Err(wrong("zero", self.zero, "must be from 0 to 3"));
        }
        if !(1..=MAX_CHUNKS).contains(&self.exchange.chunks) {
            return Err(wrong("chunks", self.exchange.chunks, format!("must be from 1 to {MAX_CHUNKS}")));
        }
        if self.exchange.chunks > 1 && self.domain > 1 {
            return Err(wrong("chunks", self.exchange.chunks, "must be 1 where experts are fetched"));
        }
        let sharing = self.layout.dp * self.layout.ep;
        if self.context == 0 || !sharing.is_multiple_of(self.context) {
            return Err(wrong("cp", self.context, format!("must divide the {sharing} ranks of dp x ep")));
        }
        if let Some(loads) = self.expert_loads {
            let is_load = |load: &f64| *load >= 0.0 && load.is_finite();
            if !loads.iter().all(is_load) || loads.iter().sum::<f64>() <= 0.0 {
                return Err(wrong("expert loads", "these", "must be numbers of at least 0, not all 0"));
            }
        }
        if !(1.0..=1e6).contains(&self.expert_compression) {
            return Err(wrong("expert compression", self.expert_compression, "must be a number from 1 to 1e6"));
        }
        if self.domain != 1 {
            let units = self.cluster.levels.last().map_or(1, |level| level.size);
            let used = units.min(self.outer_units());
            if self.domain == 0 || !used.is_multiple_of(self.domain) {
                let right = format!("must divide the {used} units of the outermost level that an expert group spans");
                return Err(wrong("domain", self.domain, right));
            }
        }
        Ok(())
    }

    /// Returns the number of units of the outermost level that the ranks holding the experts between them are in.
    fn outer_units(&self) -> usize {
        let last = self.cluster.levels.len() - 1;
        let below = if last == 0 { 1 } else { self.cluster.unit_ranks(last - 1) };
        self.layout.num_expert_ranks().div_ceil(below)
    }

    fn expert_shares(&self, places: &Places<'_>) -> Result<ExpertShares, StepError> {
        let num_experts = self.model.shape(self.precision).num_experts.max(1);
        let ranks = self.layout.num_expert_ranks();
        let sharded;
        let placement = match self.placement {
            Some(placement) => placement,
            None => {
                sharded = Placement::sharded(num_experts, ranks);
                &sharded
            }
        };
        let loads = self.expert_loads.map_or_else(|| vec![1.0; num_experts], <[f64]>::to_vec);
        if (placement.num_experts(), placement.num_ranks()) != (num_experts, ranks) {
            let given = format!("{} experts on {} ranks", placement.num_experts(), placement.num_ranks());
            return Err(wrong("placement", given, format!("must be {num_experts} experts on {ranks} ranks")));
        }
        if loads.len() != num_experts {
            return Err(wrong("expert loads", loads.len(), format!("must be {num_experts}, one for each expert")));
        }
        let mut numbers = std::collections::HashMap::new();
        let node = |rank: usize| {
            let next = numbers.len();
            *numbers.entry(places.unit(0, rank)).or_insert(next)
        };
        let nodes: Vec<usize> = self.layout.ep_group(0).into_iter().map(node).collect();
        Ok(ExpertShares::new(placement, &loads, &Nodes::new(&nodes)))
    }
}

/// The costs of a step: computation and memory of its stages, and its transfers.
#[derive(Clone, Debug)]
pub struct StepCosts<'a> {
    request: &'a StepRequest<'a>,
    stages: Vec<Stage>,
    times: Times,
    shares: ExpertShares,
}

/// A simulated step with its figures.
#[derive(Clone, Debug)]
pub struct StepReport<'a> {
    /// The schedule as it was simulated.
    pub simulation: Simulation<'a>,
    /// The most bytes of memory of each rank of the schedule.
    pub peak_memory: Vec<f64>,
    /// The bytes of each rank that do not depend on the time: weights, gradients, optimizer state.
    pub state_bytes: Vec<f64>,
    /// The share of communication that no rank waited for, with the sums of tensor parallelism, none of which are
    /// hidden; none without communication.
    pub hidden: Option<f64>,
    /// Seconds of the step, with the sums of gradients and the update.
    pub step_s: f64,
    /// Tokens of all ranks a second.
    pub tokens_per_s: f64,
    /// Model operations a second over the peak of all devices; in FP8 over that of bf16.
    pub mfu: f64,
    /// The number of ranks.
    pub num_ranks: usize,
    /// The tokens of a step.
    pub tokens: u64,
}

impl StepCosts<'_> {
    /// Returns the times and the sizes of the stages, in seconds and bytes; communication is not in them.
    #[must_use]
    pub fn times(&self) -> &Times {
        &self.times
    }

    /// Returns the schedule with its messages, and with its all-to-alls where experts are on several ranks. Fails if
    /// its number of ranks or stages is another.
    pub fn written_out(&self, schedule: &Schedule) -> Result<Schedule, StepError> {
        let (ranks, pp) = (schedule.num_ranks(), self.request.layout.pp);
        if ranks != pp {
            return Err(wrong("pp", pp, format!("the schedule has {ranks} ranks")));
        }
        self.times.check(schedule.num_stages())?;
        let checked = schedule.check()?;
        let has_experts_elsewhere = self.request.layout.num_expert_ranks() > 1;
        let has_pairs = schedule.ranks.iter().flatten().any(|entry| matches!(entry, Entry::Pair(..)));
        if has_pairs && self.request.exchange.chunks > 1 {
            let right = "must be 1: the pairs of this schedule hide all-to-alls already";
            return Err(wrong("chunks", self.request.exchange.chunks, right));
        }
        let moe_layers: Vec<u16> = self.stages.iter().map(|stage| stage.moe_layers).collect();
        if !schedule.moe_layers.is_empty() && schedule.moe_layers != moe_layers {
            return Err(wrong(
                "MoE layers of the schedule",
                format!("{:?}", schedule.moe_layers),
                format!("the stages have {moe_layers:?}"),
            ));
        }
        let num_moe_layers: usize = moe_layers.iter().map(|&layers| usize::from(layers)).sum();
        if !has_experts_elsewhere || !schedule.moe_layers.is_empty() || num_moe_layers == 0 {
            return Ok(checked.with_messages());
        }
        if schedule.has_messages() {
            let right = "must be written out too where sends and receives are, or leave those out";
            return Err(wrong("all-to-alls of the schedule", "none", right));
        }
        let most = MAX_ACTIONS / ACTIONS_OF_LAYER / num_moe_layers / self.request.exchange.chunks.max(1);
        if schedule.num_microbatches() > most {
            let right = format!("with {num_moe_layers} MoE layers there can be at most {most}");
            return Err(wrong("microbatches", schedule.num_microbatches(), right));
        }
        let expanded = checked.with_all_to_alls(&moe_layers)?;
        Ok(expanded.check()?.with_messages())
    }

    /// Simulates the step by a schedule that [`StepCosts::written_out`] gave.
    pub fn simulate<'a>(&'a self, checked: &Checked<'a>) -> Result<StepReport<'a>, StepError> {
        let schedule = checked.schedule();
        let transfers = self.transfers(schedule);
        let simulation = checked.simulate(&self.times, &transfers)?;
        let num_ranks = self.request.layout.num_ranks();
        let stage_group = self.request.layout.stage_group_size() as u64;
        let tokens = self.request.tokens as u64 * schedule.num_microbatches() as u64 * stage_group;
        let state_bytes: Vec<f64> = (0..schedule.num_ranks()).map(|rank| self.state_bytes(schedule, rank)).collect();
        let most = |rank: usize| {
            let held = simulation.timeline.memory(rank).into_iter().map(|(_, held)| held);
            state_bytes[rank] + held.fold(0.0, f64::max)
        };
        let peak_memory = (0..schedule.num_ranks()).map(most).collect();
        let step_s = simulation.step;
        let tokens_per_s = if step_s > 0.0 { tokens as f64 / step_s } else { 0.0 };
        // As papers count, and as the planner does, FP8 is compared with the peak of bf16.
        let peak = self.request.cluster.device.peak_flops(self.request.precision.beside_fp8()) * num_ranks as f64;
        Ok(StepReport {
            hidden: self.hidden(schedule, &simulation),
            peak_memory,
            state_bytes,
            step_s,
            tokens_per_s,
            mfu: tokens_per_s * self.request.model.training_flops() / peak,
            num_ranks,
            tokens,
            simulation,
        })
    }

    /// Returns the share of communication that is hidden. Computations have the sums of tensor parallelism in them,
    /// and what attention does not hide of keys and values.
    fn hidden(&self, schedule: &Schedule, simulation: &Simulation<'_>) -> Option<f64> {
        let microbatches = |copy: usize| f64::from(schedule.copies[copy].num_microbatches);
        let held = (0..schedule.num_ranks()).flat_map(|rank| schedule.stages_of(rank));
        let of_stage = |stage: &Stage| 2.0 * stage.tensor_parallel_s + 3.0 * stage.context_s;
        let sums: f64 = held.map(|(copy, stage)| microbatches(copy) * of_stage(&self.stages[stage as usize])).sum();
        let timeline = &simulation.timeline;
        let all = timeline.communication + sums;
        (all > 0.0).then(|| 1.0 - (timeline.exposed + sums) / all)
    }
}
