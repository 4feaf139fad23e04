//! A model with one MoE layer whose load is skewed on purpose and changes: expert ids are handed in by the step.
//!
//! Letters of shapes: N points, D width, E experts, C classes.

use std::ops::Range;
use std::sync::Arc;

use moeworks_model::{ParamSet, TableBuilder, WeightRole, WeightSpec, WeightTable};
use moeworks_moe::{
    LossGrad, MoeConfig, MoeLayer, MoeWeights, Ramp, RouterConfig, RouterInput, ScoreOrder, WgradTarget,
};
use moeworks_ops::head_loss::head_loss_backward;
use moeworks_ops::{Activation, Context};
use moeworks_tensor::{DType, Purpose, Random, Tensor};
use moeworks_train::metrics::LayerRecord;
use moeworks_train::task::{Evaluation, Microbatch, ModelView, PassFigures, PassGradients};
use moeworks_train::{Ranks, Task, TrainError};

const NUM_CLASSES: usize = 4;

/// The sizes of the model, and the steps after which its load changes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) width: usize,
    pub(crate) expert_width: usize,
    pub(crate) num_experts: usize,
    pub(crate) num_points: usize,
    pub(crate) period: u64,
}

/// The weights of the model, or their gradients.
#[derive(Clone)]
pub(crate) struct Weights {
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

/// The model and its data.
pub(crate) struct Skewed {
    layer: MoeLayer,
    table: Arc<WeightTable>,
    sizes: Sizes,
}

impl Skewed {
    /// Creates the model, or its part on this rank.
    pub(crate) fn new(sizes: Sizes, ranks: Option<&Ranks>) -> Self {
        let config = MoeConfig {
            width: sizes.width,
            num_experts: sizes.num_experts,
            top_k: 2,
            expert_width: sizes.expert_width,
            activation: Activation::SwiGlu,
            score_order: ScoreOrder::SoftmaxThenTopK,
            normalize_weights: true,
            capacity_factor: 0.0,
            jitter: Ramp::ZERO,
            shared_width: 0,
            router: RouterConfig::default(),
        };
        let table = TableBuilder::new(0.2)
            .layer(0)
            .add_moe(&config)
            .outside()
            .add("output.weight", WeightRole::Linear, &[NUM_CLASSES, sizes.width])
            .finish();
        let layer = match ranks {
            None => MoeLayer::new(config),
            Some(ranks) => MoeLayer::expert_parallel(config, ranks.experts().layer(0)),
        };
        Self { layer: layer.expect("a layer"), table: Arc::new(table), sizes }
    }

    /// Returns the two experts that three of four points choose in a step: expert 0 and another in each period.
    fn hot(&self, step: u64) -> [u32; 2] {
        let others = self.sizes.num_experts as u64 - 1;
        [0, (1 + step / self.sizes.period % others) as u32]
    }

    /// Returns the experts of some points in a step.
    fn expert_ids(&self, step: u64, points: Range<usize>) -> Vec<u32> {
        let hot = self.hot(step);
        let cold: Vec<u32> = (0..self.sizes.num_experts as u32).filter(|expert| !hot.contains(expert)).collect();
        let of_point = |point: usize| match point % 4 {
            0 => [cold[point / 4 * 2 % cold.len()], cold[(point / 4 * 2 + 1) % cold.len()]],
            _ => hot,
        };
        points.flat_map(of_point).collect()
    }

    /// Draws some points of a step, each with its class.
    fn points(&self, ctx: &Context, step: u64, points: Range<usize>) -> (Tensor, Vec<u32>) {
        let (width, random) = (self.sizes.width, Random::new(2, Purpose::Test, step));
        let class = |point: usize| (point / 4 % NUM_CLASSES) as u32;
        let number = |i: usize| {
            let middle = if i % NUM_CLASSES == class(i / width) as usize { 1.0 } else { 0.0 };
            middle + random.normal(i as u64)
        };
        let numbers: Vec<f32> = (points.start * width..points.end * width).map(number).collect();
        (Tensor::from_slice(ctx.pool(), &[points.len(), width], &numbers), points.map(class).collect())
    }
}

impl Task for Skewed {
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
        let share = model.share(self.sizes.num_points);
        let ids = self.expert_ids(batch.step, share.clone());
        let expert_ids = Some(self.layer.expert_ids(ctx, share.len(), &ids).expect("ids of experts"));
        let input = RouterInput { expert_ids: expert_ids.as_ref(), first_token: share.start, ..RouterInput::default() };
        let (x, classes) = self.points(ctx, batch.number(), share);
        let (y, saved) = self.layer.forward(ctx, &weights.moe, &x, &input);
        let mut layers = vec![saved.stats()];
        model.merge_stats(&mut layers);
        let PassGradients { write, grads, layer_done } = gradients;
        let scale = 1.0 / (self.sizes.num_points * batch.num) as f32;
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
