//! Expert parallelism: a decoder whose experts are spread over ranks. Each rank passes its own sequences; statistics
//! and losses are over all ranks.

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

/// The loss of a pass without tokens.
pub(crate) const NO_LOSS: HeadLoss = HeadLoss { loss_sum: 0.0, num_targets: 0, num_correct: 0 };

/// The pass of a rank without tokens, layer by layer: its experts serve the rows of other ranks, and get their
/// gradients from these alone.
pub(crate) struct IdlePass<'a> {
    stage: &'a Stage,
    mode: Mode,
    rules: RouterRules<'a>,
    checkpoint_layers: bool,
    /// Empty lists of ids, if the other ranks hand in expert ids.
    expert_ids: &'a [ExpertIds],
    /// The layers that were passed; none for a layer without experts.
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
    /// Begins a training pass. `expert_ids` are empty lists of ids, if the other ranks hand theirs in.
    pub(crate) fn training(stage: &'a Stage, options: &PassOptions, expert_ids: &'a [ExpertIds]) -> Self {
        let rules = RouterRules::without_tokens(options.has_gshard_loss());
        let checkpoint_layers = options.checkpoint_layers;
        let (layers, loss_grads) = (Vec::new(), Vec::new());
        Self { stage, mode: Mode::Train, rules, checkpoint_layers, expert_ids, layers, loss_grads }
    }

    /// Begins a pass of inference.
    pub(crate) fn inference(stage: &'a Stage) -> Self {
        let rules = RouterRules::without_tokens(false);
        let (layers, loss_grads) = (Vec::new(), Vec::new());
        Self { stage, mode: Mode::Infer, rules, checkpoint_layers: false, expert_ids: &[], layers, loss_grads }
    }

    fn input(&self, index: usize) -> RouterInput<'a> {
        let layer = self.stage.layer_block(index);
        let expert_ids = layer.moe_index.and_then(|index| self.expert_ids.get(index));
        RouterInput { expert_ids, ..self.rules.input(self.mode, layer.number) }
    }

    /// Passes the next layer, `index`, if it has experts.
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

    /// Returns the statistics of the layers that were passed.
    pub(crate) fn stats(&self) -> Vec<LayerStats> {
        self.layers.iter().flatten().map(|idle| idle.saved.stats()).collect()
    }

    /// Begins the backward pass. Gradients to be replaced are set to zero, because those of other ranks' rows are
    /// added to them.
    pub(crate) fn begin_backward(&mut self, loss_grads: Vec<LossGrad>, write: Write, grads: &mut DecoderWeights) {
        self.loss_grads = loss_grads;
        if write == Write::Replace {
            grads.tensors_mut().into_iter().for_each(|(_, tensor)| tensor.f32s_mut().fill(0.0));
        }
    }

    /// Runs backward through layer `index`, the last one that is left.
    pub(crate) fn backward(&mut self, ctx: &Context, index: usize, w: &LayerWeights, grads: &mut LayerWeights) {
        let (input, idle) = (self.input(index), self.layers.pop().flatten());
        if let (Some(idle), FeedForwardWeights::Moe(w), FeedForwardWeights::Moe(grads)) =
            (idle, &w.feed_forward, &mut grads.feed_forward)
        {
            // With checkpoints the other ranks recompute the layer and send their rows again.
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
    /// Makes a decoder whose experts are spread over the ranks of `ranks`. Its weights have only the experts of this
    /// rank.
    ///
    /// All ranks make the same passes, each over its own sequences, or over none by the methods for idle ranks.
    /// Statistics and losses are over all sequences. A rank's gradients come from its own sequences and, in its
    /// experts, from the rows of other ranks. After each pass [`ExpertRanks::failure`] tells whether communication
    /// failed.
    pub fn expert_parallel(config: ModelConfig, table: WeightTable, ranks: ExpertRanks) -> Result<Self, ConfigError> {
        Self::build(config, table, StageRanks { experts: Some(ranks), tensor: None })
    }

    /// Makes a decoder that is also tensor-parallel: the ranks of `ranks` shard the matrices of layers without
    /// experts, and make the same passes over the same sequences. Its weights are those that
    /// [`TensorSplit::part`](crate::TensorSplit::part) returns.
    pub fn tensor_parallel(config: ModelConfig, table: WeightTable, ranks: TensorRanks) -> Result<Self, ConfigError> {
        Self::build(config, table, StageRanks { experts: Some(ranks.experts().clone()), tensor: Some(ranks) })
    }

    /// Returns the tokens of `batch` whose routing this rank computes: all of them, or this rank's run if a
    /// tensor-parallel group shares the batch. The run has whole sequences if losses on routers need them.
    #[must_use]
    pub fn routed_tokens(&self, batch: &TokenBatch<'_>, are_whole: bool) -> Range<usize> {
        self.stage.routed_tokens(batch, are_whole)
    }

    /// Merges the statistics of this rank's sequences with those of all ranks.
    pub(crate) fn merge_stats(&self, layers: &mut [LayerStats]) {
        self.stage.merge_stats(layers);
    }

    /// Scales the gradients of losses that are means over all ranks' tokens to the `num_tokens` tokens of this pass.
    pub(crate) fn take_share(&self, num_tokens: usize, layers: &[LayerStats], grads: &mut [LossGrad]) {
        self.stage.take_share(num_tokens, layers, grads);
    }

    /// Serves the experts of this rank in a pass of inference in which it has no tokens.
    pub fn serve_inference(&self, ctx: &Context, weights: &DecoderWeights) {
        self.serve(ctx, weights);
    }

    /// Takes part in an evaluation without sequences.
    pub(crate) fn serve_evaluation(&self, ctx: &Context, weights: &DecoderWeights) -> PassStats {
        let mut layers = self.serve(ctx, weights).stats();
        self.merge_stats(&mut layers);
        let router = router_losses(self.config(), &layers, &PassOptions::default());
        self.pass_stats(NO_LOSS, router.values, layers)
    }

    /// Passes no tokens through the layers with experts, in order. Layers without experts are skipped.
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

    /// Makes the statistics of a pass, summed over all ranks if there are several.
    pub(crate) fn pass_stats(&self, loss: HeadLoss, router: LossValues, layers: Vec<LayerStats>) -> PassStats {
        self.stage.pass_stats(loss, router, layers)
    }
}
