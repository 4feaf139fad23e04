//! A model of one MoE layer whose load follows Zipf's law and changes after a number of steps: tokens choose experts
//! at random by it, whatever the router says.
//!
//! Letters of shapes: N tokens, D width, E experts, C classes.

use std::ops::Range;
use std::sync::Arc;

use moeworks_model::{ParamSet, TableBuilder, WeightRole, WeightSpec, WeightTable};
use moeworks_moe::{LossGrad, MoeConfig, MoeLayer, MoeWeights, RouterInput, WgradTarget};
use moeworks_ops::Context;
use moeworks_ops::head_loss::head_loss_backward;
use moeworks_tensor::{DType, Purpose, Random, Tensor};
use moeworks_train::metrics::LayerRecord;
use moeworks_train::task::{Evaluation, Microbatch, ModelView, PassFigures, PassGradients};
use moeworks_train::{Ranks, Task, TrainError};

use super::MadeLoad;

const NUM_CLASSES: usize = 4;
const TOP_K: usize = 2;
/// The random numbers that a token's choices may use.
const DRAWS: u64 = 32;
const SEED: u64 = 1;

/// The weights of the model, or their gradients.
#[derive(Clone)]
pub(super) struct Weights {
    moe: MoeWeights,
    /// The output layer, `[C, D]`.
    output: Tensor,
}

impl ParamSet for Weights {
    fn params(&self) -> Vec<&Tensor> {
        self.moe.tensors().into_iter().chain([&self.output]).collect()
    }

    fn params_mut(&mut self) -> Vec<&mut Tensor> {
        self.moe.tensors_mut().into_iter().chain([&mut self.output]).collect()
    }

    fn shared(&self) -> Self {
        self.clone()
    }
}

/// The sizes of the layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct LayerSizes {
    pub(super) width: usize,
    pub(super) expert_width: usize,
}

/// The model and its data.
pub(super) struct ZipfTask {
    layer: MoeLayer,
    table: Arc<WeightTable>,
    load: MadeLoad,
}

impl ZipfTask {
    /// Creates this rank's part of the model.
    pub(super) fn new(sizes: LayerSizes, load: MadeLoad, ranks: &Ranks) -> Self {
        let config = MoeConfig::plain(sizes.width, sizes.expert_width, load.num_experts, TOP_K);
        let table = TableBuilder::new(0.2)
            .layer(0)
            .add_moe(&config)
            .outside()
            .add("output.weight", WeightRole::Linear, &[NUM_CLASSES, sizes.width])
            .finish();
        let layer = MoeLayer::expert_parallel(config, ranks.experts().layer(0)).expect("a valid layer");
        Self { layer, table: Arc::new(table), load }
    }

    /// Draws the experts of some tokens of a step.
    fn expert_ids(&self, step: u64, tokens: Range<usize>) -> Vec<u32> {
        let sums = running_sums(&self.load.shares(step));
        let random = Random::new(SEED, Purpose::Router, step);
        tokens.flat_map(|token| two_experts(&sums, &random, token as u64 * DRAWS)).collect()
    }

    /// Draws some tokens of a step, each with its class.
    fn tokens(&self, ctx: &Context, step: u64, tokens: Range<usize>) -> (Tensor, Vec<u32>) {
        let (width, random) = (self.layer.config().width, Random::new(SEED, Purpose::Test, step));
        let class = |token: usize| (token / 4 % NUM_CLASSES) as u32;
        let number = |i: usize| {
            let middle = if i % NUM_CLASSES == class(i / width) as usize { 1.0 } else { 0.0 };
            middle + random.normal(i as u64)
        };
        let numbers: Vec<f32> = (tokens.start * width..tokens.end * width).map(number).collect();
        (Tensor::from_slice(ctx.pool(), &[tokens.len(), width], &numbers), tokens.map(class).collect())
    }
}

