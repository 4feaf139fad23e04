//! The differences of published families from the plain decoder.

use moeworks_moe::ConfigError;
use serde::{Deserialize, Serialize};

use super::rotary::Rotary;

/// The norms of the residual stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NormKind {
    /// RMSNorm with a weight.
    #[default]
    Rms,
    /// Layer norm with a weight and a bias (GPT-2, PhiMoE).
    Layer,
}

/// The kind of positions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PositionKind {
    /// Rotary embedding of queries and keys.
    #[default]
    Rotary,
    /// A learned vector for each position, added to the embedding (GPT-2).
    Learned,
    /// A learned bias per head and bucket of distances, added to attention scores (T5, 1910.10683, section 2.1). All
    /// layers share it, and there is no longest sequence.
    Relative {
        /// The number of buckets, even. An encoder has half of them for each direction; half of those hold a single
        /// distance each.
        num_buckets: usize,
        /// The distance from which on all share one bucket.
        max_distance: usize,
    },
}

/// An encoder whose output the decoder's layers attend to (T5, 1910.10683). Its layers have the sizes of the
/// decoder's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EncoderConfig {
    /// The number of its layers.
    pub num_layers: usize,
    /// The layers that are dense whatever `moe_every` says.
    pub dense_layers: Vec<usize>,
    /// The id that begins every text of the decoder.
    pub start_id: u32,
}

/// Multi-head latent attention (DeepSeek-V2, 2405.04434, section 2.1): keys and values are projected up from one
/// narrow vector per token. `head_dim` is then the sum of both key widths, and every query head has its own key head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LatentAttention {
    /// The width that queries are projected up from; 0: they are projected from the residual stream.
    pub query_rank: usize,
    /// The width that keys and values are projected up from.
    pub kv_rank: usize,
    /// The width of a head's query and key that is not rotated.
    pub plain_dim: usize,
    /// The width that is rotated; all heads share this part of the key.
    pub rotary_dim: usize,
}

/// The differences of published families from the plain decoder; the default has none.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Variant {
    /// The norms of the residual stream.
    pub norm: NormKind,
    /// The kind of positions.
    pub positions: PositionKind,
    /// The variant of the rotary embedding.
    #[serde(skip_serializing_if = "Rotary::is_plain")]
    pub rotary: Rotary,
    /// Adds biases to the projections of queries, keys and values.
    pub qkv_bias: bool,
    /// Adds a bias to attention's output projection.
    pub output_bias: bool,
    /// The limit that queries, keys and values are clamped to on both sides; 0: none (OLMoE's `clip_qkv`).
    pub clip_qkv: f32,
    /// Adds a learned logit per head that takes part in attention's softmax and has no value (GPT-OSS).
    pub sinks: bool,
    /// The number of keys that a query sees at most, its own included; 0: all.
    pub window: usize,
    /// Layers with full attention although there is a window.
    pub full_attention_layers: Vec<usize>,
    /// The factor of attention scores; 0: `1 / sqrt(head_dim)` (Granite's `attention_multiplier`).
    pub attention_scale: f32,
    /// The width of a head of values; 0: `head_dim`.
    pub value_dim: usize,
    /// Multi-head latent attention.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latent: Option<LatentAttention>,
    /// Layers that are dense whatever `moe_every` says.
    pub dense_layers: Vec<usize>,
    /// Adds biases to experts and dense feed-forwards.
    pub feed_forward_bias: bool,
    /// Adds a bias to the router's logits (GPT-OSS).
    pub router_bias: bool,
    /// Multiplies the shared experts' output by the sigmoid of a projection of the token (Qwen2-MoE).
    pub shared_gate: bool,
    /// The factor of embeddings.
    pub embedding_multiplier: f32,
    /// The factor of each block's output before it is added to the residual stream.
    pub residual_multiplier: f32,
    /// The divisor of logits.
    pub logits_divisor: f32,
    /// Adds a bias to the logits.
    pub head_bias: bool,
    /// The number of a sequence's tokens that an expert takes in a pass, at inference as in training; 0: no limit
    /// (Switch Transformers).
    pub expert_capacity: usize,
    /// An encoder before the decoder. Without tied embeddings it has its own embedding.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub encoder: Option<EncoderConfig>,
}

