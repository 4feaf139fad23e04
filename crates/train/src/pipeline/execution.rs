//! A step of a pipeline on one rank: carries out the rank's actions, one after the other.

use std::collections::HashMap;
use std::time::Instant;

use moeworks_model::{
    DecoderWeights, GradTarget, ParamSet, ResidualStream, Stage, StageOutputGrads, StageSaved, WeightGradTasks,
    WeightGrads,
};
use moeworks_moe::LayerStats;
use moeworks_ops::elementwise::fill;
use moeworks_ops::linear::Write;
use moeworks_plan::schedule::{Action, Kind, Peaks};

use super::figures::MicrobatchStats;
use super::messages::{Cut, Inbox, Line, Parcel, Work};
use super::{Pipeline, StageView, StepBatch};
use crate::error::TrainError;

/// A stage, and a microbatch that goes through it.
type Place = (u32, u32);

/// The values that F leaves for B.
struct Kept<'a> {
    saved: StageSaved<'a>,
    /// MoE layers of the stages before.
    num_before: usize,
    /// MoE layers of the stage.
    num_own: usize,
    /// The statistics of all MoE layers, where the stage has the output projection.
    stats: Vec<LayerStats>,
}

/// A step on one rank while it goes on.
pub(super) struct Execution<'a> {
    pipeline: &'a Pipeline,
    view: StageView<'a>,
    microbatches: &'a [StepBatch],
    grads: &'a mut DecoderWeights,
    line: Line<'a>,
    inbox: Inbox<'a>,
    /// Results of stages that a send has yet to take.
    outbox: HashMap<Cut, Parcel>,
    has_messages: bool,
    kept: HashMap<Place, Kept<'a>>,
    tasks: HashMap<Place, WeightGradTasks>,
    /// The account of each microbatch whose loss was found here.
    stats: Vec<MicrobatchStats>,
    peaks: Peaks,
}

impl<'a> Execution<'a> {
    /// A step whose gradients are zeros, to which those of each microbatch are added.
    pub(super) fn new(
        pipeline: &'a Pipeline,
        view: StageView<'a>,
        microbatches: &'a [StepBatch],
        grads: &'a mut DecoderWeights,
    ) -> Self {
        for tensor in grads.params_mut() {
            if !tensor.is_empty() {
                fill(view.ctx, tensor, 0.0);
            }
        }
        Self {
            pipeline,
            view,
            microbatches,
            grads,
            line: Line::new(view.ctx, view.ranks.pipeline_group().unwrap_or(view.ranks.stage_group())),
            inbox: Inbox::new(&pipeline.flows),
            outbox: HashMap::new(),
            has_messages: pipeline.plan.schedule.has_messages(),
            kept: HashMap::new(),
            tasks: HashMap::new(),
            stats: Vec::new(),
            peaks: Peaks::default(),
        }
    }

    /// Carries an action out. Computations whose parts are actions are done with one of these.
    pub(super) fn carry_out(&mut self, action: Action) -> Result<(), TrainError> {
        let Action { stage, microbatch, .. } = action;
        self.line.forget_arrived()?;
        match action.kind {
            Kind::SendOutput | Kind::SendGrad => self.send_made(action),
            Kind::ReceiveInput => self.receive(self.input(stage, microbatch)),
            Kind::ReceiveGrad => self.receive(Some(self.output_grad(stage, microbatch))),
            _ => match Work::of(&self.pipeline.plan.schedule, action) {
                Some(Work::Forward) => self.forward(stage, microbatch),
                Some(Work::InputGrad) => self.backward(stage, microbatch, WeightGrads::Later),
                Some(Work::Backward) => self.backward(stage, microbatch, WeightGrads::AtOnce),
                Some(Work::WeightGrad) => {
                    self.weight_grad(stage, microbatch);
                    Ok(())
                }
                None => Ok(()),
            },
        }
    }

    /// Waits until everything that was sent has arrived. Returns the account of the microbatches whose loss was
    /// found here, and the most that was held.
    pub(super) fn finish(self) -> Result<(Vec<MicrobatchStats>, Peaks), TrainError> {
        self.line.finish()?;
        Ok((self.stats, self.peaks))
    }

    /// The stream that a stage needs; none with the embedding.
    fn input(&self, stage: u32, microbatch: u32) -> Option<Cut> {
        Some(Cut { is_grad: false, stage: stage.checked_sub(1)?, microbatch })
    }

    /// The gradient that a stage without output projection needs.
    fn output_grad(&self, stage: u32, microbatch: u32) -> Cut {
        Cut { is_grad: true, stage: stage + 1, microbatch }
    }

    /// The parcel about `cut`, which comes from another rank if it is not there.
    fn take(&mut self, cut: Cut) -> Result<Parcel, TrainError> {
        if !self.inbox.has(cut) {
            self.receive(Some(cut))?;
        }
        Ok(self.inbox.take(cut))
    }

    fn receive(&mut self, cut: Option<Cut>) -> Result<(), TrainError> {
        let Some(cut) = cut else { return Ok(()) };
        let from = self.pipeline.plan.schedule.rank_of(cut.stage, cut.microbatch);
        match from.map(|from| from as usize).filter(|&from| from != self.pipeline.pp_rank) {
            Some(from) => Ok(self.inbox.receive(&self.line, cut, from)?),
            None => Ok(()),
        }
    }

