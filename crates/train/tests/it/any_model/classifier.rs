//! A model that is not a decoder: it classifies points with a linear layer, an MoE layer and another linear layer.
//!
//! Letters of shapes: N points, P coordinates of a point, D width, C classes.

use std::ops::Range;
use std::sync::Arc;

use moeworks_model::{ParamSet, TableBuilder, WeightRole, WeightSpec, WeightTable};
use moeworks_moe::{
    ForwardInput, LossGrad, MoeConfig, MoeLayer, MoeSaved, MoeWeights, Ramp, RouterConfig, RouterInput, ScoreOrder,
    WgradTarget, balance_loss_per_layer, next_state,
};
use moeworks_ops::head_loss::{head_loss, head_loss_backward};
use moeworks_ops::linear::{linear, linear_backward_weight};
use moeworks_ops::{Activation, Context, elementwise};
use moeworks_tensor::{DType, Purpose, Random, Tensor};
use moeworks_train::metrics::LayerRecord;
use moeworks_train::task::{Evaluation, Metric, Microbatch, ModelView, ParamsAndCopy, PassFigures, PassGradients};
use moeworks_train::{Ranks, Task, TrainError};

/// The sizes P, D and C.
const POINT: usize = 6;
const WIDTH: usize = 16;
pub(crate) const NUM_CLASSES: usize = 4;
/// The number of points of a microbatch, over all ranks.
pub(crate) const NUM_POINTS: usize = 64;
/// The number of clusters of points. Several clusters have the same class, so that no plane separates the classes.
const NUM_CLUSTERS: usize = 16;
/// The weight of the balance loss.
pub(crate) const BALANCE: f32 = 0.01;
/// The random stream of the held-out points; no microbatch uses its number.
const HELD_OUT: u64 = 1 << 40;

/// The weights of the model, or their gradients.
#[derive(Clone)]
pub(crate) struct Weights {
    /// The input layer, `[D, P]`.
    input: Tensor,
    moe: MoeWeights,
    /// The output layer, `[C, D]`.
    output: Tensor,
}

impl ParamSet for Weights {
    fn params(&self) -> Vec<&Tensor> {
        [&self.input].into_iter().chain(self.moe.tensors()).chain([&self.output]).collect()
    }

    fn params_mut(&mut self) -> Vec<&mut Tensor> {
        [&mut self.input].into_iter().chain(self.moe.tensors_mut()).chain([&mut self.output]).collect()
    }

    fn states(&self) -> Vec<(String, &Tensor)> {
        self.moe.state.iter().map(|state| (format!("layers.0.router.{}", state.name), &state.tensor)).collect()
    }

    fn states_mut(&mut self) -> Vec<&mut Tensor> {
        self.moe.state.iter_mut().map(|state| &mut state.tensor).collect()
    }

    fn shared(&self) -> Self {
        self.clone()
    }
}

/// A set of points with their classes.
struct Points {
    /// The points, `[N, P]`.
    x: Tensor,
    /// The class of each point, `[N]`.
    classes: Vec<u32>,
}

/// The model and its data.
pub(crate) struct Classifier {
    layer: MoeLayer,
    table: Arc<WeightTable>,
}

impl Classifier {
    /// Creates the model, or its part on this rank. Weights whose names match one of `frozen` are not trained.
    pub(crate) fn new(ranks: Option<&Ranks>, frozen: &[&str]) -> Self {
        let config = MoeConfig {
            width: WIDTH,
            num_experts: 4,
            top_k: 2,
            expert_width: 24,
            activation: Activation::SwiGlu,
            score_order: ScoreOrder::SoftmaxThenTopK,
            normalize_weights: true,
            capacity_factor: 0.0,
            jitter: Ramp::ZERO,
            shared_width: 0,
            router: RouterConfig { expert_bias: true, ..RouterConfig::default() },
        };
        let mut table = TableBuilder::new(0.2)
            .add("input.weight", WeightRole::Linear, &[WIDTH, POINT])
            .layer(0)
            .add_moe(&config)
            .outside()
            .add("output.weight", WeightRole::Linear, &[NUM_CLASSES, WIDTH])
            .finish();
        let frozen: Vec<String> = frozen.iter().map(|&pattern| pattern.to_owned()).collect();
        table.freeze(&frozen).expect("names of weights");
        let layer = match ranks {
            None => MoeLayer::new(config),
            Some(ranks) => MoeLayer::expert_parallel(config, ranks.experts().layer(0)),
        };
        Self { layer: layer.expect("a layer"), table: Arc::new(table) }
    }

