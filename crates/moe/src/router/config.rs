//! The settings of a router.

use serde::{Deserialize, Serialize};

use super::scheme::{FusedOps, RoutingScheme, TableSource};
use super::schemes::{RouterKind, Schemes};
use super::scores::Gate;
use crate::ConfigError;
use crate::overflow::Overflow;
use crate::{Ramp, Range, settings};

/// The maximum of zero-computation experts of each kind.
const MAX_ZERO_COMPUTATION: u64 = 1 << 16;

/// The function from logits to scores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScoreFunction {
    /// Softmax over the experts.
    #[default]
    Softmax,
    /// Sigmoid of each logit (DeepSeek-V3, 2412.19437). Losses that need a distribution divide each token's scores by
    /// their sum.
    Sigmoid,
}

/// The score by which a group of experts is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupScore {
    /// The highest score of its experts (DeepSeek-V2, 2405.04434, `group_limited_greedy`).
    #[default]
    Max,
    /// The sum of the two highest scores of its experts (DeepSeek-V3).
    TopTwo,
}

settings! {
    /// The router: how tokens are assigned to experts.
    #[serde(default)]
    pub struct RouterConfig in "router." {
        /// The routing scheme.
        kind: RouterKind = RouterKind::default();
        /// Function from logits to scores: softmax or sigmoid.
        scores: ScoreFunction = ScoreFunction::Softmax;
        /// Adds to each expert's score a bias that affects only the choice; load moves it, not a gradient.
        ///
        /// The bias is state, not a weight. Training moves it by [`bias_update_rate`](Self::bias_update_rate)
        /// (auxiliary-loss-free balance, Wang et al., 2408.15664).
        expert_bias: bool = false;
        /// Step by which an expert's bias rises below the mean load and falls above it: a number or a ramp, such as
        /// "step 0.001 to 0 over 0.965" (DeepSeek-V3).
        bias_update_rate: Ramp = Ramp::constant(1e-3), in Range::NOT_NEGATIVE;
        /// Groups of consecutive experts; divides num_experts.
        num_groups: usize = 1, in Range::whole(1..=1 << 20);
        /// Groups that a token's experts may be in (group-limited routing).
        top_groups: usize = 1, in Range::whole(1..=1 << 20);
        /// Score of a group: max (its highest score), or top_two (the sum of its two highest).
        group_score: GroupScore = GroupScore::Max;
        /// Factor on the weights of a token's experts, applied last (DeepSeek's routed_scaling_factor).
        routed_scale: f32 = 1.0, in Range::POSITIVE;
        /// Jitter of SparseMixer (PhiMoE), for top_k = 2; 0: off.
        ///
        /// In training both experts are drawn from those within twice this, relative to the score, of the highest.
        /// Each is weighed by a softmax over these experts; the second's softmax excludes the first (Liu et al.,
        /// 2409.12136).
        sparsemixer_jitter: f32 = 0.0, in Range::NOT_NEGATIVE;
        /// Standard deviation of normal noise on the logits in training: a number or a ramp; 0: none (V-MoE: 1/E,
        /// 2106.05974).
        noise_std: Ramp = Ramp::ZERO, in Range::NOT_NEGATIVE;
        /// Dropout rate of the router's input in training, a number or a ramp; the rest is scaled up to match.
        input_dropout: Ramp = Ramp::ZERO, in Range::BELOW_ONE;
        /// Temperature that divides the logits: a number or a ramp, whose end holds outside training.
        temperature: Ramp = Ramp::constant(1.0), in Range::POSITIVE;
        /// Share of the run, from its start, over which choices are random.
        random_share: f64 = 0.0, in Range::SHARE;
        /// Share of the run, after random_share, over which the probability of a random choice falls to 0.
        random_fade: f64 = 0.1, in Range::SHARE;
        /// Experts whose output is zero (MoE++).
        ///
        /// Equation 3 of Jin et al., 2410.07348. Their weights count when a token's weights are normalised; in the
        /// authors' code they do not, which null_experts reproduces.
        zero_experts: usize = 0, in Range::whole(0..=MAX_ZERO_COMPUTATION);
        /// Experts that return the token itself (MoE++, equation 4).
        copy_experts: usize = 0, in Range::whole(0..=MAX_ZERO_COMPUTATION);
        /// Experts that return a mixture of the token and a learned vector (MoE++, equation 5).
        constant_experts: usize = 0, in Range::whole(0..=MAX_ZERO_COMPUTATION);
        /// Experts whose output is zero and whose weights do not count when a token's weights are normalised
        /// (AdaMoE).
        ///
        /// The balance loss uses their mean load for each (Zeng et al., 2406.13233).
        null_experts: usize = 0, in Range::whole(0..=MAX_ZERO_COMPUTATION);
        /// Adds the previous MoE layer's logits, times a learned matrix, to the logits (MoE++, equation 6).
        gate_residual: bool = false;
        /// Weight of a zero-computation expert in the balance loss (tau of MoE++).
        ///
        /// A zero-computation expert's capacity is 1/tau of a computing one's (equations 7 and 8; 0.75 in most of
        /// MoE++'s experiments).
        zero_computation_ratio: f32 = 0.75, in Range::POSITIVE, was "free_ratio";
        /// First token ids of the modalities after modality 0, such as "1000, 2000".
        ///
        /// With this example ids below 1000 are modality 0, those below 2000 modality 1. Empty: one modality, or
        /// those of [`RouterInput::modalities`](crate::RouterInput::modalities).
        modality_boundaries: String = String::new();
        /// Experts reserved for each modality, such as "4, 2"; the others are shared by all.
        ///
        /// With this example the first four are for modality 0 and the next two for modality 1. Empty: all are
        /// shared.
        modality_experts: String = String::new();
        /// Choices beyond an expert's capacity: drop (later tokens first), priority (lower scores first), or reroute
        /// to the next expert.
        overflow: Overflow = Overflow::Drop;
        /// Tokens that share a capacity (GShard's local groups); 0: all tokens of a microbatch, on all ranks.
        local_group: usize = 0, in Range::COUNT;
    }
    besides {
        /// The number of token ids of the model, for schemes with a table of ids. It is not a setting; whoever makes
        /// a layer sets it.
        #[serde(skip)]
        num_token_ids: usize;
        /// The schemes' own settings.
        #[serde(flatten)]
        schemes: Schemes;
    }
}