impl Default for Variant {
    fn default() -> Self {
        Self {
            norm: NormKind::Rms,
            positions: PositionKind::Rotary,
            rotary: Rotary::default(),
            qkv_bias: false,
            output_bias: false,
            clip_qkv: 0.0,
            sinks: false,
            window: 0,
            full_attention_layers: Vec::new(),
            attention_scale: 0.0,
            value_dim: 0,
            latent: None,
            dense_layers: Vec::new(),
            feed_forward_bias: false,
            router_bias: false,
            shared_gate: false,
            embedding_multiplier: 1.0,
            residual_multiplier: 1.0,
            logits_divisor: 1.0,
            head_bias: false,
            expert_capacity: 0,
            encoder: None,
        }
    }
}

impl Variant {
    /// Returns true if nothing differs from the plain decoder.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        *self == Self::default()
    }

    pub(super) fn validate(&self, head_dim: usize) -> Result<(), ConfigError> {
        let wrong =
            |setting, value: &dyn ToString, expected: &str| Err(ConfigError::new(setting, value.to_string(), expected));
        for (setting, value) in [("variant.clip_qkv", self.clip_qkv), ("variant.attention_scale", self.attention_scale)]
        {
            if !(value >= 0.0 && value.is_finite()) {
                return wrong(setting, &value, "must be a number of at least 0");
            }
        }
        for (setting, value) in [
            ("variant.embedding_multiplier", self.embedding_multiplier),
            ("variant.residual_multiplier", self.residual_multiplier),
            ("variant.logits_divisor", self.logits_divisor),
        ] {
            if !(value.is_finite() && value != 0.0) {
                return wrong(setting, &value, "must be a number other than 0");
            }
        }
        if self.value_dim > 1 << 14 {
            return wrong("variant.value_dim", &self.value_dim, "must be at most 16384");
        }
        if let Some(latent) = &self.latent {
            latent.validate(head_dim)?;
        }
        if u32::try_from(self.expert_capacity).is_err() {
            return wrong("variant.expert_capacity", &self.expert_capacity, "must be below 2^32");
        }
        if let Some(encoder) = &self.encoder {
            self.validate_encoder(encoder)?;
        }
        match self.positions {
            PositionKind::Rotary => self.rotary.validate(self.latent.map_or(head_dim, |latent| latent.rotary_dim)),
            PositionKind::Learned => Ok(()),
            PositionKind::Relative { num_buckets, max_distance } => self.validate_relative(num_buckets, max_distance),
        }
    }

    fn validate_relative(&self, num_buckets: usize, max_distance: usize) -> Result<(), ConfigError> {
        if !num_buckets.is_multiple_of(2) || !(4..=1 << 16).contains(&num_buckets) {
            let expected = "must be an even number from 4 to 65536";
            return Err(ConfigError::new("variant.positions.num_buckets", num_buckets, expected));
        }
        if max_distance <= num_buckets / 2 || max_distance > 1 << 24 {
            let expected = format!("must be above half of num_buckets, {num_buckets}, and at most 2^24");
            return Err(ConfigError::new("variant.positions.max_distance", max_distance, expected));
        }
        if self.window > 0 || self.sinks {
            return Err(ConfigError::new("variant.positions", "relative", "cannot be combined with a window or sinks"));
        }
        Ok(())
    }

    fn validate_encoder(&self, encoder: &EncoderConfig) -> Result<(), ConfigError> {
        if !(1..=1 << 14).contains(&encoder.num_layers) {
            let expected = "must be from 1 to 16384";
            return Err(ConfigError::new("variant.encoder.num_layers", encoder.num_layers, expected));
        }
        let is_relative = matches!(self.positions, PositionKind::Relative { .. });
        if !is_relative || self.latent.is_some() {
            let expected = "needs relative positions and plain attention";
            return Err(ConfigError::new("variant.encoder", "given", expected));
        }
        Ok(())
    }
}

impl LatentAttention {
    fn validate(&self, head_dim: usize) -> Result<(), ConfigError> {
        let limits = [
            ("variant.latent.kv_rank", self.kv_rank, 1),
            ("variant.latent.rotary_dim", self.rotary_dim, 2),
            ("variant.latent.query_rank", self.query_rank, 0),
        ];
        for (setting, value, least) in limits {
            if value < least || value > 1 << 20 {
                return Err(ConfigError::new(setting, value, format!("must be from {least} to {}", 1 << 20)));
            }
        }
        if self.plain_dim.checked_add(self.rotary_dim) != Some(head_dim) {
            let expected = format!("must sum to head_dim, {head_dim}, with rotary_dim, {}", self.rotary_dim);
            return Err(ConfigError::new("variant.latent.plain_dim", self.plain_dim, expected));
        }
        Ok(())
    }
}
