//! What an MoE layer is made of.

use moeworks_ops::Activation;

use crate::{ConfigError, Ramp, RouterConfig};

/// When the softmax is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScoreOrder {
    /// Softmax over all experts, then the top k of the probabilities (Switch, OLMoE, Qwen, Mixtral).
    SoftmaxThenTopK,
    /// Top k of the logits, then softmax over those k (GPT-OSS, Granite). The same as the other order with normalised
    /// weights, up to rounding.
    TopKThenSoftmax,
}

/// The shape and the rules of an MoE layer.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeConfig {
    /// D: width of the model.
    pub width: usize,
    /// E: number of routed experts.
    pub num_experts: usize,
    /// K: experts a token goes to, 1 to E.
    pub top_k: usize,
    /// F: hidden width of one expert.
    pub expert_width: usize,
    /// What stands between an expert's projections.
    pub activation: Activation,
    /// When the softmax is taken.
    pub score_order: ScoreOrder,
    /// With [`ScoreOrder::SoftmaxThenTopK`]: whether a token's weights are divided by their sum.
    pub normalize_weights: bool,
    /// Positive: an expert takes at most `C = ceil(factor K T / E)` rows and later choices are dropped: the first choices of
    /// all tokens are served in the order of the tokens, then all second choices, and so on, as in GShard; a dropped choice
    /// contributes exactly zero and the weights of the token's other choices stay. 0: no token is ever dropped. Negative: no token is dropped up to `|factor|` times the even share, that is `C = min(needed,
    /// ceil(|factor| K T / E))`, Tutel's rule.
    pub capacity_factor: f32,
    /// In training the router's input is multiplied by a number uniform in `[1 - jitter, 1 + jitter]` (Switch, 1e-2).
    pub jitter: Ramp,
    /// Hidden width of the shared experts, which every token passes, all of them together; 0 for none.
    pub shared_width: usize,
    /// How tokens and experts find each other.
    pub router: RouterConfig,
}

impl MoeConfig {
    /// The plain layer that most models have: SwiGLU experts, the best `top_k` by softmax with weights that sum to one, no
    /// token dropped, nothing shared.
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
        if !self.capacity_factor.is_finite() {
            return Err(ConfigError::new("capacity_factor", self.capacity_factor, "must be a finite number"));
        }
        if self.jitter.range().0 < 0.0 || self.jitter.range().1 >= 1.0 {
            return Err(ConfigError::new("jitter", self.jitter, "must be at least 0 and below 1"));
        }
        self.router.validate(self.num_experts, self.top_k)
    }
}
