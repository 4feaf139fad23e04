//! Upcycling of a dense model to a Mixture-of-Experts (Komatsuzaki et al., "Sparse Upcycling", 2212.05055): experts
//! start as copies of the feed-forward, and the router is newly initialised.
//!
//! Without noise, and with router weights that sum to 1, the new model computes what the dense one does.

use moeworks_moe::{ConfigError, MoeWeights, ScoreOrder};
use moeworks_ops::{Context, elementwise};
use moeworks_tensor::{DType, Purpose, Random, Tensor};

use crate::config::ModelConfig;
use crate::weights::{DecoderWeights, DenseWeights, FeedForwardWeights};

/// The options of upcycling.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UpcycleOptions {
    /// The number of experts, E.
    pub num_experts: usize,
    /// The number of experts per token, K.
    pub top_k: usize,
    /// Layer i becomes an MoE layer if (i + 1) is a multiple of this.
    pub every: usize,
    /// The standard deviation of normal noise added to the experts' weights, relative to that of the weights; 0:
    /// experts are exact copies.
    pub noise: f32,
    /// The seed of routers and noise.
    pub seed: u64,
}

/// Upcycles the dense model `config`, `weights`. Tensors that do not change are shared, and experts keep the type of
/// the feed-forward. Fails if the model already has experts or an option is out of range.
pub fn upcycle(
    ctx: &Context,
    config: &ModelConfig,
    weights: &DecoderWeights,
    options: &UpcycleOptions,
) -> Result<(ModelConfig, DecoderWeights), ConfigError> {
    let UpcycleOptions { num_experts, top_k, every, noise, seed } = *options;
    if config.num_experts > 0 {
        return Err(ConfigError::new("num_experts", config.num_experts, "must be 0: only a dense model is upcycled"));
    }
    if num_experts == 0 {
        return Err(ConfigError::new("num_experts", num_experts, "must be at least 1"));
    }
    if every > config.num_layers {
        let expected =
            format!("must be at most the number of layers, {}: no layer would have experts", config.num_layers);
        return Err(ConfigError::new("every", every, expected));
    }
    if !(noise >= 0.0 && noise.is_finite()) {
        return Err(ConfigError::new("noise", noise, "must be a number of at least 0"));
    }
    let upcycled = ModelConfig {
        num_experts,
        top_k,
        moe_every: every,
        expert_width: config.dense_width,
        shared_width: 0,
        score_order: ScoreOrder::SoftmaxThenTopK,
        normalize_weights: true,
        ..config.clone()
    };
    upcycled.validate()?;
    let mut result = weights.map(|_, tensor| tensor.clone());
    for (i, layer) in result.layers.iter_mut().enumerate().filter(|(i, _)| upcycled.is_moe_layer(*i)) {
        let FeedForwardWeights::Dense(dense) = &layer.feed_forward else { continue };
        let maker = ExpertMaker { ctx, options, layer: i as u64 };
        layer.feed_forward = FeedForwardWeights::Moe(maker.moe(dense, &upcycled, seed));
    }
    Ok((upcycled, result))
}

struct ExpertMaker<'a> {
    ctx: &'a Context,
    options: &'a UpcycleOptions,
    layer: u64,
}

impl ExpertMaker<'_> {
    fn moe(&self, dense: &DenseWeights, config: &ModelConfig, seed: u64) -> MoeWeights {
        let mut router = self.ctx.empty(&[config.num_experts, config.width], DType::F32);
        let random = Random::new(seed, Purpose::Init, 4 * self.layer);
        let std = if config.init_std > 0.0 { config.init_std } else { 0.02 };
        elementwise::fill_normal(self.ctx, &random, std, &mut router);
        MoeWeights {
            router,
            router_bias: None,
            gate_up: self.experts(&dense.gate_up, 1),
            down: self.experts(&dense.down, 2),
            biases: dense.biases.as_ref().map(|(gate_up, down)| (self.copies(gate_up), self.copies(down))),
            shared: None,
            extras: config.moe().zero_extras(self.ctx),
            state: config.moe().first_state(self.ctx),
        }
    }

    /// Returns E copies of a stack of one matrix.
    fn copies(&self, one: &Tensor) -> Tensor {
        let mut shape = one.shape().to_vec();
        shape[0] = self.options.num_experts;
        let mut all = self.ctx.empty(&shape, one.dtype());
        all.bytes_mut().chunks_exact_mut(one.num_bytes().max(1)).for_each(|part| part.copy_from_slice(one.bytes()));
        all
    }

    /// Returns E copies, each with its own noise.
    fn experts(&self, one: &Tensor, stream: u64) -> Tensor {
        let copies = self.copies(one);
        if self.options.noise == 0.0 {
            return copies;
        }
        let mean_square = elementwise::sum_of_squares(self.ctx, one) / one.len().max(1) as f64;
        let std = self.options.noise * mean_square.sqrt() as f32;
        let mut noisy = self.ctx.empty(copies.shape(), DType::F32);
        let random = Random::new(self.options.seed, Purpose::Init, 4 * self.layer + stream);
        elementwise::fill_normal(self.ctx, &random, std, &mut noisy);
        elementwise::add_assign(self.ctx, &mut noisy, &copies);
        elementwise::cast(self.ctx, &noisy, copies.dtype())
    }
}
