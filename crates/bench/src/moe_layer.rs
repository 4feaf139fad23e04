//! An MoE layer with random weights, for timing.

use std::collections::HashSet;

use moeworks_moe::{
    BackwardInput, ConfigError, LossGrad, MoeConfig, MoeLayer, MoeWeights, RouterConfig, RouterInput, WgradTarget,
};
use moeworks_ops::linear::Write;
use moeworks_ops::{Activation, Context, elementwise};
use moeworks_tensor::{DType, Purpose, Random, Tensor};

use crate::timing::run_seconds;

/// The shape of a layer and the types of its weights and their gradients.
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct LayerShape {
    pub(crate) d: usize,
    pub(crate) f: usize,
    pub(crate) e: usize,
    pub(crate) k: usize,
    pub(crate) activation: Activation,
    pub(crate) dtype: DType,
    /// The type of the gradients of the experts' weights.
    pub(crate) gradients: DType,
}

/// A layer with its weights and gradients.
pub(crate) struct TimedLayer {
    pub(crate) shape: LayerShape,
    layer: MoeLayer,
    pub(crate) weights: MoeWeights,
    /// Allocated at the first backward pass, because they are twice as large as the weights.
    grads: Option<MoeWeights>,
}

impl TimedLayer {
    pub(crate) fn new(ctx: &Context, shape: LayerShape, router: &RouterConfig) -> Result<Self, ConfigError> {
        let layer = MoeLayer::new(MoeConfig {
            activation: shape.activation,
            router: router.clone(),
            ..MoeConfig::plain(shape.d, shape.f, shape.e, shape.k)
        })?;
        // The weights are drawn on the CPU, so that a GPU never holds their f32 form as well.
        let host = ctx.on_host();
        let mut weights = MoeWeights::random(&host, layer.config(), 0, 0.02);
        for experts in [&mut weights.gate_up, &mut weights.down] {
            *experts = elementwise::cast(&host, experts, shape.dtype);
        }
        Ok(Self { shape, layer, weights, grads: None })
    }

    /// Returns the router's settings.
    pub(crate) fn router(&self) -> &RouterConfig {
        &self.layer.config().router
    }

    /// Returns the layer, its weights and their gradients.
    pub(crate) fn parts(&mut self, ctx: &Context) -> (&MoeLayer, &MoeWeights, &mut MoeWeights) {
        let new = || MoeWeights::zeros(ctx, self.layer.config(), self.shape.gradients);
        (&self.layer, &self.weights, self.grads.get_or_insert_with(new))
    }

    /// Draws inputs and gradients of outputs in the type of the weights; each `set` is different.
    pub(crate) fn tokens(&self, ctx: &Context, count: usize, set: usize) -> (Tensor, Tensor) {
        let draw = |stream, dtype| {
            let mut tensor: Tensor = ctx.empty(&[count, self.shape.d], DType::F32);
            elementwise::fill_normal(ctx, &Random::new(set as u64, Purpose::Test, stream), 1.0, &mut tensor);
            elementwise::cast(ctx, &tensor, dtype)
        };
        (draw(0, self.shape.dtype), draw(1, self.shape.dtype))
    }

    /// Returns the number of experts that have tokens.
    pub(crate) fn num_used(&self, ctx: &Context, x: &Tensor) -> usize {
        let input = RouterInput { is_forward_only: true, ..RouterInput::default() };
        let (_, saved) = self.layer.forward(ctx, &self.weights, x, &input);
        saved.routing().expert_ids().iter().collect::<HashSet<_>>().len()
    }

    /// Runs the forward pass, and with `is_both` the backward pass with the gradients of the weights of the experts
    /// that have rows.
    pub(crate) fn pass(&mut self, ctx: &Context, x: &Tensor, dy: &Tensor, is_both: bool) {
        let input = RouterInput { is_forward_only: !is_both, ..RouterInput::default() };
        let (y, saved) = self.layer.forward(ctx, &self.weights, x, &input);
        if is_both {
            let losses =
                LossGrad { balance: vec![0.0; self.layer.config().num_choosable()], z: 0.0, ..LossGrad::default() };
            let (layer, weights, grads) = self.parts(ctx);
            let wgrad = WgradTarget { write: Write::Replace, only_used: true, grads: &mut *grads };
            let input = BackwardInput { wgrad: Some(wgrad), ..BackwardInput::from(&losses) };
            let (_, task) = layer.backward(ctx, weights, &saved, dy, input);
            task.run(ctx, WgradTarget { write: Write::Replace, only_used: true, grads });
        }
        drop(y);
    }

    /// Returns the seconds of each of several passes.
    pub(crate) fn times(&mut self, ctx: &Context, tokens: usize, is_both: bool) -> Vec<f64> {
        let (x, dy) = self.tokens(ctx, tokens, 0);
        run_seconds(ctx, || self.pass(ctx, &x, &dy, is_both))
    }
}
