//! Tensors of a router besides its matrix: weights that only some schemes have, and state, which is kept from step to step
//! and is no weight: it has no gradient, and the optimizer never sees it.

use moeworks_ops::Context;
use moeworks_ops::elementwise::fill_normal;
use moeworks_tensor::{DType, Random};

use super::residual::RESIDUAL;
use crate::weights::NamedTensor;
use crate::zero_computation::{CONSTANT, CONSTANT_MIX};
use crate::{LayerStats, MoeConfig};

/// In the state of a router: `[E]`, the bias on the experts' scores. The name is that of DeepSeek-V3's files.
pub(crate) const EXPERT_BIAS: &str = "e_score_correction_bias";
/// The statistics of one whole step.
pub(crate) struct StepStats<'a> {
    pub(crate) config: &'a MoeConfig,
    /// The statistics of all MoE layers of the model.
    pub(crate) layers: &'a [LayerStats],
    /// The layer whose state is moved.
    pub(crate) index: usize,
}

impl StepStats<'_> {
    /// The statistics of the layer.
    pub(crate) fn own(&self) -> &LayerStats {
        &self.layers[self.index]
    }
}

/// Moves the state of the router of layer `index` by what one whole step's tokens did in `layers`, all MoE layers of a model of
/// `config`, when `progress`, 0 to 1, of the run is done.
///
/// The bias of each expert: `b += gamma sign(mean load - load)` (2408.15664, algorithm 1), with the loads of its layer before any
/// choice is dropped. Other state is the scheme's.
///
/// Panics if there is no layer `index`.
pub fn next_state(
    config: &MoeConfig,
    state: &mut [NamedTensor],
    (layers, index): (&[LayerStats], usize),
    progress: f64,
) {
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

/// The sign, 0 for 0.
pub(crate) fn sign(x: f64) -> f32 {
    if x == 0.0 { 0.0 } else { x.signum() as f32 }
}

/// The first values of a weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Normal numbers of the model's deviation.
    Normal,
    /// One number throughout.
    Constant(f32),
    /// Normal numbers of this deviation.
    Deviation(f32),
}

/// A weight or a state that only some schemes have.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightShape {
    /// Its name, as in files behind the router's own.
    pub name: &'static str,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its first values.
    pub init: Init,
}

impl WeightShape {
    /// A tensor of this name.
    pub(crate) fn new(name: &'static str, shape: &[usize], init: Init) -> Self {
        Self { name, shape: shape.to_vec(), init }
    }
}

impl MoeConfig {
    /// Experts that a token can have, those without computation included.
    #[must_use]
    pub fn num_choosable(&self) -> usize {
        self.num_experts + self.router.num_zero_computation()
    }

    /// The shape of the router's matrix.
    #[must_use]
    pub fn router_shape(&self) -> [usize; 2] {
        self.router.scheme().matrix_shape(self)
    }

    /// Products of length D that a token takes to be routed, where the plain router takes one for each expert.
    #[must_use]
    pub fn router_products(&self) -> usize {
        let all = self.num_choosable();
        let residual = if self.router.gate_residual { (all * all).div_ceil(self.width.max(1)) } else { 0 };
        residual + self.router.scheme().num_products(self)
    }

    /// The most experts that a token has at any time of a run.
    #[must_use]
    pub fn largest_top_k(&self) -> usize {
        self.router.scheme().largest_top_k(self)
    }

    /// The weights that the router has besides its matrix.
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

    /// The state that the router keeps.
    #[must_use]
    pub fn state_shapes(&self) -> Vec<WeightShape> {
        let bias = WeightShape::new(EXPERT_BIAS, &[self.num_choosable()], Init::Constant(0.0));
        let bias = self.router.expert_bias.then_some(bias);
        bias.into_iter().chain(self.router.scheme().state(self)).collect()
    }

    /// The state before the first step.
    #[must_use]
    pub fn first_state(&self, ctx: &Context) -> Vec<NamedTensor> {
        let random = Random::new(0, moeworks_tensor::Purpose::Init, 0);
        self.state_shapes().iter().map(|shape| NamedTensor::first(ctx, shape, &random, 0.0)).collect()
    }

    /// The weights that the router has besides its matrix, as zeros.
    #[must_use]
    pub fn zero_extras(&self, ctx: &Context) -> Vec<NamedTensor> {
        let zeros = |shape: WeightShape| NamedTensor { name: shape.name, tensor: ctx.zeros(&shape.shape, DType::F32) };
        self.extra_shapes().into_iter().map(zeros).collect()
    }
}

impl NamedTensor {
    /// The first values of a weight of `shape`; `std` is the model's deviation.
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
