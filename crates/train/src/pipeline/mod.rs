//! Pipelines carried out: stage groups that hold stages of the model and go through the actions of a
//! [`Schedule`](moeworks_plan::Schedule), whichever it is.
//!
//! A [`PipelinePlan`] is the decision: the schedule, and the part of the model that each stage has. `Pipeline` is
//! a rank's place in it, with its stages; it takes a whole step's microbatches through them (`Pipeline::step`)
//! and evaluates, routes and writes texts with the same stages. Over a cut goes a residual stream with the
//! statistics of the MoE layers before it, and back its gradient with the statistics of all MoE layers, from which
//! each stage finds the losses on its routers.

mod execution;
mod figures;
mod grads;
mod inference;
mod messages;
mod plan;
mod timing;
mod work;

use std::sync::Arc;

use moeworks_model::{
    Decoder, DecoderWeights, Gather, ModelConfig, PassOptions, PassStats, Stage, StageRanks, TensorRanks, WeightTable,
};
use moeworks_ops::Context;
use moeworks_plan::schedule::{Chain, Entry, Peaks};

use crate::config::ConfigError;
use crate::error::TrainError;
use crate::parallel::{Ranks, SumsUnderWay, WholeLayers};
use execution::Execution;
use grads::StepGrads;
use messages::Flows;
pub use plan::{PipelinePlan, is_schedule_file};
pub use timing::{ActionTimes, StepTimes, TimedPipeline, time_steps};

/// A rank's place in a pipeline.
pub(crate) struct Pipeline {
    plan: PipelinePlan,
    /// By their numbers; none where another stage group has the stage.
    stages: Vec<Option<Stage>>,
    /// This rank's pp index.
    pp_rank: usize,
    /// The messages that come to this rank, in the order in which they are sent.
    flows: Flows,
    /// True if the two of a pair take turns.
    overlaps_pairs: bool,
}

/// A model as the stages of a pipeline see it.
#[derive(Clone, Copy)]
pub(crate) struct StageView<'a> {
    /// The device and the threads that compute.
    pub(crate) ctx: &'a Context,
    /// This rank's place.
    pub(crate) ranks: &'a Ranks,
    /// The weights of this rank's stages.
    pub(crate) weights: &'a DecoderWeights,
}

impl<'a> StageView<'a> {
    /// Returns the view with other weights, if there are some.
    fn with_weights<'b>(self, weights: Option<&'b DecoderWeights>) -> StageView<'b>
    where
        'a: 'b,
    {
        StageView { weights: weights.unwrap_or(self.weights), ..self }
    }
}

/// A microbatch of a step: this rank's sequences.
pub(crate) struct StepBatch {
    /// The sequences.
    pub(crate) batch: moeworks_infer::data::Batch,
    /// The settings of its pass.
    pub(crate) options: PassOptions,
}

/// The result of a step.
pub(crate) struct StepOutcome {
    /// The account of each microbatch, over all ranks.
    pub(crate) stats: Vec<PassStats>,
    /// The most that this rank held at once.
    #[cfg_attr(not(test), allow(dead_code))] // A test holds it against the schedule's own.
    pub(crate) peaks: Peaks,
}

impl Pipeline {
    /// The place of this rank in the pipeline of `plan` with a model of `config`, and the decoder of the model,
    /// whose weights here are those of this rank's stages. All ranks call this.
    pub(crate) fn on_ranks(
        ranks: &Arc<Ranks>,
        config: &ModelConfig,
        table: WeightTable,
        plan: PipelinePlan,
    ) -> Result<(Self, Decoder), TrainError> {
        let tensor = ranks.cut_tensors(config, &table)?.cloned();
        ranks.share_out_stages(&plan, &table)?;
        let stage_ranks = stage_ranks(ranks, tensor.clone());
        let gather = ranks.shards_weights().then(|| Arc::new(WholeLayers::with_whole_ends(Arc::clone(ranks))));
        let decoder = match tensor {
            None => Decoder::expert_parallel(config.clone(), table, ranks.experts().clone()),
            Some(tensor) => Decoder::tensor_parallel(config.clone(), table, tensor),
        };
        let decoder = decoder.map_err(ConfigError::from)?;
        ranks.hold(decoder.weight_table());
        let pp_rank = ranks.pp_rank();
        let own = plan.stages_of(pp_rank);
        let stage = |(index, part): (usize, &moeworks_model::StagePart)| {
            let make = || {
                let table = Arc::clone(decoder.weight_table());
                let stage = Stage::over_ranks(config.clone(), table, part.clone(), stage_ranks.clone())?;
                Ok::<_, moeworks_moe::ConfigError>(match &gather {
                    None => stage,
                    Some(gather) => stage.gathering(Arc::clone(gather) as Arc<dyn Gather>),
                })
            };
            own.contains(&index).then(make).transpose()
        };
        let stages = plan.parts.iter().enumerate().map(stage).collect::<Result<Vec<_>, _>>();
        let stages = stages.map_err(ConfigError::from)?;
        let flows = Flows::new(&plan.schedule, pp_rank);
        Ok((Self { plan, stages, pp_rank, flows, overlaps_pairs: true }, decoder))
    }

    /// The stage with number `index`, which this rank has.
    fn stage(&self, index: usize) -> &Stage {
        self.stages[index].as_ref().expect("the schedule gives this rank actions of its own stages alone")
    }

    /// Gathers the tensors outside the layers, if ranks keep slices of weights: they are whole for all passes of a
    /// step, because the ends of the model may share them. All ranks call this.
    fn gathered_ends(&self, view: StageView<'_>) -> Option<DecoderWeights> {
        let StageView { ctx, ranks, weights } = view;
        ranks.shards_weights().then(|| ranks.gather_outside(ctx, weights))
    }

    /// The number of stages.
    fn num_stages(&self) -> usize {
        self.plan.parts.len()
    }

    /// Takes the microbatches of a step through the stages and back, as the schedule says. `grads` become the
    /// gradients of this rank's sequences; sharded ones are reduced into the slices of `sums`. All ranks call this.
    pub(crate) fn step(
        &self,
        view: StageView<'_>,
        microbatches: &[StepBatch],
        grads: &mut DecoderWeights,
        sums: &mut SumsUnderWay,
    ) -> Result<StepOutcome, TrainError> {
        let gathered = self.gathered_ends(view);
        let view = view.with_weights(gathered.as_ref());
        let mut execution = Execution::new(self, view, microbatches, StepGrads { grads, slices: sums.slices.as_mut() });
        for entry in &self.plan.schedule.ranks[self.pp_rank] {
            match *entry {
                Entry::One(action) => execution.carry_out(action)?,
                Entry::Pair(forward, backward) => execution.carry_out_pair(forward, backward)?,
            }
        }
        let (own, peaks) = execution.finish()?;
        view.ranks.check()?;
        let stats = figures::of_all_ranks(self, view, microbatches, &own)?;
        Ok(StepOutcome { stats, peaks })
    }
}

/// The ranks of a stage group, as its stages know them; none where a stage group is one rank.
fn stage_ranks(ranks: &Ranks, tensor: Option<TensorRanks>) -> StageRanks {
    let is_one = ranks.stage_group().size() == 1;
    StageRanks { experts: (!is_one).then(|| ranks.experts().clone()), tensor }
}

/// The entries of a list whose chain is `chain`, as actions.
fn of_chain(entries: &[Entry], chain: Chain) -> impl Iterator<Item = moeworks_plan::schedule::Action> + '_ {
    entries.iter().flat_map(Entry::actions).filter(move |action| action.kind.chain() == chain)
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