impl RouterConfig {
    /// Returns the chosen scheme.
    pub(crate) fn scheme(&self) -> &dyn RoutingScheme {
        self.schemes.get(self.kind)
    }

    /// Returns the number of experts per token that this scheme requires; none if any number works.
    #[must_use]
    pub fn fixed_top_k(&self) -> Option<usize> {
        self.scheme().fixed_top_k()
    }

    /// Returns whether a token takes every expert whose logit is above 0, weighted by the logit.
    #[must_use]
    pub fn has_relu_gates(&self, top_k: usize) -> bool {
        self.scheme().gate(self, top_k) == Gate::Relu
    }

    /// Returns whether a trained model routes by plain softmax top-k over linear logits.
    #[must_use]
    pub fn is_plain_at_inference(&self) -> bool {
        self.scheme().is_plain_when_trained() && self.temperature.end == 1.0 && self.is_softmax_top_k()
    }

    /// Returns whether tokens choose and weigh by plain softmax top-k, in passes in which tokens choose.
    pub(crate) fn is_softmax_top_k(&self) -> bool {
        self.scheme().fused_ops() == FusedOps::Softmax
            && self.scores == ScoreFunction::Softmax
            && !self.expert_bias
            && self.top_groups == self.num_groups
            && self.routed_scale == 1.0
            && self.sparsemixer_jitter == 0.0
            && self.num_zero_computation() == 0
            && !self.gate_residual
            && self.modality_experts.is_empty()
    }

    /// Returns whether tokens choose by top-k of softmax or sigmoid scores, with bias and groups, and weigh by the
    /// scores, in passes in which tokens choose.
    pub(crate) fn is_score_top_k(&self) -> bool {
        self.scheme().fused_ops() != FusedOps::None
            && self.sparsemixer_jitter == 0.0
            && self.modality_experts.is_empty()
    }

    /// Returns whether the router needs the ids of tokens.
    #[must_use]
    pub fn looks_at_ids(&self) -> bool {
        self.scheme().looks_at_ids() || !self.modality_boundaries.is_empty()
    }

    /// Returns whether the logits have noise in training, which the smooth load of the load loss requires.
    #[must_use]
    pub fn has_logit_noise(&self) -> bool {
        self.scheme().has_learned_noise() || self.noise_std.range().1 > 0.0
    }

    /// Returns whether the L1 loss on the gates balances loads ([`l1_loads`](crate::l1_loads)); `None` without an L1
    /// loss.
    #[must_use]
    pub fn l1_is_balanced(&self) -> Option<bool> {
        self.scheme().l1_is_balanced()
    }

    /// Returns the data from which a run makes a table of ids before its first step.
    #[must_use]
    pub fn table_source(&self) -> Option<TableSource> {
        self.scheme().table_source()
    }

    /// Returns whether every token uses all of the router's weights.
    #[must_use]
    pub fn passes_all_weights(&self) -> bool {
        self.scheme().passes_all_weights()
    }

    /// Returns the number of zero-computation experts; they come after all others.
    #[must_use]
    pub fn num_zero_computation(&self) -> usize {
        self.zero_experts + self.copy_experts + self.constant_experts + self.null_experts
    }

    /// Returns the probability that a token's choice is random at `progress`, 0 to 1, of the run.
    pub(crate) fn random_probability(&self, progress: f64) -> f64 {
        if self.random_share == 0.0 {
            0.0
        } else if progress < self.random_share {
            1.0
        } else if self.random_fade == 0.0 {
            0.0
        } else {
            (1.0 - (progress - self.random_share) / self.random_fade).max(0.0)
        }
    }

    /// Parses the first ids of the modalities after modality 0, and the numbers of experts reserved for each.
    pub(crate) fn modalities(&self) -> Result<(Vec<u32>, Vec<usize>), ConfigError> {
        let boundaries = numbers("router.modality_boundaries", &self.modality_boundaries)?;
        if !boundaries.is_sorted_by(|a, b| a < b) {
            let expected = "must be token ids in rising order, such as \"1000, 2000\"";
            return Err(ConfigError::new("router.modality_boundaries", &self.modality_boundaries, expected));
        }
        Ok((boundaries, numbers("router.modality_experts", &self.modality_experts)?))
    }
}

/// Returns the number of modalities, from their first ids and the numbers of experts reserved for them.
pub(crate) fn num_modalities(boundaries: &[u32], reserved: &[usize]) -> usize {
    if boundaries.is_empty() { reserved.len().max(1) } else { boundaries.len() + 1 }
}

/// Parses the whole numbers of a setting that is a list.
pub(crate) fn numbers<T: std::str::FromStr>(setting: &'static str, text: &str) -> Result<Vec<T>, ConfigError> {
    if text.trim().is_empty() {
        return Ok(Vec::new());
    }
    let wrong = || ConfigError::new(setting, format!("{text:?}"), "must be whole numbers with commas between");
    text.split(',').map(|word| word.trim().parse().map_err(|_| wrong())).collect()
}