    /// Hands what a stage made to the stage that needs it: of this rank at once, of another as soon as it may leave.
    fn hand_on(&mut self, cut: Cut, parcel: Parcel) -> Result<(), TrainError> {
        let to = cut.destination().and_then(|stage| self.pipeline.plan.schedule.rank_of(stage, cut.microbatch));
        let Some(to) = to.map(|to| to as usize) else { return Ok(()) };
        if to == self.pipeline.pp_rank {
            self.inbox.put(cut, parcel);
        } else if self.has_messages {
            self.outbox.insert(cut, parcel);
        } else {
            self.line.send(cut, parcel, to)?;
        }
        Ok(())
    }

    /// Sends what a stage made.
    fn send_made(&mut self, action: Action) -> Result<(), TrainError> {
        let Action { stage, microbatch, kind, .. } = action;
        let cut = Cut { is_grad: kind == Kind::SendGrad, stage, microbatch };
        let to = cut.destination().and_then(|stage| self.pipeline.plan.schedule.rank_of(stage, microbatch));
        if let (Some(parcel), Some(to)) = (self.outbox.remove(&cut), to) {
            self.line.send(cut, parcel, to as usize)?;
        }
        Ok(())
    }

    fn stage(&self, stage: u32) -> &'a Stage {
        self.pipeline.stage(stage as usize)
    }

    /// F: the forward of a stage.
    fn forward(&mut self, index: u32, microbatch: u32) -> Result<(), TrainError> {
        let parcel = self.input(index, microbatch).map(|cut| self.take(cut)).transpose()?;
        let (stream, mut stats) = parcel.map_or((None, Vec::new()), |parcel| (Some(parcel.stream), parcel.stats));
        let start = Instant::now();
        let (stage, StageView { ctx, weights, ranks }) = (self.stage(index), self.view);
        let StepBatch { batch, options } = &self.microbatches[microbatch as usize];
        let forward = stage.forward(ctx, weights, &batch.tokens(), options, stream)?;
        let own = stage.merged_stats(&forward.saved);
        let (num_before, num_own) = (stats.len(), own.len());
        stats.extend(own);
        ranks.meter().record("F", start);
        let stats = match forward.stream {
            None => stats,
            Some(stream) => {
                self.hand_on(Cut { is_grad: false, stage: index, microbatch }, Parcel { stream, stats })?;
                Vec::new()
            }
        };
        self.kept.insert((index, microbatch), Kept { saved: forward.saved, num_before, num_own, stats });
        self.count();
        Ok(())
    }

    /// B, or with the gradients of weights at once BW.
    fn backward(&mut self, index: u32, microbatch: u32, when: WeightGrads) -> Result<(), TrainError> {
        let kept = self.kept.remove(&(index, microbatch)).expect("a checked schedule has F before B");
        let Kept { saved, num_before, num_own, stats } = kept;
        let stage = self.stage(index);
        let (stream, stats) = if stage.part().has_head {
            (None, stats)
        } else {
            let parcel = self.take(self.output_grad(index, microbatch))?;
            (Some(parcel.stream), parcel.stats)
        };
        let start = Instant::now();
        let StageView { ctx, weights, ranks } = self.view;
        let StepBatch { batch, options } = &self.microbatches[microbatch as usize];
        let losses = stage.losses_on_routers(&batch.tokens(), &stats, options);
        let loss_grads = losses.grads.into_iter().skip(num_before).take(num_own).collect();
        let output = StageOutputGrads { stream, loss_grads };
        let target = GradTarget::new(Write::Add, &mut *self.grads);
        let back = stage.backward(ctx, weights, saved, output, target, when)?;
        ranks.meter().record(if when == WeightGrads::Later { "B" } else { "BW" }, start);
        if let Some(loss) = back.loss {
            let stats = stage.pass_stats(loss, losses.values, stats.clone());
            self.stats.push(MicrobatchStats { microbatch, stats });
        }
        if when == WeightGrads::Later {
            self.tasks.insert((index, microbatch), back.tasks);
            self.count();
        }
        self.hand_back(back.stream, Cut { is_grad: true, stage: index, microbatch }, stats)
    }

    /// Hands the gradient of a stage's input to the stage before, if there is one.
    fn hand_back(
        &mut self,
        stream: Option<ResidualStream>,
        cut: Cut,
        stats: Vec<LayerStats>,
    ) -> Result<(), TrainError> {
        stream.map_or(Ok(()), |stream| self.hand_on(cut, Parcel { stream, stats }))
    }

    /// W: the gradients of a stage's weights that B left.
    fn weight_grad(&mut self, index: u32, microbatch: u32) {
        let tasks = self.tasks.remove(&(index, microbatch)).expect("a checked schedule has B before W");
        let start = Instant::now();
        tasks.run(self.view.ctx, self.grads);
        self.view.ranks.meter().record("W", start);
    }

    /// Notes what is held.
    fn count(&mut self) {
        let (activations, weight_grads) = (self.kept.len(), self.tasks.len());
        self.peaks.activations = self.peaks.activations.max(activations);
        self.peaks.weight_grads = self.peaks.weight_grads.max(weight_grads);
        self.peaks.held = self.peaks.held.max(activations + weight_grads);
    }
}
