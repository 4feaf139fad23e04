//! A decoder whose experts live on several ranks: each rank passes sequences of its own, and accounts are of all of them.

use std::ops::Range;

use moeworks_moe::{
    ConfigError, ExpertIds, ExpertRanks, LayerStats, LossGrad, MoeLayer, MoeSaved, RouterInput, WgradTarget,
};
use moeworks_ops::Context;
use moeworks_ops::head_loss::HeadLoss;
use moeworks_ops::linear::Write;
use moeworks_tensor::{DType, Tensor};

use crate::config::ModelConfig;
use crate::decoder::Decoder;
use crate::gather::after;
use crate::layers::RouterRules;
use crate::losses::{LossValues, router_losses};
use crate::mode::Mode;
use crate::pass::{PassOptions, PassStats, TokenBatch};
use crate::stage::{Stage, StageRanks};
use crate::tensor_ranks::TensorRanks;
use crate::weights::{DecoderWeights, FeedForwardWeights, LayerWeights, WeightTable};

/// The loss of no token.
pub(crate) const NO_LOSS: HeadLoss = HeadLoss { loss_sum: 0.0, num_targets: 0, num_correct: 0 };

/// The pass of a rank without tokens, layer by layer: the experts here serve the rows of others, and that is all that they learn from.
pub(crate) struct IdlePass<'a> {
    stage: &'a Stage,
    mode: Mode,
    rules: RouterRules<'a>,
    checkpoint_layers: bool,
    /// Lists of no ids, where the other ranks hand expert ids in.
    expert_ids: &'a [ExpertIds],
    /// The layers passed; none for one without experts.
    layers: Vec<Option<IdleLayer<'a>>>,
    loss_grads: Vec<LossGrad>,
}

/// A layer that was passed without tokens.
struct IdleLayer<'a> {
    layer: &'a MoeLayer,
    x: Tensor,
    saved: MoeSaved,
}

impl<'a> IdlePass<'a> {
    /// A training pass. `expert_ids` are lists of no ids where the other ranks hand theirs in.
    pub(crate) fn training(stage: &'a Stage, options: &PassOptions, expert_ids: &'a [ExpertIds]) -> Self {
        let rules = RouterRules::without_tokens(options.has_gshard_loss());
        let checkpoint_layers = options.checkpoint_layers;
        let (layers, loss_grads) = (Vec::new(), Vec::new());
        Self { stage, mode: Mode::Train, rules, checkpoint_layers, expert_ids, layers, loss_grads }
    }

    /// A pass in use.
    fn inference(stage: &'a Stage) -> Self {
        let rules = RouterRules::without_tokens(false);
        let (layers, loss_grads) = (Vec::new(), Vec::new());
        Self { stage, mode: Mode::Infer, rules, checkpoint_layers: false, expert_ids: &[], layers, loss_grads }
    }

    fn input(&self, index: usize) -> RouterInput<'a> {
        let layer = self.stage.layer_block(index);
        let expert_ids = layer.moe_index.and_then(|index| self.expert_ids.get(index));
        RouterInput { expert_ids, ..self.rules.input(self.mode, layer.number) }
    }

    /// Goes through the next layer, `index`, if it has experts.
    pub(crate) fn forward(&mut self, ctx: &Context, index: usize, w: &LayerWeights) {
        let layer = &self.stage.layer_block(index).feed_forward.moe;
        let idle = match (&w.feed_forward, layer) {
            (FeedForwardWeights::Moe(w), Some(layer)) => {
                let x = ctx.zeros(&[0, self.stage.config.width], w.gate_up.dtype().of_activations());
                let (_, saved) = layer.forward(ctx, w, &x, &self.input(index));
                Some(IdleLayer { layer, x, saved })
            }
            _ => None,
        };
        self.layers.push(idle);
    }

    /// The statistics of the layers passed.
    pub(crate) fn stats(&self) -> Vec<LayerStats> {
        self.layers.iter().flatten().map(|idle| idle.saved.stats()).collect()
    }

    /// Begins the way back: gradients that are to be replaced are zeros, to which those of the rows of others are added.
    pub(crate) fn begin_backward(&mut self, loss_grads: Vec<LossGrad>, write: Write, grads: &mut DecoderWeights) {
        self.loss_grads = loss_grads;
        if write == Write::Replace {
            grads.tensors_mut().into_iter().for_each(|(_, tensor)| tensor.f32s_mut().fill(0.0));
        }
    }

    /// Goes back through layer `index`, the last that it has not been through.
    pub(crate) fn backward(&mut self, ctx: &Context, index: usize, w: &LayerWeights, grads: &mut LayerWeights) {
        let (input, idle) = (self.input(index), self.layers.pop().flatten());
        if let (Some(idle), FeedForwardWeights::Moe(w), FeedForwardWeights::Moe(grads)) =
            (idle, &w.feed_forward, &mut grads.feed_forward)
        {
            // With checkpoints the others compute the layer again, and its rows come again.
            let saved = match self.checkpoint_layers {
                true => idle.layer.forward(ctx, w, &idle.x, &input).1,
                false => idle.saved,
            };
            let dy = ctx.zeros(&[0, self.stage.config.width], DType::F32);
            let loss_grad = self.loss_grads.pop().unwrap_or_default();
            idle.layer.backward(ctx, w, &saved, &dy, &loss_grad).1.run(ctx, WgradTarget::new(Write::Add, grads));
        }
    }
}

