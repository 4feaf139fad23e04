//! A step of a pipeline on one rank: carries out the rank's actions, one after the other.

use std::collections::HashMap;
use std::time::Instant;

use moeworks_model::{WeightGradTasks, WeightGrads};
use moeworks_plan::schedule::{Action, Kind, Peaks};

use super::figures::MicrobatchStats;
use super::grads::StepGrads;
use super::messages::{Cut, Inbox, Line, Parcel, Work};
use super::work::{BackwardResult, BackwardWork, ForwardResult, ForwardWork, Kept, StageBatch};
use super::{Pipeline, StageView, StepBatch};
use crate::error::TrainError;

/// A stage, and a microbatch that goes through it.
type Place = (u32, u32);

/// A step on one rank while it goes on.
pub(super) struct Execution<'a> {
    pipeline: &'a Pipeline,
    view: StageView<'a>,
    microbatches: &'a [StepBatch],
    grads: StepGrads<'a>,
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
        mut grads: StepGrads<'a>,
    ) -> Self {
        grads.clear(view);
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
        self.go_on_with_messages()?;
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

    /// Lets messages go on: gives the memory of sent ones back, and takes what has come.
    fn go_on_with_messages(&mut self) -> Result<(), TrainError> {
        self.line.forget_arrived()?;
        Ok(self.inbox.progress(&self.line)?)
    }

    /// Waits until everything that was sent has arrived, and ends the sums of gradients. Returns the account of the
    /// microbatches whose loss was found here, and the most that was held.
    pub(super) fn finish(mut self) -> Result<(Vec<MicrobatchStats>, Peaks), TrainError> {
        self.line.finish()?;
        self.grads.end_step(self.view);
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

    /// The stage with number `index` and a microbatch of it.
    fn stage_batch(&self, index: u32, microbatch: u32) -> StageBatch<'a> {
        let (stage, batch) = (self.pipeline.stage(index as usize), &self.microbatches[microbatch as usize]);
        StageBatch { index, microbatch, stage, batch }
    }

    /// F: the forward of a stage.
    fn forward(&mut self, index: u32, microbatch: u32) -> Result<(), TrainError> {
        let work = self.begin_forward(index, microbatch)?;
        let (of, start) = (work.of, Instant::now());
        let result = work.run(self.view)?;
        self.view.ranks.meter().record("F", start);
        self.end_forward(of, result)?;
        self.count(0);
        Ok(())
    }

    /// B, or with the gradients of weights at once BW.
    fn backward(&mut self, index: u32, microbatch: u32, when: WeightGrads) -> Result<(), TrainError> {
        let work = self.begin_backward(index, microbatch, when)?;
        let start = Instant::now();
        let result = work.run(self.view, &mut self.grads)?;
        self.view.ranks.meter().record(if when == WeightGrads::Later { "B" } else { "BW" }, start);
        self.end_backward(result)
    }

    /// Carries out a pair: a forward and a backward that take turns, so that the all-to-alls of one travel while the
    /// other computes. Without all-to-alls they are computed one after the other.
    pub(super) fn carry_out_pair(&mut self, forward: Action, backward: Action) -> Result<(), TrainError> {
        if !self.pipeline.overlaps_pairs || self.view.ranks.stage_group().size() == 1 {
            self.carry_out(forward)?;
            return self.carry_out(backward);
        }
        self.go_on_with_messages()?;
        let when = if backward.kind == Kind::Backward { WeightGrads::AtOnce } else { WeightGrads::Later };
        let forward = self.begin_forward(forward.stage, forward.microbatch)?;
        let backward = self.begin_backward(backward.stage, backward.microbatch, when)?;
        let (of, view, grads, start) = (forward.of, self.view, &mut self.grads, Instant::now());
        let (back, front) = view.ranks.experts().take_turns(|| backward.run(view, grads), || forward.run(view));
        let (front, back) = (front?, back?);
        view.ranks.meter().record(if when == WeightGrads::Later { "F&B" } else { "F&BW" }, start);
        self.end_forward(of, front)?;
        // The activations that B has consumed were there while F made its own.
        self.count(1);
        self.end_backward(back)
    }

    /// Takes the input of a forward, which may have to come from another rank.
    fn begin_forward(&mut self, index: u32, microbatch: u32) -> Result<ForwardWork<'a>, TrainError> {
        let parcel = self.input(index, microbatch).map(|cut| self.take(cut)).transpose()?;
        let (stream, stats) = parcel.map_or((None, Vec::new()), |parcel| (Some(parcel.stream), parcel.stats));
        Ok(ForwardWork { of: self.stage_batch(index, microbatch), stream, stats })
    }

    /// Hands the output of a forward on, and keeps what its backward needs.
    fn end_forward(&mut self, of: StageBatch<'a>, result: ForwardResult<'a>) -> Result<(), TrainError> {
        let StageBatch { index: stage, microbatch, .. } = of;
        if let Some((stream, stats)) = result.output {
            self.hand_on(Cut { is_grad: false, stage, microbatch }, Parcel { stream, stats })?;
        }
        self.kept.insert((stage, microbatch), result.kept);
        Ok(())
    }

    /// Takes the input of a backward, which may have to come from another rank.
    fn begin_backward(
        &mut self,
        index: u32,
        microbatch: u32,
        when: WeightGrads,
    ) -> Result<BackwardWork<'a>, TrainError> {
        let of = self.stage_batch(index, microbatch);
        let mut kept = self.kept.remove(&(index, microbatch)).expect("a checked schedule has F before B");
        let (stream, stats) = if of.stage.part().has_head {
            (None, std::mem::take(&mut kept.stats))
        } else {
            let parcel = self.take(self.output_grad(index, microbatch))?;
            (Some(parcel.stream), parcel.stats)
        };
        Ok(BackwardWork { of, kept, stream, stats, when })
    }

    /// Hands the gradient of a stage's input to the stage before, if there is one, and keeps the tasks for W.
    fn end_backward(&mut self, mut result: BackwardResult<'a>) -> Result<(), TrainError> {
        let StageBatch { index: stage, microbatch, .. } = result.of;
        if let Some(stats) = result.take_account() {
            self.stats.push(MicrobatchStats { microbatch, stats });
        }
        let BackwardResult { when, stats, back, .. } = result;
        if when == WeightGrads::Later {
            self.tasks.insert((stage, microbatch), back.tasks);
            self.count(0);
        }
        match back.stream {
            Some(stream) => self.hand_on(Cut { is_grad: true, stage, microbatch }, Parcel { stream, stats }),
            None => Ok(()),
        }
    }

    /// W: the gradients of a stage's weights that B left.
    fn weight_grad(&mut self, index: u32, microbatch: u32) {
        let tasks = self.tasks.remove(&(index, microbatch)).expect("a checked schedule has B before W");
        let start = Instant::now();
        self.grads.run_tasks(self.view, tasks);
        self.view.ranks.meter().record("W", start);
    }

    /// Notes what is held: what is kept, and activations that are `in_use`.
    fn count(&mut self, in_use: usize) {
        let (activations, weight_grads) = (self.kept.len() + in_use, self.tasks.len());
        self.peaks.activations = self.peaks.activations.max(activations);
        self.peaks.weight_grads = self.peaks.weight_grads.max(weight_grads);
        self.peaks.held = self.peaks.held.max(activations + weight_grads);
    }
}