    /// Draws some of the points of a random stream. Each is near the centre of a cluster, which determines its class.
    fn points(ctx: &Context, stream: u64, which: Range<usize>) -> Points {
        let (middles, random) = (Random::new(1, Purpose::Test, 0), Random::new(2, Purpose::Test, stream));
        let cluster = |point: usize| random.below(point as u64, NUM_CLUSTERS as u64) as usize;
        let number = |i: usize| {
            let middle = middles.normal((cluster(i / POINT) * POINT + i % POINT) as u64);
            2.0 * middle + 0.5 * random.normal((1 << 20) + i as u64)
        };
        let numbers: Vec<f32> = (which.start * POINT..which.end * POINT).map(number).collect();
        let x = Tensor::from_slice(ctx.pool(), &[which.len(), POINT], &numbers);
        Points { x, classes: which.map(|point| (cluster(point) % NUM_CLASSES) as u32).collect() }
    }

    /// Computes the hidden layers for points: the input `[N, D]` of the MoE layer, the sum of that and its output,
    /// and the values that backward needs.
    fn hidden(
        &self,
        ctx: &Context,
        weights: &Weights,
        x: &Tensor,
        input: &RouterInput<'_>,
    ) -> (Tensor, Tensor, MoeSaved) {
        let h = linear(ctx, x, &weights.input, DType::F32);
        let (y, saved) = self.layer.forward(ctx, &weights.moe, &h, ForwardInput { router: *input, base: Some(&h) });
        (h, y, saved)
    }
}

impl Task for Classifier {
    type Params = Weights;

    fn table(&self) -> &Arc<WeightTable> {
        &self.table
    }

    fn build_params(&self, ctx: &Context, make: &mut dyn FnMut(&WeightSpec) -> Tensor) -> Weights {
        let empty = || ctx.empty(&[0], DType::F32);
        let moe = MoeWeights::zeros(ctx, self.layer.config(), DType::F32);
        let mut weights = Weights { input: empty(), moe, output: empty() };
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
        let share = model.share(NUM_POINTS);
        let input = RouterInput { progress: batch.progress, first_token: share.start, ..RouterInput::default() };
        let Points { x, classes } = Self::points(ctx, batch.number(), share);
        let (_, y, saved) = self.hidden(ctx, weights, &x, &input);
        let mut layers = vec![saved.stats()];
        model.merge_stats(&mut layers);
        let balance = balance_loss_per_layer(&[&layers[0]], BALANCE / batch.num as f32);
        let losses = LossGrad { balance: balance.gradients[0].clone(), ..LossGrad::default() };

        let PassGradients { write, grads, layer_done } = gradients;
        let scale = 1.0 / (NUM_POINTS * batch.num) as f32;
        let (loss, dy) = head_loss_backward(ctx, &y, &weights.output, &classes, scale, write, &mut grads.output);
        let (mut dh, task) = self.layer.backward(ctx, &weights.moe, &saved, &dy, &losses);
        task.run(ctx, WgradTarget::new(write, &mut grads.moe));
        layer_done(0, grads);
        elementwise::add_assign(ctx, &mut dh, &dy);
        linear_backward_weight(ctx, &dh, &x, DType::F32, write, &mut grads.input);

        let accuracy = Metric { name: "accuracy", sum: loss.num_correct as f64, count: loss.num_targets as f64 };
        let mut figures = PassFigures {
            loss_sum: loss.loss_sum,
            num_targets: loss.num_targets,
            balance_loss: balance.value,
            layers,
            metrics: vec![accuracy],
            ..PassFigures::default()
        };
        model.sum(&mut figures);
        Ok(figures)
    }

    fn evaluate(
        &mut self,
        model: &ModelView<'_, Weights>,
        _layers: &mut [LayerRecord],
    ) -> Result<Option<Evaluation>, TrainError> {
        let input = RouterInput { is_inference: true, is_forward_only: true, ..RouterInput::default() };
        let Points { x, classes } = Self::points(model.ctx, HELD_OUT, model.share(4 * NUM_POINTS));
        let (_, y, _) = self.hidden(model.ctx, model.params, &x, &input);
        let loss = head_loss(model.ctx, &y, &model.params.output, &classes);
        let accuracy = Metric { name: "accuracy", sum: loss.num_correct as f64, count: loss.num_targets as f64 };
        let (loss_sum, num_targets) = (loss.loss_sum, loss.num_targets);
        let mut figures = PassFigures { loss_sum, num_targets, metrics: vec![accuracy], ..PassFigures::default() };
        model.sum(&mut figures);
        Ok(figures.evaluation())
    }

    fn next_states(
        &mut self,
        _ctx: &Context,
        params: ParamsAndCopy<'_, Weights>,
        figures: &PassFigures,
        progress: f64,
    ) {
        for weights in std::iter::once(params.params).chain(params.copy) {
            next_state(self.layer.config(), &mut weights.moe.state, &figures.layers, 0, progress);
        }
    }

    fn config_text(&self) -> String {
        "# A classifier of points: it has no settings.\n".to_owned()
    }

    fn moe_layers(&self) -> Vec<usize> {
        vec![0]
    }

    fn metric_names(&self) -> Vec<&'static str> {
        vec!["accuracy"]
    }
}
