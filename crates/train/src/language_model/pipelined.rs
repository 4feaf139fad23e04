//! The language model over the stages of a pipeline: a training step, validation, and what its routers choose.

use std::collections::BTreeMap;
use std::time::Instant;

use moeworks_comm::Reduce;
use moeworks_infer::data::Batch;
use moeworks_model::{DecoderWeights, TokenBatch};
use moeworks_moe::MoeSaved;

use super::validation::{SPECIALIZATION_TOKENS, specialize};
use super::{LanguageModel, options, own_share};
use crate::error::TrainError;
use crate::metrics::LayerRecord;
use crate::pipeline::{Pipeline, StageView, StepBatch};
use crate::routing::RoutingSample;
use crate::task::{Microbatch, ModelView, PassFigures, StepGradients};

impl LanguageModel {
    /// This rank's place in a pipeline with the model as its stages see it, if there is a pipeline.
    fn in_stages<'a>(&'a self, model: &ModelView<'a, DecoderWeights>) -> Option<(&'a Pipeline, StageView<'a>)> {
        let ModelView { ctx, ranks, params: weights } = *model;
        Some((self.pipeline.as_ref()?, StageView { ctx, ranks: ranks?, weights }))
    }

    /// The figures and gradients of all microbatches of a step; none without a pipeline.
    pub(super) fn pipelined_step(
        &self,
        model: &ModelView<'_, DecoderWeights>,
        first: Microbatch,
        gradients: StepGradients<'_, DecoderWeights>,
    ) -> Result<Option<PassFigures>, TrainError> {
        let Some((pipeline, view)) = self.in_stages(model) else { return Ok(None) };
        let start = Instant::now();
        let microbatch = |index: usize| {
            let place = Microbatch { index, ..first };
            let mut options = options::pass_options(&self.config, self.dataset.targets_of_step(place.step), place);
            let sequences = self.dataset.train_batch(place.step, index);
            let batch = own_share(model.ranks, sequences, &mut options.first_token);
            StepBatch { batch, options }
        };
        let microbatches: Vec<StepBatch> = (0..first.num).map(microbatch).collect();
        view.ranks.meter().record("data", start);
        let StepGradients { grads, sums } = gradients;
        let outcome = pipeline.step(view, &microbatches, grads, sums)?;
        let figures = outcome.stats.into_iter().map(PassFigures::from);
        let total = figures.reduce(|mut total, figures| {
            total.add(&figures);
            total
        });
        Ok(Some(total.unwrap_or_default()))
    }

    /// Mean loss on the validation windows, as without pipeline.
    pub(super) fn validate_in_stages(
        &self,
        model: &ModelView<'_, DecoderWeights>,
        layers: &mut [LayerRecord],
    ) -> Result<Option<f64>, TrainError> {
        let Some((pipeline, view)) = self.in_stages(model) else { return Ok(None) };
        let mut first_choices: BTreeMap<usize, Vec<(u32, u32)>> = BTreeMap::new();
        let mut watch = |batch: &Batch, layer: usize, saved: &MoeSaved| {
            let routed = &batch.inputs[self.decoder.routed_tokens(&batch.tokens(), false)];
            let pairs = first_choices.entry(layer).or_default();
            let room = SPECIALIZATION_TOKENS - pairs.len();
            let first = |(t, &id): (usize, &u32)| Some((id, saved.routing().choices(t).next()?.0));
            pairs.extend(routed.iter().enumerate().filter_map(first).take(room));
        };
        let batches = self.dataset.validation_batches(self.config.train.eval_batches);
        let own = batches.map(|batch| own_share(model.ranks, batch, &mut 0));
        let losses = pipeline.evaluate(view, own, &mut watch)?;
        // Of ranks that pass the same sequences one counts.
        let is_counted = view.ranks.layout().place(view.ranks.rank()).2 == 0;
        let mut sums = [0.0, 0.0];
        for loss in losses.iter().filter(|_| is_counted) {
            sums = [sums[0] + loss.loss_sum, sums[1] + loss.num_targets as f64];
        }
        view.ranks.world().all_reduce(&mut sums, Reduce::Sum)?;
        specialize(model.ranks, first_choices, layers)?;
        let [loss, targets] = sums;
        Ok((targets > 0.0).then(|| loss / targets))
    }

    /// Adds to `sample` what the routers of this rank's stages choose for its tokens. All ranks call this.
    pub(super) fn route_in_stages(
        &self,
        model: &ModelView<'_, DecoderWeights>,
        batch: &Batch,
        sample: &mut RoutingSample,
    ) -> Result<(), TrainError> {
        let Some((pipeline, view)) = self.in_stages(model) else { return Ok(()) };
        if !view.ranks.passes_with_root() {
            pipeline.serve(view);
            return Ok(());
        }
        let tokens = TokenBatch::without_targets(&batch.inputs, batch.num_sequences);
        pipeline.route(view, &tokens, &mut |layer, saved| sample.add(layer, saved.routing()))
    }
}