impl Decoder {
    /// A decoder whose experts live on the ranks of `ranks`. Of the experts, weights are those that are held here.
    ///
    /// All ranks that have tokens make the same passes, each over sequences of its own, or none. Statistics and losses are those of
    /// all sequences; gradients are what this rank's sequences, and rows of others in the experts here, give. After each pass
    /// [`ExpertRanks::failure`] says whether it counts.
    pub fn expert_parallel(config: ModelConfig, table: WeightTable, ranks: ExpertRanks) -> Result<Self, ConfigError> {
        Self::build(config, table, StageRanks { experts: Some(ranks), tensor: None })
    }

    /// As [`expert_parallel`](Self::expert_parallel) where the ranks of `ranks` hold the matrices of the other layers between them, too, and make
    /// the same passes over the same sequences. Weights are those that [`TensorSplit::part`](crate::TensorSplit::part) leaves.
    pub fn tensor_parallel(config: ModelConfig, table: WeightTable, ranks: TensorRanks) -> Result<Self, ConfigError> {
        Self::build(config, table, StageRanks { experts: Some(ranks.experts().clone()), tensor: Some(ranks) })
    }

    /// The tokens of `batch` that this rank takes through layers with experts, of whose routers it knows: all of them, but where
    /// others make the same pass; whole sequences where losses on routers look at these.
    #[must_use]
    pub fn routed_tokens(&self, batch: &TokenBatch<'_>, are_whole: bool) -> Range<usize> {
        let TokenBatch { num_sequences, seq_len, .. } = *batch;
        let split = self.stage.tensor.as_ref().map(TensorRanks::split);
        split
            .map_or(0..num_sequences * seq_len, |split| split.run_of(split.rank(), (num_sequences, seq_len), are_whole))
    }

    /// Makes of the statistics of these sequences those of all ranks' sequences.
    pub(crate) fn merge_stats(&self, layers: &mut [LayerStats]) {
        if let Some(ranks) = &self.stage.ranks {
            ranks.merge_stats(layers);
        }
    }

    /// Gives the `num_tokens` tokens of a pass their share of what means over all ranks' tokens say.
    pub(crate) fn take_share(&self, num_tokens: usize, layers: &[LayerStats], grads: &mut [LossGrad]) {
        if self.stage.ranks.is_some() {
            for (grad, stats) in grads.iter_mut().zip(layers) {
                grad.of_share(num_tokens as f32 / stats.num_tokens.max(1) as f32);
            }
        }
    }

    /// The part of a rank without tokens in a pass of inference that others make: the experts here serve their rows.
    pub fn serve_inference(&self, ctx: &Context, weights: &DecoderWeights) {
        self.serve(ctx, weights);
    }

    /// The evaluation of a rank without sequences.
    pub(crate) fn serve_evaluation(&self, ctx: &Context, weights: &DecoderWeights) -> PassStats {
        let mut layers = self.serve(ctx, weights).stats();
        self.merge_stats(&mut layers);
        let router = router_losses(self.config(), &layers, &PassOptions::default());
        self.pass_stats(NO_LOSS, router.values, layers)
    }

    /// Passes no token through the layers with experts in use, first to last; there is nothing of those without.
    fn serve(&self, ctx: &Context, weights: &DecoderWeights) -> IdlePass<'_> {
        let gathered = self.stage.gathered(ctx, weights);
        let weights = gathered.as_ref().unwrap_or(weights);
        let num_layers = self.config().num_layers;
        let mut idle = IdlePass::inference(&self.stage);
        for index in 0..num_layers {
            idle.forward(ctx, index, &self.stage.whole_layer(ctx, weights, index, after(index, num_layers)));
        }
        idle
    }

    /// The account of a pass: over all ranks, if there are several.
    pub(crate) fn pass_stats(&self, loss: HeadLoss, router: LossValues, layers: Vec<LayerStats>) -> PassStats {
        // Ranks that make the same pass have found the same.
        let is_counted = self.stage.tensor.as_ref().is_none_or(|ranks| ranks.split().rank() == 0);
        let loss = if is_counted { loss } else { NO_LOSS };
        let mut sums = [loss.loss_sum, loss.num_targets as f64, loss.num_correct as f64];
        if let Some(ranks) = &self.stage.ranks {
            ranks.sum(&mut sums);
        }
        let [loss_sum, num_targets, num_correct] = sums;
        let (num_targets, num_correct) = (num_targets as usize, num_correct as usize);
        let LossValues { balance: balance_loss, z: z_loss, others: router_losses } = router;
        PassStats { loss_sum, num_targets, num_correct, balance_loss, z_loss, router_losses, layers }
    }
}
