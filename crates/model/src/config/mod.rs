//! The configuration of a decoder language model.

mod rotary;
mod variant;

use moeworks_moe::{ConfigError, MoeConfig, Ramp, Range, RouterConfig, ScoreOrder, Section as _, settings};
use moeworks_ops::Activation;
use serde::{Deserialize, Serialize};

pub use rotary::{RopeScaling, Rotary};
pub use variant::{EncoderConfig, LatentAttention, NormKind, PositionKind, Variant};

/// The RMS norm of queries and keys before the rotary embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QkNorm {
    /// None (Mixtral).
    None,
    /// Over each head, with one weight of `head_dim` for all heads (Qwen3).
    Head,
    /// Over the whole projection before it is split into heads (OLMoE).
    Whole,
}

/// The activation of feed-forward networks, as written in configurations.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ActivationKind {
    /// Three matrices: `silu(gate) * up`.
    Swiglu,
    /// Two matrices, exact GELU.
    Gelu,
    /// Two matrices, GELU approximated with a hyperbolic tangent (GPT-2).
    GeluTanh,
    /// Three matrices: `g sigmoid(alpha g) (up + 1)`, with inputs clamped to a limit (GPT-OSS).
    ClampedSwiglu {
        /// The slope of the sigmoid.
        alpha: f32,
        /// The limit that inputs are clamped to.
        limit: f32,
    },
    /// Two matrices, ReLU.
    Relu,
}

impl From<ActivationKind> for Activation {
    fn from(kind: ActivationKind) -> Self {
        match kind {
            ActivationKind::Swiglu => Self::SwiGlu,
            ActivationKind::Gelu => Self::Gelu,
            ActivationKind::GeluTanh => Self::GeluTanh,
            ActivationKind::ClampedSwiglu { alpha, limit } => Self::ClampedSwiGlu { alpha, limit },
            ActivationKind::Relu => Self::Relu,
        }
    }
}

/// Bounds of a model's sizes. They keep products of sizes from overflowing, because a configuration may come from a
/// file.
const MAX_WIDTH: u64 = 1 << 20;
const MAX_LAYERS: u64 = 1 << 14;
const MAX_HEADS: u64 = 1 << 14;
const MAX_EXPERTS: u64 = 1 << 20;