/// Returns the sums of the shares up to each expert.
fn running_sums(shares: &[f64]) -> Vec<f64> {
    let add = |sum: &mut f64, share: &f64| {
        *sum += share;
        Some(*sum)
    };
    shares.iter().scan(0.0, add).collect()
}

/// Draws two different experts, from random numbers beginning at `position`.
fn two_experts(sums: &[f64], random: &Random, position: u64) -> [u32; TOP_K] {
    let draw = |i: u64| {
        let at = f64::from(random.uniform(position + i)) * sums.last().copied().unwrap_or(1.0);
        sums.partition_point(|&sum| sum <= at).min(sums.len() - 1) as u32
    };
    let first = draw(0);
    let second = (1..DRAWS).map(draw).find(|&expert| expert != first);
    [first, second.unwrap_or((first + 1) % sums.len() as u32)]
}

impl Task for ZipfTask {
    type Params = Weights;

    fn table(&self) -> &Arc<WeightTable> {
        &self.table
    }

    fn build_params(&self, ctx: &Context, make: &mut dyn FnMut(&WeightSpec) -> Tensor) -> Weights {
        let moe = MoeWeights::zeros(ctx, self.layer.config(), DType::F32);
        let mut weights = Weights { moe, output: ctx.empty(&[0], DType::F32) };
        for (spec, tensor) in self.table.specs().iter().zip(weights.params_mut()) {
            *tensor = make(spec);
        }
        weights
    }

    fn train_pass(
        &mut self,
        model: &ModelView<'_, Weights>,
        batch: Microbatch,
        gradients: PassGradients<'_, Weights>,
    ) -> Result<PassFigures, TrainError> {
        let (ctx, weights) = (model.ctx, model.params);
        let share = model.share(self.load.num_tokens);
        let ids = self.expert_ids(batch.step, share.clone());
        let expert_ids = Some(self.layer.expert_ids(ctx, share.len(), &ids).expect("ids of experts"));
        let input = RouterInput { expert_ids: expert_ids.as_ref(), first_token: share.start, ..RouterInput::default() };
        let (x, classes) = self.tokens(ctx, batch.number(), share);
        let (y, saved) = self.layer.forward(ctx, &weights.moe, &x, &input);
        let mut layers = vec![saved.stats()];
        model.merge_stats(&mut layers);
        let PassGradients { write, grads, layer_done } = gradients;
        let scale = 1.0 / (self.load.num_tokens * batch.num) as f32;
        let (loss, dy) = head_loss_backward(ctx, &y, &weights.output, &classes, scale, write, &mut grads.output);
        let (_, task) = self.layer.backward(ctx, &weights.moe, &saved, &dy, &LossGrad::default());
        task.run(ctx, WgradTarget::new(write, &mut grads.moe));
        layer_done(0, grads);
        let (loss_sum, num_targets) = (loss.loss_sum, loss.num_targets);
        let mut figures = PassFigures { loss_sum, num_targets, layers, ..PassFigures::default() };
        model.sum(&mut figures);
        Ok(figures)
    }

    fn evaluate(
        &mut self,
        _model: &ModelView<'_, Weights>,
        _layers: &mut [LayerRecord],
    ) -> Result<Option<Evaluation>, TrainError> {
        Ok(None)
    }

    fn config_text(&self) -> String {
        "# A model whose load changes: it has no settings.\n".to_owned()
    }

    fn moe_layers(&self) -> Vec<usize> {
        vec![0]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_of_a_token_differ_and_are_drawn_by_their_shares() {
        let sums = running_sums(&[0.5, 0.25, 0.125, 0.125]);
        let random = Random::new(3, Purpose::Test, 0);
        let mut counts = [0; 4];
        for token in 0..4000 {
            let [first, second] = two_experts(&sums, &random, token * DRAWS);
            assert_ne!(first, second);
            counts[first as usize] += 1;
        }
        assert!((1850..2150).contains(&counts[0]) && (400..600).contains(&counts[3]), "{counts:?}");
    }
}
