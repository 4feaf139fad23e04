//! A decoder whose experts live on several ranks: each rank passes sequences of its own, and accounts are of all of them.

use std::ops::Range;

use moeworks_moe::{ConfigError, ExpertRanks, LayerStats, LossGrad, MoeLayer, MoeSaved, RouterInput, WgradTarget};
use moeworks_ops::Context;
use moeworks_ops::head_loss::HeadLoss;
use moeworks_ops::linear::Write;
use moeworks_tensor::{DType, Tensor};

use crate::config::ModelConfig;
use crate::decoder::{Decoder, LayerDone};
use crate::gather::after;
use crate::layers::feed_forward::FeedForwardBlock;
use crate::losses::{LossValues, router_losses};
use crate::pass::{PassOptions, PassStats, TokenBatch};
use crate::tensor_ranks::TensorRanks;
use crate::weights::{DecoderWeights, FeedForwardWeights, WeightTable};

/// The loss of no token.
const NO_LOSS: HeadLoss = HeadLoss { loss_sum: 0.0, num_targets: 0, num_correct: 0 };

/// A layer that was passed without tokens.
struct Idle<'a> {
    layer: &'a MoeLayer,
    x: Tensor,
    saved: MoeSaved,
}

impl Decoder {
    /// A decoder whose experts live on the ranks of `ranks`. Of the experts, weights are those that are held here.
    ///
    /// All ranks that have tokens make the same passes, each over sequences of its own, or none. Statistics and losses are those of
    /// all sequences; gradients are what this rank's sequences, and rows of others in the experts here, give. After each pass
    /// [`ExpertRanks::failure`] says whether it counts.
    pub fn over_ranks(config: ModelConfig, table: WeightTable, ranks: ExpertRanks) -> Result<Self, ConfigError> {
        Self::build(config, table, Some(ranks), None)
    }

    /// As [`over_ranks`](Self::over_ranks) where the ranks of `ranks` hold the matrices of the other layers between them, too, and make
    /// the same passes over the same sequences. Weights are those that [`TensorSplit::part`](crate::TensorSplit::part) leaves.
    pub fn over_tensor_ranks(config: ModelConfig, table: WeightTable, ranks: TensorRanks) -> Result<Self, ConfigError> {
        Self::build(config, table, Some(ranks.experts().clone()), Some(ranks))
    }

    /// The tokens of `batch` that this rank takes through layers with experts, of whose routers it knows: all of them, but where
    /// others make the same pass; whole sequences where losses on routers look at these.
    #[must_use]
    pub fn routed_tokens(&self, batch: &TokenBatch<'_>, are_whole: bool) -> Range<usize> {
        let TokenBatch { num_sequences, seq_len, .. } = *batch;
        let split = self.tensor.as_ref().map(TensorRanks::split);
        split
            .map_or(0..num_sequences * seq_len, |split| split.run_of(split.rank(), (num_sequences, seq_len), are_whole))
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
                grad.of_share(num_tokens as f32 / stats.num_tokens.max(1) as f32);
            }
        }
    }

    /// The training pass of a rank without sequences: the experts here serve the rows of others, and that is all that they
    /// learn from.
    pub(crate) fn serve_training(
        &self,
        ctx: &Context,
        weights: &DecoderWeights,
        options: &PassOptions,
        (write, done): (Write, LayerDone<'_>),
        grads: &mut DecoderWeights,
    ) -> PassStats {
        if write == Write::Replace {
            grads.tensors_mut().into_iter().for_each(|(_, tensor)| tensor.f32s_mut().fill(0.0));
        }
        let input = RouterInput { has_gshard_loss: options.has_gshard_loss(), ..RouterInput::default() };
        let gathered = self.gathered(ctx, weights);
        let weights = gathered.as_ref().unwrap_or(weights);
        let mut saved = self.serve(ctx, weights, &input);
        let mut layers: Vec<LayerStats> = saved.iter().flatten().map(|idle| idle.saved.stats()).collect();
        self.merge_stats(&mut layers);
        let (losses, mut loss_grads) = router_losses(&layers, (&self.config().router, self.config().top_k), options);
        self.take_share(0, &layers, &mut loss_grads);
        for (index, idle) in saved.iter_mut().enumerate().rev() {
            let w = self.layer(ctx, weights, (index, index.checked_sub(1)));
            if let (Some(idle), FeedForwardWeights::Moe(w), FeedForwardWeights::Moe(moe_grads)) =
                (idle, &w.feed_forward, &mut grads.layers[index].feed_forward)
            {
                if options.checkpoint_layers {
                    // The others compute the layer again, and its rows come again.
                    idle.saved = idle.layer.forward(ctx, w, &idle.x, &input).1;
                }
                let dy = ctx.zeros(&[0, self.config().width], DType::F32);
                let loss_grad = loss_grads.pop().unwrap_or_default();
                let (_, task) = idle.layer.backward(ctx, w, &idle.saved, &dy, &loss_grad);
                task.run(ctx, WgradTarget::new(Write::Add, moe_grads));
            }
            done(index, grads);
        }
        self.pass_stats(NO_LOSS, losses, layers)
    }

    /// The part of a rank without tokens in a pass of inference that others make: the experts here serve their rows.
    pub fn serve_inference(&self, ctx: &Context, weights: &DecoderWeights) {
        self.serve_rows(ctx, weights);
    }

    fn serve_rows(&self, ctx: &Context, weights: &DecoderWeights) -> Vec<Option<Idle<'_>>> {
        let input = RouterInput { is_inference: true, is_forward_only: true, ..RouterInput::default() };
        let gathered = self.gathered(ctx, weights);
        self.serve(ctx, gathered.as_ref().unwrap_or(weights), &input)
    }

    /// The evaluation of a rank without sequences.
    pub(crate) fn serve_evaluation(&self, ctx: &Context, weights: &DecoderWeights) -> PassStats {
        let saved = self.serve_rows(ctx, weights);
        let mut layers: Vec<LayerStats> = saved.iter().flatten().map(|idle| idle.saved.stats()).collect();
        self.merge_stats(&mut layers);
        let (losses, _) = router_losses(&layers, (&self.config().router, self.config().top_k), &PassOptions::default());
        self.pass_stats(NO_LOSS, losses, layers)
    }

    /// Passes no token through the layers with experts, first to last; there is nothing of those without.
    fn serve<'a>(&'a self, ctx: &Context, weights: &DecoderWeights, input: &RouterInput<'_>) -> Vec<Option<Idle<'a>>> {
        let blocks = if input.is_inference { &self.inference } else { &self.training };
        let serve = |(index, block): (usize, &'a FeedForwardBlock)| {
            let w = self.layer(ctx, weights, (index, after(index, blocks.len())));
            let (FeedForwardWeights::Moe(w), Some(layer)) = (&w.feed_forward, &block.moe) else { return None };
            let x = ctx.zeros(&[0, self.config().width], w.gate_up.dtype().of_activations());
            let (_, saved) = layer.forward(ctx, w, &x, input);
            Some(Idle { layer, x, saved })
        };
        blocks.iter().enumerate().map(serve).collect()
    }

    /// The account of a pass: over all ranks, if there are several.
    pub(crate) fn pass_stats(&self, loss: HeadLoss, router: LossValues, layers: Vec<LayerStats>) -> PassStats {
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
}