settings! {
    /// The model's shape and rules.
    ///
    /// A decoder language model with an MoE feed-forward in every `moe_every`-th layer. The default is the `tiny`
    /// preset: 4 layers, width 256, 8 experts of width 512, top-2 routing.
    #[serde(deny_unknown_fields, default)]
    pub struct ModelConfig in "" {
        /// Size of the vocabulary (V); 0: that of the tokenizer.
        ///
        /// It is 0 until the tokenizer is known.
        vocab_size: usize = 0, in Range::whole(0..=1 << 24);
        /// Width of the residual stream (D).
        width: usize = 256, in Range::whole(1..=MAX_WIDTH);
        /// Layers (L).
        num_layers: usize = 4, in Range::whole(1..=MAX_LAYERS);
        /// Query heads (H).
        num_heads: usize = 4, in Range::whole(1..=MAX_HEADS);
        /// Key and value heads; divides num_heads.
        num_kv_heads: usize = 4, in Range::whole(1..=MAX_HEADS);
        /// Width of a head, even.
        head_dim: usize = 64, in Range::whole(1..=1 << 14);
        /// Norm of queries and keys: none, head (Qwen3) or whole (OLMoE).
        qk_norm: QkNorm = QkNorm::Head;
        /// Experts of an MoE layer (E); 0: a dense model.
        num_experts: usize = 8, in Range::whole(0..=MAX_EXPERTS);
        /// Experts that a token goes to (K), 1 to num_experts.
        top_k: usize = 2, in Range::whole(0..=MAX_EXPERTS);
        /// Hidden width of an expert (F).
        expert_width: usize = 512, in Range::whole(0..=MAX_WIDTH);
        /// Hidden width of all shared experts together; 0: none.
        shared_width: usize = 0, in Range::whole(0..=MAX_WIDTH);
        /// Distance between MoE layers; 1: every layer is one.
        ///
        /// Layer i is an MoE layer if (i + 1) is a multiple of this.
        moe_every: usize = 1, in Range::AT_LEAST_ONE;
        /// Hidden width of the dense feed-forward of the other layers.
        dense_width: usize = 1024, in Range::whole(0..=MAX_WIDTH);
        /// Activation of experts and dense feed-forwards: swiglu, gelu or relu.
        activation: ActivationKind = ActivationKind::Swiglu;
        /// Order of softmax and choice: softmax_then_top_k (over all experts), or top_k_then_softmax (over the chosen
        /// ones).
        score_order: ScoreOrder = ScoreOrder::SoftmaxThenTopK, was "softmax_before_topk";
        /// Divides a token's router weights by their sum.
        normalize_weights: bool = true;
        /// Above 0: an expert takes ceil(factor K T / E) tokens, later ones are dropped; 0: none is ever dropped;
        /// below 0: none is dropped up to |factor| times the even share.
        ///
        /// See [`MoeConfig::capacity_factor`].
        capacity_factor: f32 = 0.0, in MoeConfig::CAPACITY_FACTOR;
        /// In training, router inputs are multiplied by a number in [1 - jitter, 1 + jitter]: a number or a ramp.
        ///
        /// See [`MoeConfig::jitter`].
        jitter: Ramp = Ramp::ZERO, in MoeConfig::JITTER;
        /// Uses the embedding as the output projection.
        tie_embeddings: bool = false;
        /// Base of the rotary embedding.
        rope_theta: f64 = 10_000.0, in Range::POSITIVE;
        /// Epsilon of the RMS norms.
        norm_eps: f32 = 1e-6, in Range::POSITIVE;
        /// The longest sequence that the model is made for.
        ///
        /// Not a limit with relative positions.
        max_seq_len: usize = 1024, in Range::whole(1..=1 << 30);
        /// Standard deviation of the initial weights.
        ///
        /// The normal distribution is truncated at three standard deviations. Output projections of blocks are
        /// divided by sqrt(2 L).
        init_std: f32 = 0.02, in Range::NOT_NEGATIVE;
    }
    besides {
        /// The router: how tokens are assigned to experts.
        router: RouterConfig;
        /// Deviations of published families from the plain model.
        #[serde(skip_serializing_if = "Variant::is_plain")]
        variant: Variant;
    }
}

impl ModelConfig {
    /// Returns true if layer `i` (from 0) has an MoE feed-forward.
    #[must_use]
    pub fn is_moe_layer(&self, i: usize) -> bool {
        self.num_experts > 0 && (i + 1).is_multiple_of(self.moe_every.max(1)) && !self.variant.dense_layers.contains(&i)
    }

    /// Returns the configuration of the encoder's layers as if they were a decoder's; none without an encoder.
    #[must_use]
    pub fn of_encoder(&self) -> Option<Self> {
        let EncoderConfig { num_layers, dense_layers, .. } = self.variant.encoder.clone()?;
        let variant = Variant { encoder: None, dense_layers, ..self.variant.clone() };
        Some(Self { num_layers, variant, ..self.clone() })
    }

    /// Returns the number of the encoder's layers; 0 without one.
    #[must_use]
    pub fn num_encoder_layers(&self) -> usize {
        self.variant.encoder.as_ref().map_or(0, |encoder| encoder.num_layers)
    }

    /// Lists the MoE layers in the order in which tokens pass them: true for an encoder's layer, and its number in
    /// its stack.
    #[must_use]
    pub fn moe_layers(&self) -> Vec<(bool, usize)> {
        let of = |config: &Self, is_encoder: bool| -> Vec<(bool, usize)> {
            (0..config.num_layers).filter(|&i| config.is_moe_layer(i)).map(|i| (is_encoder, i)).collect()
        };
        let encoder = self.of_encoder().map_or_else(Vec::new, |encoder| of(&encoder, true));
        encoder.into_iter().chain(of(self, false)).collect()
    }

