//! What a router has besides its matrix: weights that only some schemes have, and state, which is kept from step to step
//! and is no weight: it has no gradient, and the optimizer never sees it.

use moeworks_ops::Context;
use moeworks_ops::elementwise::fill_normal;
use moeworks_tensor::{DType, Random};

use super::config::{HashTable, RouterConfig, RouterKind};
use super::residual::RESIDUAL;
use super::scorer::{LOG_SCALE, NOISE, PROJECTION};
use super::tree::{TREE, Tree};
use crate::free::{CONSTANT, CONSTANT_MIX};
use crate::weights::NamedTensor;
use crate::{LayerStats, MoeConfig};

/// In the state of a router: `[E]`, the bias on the experts' scores. The name is that of DeepSeek-V3's files.
pub(crate) const EXPERT_BIAS: &str = "e_score_correction_bias";
/// In the state of a router: `[1]`, the weight of the L1 loss.
pub(crate) const L1_WEIGHT: &str = "l1_weight";

/// In the state of a router: `[ids, K]`, the experts of each id of a token as numbers, -1 for none.
pub(crate) const HASH_TABLE: &str = "hash_table";

/// Moves the state of the router of layer `index` by what one whole step's tokens did in `layers`, all MoE layers of a model of
/// `config`, when `progress`, 0 to 1, of the run is done.
///
/// The bias of each expert: `b += gamma sign(mean load - load)` (2408.15664, algorithm 1), with the loads of its layer before any
/// choice is dropped. The weight of the L1 loss: `lambda *= rate^sign((1 - K/E) - sparsity)`, with the sparsity the share of experts
/// that a token does not have, the mean over all layers, so that they share one weight (ReMoE, 2412.14711, equations 7 and 8).
///
/// Panics if there is no layer `index`.
pub fn next_state(
    config: &MoeConfig,
    state: &mut [NamedTensor],
    (layers, index): (&[LayerStats], usize),
    progress: f64,
) {
    let stats = &layers[index];
    for NamedTensor { name, tensor } in state {
        match *name {
            EXPERT_BIAS => {
                let (bias, rate) = (tensor.f32s_mut(), config.router.bias_update_rate.at(progress) as f32);
                let total: f64 = stats.tokens_per_expert.iter().map(|&n| f64::from(n)).sum();
                let mean = total / bias.len() as f64;
                for (bias, &load) in bias.iter_mut().zip(&stats.tokens_per_expert) {
                    *bias += rate * sign(mean - f64::from(load));
                }
            }
            L1_WEIGHT if stats.num_tokens > 0 => {
                let sum = |count: fn(&LayerStats) -> usize| layers.iter().map(count).sum::<usize>() as f64;
                let mean_active = sum(|layer| layer.num_choices) / sum(|layer| layer.num_tokens);
                let weight = &mut tensor.f32s_mut()[0];
                // More experts than K: less sparse than wanted.
                *weight *= config.router.l1_rate.powf(sign(mean_active - config.top_k as f64));
                *weight = weight.clamp(f32::MIN_POSITIVE, f32::MAX);
            }
            _ => {}
        }
    }
}

fn sign(x: f64) -> f32 {
    if x == 0.0 { 0.0 } else { x.signum() as f32 }
}

/// What a weight is filled with at the beginning.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Normal numbers of the model's deviation.
    Normal,
    /// One number throughout.
    Constant(f32),
}

/// A weight or a state that only some schemes have.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightShape {
    /// Its name, as in files behind the router's own.
    pub name: &'static str,
    /// Its shape.
    pub shape: Vec<usize>,
    /// What it begins with.
    pub init: Init,
}

impl WeightShape {
    fn new(name: &'static str, shape: &[usize], init: Init) -> Self {
        Self { name, shape: shape.to_vec(), init }
    }
}

impl MoeConfig {
    /// Experts that a token can have, those without computation included.
    #[must_use]
    pub fn num_choosable(&self) -> usize {
        self.num_experts + self.router.num_free()
    }

    /// The shape of the router's matrix.
    #[must_use]
    pub fn router_shape(&self) -> [usize; 2] {
        match self.router.kind {
            RouterKind::Cosine => [self.num_choosable(), self.cosine_dim()],
            RouterKind::Hash => [0, self.width],
            _ => [self.num_choosable(), self.width],
        }
    }

    /// The width of the cosine router's projection.
    fn cosine_dim(&self) -> usize {
        match self.router.cosine_dim {
            0 => self.width.min(256),
            width => width,
        }
    }

    /// Products of length D that a token takes to be routed, where the plain router takes one for each expert.
    #[must_use]
    pub fn router_products(&self) -> usize {
        let all = self.num_choosable();
        let residual = if self.router.gate_residual { (all * all).div_ceil(self.width.max(1)) } else { 0 };
        residual
            + match self.router.kind {
                RouterKind::Hierarchical => Tree::of(self).products(),
                RouterKind::Hash => 0,
                RouterKind::NoisyTopK => 2 * all,
                // The projection, and cosines of its width, in products of length D.
                RouterKind::Cosine => self.cosine_dim() + (all * self.cosine_dim()).div_ceil(self.width.max(1)),
                _ => all,
            }
    }

    /// The weights that the router has besides its matrix.
    #[must_use]
    pub fn extra_shapes(&self) -> Vec<WeightShape> {
        let (e, d, router) = (self.num_choosable(), self.width, &self.router);
        let mut shapes = Vec::new();
        match router.kind {
            RouterKind::NoisyTopK => shapes.push(WeightShape::new(NOISE, &[e, d], Init::Constant(0.0))),
            RouterKind::Cosine => {
                let log_scale = -router.cosine_temperature.ln();
                shapes.push(WeightShape::new(PROJECTION, &[self.cosine_dim(), d], Init::Normal));
                shapes.push(WeightShape::new(LOG_SCALE, &[1], Init::Constant(log_scale)));
            }
            RouterKind::Hierarchical => {
                let num_clusters = Tree::of(self).num_clusters();
                // A prime number of experts has none.
                shapes.extend((num_clusters > 0).then(|| WeightShape::new(TREE, &[num_clusters, d], Init::Normal)));
            }
            _ => {}
        }
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
        let RouterConfig { expert_bias, kind, l1_start, hash, hash_ids, .. } = self.router;
        if kind == RouterKind::Hash && hash != HashTable::Random {
            return vec![WeightShape::new(HASH_TABLE, &[hash_ids, self.top_k], Init::Constant(-1.0))];
        }
        let bias = WeightShape::new(EXPERT_BIAS, &[self.num_choosable()], Init::Constant(0.0));
        let l1 = WeightShape::new(L1_WEIGHT, &[1], Init::Constant(l1_start));
        let bias = expert_bias.then_some(bias);
        bias.into_iter().chain((kind == RouterKind::Relu).then_some(l1)).collect()
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
    /// What a weight of `shape` begins with; `std` is the model's deviation.
    #[must_use]
    pub fn first(ctx: &Context, shape: &WeightShape, random: &Random, std: f32) -> Self {
        let mut tensor = ctx.zeros(&shape.shape, DType::F32);
        match shape.init {
            Init::Normal => fill_normal(ctx, random, std, &mut tensor),
            Init::Constant(value) => tensor.f32s_mut().fill(value),
        }
        Self { name: shape.name, tensor }
    }
}
