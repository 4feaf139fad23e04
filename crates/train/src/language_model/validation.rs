//! The validation loss, and the routing of validation tokens.

use std::collections::BTreeMap;

use moeworks_infer::generation::ModelRef;
use moeworks_model::{DecoderWeights, Mode, TokenBatch};

use super::{LanguageModel, own_share};
use crate::error::TrainError;
use crate::metrics::{LayerRecord, Record};
use crate::parallel::Ranks;
use crate::routing::{RoutingSample, specialization};
use crate::task::ModelView;

/// The most tokens of each layer on which specialisation is measured.
pub(super) const SPECIALIZATION_TOKENS: usize = 1 << 16;
/// The most tokens whose experts are compared between checkpoints; a single longer sequence is kept whole.
const SAMPLE_TOKENS: usize = 1 << 12;

impl LanguageModel {
    /// Computes the mean loss on the validation windows; `None` without any. Writes the specialisation of each layer
    /// to `layers`.
    pub(super) fn validate(
        &self,
        model: &ModelView<'_, DecoderWeights>,
        layers: &mut [LayerRecord],
    ) -> Result<Option<f64>, TrainError> {
        let num_encoder_layers = self.config.model.num_encoder_layers();
        if self.pipeline.is_some() {
            return self.validate_in_stages(model, layers);
        }
        let (mut loss, mut targets) = (0.0, 0);
        let mut first_choices: BTreeMap<usize, Vec<(u32, u32)>> = BTreeMap::new();
        for batch in self.dataset.validation_batches(self.config.train.eval_batches) {
            let batch = own_share(model.ranks, batch, &mut 0);
            let tokens = batch.tokens();
            let routed = &batch.inputs[self.decoder.routed_tokens(&tokens, false)];
            let stats = self.decoder.evaluate(
                model.ctx,
                model.params,
                &tokens,
                Some(&mut |layer, saved| {
                    let pairs = first_choices.entry(layer).or_default();
                    let room = SPECIALIZATION_TOKENS - pairs.len();
                    let first = |(t, &id): (usize, &u32)| Some((id, saved.routing().choices(t).next()?.0));
                    let routed = if layer < num_encoder_layers { &batch.sources } else { routed };
                    pairs.extend(routed.iter().enumerate().filter_map(first).take(room));
                }),
            )?;
            model.ranks.map_or(Ok(()), Ranks::check)?;
            loss += stats.loss_sum;
            targets += stats.num_targets;
        }
        specialize(model.ranks, first_choices, layers)?;
        Ok((targets > 0).then(|| loss / targets as f64))
    }

    /// Routes the sample of validation tokens, records in `record` its agreement with the previous planned
    /// checkpoint, and keeps it for the next one.
    pub(super) fn compare_routing(
        &mut self,
        model: &ModelView<'_, DecoderWeights>,
        record: &mut Record,
    ) -> Result<(), TrainError> {
        let sample = self.sample_routing(model)?;
        if let (Some(now), Some(before)) = (&sample, &self.routing) {
            for layer in &mut record.layers {
                layer.checkpoint_agreement = now.agreement(layer.layer, before);
            }
        }
        self.routing = sample;
        Ok(())
    }

    /// Collects the routers' choices for the first validation sequences, on all ranks. `None` for a dense model, a
    /// model with an encoder, and without validation data.
    fn sample_routing(&self, view: &ModelView<'_, DecoderWeights>) -> Result<Option<RoutingSample>, TrainError> {
        if self.config.model.variant.encoder.is_some() {
            return Ok(None);
        }
        let Some(mut batch) = self.dataset.validation_batches(1).next() else { return Ok(None) };
        batch.num_sequences = batch.num_sequences.min((SAMPLE_TOKENS / batch.seq_len).max(1));
        batch.inputs.truncate(batch.num_sequences * batch.seq_len);
        let mut sample = RoutingSample::new(batch.inputs.clone());
        let ModelRef { ctx, decoder, weights } = self.model(view);
        if self.pipeline.is_some() {
            self.route_in_stages(view, &batch, &mut sample)?;
        } else if view.ranks.is_none_or(Ranks::passes_with_root) {
            let tokens = TokenBatch::without_targets(&batch.inputs, batch.num_sequences);
            let mode = Mode::Infer;
            decoder.route(ctx, weights, &tokens, mode, &mut |layer, saved| sample.add(layer, saved.routing()))?;
        } else {
            decoder.serve_inference(ctx, weights);
        }
        if let Some(ranks) = view.ranks {
            ranks.check()?;
            let layers = self.config.model.moe_layers().into_iter().map(|(_, layer)| layer);
            sample = sample.joined(layers, |own| ranks.all_values(own))?;
        }
        Ok((!sample.is_empty()).then_some(sample))
    }
}

/// Writes the specialisation of `layers` from the first choices of this rank's tokens, a token and an expert each,
/// and those of all others.
pub(super) fn specialize(
    ranks: Option<&Ranks>,
    mut first_choices: BTreeMap<usize, Vec<(u32, u32)>>,
    layers: &mut [LayerRecord],
) -> Result<(), TrainError> {
    for layer in layers {
        let pairs = all_pairs(ranks, first_choices.remove(&layer.layer).unwrap_or_default())?;
        layer.specialization = specialization(pairs);
    }
    Ok(())
}

/// Gathers the pairs of all ranks.
fn all_pairs(ranks: Option<&Ranks>, pairs: Vec<(u32, u32)>) -> Result<Vec<(u32, u32)>, TrainError> {
    let Some(ranks) = ranks else { return Ok(pairs) };
    let flat: Vec<u32> = pairs.into_iter().flat_map(|(token, expert)| [token, expert]).collect();
    Ok(ranks.all_values(&flat)?.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect())
}
