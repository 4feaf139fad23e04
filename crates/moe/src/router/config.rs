//! The settings of a router: the scheme and its numbers.

use serde::{Deserialize, Serialize};

use crate::config::ConfigError;
use crate::overflow::Overflow;

/// How tokens and experts find each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RouterKind {
    /// Each token takes the K experts with the highest scores.
    #[default]
    TopK,
}

/// What makes scores of logits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScoreFunction {
    /// Softmax over the experts.
    #[default]
    Softmax,
    /// Sigmoid of each logit by itself (DeepSeek-V3, 2412.19437). The losses that need a distribution take each token's
    /// scores divided by their sum.
    Sigmoid,
}

/// What a group of experts is chosen by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupScore {
    /// Its highest score (DeepSeek-V2, 2405.04434, `group_limited_greedy`).
    #[default]
    Max,
    /// The sum of its two highest scores (DeepSeek-V3).
    TopTwo,
}

/// The settings of a router.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RouterConfig {
    /// The scheme.
    pub kind: RouterKind,
    /// What makes scores of logits.
    pub scores: ScoreFunction,
    /// A bias on each expert's score that counts in the choice and not in the weight; it is state and no weight: it has no
    /// gradient, and training moves it by [`bias_update_rate`](Self::bias_update_rate) (auxiliary-loss-free balance, Wang et
    /// al., 2408.15664).
    pub expert_bias: bool,
    /// Gamma: after each step the bias of an expert below the mean load rises by this, that of one above falls.
    pub bias_update_rate: f32,
    /// Groups of consecutive experts, such as those of one device; divides E.
    pub num_groups: usize,
    /// Groups that a token's experts may be in.
    pub top_groups: usize,
    /// What groups are chosen by.
    pub group_score: GroupScore,
    /// Multiplies the weights at the end (DeepSeek's `routed_scaling_factor`).
    pub routed_scale: f32,
    /// Above 0: of a token's two experts each is weighed by a softmax over the experts that come as close to it as twice
    /// this, relative to the score, the first without regard to the second and the second without the first (sparsemixer,
    /// Liu et al., 2409.12136, as PhiMoE uses it after training). For inference alone.
    pub sparsemixer_jitter: f32,
    /// What becomes of a choice whose expert has no room.
    pub overflow: Overflow,
    /// Tokens that share a capacity (GShard's local groups); 0: all tokens of a microbatch.
    pub local_group: usize,
}

impl Default for RouterConfig {
    fn default() -> Self {
        Self {
            kind: RouterKind::TopK,
            scores: ScoreFunction::Softmax,
            expert_bias: false,
            bias_update_rate: 1e-3,
            num_groups: 1,
            top_groups: 1,
            group_score: GroupScore::Max,
            routed_scale: 1.0,
            sparsemixer_jitter: 0.0,
            overflow: Overflow::Drop,
            local_group: 0,
        }
    }
}

impl RouterConfig {
    /// Whether a trained model chooses by softmax over linear logits and the highest K, nothing more.
    #[must_use]
    pub fn is_plain_at_inference(&self) -> bool {
        self.kind == RouterKind::TopK
            && self.scores == ScoreFunction::Softmax
            && !self.expert_bias
            && self.top_groups == self.num_groups
            && self.routed_scale == 1.0
            && self.sparsemixer_jitter == 0.0
    }

    /// Checks every setting, for `num_experts` experts of which a token takes `top_k`.
    pub(crate) fn validate(&self, num_experts: usize, top_k: usize) -> Result<(), ConfigError> {
        let wrong = |setting, value: &dyn ToString, expected: String| {
            Err(ConfigError::new(setting, value.to_string(), expected))
        };
        if self.num_groups == 0 || !num_experts.is_multiple_of(self.num_groups) {
            let expected = format!("must divide the number of experts, {num_experts}");
            return wrong("router.num_groups", &self.num_groups, expected);
        }
        if self.top_groups == 0 || self.top_groups > self.num_groups {
            let expected = format!("must be from 1 to router.num_groups, {}", self.num_groups);
            return wrong("router.top_groups", &self.top_groups, expected);
        }
        let reachable = num_experts / self.num_groups * self.top_groups;
        if top_k > reachable {
            let expected = format!("must leave a token at least top_k = {top_k} experts, but leaves {reachable}");
            return wrong("router.top_groups", &self.top_groups, expected);
        }
        if !(self.routed_scale > 0.0 && self.routed_scale.is_finite()) {
            return wrong("router.routed_scale", &self.routed_scale, "must be a number above 0".to_owned());
        }
        if !(self.sparsemixer_jitter >= 0.0 && self.sparsemixer_jitter.is_finite()) {
            let expected = "must be a number of at least 0".to_owned();
            return wrong("router.sparsemixer_jitter", &self.sparsemixer_jitter, expected);
        }
        if self.sparsemixer_jitter > 0.0 && top_k != 2 {
            let expected = format!("must be 0 unless a token goes to two experts, not {top_k}");
            return wrong("router.sparsemixer_jitter", &self.sparsemixer_jitter, expected);
        }
        if !(self.bias_update_rate >= 0.0 && self.bias_update_rate.is_finite()) {
            return wrong(
                "router.bias_update_rate",
                &self.bias_update_rate,
                "must be a number of at least 0".to_owned(),
            );
        }
        Ok(())
    }
}