    /// Lists the numbers of the MoE layers, counting an encoder's layers before the decoder's.
    #[must_use]
    pub fn moe_layer_numbers(&self) -> Vec<usize> {
        let before = self.num_encoder_layers();
        let number = |(is_encoder, i): (bool, usize)| if is_encoder { i } else { before + i };
        self.moe_layers().into_iter().map(number).collect()
    }

    /// Returns the name of the layer with this number, in its own stack's numbering.
    #[must_use]
    pub fn layer_name(&self, number: usize) -> String {
        match number.checked_sub(self.num_encoder_layers()) {
            Some(i) => format!("layer {i}"),
            None => format!("encoder layer {number}"),
        }
    }

    /// Returns true if a trained model of `other` computes the same function as one of this configuration with the
    /// same weights.
    #[must_use]
    pub fn computes_as(&self, other: &Self) -> bool {
        self.computed() == other.computed()
    }

    /// Returns the canonical form of what a trained model of this configuration computes. Settings of training, and
    /// those without effect, have their defaults; of two equivalent forms it is always the same one.
    pub(crate) fn computed(&self) -> Self {
        let default = Self::default();
        let mut c = Self { capacity_factor: 0.0, jitter: Ramp::ZERO, init_std: default.init_std, ..self.clone() };
        let RouterConfig { bias_update_rate, overflow, local_group, .. } = RouterConfig::default();
        c.router = RouterConfig { bias_update_rate, overflow, local_group, ..c.router };
        if c.router.top_groups == c.router.num_groups {
            (c.router.num_groups, c.router.top_groups) = (1, 1);
        }
        if c.router.num_groups == 1 {
            c.router.group_score = RouterConfig::default().group_score;
        }
        let dense_layers = |config: &Self| -> Vec<usize> {
            (0..config.num_layers.min(1 << 14)).filter(|&i| !config.is_moe_layer(i)).collect()
        };
        let of_encoder = self.of_encoder().map(|encoder| (dense_layers(&encoder), encoder.num_layers));
        let of_decoder = dense_layers(self);
        let is_dense = |dense: &[usize], num_layers: usize| dense.len() >= num_layers.min(1 << 14);
        if is_dense(&of_decoder, self.num_layers)
            && of_encoder.as_ref().is_none_or(|(dense, all)| is_dense(dense, *all))
        {
            c = Self {
                num_experts: 0,
                top_k: default.top_k,
                expert_width: default.expert_width,
                shared_width: default.shared_width,
                score_order: default.score_order,
                normalize_weights: default.normalize_weights,
                router: default.router,
                ..c
            };
            c.variant.shared_gate = false;
            c.variant.router_bias = false;
        }
        // Normalised weights are the same in either order.
        c.normalize_weights |= c.score_order == ScoreOrder::TopKThenSoftmax;
        c.score_order = ScoreOrder::SoftmaxThenTopK;
        if of_decoder.is_empty() && of_encoder.as_ref().is_none_or(|(dense, _)| dense.is_empty()) {
            c.dense_width = default.dense_width;
        }
        c.moe_every = 1;
        c.variant.dense_layers = of_decoder;
        if let (Some(encoder), Some((dense, _))) = (&mut c.variant.encoder, of_encoder) {
            encoder.dense_layers = dense;
        }
        c.variant.value_dim = self.value_dim();
        c.variant.attention_scale = self.attention_scale();
        if self.variant.positions != PositionKind::Rotary {
            c.rope_theta = default.rope_theta;
        }
        c
    }

    /// Returns the number of keys that a query of layer `i` sees at most, its own included; none: all up to its own.
    #[must_use]
    pub fn window(&self, i: usize) -> Option<usize> {
        let Variant { window, full_attention_layers, .. } = &self.variant;
        (*window > 0 && !full_attention_layers.contains(&i)).then_some(*window)
    }

