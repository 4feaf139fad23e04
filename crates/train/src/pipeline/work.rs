//! The computations of a stage that a schedule orders, each with all that it needs and apart from the bookkeeping of
//! the step, so that two of them can take turns.

use moeworks_model::{
    PassStats, ResidualStream, RouterLoss, Stage, StageBackward, StageForward, StageOutputGrads, StageSaved,
    WeightGrads,
};
use moeworks_moe::LayerStats;

use super::grads::StepGrads;
use super::{StageView, StepBatch};
use crate::error::TrainError;

/// A stage, and a microbatch that goes through it.
#[derive(Clone, Copy)]
pub(super) struct StageBatch<'a> {
    pub(super) index: u32,
    pub(super) microbatch: u32,
    pub(super) stage: &'a Stage,
    pub(super) batch: &'a StepBatch,
}

/// The values that F leaves for B.
pub(super) struct Kept<'a> {
    saved: StageSaved<'a>,
    /// MoE layers of the stages before.
    num_before: usize,
    /// MoE layers of the stage.
    num_own: usize,
    /// The statistics of all MoE layers, where the stage has the output projection.
    pub(super) stats: Vec<LayerStats>,
}

/// F: the forward of a stage, with its input.
pub(super) struct ForwardWork<'a> {
    pub(super) of: StageBatch<'a>,
    pub(super) stream: Option<ResidualStream>,
    /// The statistics of the MoE layers of the stages before.
    pub(super) stats: Vec<LayerStats>,
}

/// The result of F.
pub(super) struct ForwardResult<'a> {
    pub(super) kept: Kept<'a>,
    /// The stream for the next stage, with the statistics of the MoE layers so far.
    pub(super) output: Option<(ResidualStream, Vec<LayerStats>)>,
}

impl<'a> ForwardWork<'a> {
    /// Computes it. The ranks of the stage group call this together.
    pub(super) fn run(self, view: StageView<'a>) -> Result<ForwardResult<'a>, TrainError> {
        let Self { of: StageBatch { stage, batch, .. }, stream, mut stats } = self;
        let StepBatch { batch, options } = batch;
        let forward = stage.forward(view.ctx, view.weights, &batch.tokens(), options, stream)?;
        let own = stage.merged_stats(&forward.saved);
        let (num_before, num_own) = (stats.len(), own.len());
        stats.extend(own);
        let StageForward { stream, saved } = forward;
        let (output, stats) = match stream {
            None => (None, stats),
            Some(stream) => (Some((stream, stats)), Vec::new()),
        };
        Ok(ForwardResult { kept: Kept { saved, num_before, num_own, stats }, output })
    }
}

/// B, or with the gradients of weights at once BW: the backward of a stage, with its input.
pub(super) struct BackwardWork<'a> {
    pub(super) of: StageBatch<'a>,
    pub(super) kept: Kept<'a>,
    /// The gradient of the stage's output; none with the output projection.
    pub(super) stream: Option<ResidualStream>,
    /// The statistics of all MoE layers.
    pub(super) stats: Vec<LayerStats>,
    pub(super) when: WeightGrads,
}

/// The result of B.
pub(super) struct BackwardResult<'a> {
    pub(super) of: StageBatch<'a>,
    pub(super) when: WeightGrads,
    pub(super) stats: Vec<LayerStats>,
    losses: RouterLoss,
    pub(super) back: StageBackward,
}

impl<'a> BackwardWork<'a> {
    /// Computes it, and adds the gradients of weights to `grads`. The ranks of the stage group call this together.
    pub(super) fn run(self, view: StageView<'a>, grads: &mut StepGrads<'_>) -> Result<BackwardResult<'a>, TrainError> {
        let Self { of, kept: Kept { saved, num_before, num_own, .. }, stream, stats, when } = self;
        let StepBatch { batch, options } = of.batch;
        let mut losses = of.stage.losses_on_routers(&batch.tokens(), &stats, options);
        let loss_grads = std::mem::take(&mut losses.grads).into_iter().skip(num_before).take(num_own).collect();
        let output = StageOutputGrads { stream, loss_grads };
        let back = grads.backward(view, of.stage, when, |target| {
            of.stage.backward(view.ctx, view.weights, saved, output, target, when)
        })?;
        Ok(BackwardResult { of, when, stats, losses, back })
    }
}

impl BackwardResult<'_> {
    /// Returns the account of the microbatch, if its loss was found here. The ranks of the stage group call this
    /// together.
    pub(super) fn take_account(&mut self) -> Option<PassStats> {
        let loss = self.back.loss.take()?;
        Some(self.of.stage.pass_stats(loss, self.losses.values, self.stats.clone()))
    }
}
