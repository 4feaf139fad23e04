//! The settings of a router: the scheme and its numbers.

use serde::{Deserialize, Serialize};

use super::scheme::{FusedOps, RoutingScheme, TableSource};
use super::schemes::{RouterKind, Schemes};
use super::scores::Gate;
use crate::ConfigError;
use crate::overflow::Overflow;
use crate::{Ramp, Range, settings};

/// No router has more experts without computation.
const MAX_ZERO_COMPUTATION: u64 = 1 << 16;

/// The function that makes scores of logits.
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

/// The score that a group of experts is chosen by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupScore {
    /// Its highest score (DeepSeek-V2, 2405.04434, `group_limited_greedy`).
    #[default]
    Max,
    /// The sum of its two highest scores (DeepSeek-V3).
    TopTwo,
}

settings! {
    /// The router: how tokens are assigned to experts.
    #[serde(default)]
    pub struct RouterConfig in "router." {
        /// The scheme.
        kind: RouterKind = RouterKind::default();
        /// Function from logits to scores: softmax or sigmoid.
        scores: ScoreFunction = ScoreFunction::Softmax;
        /// Whether each expert has a bias that counts in the choice only, moved by load and not by gradient.
        ///
        /// It is state and no weight; training moves it by [`bias_update_rate`](Self::bias_update_rate) (auxiliary-loss-free balance,
        /// Wang et al., 2408.15664).
        expert_bias: bool = false;
        /// Step by which the bias of an expert below the mean load rises, and of one above it falls: a number or a ramp, such as
        /// "step 0.001 to 0 over 0.965" (DeepSeek-V3).
        bias_update_rate: Ramp = Ramp::constant(1e-3), in Range::NOT_NEGATIVE;
        /// Groups of consecutive experts; divides num_experts.
        num_groups: usize = 1, in Range::whole(1..=1 << 20);
        /// Groups that the experts of a token may be in.
        top_groups: usize = 1, in Range::whole(1..=1 << 20);
        /// Score of a group: max, or top_two: the sum of its two highest scores.
        group_score: GroupScore = GroupScore::Max;
        /// Factor on the weights of a token's experts.
        ///
        /// DeepSeek's `routed_scaling_factor`, applied at the end.
        routed_scale: f32 = 1.0, in Range::POSITIVE;
        /// Above 0: sparsemixer (PhiMoE): in training two experts are drawn from those within twice this of the highest score.
        ///
        /// Each of a token's two experts is weighed by a softmax over the experts that come as close to the highest as twice this,
        /// relative to the score, the first without regard to the second and the second without the first (Liu et al., 2409.12136).
        sparsemixer_jitter: f32 = 0.0, in Range::NOT_NEGATIVE;
        /// Deviation of normal noise on the logits in training, a number or a ramp; 0: none.
        ///
        /// V-MoE takes 1/E (2106.05974).
        noise_std: Ramp = Ramp::ZERO, in Range::NOT_NEGATIVE;
        /// Share of elements of the router's input that training leaves out, a number or a ramp.
        ///
        /// The other elements grow by as much.
        input_dropout: Ramp = Ramp::ZERO, in Range::BELOW_ONE;
        /// Logits are divided by this: a number or a ramp, whose end holds outside training.
        temperature: Ramp = Ramp::constant(1.0), in Range::POSITIVE;
        /// Share of the run over which choices are random.
        random_share: f64 = 0.0, in Range::SHARE;
        /// Share of the run, after that, over which random choices become rare.
        random_fade: f64 = 0.1, in Range::SHARE;
        /// Experts whose output is zero (MoE++).
        ///
        /// Jin et al., 2410.07348, equation 3. Where weights are divided by their sum those of these experts count; in the authors' program
        /// they do not: null experts are like that.
        zero_experts: usize = 0, in Range::whole(0..=MAX_ZERO_COMPUTATION);
        /// Experts that return the token itself (MoE++).
        ///
        /// Equation 4.
        copy_experts: usize = 0, in Range::whole(0..=MAX_ZERO_COMPUTATION);
        /// Experts that return a mixture of the token and a learned vector (MoE++).
        ///
        /// Equation 5.
        constant_experts: usize = 0, in Range::whole(0..=MAX_ZERO_COMPUTATION);
        /// Experts whose output is zero and whose weights do not count when a token's weights are normalised (AdaMoE).
        ///
        /// The balance loss takes their mean load for each (Zeng et al., 2406.13233).
        null_experts: usize = 0, in Range::whole(0..=MAX_ZERO_COMPUTATION);
        /// Whether the logits of the MoE layer before, times a learned matrix, are added (MoE++).
        ///
        /// Equation 6.
        gate_residual: bool = false;
        /// Weight of an expert without computation in the balance loss (tau of MoE++).
        ///
        /// In the capacity its share is one over this (equations 7 and 8; 0.75 in most of MoE++'s experiments).
        free_ratio: f32 = 0.75, in Range::POSITIVE;
        /// Token ids at which modalities begin after the first, such as "1000, 2000".
        ///
        /// Ids below 1000 are modality 0, and so on. Empty: one modality, or those of
        /// [`RouterInput::modalities`](crate::RouterInput::modalities).
        modality_boundaries: String = String::new();
        /// Experts reserved for each modality, such as "4, 2"; the others are shared.
        ///
        /// The first four are for modality 0, the next two for modality 1. Empty: all are shared.
        modality_experts: String = String::new();
        /// Choices beyond an expert's capacity: drop later tokens, priority (drop those of lower score), reroute to the next expert.
        overflow: Overflow = Overflow::Drop;
        /// Tokens that share a capacity; 0: all of a microbatch.
        ///
        /// GShard's local groups; 0 counts the tokens of all ranks.
        local_group: usize = 0, in Range::COUNT;
    }
    besides {
        /// Ids of tokens that the model knows, for schemes with a table of them: no setting, but set by whoever makes a layer.
        #[serde(skip)]
        num_token_ids: usize;
        /// The settings that schemes have of their own.
        #[serde(flatten)]
        schemes: Schemes;
    }
}