    /// Returns the width of a head of values.
    #[must_use]
    pub fn value_dim(&self) -> usize {
        if self.variant.value_dim == 0 { self.head_dim } else { self.variant.value_dim }
    }

    /// Returns the factor of attention scores.
    #[must_use]
    pub fn attention_scale(&self) -> f32 {
        let Variant { attention_scale, latent, rotary, .. } = &self.variant;
        if *attention_scale > 0.0 {
            return *attention_scale;
        }
        let factor = if latent.is_some() { rotary.scaling.score_factor() } else { 1.0 };
        (factor / (self.head_dim as f64).sqrt()) as f32
    }

    /// Returns the configuration of the model's MoE layers.
    #[must_use]
    pub fn moe(&self) -> MoeConfig {
        MoeConfig {
            width: self.width,
            num_experts: self.num_experts,
            top_k: self.top_k,
            expert_width: self.expert_width,
            activation: self.activation.into(),
            score_order: self.score_order,
            normalize_weights: self.normalize_weights,
            capacity_factor: self.capacity_factor,
            jitter: self.jitter,
            shared_width: self.shared_width,
            router: RouterConfig { num_token_ids: self.vocab_size, ..self.router.clone() },
        }
    }

    /// Checks every setting; `vocab_size` may still be 0.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.check_ranges()?;
        self.check_sizes()?;
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            let expected = format!("must divide num_heads, {}", self.num_heads);
            return Err(ConfigError::new("num_kv_heads", self.num_kv_heads, expected));
        }
        self.variant.validate(self.head_dim)?;
        if self.variant.latent.is_some() && self.num_kv_heads != self.num_heads {
            let expected = format!("must be num_heads, {}, in latent attention", self.num_heads);
            return Err(ConfigError::new("num_kv_heads", self.num_kv_heads, expected));
        }
        self.check_encoder()?;
        let has_dense_layer = (0..self.num_layers).any(|i| !self.is_moe_layer(i));
        if has_dense_layer && self.dense_width == 0 {
            return Err(ConfigError::new("dense_width", 0, "must be at least 1: some layers are dense"));
        }
        if self.num_experts > 0 { self.moe().validate() } else { Ok(()) }?;
        if !self.router.modality_experts.is_empty() && self.router.modality_boundaries.is_empty() {
            let expected =
                "must be the token ids at which modalities begin, as router.modality_experts reserves experts";
            return Err(ConfigError::new("router.modality_boundaries", "\"\"", expected));
        }
        Ok(())
    }

    /// Checks the encoder against the other settings.
    fn check_encoder(&self) -> Result<(), ConfigError> {
        let Some(encoder) = &self.variant.encoder else { return Ok(()) };
        if self.vocab_size > 0 && encoder.start_id as usize >= self.vocab_size {
            let expected = format!("must be below vocab_size, {}", self.vocab_size);
            return Err(ConfigError::new("variant.encoder.start_id", encoder.start_id, expected));
        }
        if !self.router.is_plain_at_inference() {
            return Err(ConfigError::new("router", "given", "must be plain in a model with an encoder"));
        }
        let of_encoder = self.of_encoder();
        let has_dense_layer = of_encoder.is_some_and(|c| (0..c.num_layers).any(|i| !c.is_moe_layer(i)));
        if has_dense_layer && self.dense_width == 0 {
            return Err(ConfigError::new("dense_width", 0, "must be at least 1: some layers are dense"));
        }
        Ok(())
    }

    /// Limits the number of weights of a layer's experts, so that no product of sizes overflows.
    fn check_sizes(&self) -> Result<(), ConfigError> {
        let experts = self.num_experts * self.expert_width;
        if experts.checked_mul(2 * self.width).is_none_or(|elements| elements > 1 << 48) {
            let expected = "must keep the experts of a layer below 2^48 weights";
            return Err(ConfigError::new("num_experts", self.num_experts, expected));
        }
        Ok(())
    }
}
