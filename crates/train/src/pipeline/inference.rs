//! Passes through the stages that keep nothing: evaluation, routing, and texts that the model writes. They go
//! through the first copy of the weights, one batch after the other, so that a stage group computes one batch while
//! the next has another.

use moeworks_infer::data::Batch;
use moeworks_model::{KvCache, Mode, ResidualStream, RoutingHook, Stage, TextPart, TokenBatch};
use moeworks_ops::head_loss::HeadLoss;
use moeworks_tensor::{DType, Tensor};

use super::messages::{Cut, Line, Parcel};
use super::{Pipeline, StageView};
use crate::error::TrainError;

/// The tag of logits on their way to the root.
const LOGITS_TAG: u32 = 3;

/// A text in the making.
pub(crate) struct PipelinedText {
    cache: KvCache,
    len: usize,
}

impl Pipeline {
    /// The configuration of the model.
    pub(super) fn config(&self) -> &moeworks_model::ModelConfig {
        self.stages.iter().flatten().next().expect("a rank of a pipeline has a stage").config()
    }

    /// The pp index of the ranks that have stage `index` of the first copy of the weights.
    fn pp_rank_of(&self, index: usize) -> usize {
        self.plan.schedule.copies[0].stage_ranks[index] as usize
    }

    /// Takes a stream through the stages: `work` through each of this rank's stages. Returns what comes out of the
    /// last, where it is here.
    fn through(
        &self,
        line: &mut Line<'_>,
        mut work: impl FnMut(&Stage, Option<ResidualStream>) -> Result<ResidualStream, TrainError>,
    ) -> Result<Option<ResidualStream>, TrainError> {
        let mut stream = None;
        for index in 0..self.num_stages() {
            if self.pp_rank_of(index) != self.pp_rank {
                continue;
            }
            let cut = |stage: usize| Cut { is_grad: false, stage: stage as u32, microbatch: 0 };
            let before = index.checked_sub(1).filter(|&before| self.pp_rank_of(before) != self.pp_rank);
            if let Some(before) = before {
                stream = Some(line.receive(cut(before), self.pp_rank_of(before))?.stream);
            }
            let behind = work(self.stage(index), stream.take())?;
            match self.plan.parts.get(index + 1).map(|_| self.pp_rank_of(index + 1)) {
                Some(to) if to != self.pp_rank => {
                    line.send(cut(index), Parcel { stream: behind, stats: Vec::new() }, to)?;
                }
                _ => stream = Some(behind),
            }
        }
        Ok(stream)
    }

    fn line<'v>(view: &StageView<'v>) -> Line<'v> {
        Line::new(view.ctx, view.ranks.pipeline_group().unwrap_or(view.ranks.stage_group()))
    }

    /// The losses of this rank's sequences in each of `batches`, where the last stage is here; `hook` sees what the
    /// MoE layers of this rank's stages decided. All ranks call this.
    pub(crate) fn evaluate(
        &self,
        view: StageView<'_>,
        batches: impl Iterator<Item = Batch>,
        hook: &mut dyn FnMut(&Batch, usize, &moeworks_moe::MoeSaved),
    ) -> Result<Vec<HeadLoss>, TrainError> {
        let gathered = self.gathered_ends(view);
        let view = view.with_weights(gathered.as_ref());
        let StageView { ctx, weights, ranks } = view;
        let (mut line, mut losses) = (Self::line(&view), Vec::new());
        for batch in batches {
            if batch.num_sequences == 0 {
                self.serve_stages(view);
                continue;
            }
            let stream = self.through(&mut line, |stage, stream| {
                let mut watch = |layer: usize, saved: &moeworks_moe::MoeSaved| hook(&batch, layer, saved);
                Ok(stage.observe(ctx, weights, &batch.tokens(), Mode::Infer, stream, Some(&mut watch))?)
            })?;
            line.forget_arrived()?;
            if let Some(stream) = stream {
                losses.push(self.stage(self.num_stages() - 1).loss(ctx, weights, &stream, &batch.targets));
            }
            ranks.check()?;
        }
        line.finish()?;
        Ok(losses)
    }

    /// Shows `hook` what each MoE layer of this rank's stages decides for the inputs of `batch`, by the rules of use.
    pub(crate) fn route(
        &self,
        view: StageView<'_>,
        batch: &TokenBatch<'_>,
        hook: RoutingHook<'_>,
    ) -> Result<(), TrainError> {
        let gathered = self.gathered_ends(view);
        let view = view.with_weights(gathered.as_ref());
        let mut line = Self::line(&view);
        self.through(&mut line, |stage, stream| {
            Ok(stage.observe(view.ctx, view.weights, batch, Mode::Infer, stream, Some(&mut *hook))?)
        })?;
        Ok(line.finish()?)
    }

    /// The part of a rank without tokens in such a pass: its experts serve the rows of others.
    pub(crate) fn serve(&self, view: StageView<'_>) {
        let gathered = self.gathered_ends(view);
        self.serve_stages(view.with_weights(gathered.as_ref()));
    }

    fn serve_stages(&self, view: StageView<'_>) {
        for index in (0..self.num_stages()).filter(|&index| self.pp_rank_of(index) == self.pp_rank) {
            self.stage(index).serve(view.ctx, view.weights);
        }
    }

    /// A text without tokens.
    pub(crate) fn begin_text(&self) -> PipelinedText {
        PipelinedText { cache: KvCache::new(self.config()), len: 0 }
    }

    /// Appends `ids` to a text, together with the other ranks that pass the root's tokens. Returns the logits after
    /// them in the root's stage group.
    pub(crate) fn extend(
        &self,
        view: StageView<'_>,
        text: &mut PipelinedText,
        ids: &[u32],
    ) -> Result<Option<Tensor>, TrainError> {
        let gathered = self.gathered_ends(view);
        let StageView { ctx, weights, ranks } = view.with_weights(gathered.as_ref());
        let (mut line, part) = (Self::line(&view), TextPart { ids, start: text.len });
        text.len += ids.len();
        let stream =
            self.through(&mut line, |stage, stream| Ok(stage.extend(ctx, weights, &mut text.cache, part, stream)?))?;
        let last = self.num_stages() - 1;
        let logits = stream.map(|stream| self.stage(last).last_logits(ctx, weights, &stream));
        line.finish()?;
        let comm = ranks.pipeline_group().unwrap_or(ranks.stage_group());
        match (logits, self.pp_rank, self.pp_rank_of(last)) {
            (Some(logits), 0, _) => Ok(Some(logits)),
            (Some(logits), ..) => {
                comm.send(logits.f32s(), 0, LOGITS_TAG)?;
                Ok(None)
            }
            (None, 0, from) => {
                let mut logits = ctx.empty(&[self.config().vocab_size], DType::F32);
                comm.receive(logits.f32s_mut(), from, LOGITS_TAG)?;
                Ok(Some(logits))
            }
            (None, ..) => Ok(None),
        }
    }
}
