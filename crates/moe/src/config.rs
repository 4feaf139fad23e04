//! The configuration of an MoE layer.

use moeworks_ops::Activation;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

use crate::{ConfigError, Ramp, Range, Ranged, RouterConfig};

/// The order of the softmax and the top-k selection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ScoreOrder {
    /// Softmax over all experts, then the top k of the probabilities (Switch, OLMoE, Qwen, Mixtral).
    SoftmaxThenTopK,
    /// Top k of the logits, then softmax over those k (GPT-OSS, Granite). Up to rounding this equals the other order
    /// with normalised weights.
    TopKThenSoftmax,
}

impl<'de> Deserialize<'de> for ScoreOrder {
    /// Reads a name or, as in older configurations, a boolean: true if the softmax comes before the selection.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            IsSoftmaxFirst(bool),
            Name(String),
        }
        match Written::deserialize(deserializer) {
            Ok(Written::IsSoftmaxFirst(true)) => Ok(Self::SoftmaxThenTopK),
            Ok(Written::IsSoftmaxFirst(false)) => Ok(Self::TopKThenSoftmax),
            Ok(Written::Name(name)) if name == "softmax_then_top_k" => Ok(Self::SoftmaxThenTopK),
            Ok(Written::Name(name)) if name == "top_k_then_softmax" => Ok(Self::TopKThenSoftmax),
            _ => Err(D::Error::custom("must be softmax_then_top_k or top_k_then_softmax")),
        }
    }
}

/// The shape and the rules of an MoE layer.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeConfig {
    /// D: width of the model.
    pub width: usize,
    /// E: number of routed experts.
    pub num_experts: usize,
    /// K: experts per token, 1 to E.
    pub top_k: usize,
    /// F: hidden width of one expert.
    pub expert_width: usize,
    /// The activation between an expert's projections.
    pub activation: Activation,
    /// The order of the softmax and the top-k selection.
    pub score_order: ScoreOrder,
    /// True if a token's weights are divided by their sum; used with [`ScoreOrder::SoftmaxThenTopK`].
    pub normalize_weights: bool,
    /// The capacity factor. Positive: an expert takes at most `C = ceil(factor K T / E)` rows and later choices are
    /// dropped. The first choices of all tokens are served in the order of the tokens, then all second choices, and
    /// so on, as in GShard. A dropped choice contributes exactly zero and the weights of the token's other choices
    /// stay. 0: no token is ever dropped. Negative: `C = min(needed, ceil(|factor| K T / E))`, so that nothing is
    /// dropped below `|factor|` times the even share (Tutel's rule).
    pub capacity_factor: f32,
    /// In training, multiplies the router's input by uniform noise in `[1 - jitter, 1 + jitter]` (Switch, 1e-2).
    pub jitter: Ramp,
    /// Total hidden width of the shared experts, which every token passes through; 0 for none.
    pub shared_width: usize,
    /// The router's configuration.
    pub router: RouterConfig,
}

impl MoeConfig {
    /// The range of [`capacity_factor`](Self::capacity_factor).
    pub const CAPACITY_FACTOR: Range = Range::FINITE;
    /// The range of [`jitter`](Self::jitter).
    pub const JITTER: Range = Range::BELOW_ONE;

    /// Creates the layer of most models: SwiGLU experts, softmax top-k with weights that sum to one, no dropped
    /// tokens, no shared experts.
    #[must_use]
    pub fn plain(width: usize, expert_width: usize, num_experts: usize, top_k: usize) -> Self {
        Self {
            width,
            num_experts,
            top_k,
            expert_width,
            activation: Activation::SwiGlu,
            score_order: ScoreOrder::SoftmaxThenTopK,
            normalize_weights: true,
            capacity_factor: 0.0,
            jitter: Ramp::ZERO,
            shared_width: 0,
            router: RouterConfig::default(),
        }
    }

    /// Checks every setting.
    pub fn validate(&self) -> Result<(), ConfigError> {
        for (setting, value) in
            [("width", self.width), ("num_experts", self.num_experts), ("expert_width", self.expert_width)]
        {
            if value == 0 {
                return Err(ConfigError::new(setting, value, "must be at least 1"));
            }
        }
        if self.top_k == 0 || self.top_k > self.num_experts {
            let expected = format!("must be from 1 to the number of experts, {}", self.num_experts);
            return Err(ConfigError::new("top_k", self.top_k, expected));
        }
        self.capacity_factor.check("capacity_factor", &Self::CAPACITY_FACTOR)?;
        self.jitter.check("jitter", &Self::JITTER)?;
        self.router.validate(self.num_experts, self.top_k)
    }
}