impl RouterConfig {
    /// The chosen scheme.
    pub(crate) fn scheme(&self) -> &dyn RoutingScheme {
        self.schemes.get(self.kind)
    }

    /// Returns the number of experts that each token must have with this scheme; none where any number works.
    #[must_use]
    pub fn fixed_top_k(&self) -> Option<usize> {
        self.scheme().fixed_top_k()
    }

    /// Returns whether a token takes every expert whose logit is above 0, weighed by the logit.
    #[must_use]
    pub fn has_relu_gates(&self, top_k: usize) -> bool {
        self.scheme().gate(self, top_k) == Gate::Relu
    }

    /// Whether a trained model chooses by softmax over linear logits and the highest K, nothing more.
    #[must_use]
    pub fn is_plain_at_inference(&self) -> bool {
        self.scheme().is_plain_when_trained() && self.temperature.end == 1.0 && self.is_softmax_top_k()
    }

    /// Whether tokens, where they choose, take the highest K by softmax over logits, whatever these are, and weigh them by it.
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

    /// Whether tokens, where they choose, take the highest K by softmax or sigmoid, by bias and groups, and weigh them by their scores.
    pub(crate) fn is_score_top_k(&self) -> bool {
        self.scheme().fused_ops() != FusedOps::None
            && self.sparsemixer_jitter == 0.0
            && self.modality_experts.is_empty()
    }

    /// Whether the ids of tokens are looked at.
    #[must_use]
    pub fn looks_at_ids(&self) -> bool {
        self.scheme().looks_at_ids() || !self.modality_boundaries.is_empty()
    }

    /// Whether the logits have noise in training, of which the smooth load of the load loss is known.
    #[must_use]
    pub fn has_logit_noise(&self) -> bool {
        self.scheme().has_learned_noise() || self.noise_std.range().1 > 0.0
    }

    /// Whether the gates have an L1 loss and, if so, whether it balances loads ([`l1_loads`](crate::l1_loads)).
    #[must_use]
    pub fn l1_is_balanced(&self) -> Option<bool> {
        self.scheme().l1_is_balanced()
    }

    /// The data of which a run makes a table of ids before its first step.
    #[must_use]
    pub fn table_source(&self) -> Option<TableSource> {
        self.scheme().table_source()
    }

    /// Whether every token passes all of the router's weights.
    #[must_use]
    pub fn passes_all_weights(&self) -> bool {
        self.scheme().passes_all_weights()
    }

    /// Experts without computation; they come after all others.
    #[must_use]
    pub fn num_zero_computation(&self) -> usize {
        self.zero_experts + self.copy_experts + self.constant_experts + self.null_experts
    }

    /// The probability that a token's choice is random when `progress` of the run is done.
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

    /// The ids at which modalities begin after the first, and the experts reserved for each.
    pub(crate) fn modalities(&self) -> Result<(Vec<u32>, Vec<usize>), ConfigError> {
        let boundaries = numbers("router.modality_boundaries", &self.modality_boundaries)?;
        if !boundaries.is_sorted_by(|a, b| a < b) {
            let expected = "must be token ids in rising order, such as \"1000, 2000\"";
            return Err(ConfigError::new("router.modality_boundaries", &self.modality_boundaries, expected));
        }
        Ok((boundaries, numbers("router.modality_experts", &self.modality_experts)?))
    }
}

/// The number of modalities, by the ids at which they begin and the experts reserved for them.
pub(crate) fn num_modalities(boundaries: &[u32], reserved: &[usize]) -> usize {
    if boundaries.is_empty() { reserved.len().max(1) } else { boundaries.len() + 1 }
}

/// The whole numbers of a setting that is a list.
pub(crate) fn numbers<T: std::str::FromStr>(setting: &'static str, text: &str) -> Result<Vec<T>, ConfigError> {
    if text.trim().is_empty() {
        return Ok(Vec::new());
    }
    let wrong = || ConfigError::new(setting, format!("{text:?}"), "must be whole numbers with commas between");
    text.split(',').map(|word| word.trim().parse().map_err(|_| wrong())).collect()
}
