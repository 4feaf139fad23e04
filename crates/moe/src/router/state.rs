//! A router's tensors besides its matrix: weights that only some schemes have, and state that lasts from step to
//! step. State has no gradient and the optimizer never sees it.

use moeworks_ops::Context;
use moeworks_ops::elementwise::fill_normal;
use moeworks_tensor::{DType, Random};

use super::residual::RESIDUAL;
use crate::weights::NamedTensor;
use crate::zero_computation::{CONSTANT, CONSTANT_MIX};
use crate::{LayerStats, MoeConfig};

/// `[E]`: the state with the bias on the experts' scores, named as in DeepSeek-V3's files.
pub(crate) const EXPERT_BIAS: &str = "e_score_correction_bias";
/// The statistics of one whole step.
pub(crate) struct StepStats<'a> {
    pub(crate) config: &'a MoeConfig,
    /// The statistics of all MoE layers of the model.
    pub(crate) layers: &'a [LayerStats],
    /// The index of the layer whose state is updated.
    pub(crate) index: usize,
}

impl StepStats<'_> {
    /// Returns the statistics of the layer.
    pub(crate) fn own(&self) -> &LayerStats {
        &self.layers[self.index]
    }
}

/// Updates the router state of MoE layer `index` after a whole step, at `progress`, 0 to 1, of the run. `layers` are
/// the statistics of all MoE layers.
///
/// An expert's bias moves by `b += gamma sign(mean load - load)` (2408.15664, algorithm 1), with the loads of its
/// layer before any choice is dropped. Schemes update their own state.
///
/// Panics if `index` is out of range.
pub fn next_state(config: &MoeConfig, state: &mut [NamedTensor], layers: &[LayerStats], index: usize, progress: f64) {
    let step = StepStats { config, layers, index };
    for state in state {
        if state.name != EXPERT_BIAS {
            config.router.scheme().next_state(state, &step);
            continue;
        }
        let stats = step.own();
        let (bias, rate) = (state.tensor.f32s_mut(), config.router.bias_update_rate.at(progress) as f32);
        let total: f64 = stats.tokens_per_expert.iter().map(|&n| f64::from(n)).sum();
        let mean = total / bias.len() as f64;
        for (bias, &load) in bias.iter_mut().zip(&stats.tokens_per_expert) {
            *bias += rate * sign(mean - f64::from(load));
        }
    }
}

/// Returns the sign, 0 for 0.
pub(crate) fn sign(x: f64) -> f32 {
    if x == 0.0 { 0.0 } else { x.signum() as f32 }
}

/// The initial values of a weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Normal numbers of the model's standard deviation.
    Normal,
    /// A constant.
    Constant(f32),
    /// Normal numbers of this standard deviation.
    Deviation(f32),
}

/// The shape and initialisation of a weight or state that only some schemes have.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightShape {
    /// The name, appended to the router's own name in files.
    pub name: &'static str,
    /// The shape.
    pub shape: Vec<usize>,
    /// The initial values.
    pub init: Init,
}

impl WeightShape {
    /// Creates the shape of the tensor `name`.
    pub(crate) fn new(name: &'static str, shape: &[usize], init: Init) -> Self {
        Self { name, shape: shape.to_vec(), init }
    }
}

impl MoeConfig {
    /// Returns the number of experts that a token can choose, zero-computation experts included.
    #[must_use]
    pub fn num_choosable(&self) -> usize {
        self.num_experts + self.router.num_zero_computation()
    }

    /// Returns the shape of the router's matrix.
    #[must_use]
    pub fn router_shape(&self) -> [usize; 2] {
        self.router.scheme().matrix_shape(self)
    }

    /// Returns the number of products of length D that routing a token takes; the plain router takes one per expert.
    #[must_use]
    pub fn router_products(&self) -> usize {
        let all = self.num_choosable();
        let residual = if self.router.gate_residual { (all * all).div_ceil(self.width.max(1)) } else { 0 };
        residual + self.router.scheme().num_products(self)
    }

    /// Returns the largest number of experts per token at any time of a run.
    #[must_use]
    pub fn largest_top_k(&self) -> usize {
        self.router.scheme().largest_top_k(self)
    }

    /// Returns the shapes of the router's weights besides its matrix.
    #[must_use]
    pub fn extra_shapes(&self) -> Vec<WeightShape> {
        let (e, d, router) = (self.num_choosable(), self.width, &self.router);
        let mut shapes = router.scheme().weights(self);
        if router.constant_experts > 0 {
            shapes.push(WeightShape::new(CONSTANT, &[router.constant_experts, d], Init::Normal));
            shapes.push(WeightShape::new(CONSTANT_MIX, &[2 * router.constant_experts, d], Init::Normal));
        }
        if router.gate_residual {
            shapes.push(WeightShape::new(RESIDUAL, &[e, e], Init::Constant(0.0)));
        }
        shapes
    }

    /// Returns the shapes of the router's state.
    #[must_use]
    pub fn state_shapes(&self) -> Vec<WeightShape> {
        let bias = WeightShape::new(EXPERT_BIAS, &[self.num_choosable()], Init::Constant(0.0));
        let bias = self.router.expert_bias.then_some(bias);
        bias.into_iter().chain(self.router.scheme().state(self)).collect()
    }

    /// Returns the state before the first step.
    #[must_use]
    pub fn first_state(&self, ctx: &Context) -> Vec<NamedTensor> {
        let random = Random::new(0, moeworks_tensor::Purpose::Init, 0);
        self.state_shapes().iter().map(|shape| NamedTensor::first(ctx, shape, &random, 0.0)).collect()
    }

    /// Returns the router's weights besides its matrix, as zeros.
    #[must_use]
    pub fn zero_extras(&self, ctx: &Context) -> Vec<NamedTensor> {
        let zeros = |shape: WeightShape| NamedTensor { name: shape.name, tensor: ctx.zeros(&shape.shape, DType::F32) };
        self.extra_shapes().into_iter().map(zeros).collect()
    }
}

impl NamedTensor {
    /// Initialises a weight of `shape`; `std` is the model's standard deviation.
    #[must_use]
    pub fn first(ctx: &Context, shape: &WeightShape, random: &Random, std: f32) -> Self {
        let mut tensor = ctx.zeros(&shape.shape, DType::F32);
        match shape.init {
            Init::Normal => fill_normal(ctx, random, std, &mut tensor),
            Init::Constant(value) => tensor.f32s_mut().fill(value),
            Init::Deviation(std) => fill_normal(ctx, random, std, &mut tensor),
        }
        Self { name: shape.name, tensor }
    }
}
