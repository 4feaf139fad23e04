//! A stage that lies on several ranks, or whose neighbours do: statistics and losses of all of them, and texts that
//! grow.

use std::ops::Range;

use moeworks_moe::{LayerStats, LossGrad};
use moeworks_ops::head_loss::HeadLoss;
use moeworks_ops::{Context, elementwise};
use moeworks_tensor::{DType, Tensor};

use super::embed_and_head::Ids;
use super::{Stage, StageSaved};
use crate::expert_parallel::{IdlePass, NO_LOSS};
use crate::gather::after;
use crate::kv_cache::KvCache;
use crate::layers::layer::ResidualStream;
use crate::layers::{RouterRules, Sequences};
use crate::losses::{LossValues, RouterLoss, router_losses};
use crate::mode::Mode;
use crate::pass::{BatchError, PassOptions, PassStats, TokenBatch};
use crate::tensor_ranks::TensorRanks;
use crate::weights::DecoderWeights;

/// The next tokens of a text.
#[derive(Clone, Copy, Debug)]
pub struct TextPart<'a> {
    /// The tokens.
    pub ids: &'a [u32],
    /// The number of tokens before them, which the stage has been given before.
    pub start: usize,
}

impl Stage {
    /// The tokens of `batch` that this rank takes through layers with experts, of whose routers it knows: all of
    /// them, but where others make the same pass; whole sequences where losses on routers look at these.
    #[must_use]
    pub fn routed_tokens(&self, batch: &TokenBatch<'_>, are_whole: bool) -> Range<usize> {
        let TokenBatch { num_sequences, seq_len, .. } = *batch;
        let split = self.tensor.as_ref().map(TensorRanks::split);
        split.map_or(0..num_sequences * seq_len, |split| split.run_of(split.rank(), num_sequences, seq_len, are_whole))
    }

    /// Makes of the statistics of these sequences those of all ranks' sequences.
    pub(crate) fn merge_stats(&self, layers: &mut [LayerStats]) {
        if let Some(ranks) = &self.ranks {
            ranks.merge_stats(layers);
        }
    }

    /// Gives the `num_tokens` tokens of a pass their share of what means over all ranks' tokens say.
    pub(crate) fn take_share(&self, num_tokens: usize, layers: &[LayerStats], grads: &mut [LossGrad]) {
        if self.ranks.is_some() {
            for (grad, stats) in grads.iter_mut().zip(layers) {
                grad.scale_to_share(num_tokens as f32 / stats.num_tokens.max(1) as f32);
            }
        }
    }

    /// The statistics of the stage's MoE layers over the sequences of all its ranks, which call this together.
    /// Nothing is communicated by a stage without MoE layers.
    #[must_use]
    pub fn merged_stats(&self, saved: &StageSaved<'_>) -> Vec<LayerStats> {
        let mut layers = saved.stats().to_vec();
        if !layers.is_empty() {
            self.merge_stats(&mut layers);
        }
        layers
    }

    /// The losses on the routers of the whole model for `batch`, from the merged statistics of all its MoE layers,
    /// first to last; the gradients are those of this rank's tokens.
    #[must_use]
    pub fn losses_on_routers(
        &self,
        batch: &TokenBatch<'_>,
        layers: &[LayerStats],
        options: &PassOptions,
    ) -> RouterLoss {
        let mut losses = router_losses(&self.config, layers, options);
        let num_tokens = self.routed_tokens(batch, options.sequence_coef != 0.0).len();
        self.take_share(num_tokens, layers, &mut losses.grads);
        losses
    }

    /// The account of a pass over the sequences of all ranks of the stage, which call this together, each with its
    /// `loss`.
    #[must_use]
    pub fn pass_stats(&self, loss: HeadLoss, router: LossValues, layers: Vec<LayerStats>) -> PassStats {
        // Ranks that make the same pass have found the same.
        let is_counted = self.tensor.as_ref().is_none_or(|ranks| ranks.split().rank() == 0);
        let loss = if is_counted { loss } else { NO_LOSS };
        let mut sums = [loss.loss_sum, loss.num_targets as f64, loss.num_correct as f64];
        if let Some(ranks) = &self.ranks {
            ranks.sum(&mut sums);
        }
        let [loss_sum, num_targets, num_correct] = sums;
        let (num_targets, num_correct) = (num_targets as usize, num_correct as usize);
        let LossValues { balance: balance_loss, z: z_loss, others: router_losses } = router;
        PassStats { loss_sum, num_targets, num_correct, balance_loss, z_loss, router_losses, layers }
    }

    /// The part of a rank without tokens in a pass of inference that other ranks of the stage make: the experts
    /// here serve their rows.
    pub fn serve(&self, ctx: &Context, weights: &DecoderWeights) {
        let mut idle = IdlePass::inference(self);
        for index in self.part.layers.clone() {
            idle.forward(ctx, index, &self.whole_layer(ctx, weights, index, after(index, self.part.layers.end)));
        }
    }

    /// Takes the next tokens of a text through the stage, whose layers' keys and values are in `cache`. A stage
    /// without embedding takes the stream `from` the stage before.
    ///
    /// Fails if the tokens are not those of the model, or a stream is missing or not wanted.
    pub fn extend(
        &self,
        ctx: &Context,
        weights: &DecoderWeights,
        cache: &mut KvCache,
        text: TextPart<'_>,
        from: Option<ResidualStream>,
    ) -> Result<ResidualStream, BatchError> {
        self.check_stream(from.is_none(), self.part.has_embedding)?;
        self.check_ids("prompt", text.ids)?;
        let sequences = Sequences { count: 1, len: text.ids.len(), start: text.start };
        self.check_len(sequences.end())?;
        let rules = RouterRules::plain(text.ids, &sequences);
        let pass = self.pass(ctx, weights, Mode::Infer, sequences, rules, None);
        let stream = self.entry(&pass, weights, Ids::Known(text.ids), from);
        Ok(self.forward_layers(&pass, weights, stream, Some(cache.layers_mut()), None))
    }

    /// The logits `[V]` f32 behind the last token of `stream`. The stage has the output projection.
    #[must_use]
    pub fn last_logits(&self, ctx: &Context, weights: &DecoderWeights, stream: &ResidualStream) -> Tensor {
        let mut last = ctx.empty(&[1, self.config.width], DType::F32);
        elementwise::copy_rows(ctx, &stream.x, stream.x.rows() - 1, &mut last, 0, 1);
        self.head_logits(ctx, weights, &last).reshaped(&[self.config.vocab_size])
    }
}
