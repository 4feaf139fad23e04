//! The settings of a router: the scheme and its numbers.

use serde::{Deserialize, Serialize};

use super::scheme::{FusedOps, RoutingScheme, TableSource};
use super::schemes::{RouterKind, Schemes};
use super::scores::Gate;
use crate::ConfigError;
use crate::Ramp;
use crate::overflow::Overflow;

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

/// The settings of a router.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RouterConfig {
    /// The scheme.
    pub kind: RouterKind,
    /// The function that makes scores of logits.
    pub scores: ScoreFunction,
    /// A bias on each expert's score that counts in the choice and not in the weight; it is state and no weight: it has no
    /// gradient, and training moves it by [`bias_update_rate`](Self::bias_update_rate) (auxiliary-loss-free balance, Wang et
    /// al., 2408.15664).
    pub expert_bias: bool,
    /// Gamma: after each step the bias of an expert below the mean load rises by this, that of one above falls.
    pub bias_update_rate: Ramp,
    /// Groups of consecutive experts, such as those of one device; divides E.
    pub num_groups: usize,
    /// Groups that a token's experts may be in.
    pub top_groups: usize,
    /// The score that groups are chosen by.
    pub group_score: GroupScore,
    /// Multiplies the weights at the end (DeepSeek's `routed_scaling_factor`).
    pub routed_scale: f32,
    /// Above 0: of a token's two experts each is weighed by a softmax over the experts that come as close to the highest as
    /// twice this, relative to the score, the first without regard to the second and the second without the first
    /// (sparsemixer, Liu et al., 2409.12136, PhiMoE). In training they are drawn from it.
    pub sparsemixer_jitter: f32,
    /// Deviation of normal noise on the logits in training (1/E in V-MoE, 2106.05974); 0: none.
    pub noise_std: Ramp,
    /// The share of elements of the router's input that training sets to 0, the others growing by as much.
    pub input_dropout: Ramp,
    /// Logits are divided by this before scores are taken; its last value holds outside training.
    pub temperature: Ramp,
    /// The share of a run over which choices are random.
    pub random_share: f64,
    /// The share of a run, after that, over which the probability of a random choice falls to 0.
    pub random_fade: f64,
    /// Experts that give nothing (Jin et al., "MoE++", 2410.07348, equation 3). Where weights are divided by their sum theirs count;
    /// in the authors' program they do not: null experts are like that.
    pub zero_experts: usize,
    /// Experts that give the token itself (MoE++, equation 4).
    pub copy_experts: usize,
    /// Experts that give a mixture of the token and a learned vector (MoE++, equation 5).
    pub constant_experts: usize,
    /// Experts that give nothing and do not count in the normalisation of weights; the balance loss takes their mean load
    /// for each (Zeng et al., "AdaMoE", 2406.13233).
    pub null_experts: usize,
    /// Whether the logits of the MoE layer before, times a learned matrix, are added to this one's (MoE++, equation 6).
    pub gate_residual: bool,
    /// Tau: the share in the balance loss and in the capacity of an expert without computation is this (in the loss) and
    /// one over this (in the capacity) of that of others (MoE++, equations 7 and 8; 0.75 in most of its experiments).
    pub free_ratio: f32,
    /// Token ids at which a new modality begins, such as "1000, 2000": ids below 1000 are modality 0, and so on. Empty: one
    /// modality, or those of [`RouterInput::modalities`](crate::RouterInput::modalities).
    pub modality_boundaries: String,
    /// The number of experts reserved for each modality, such as "4, 2": the first four for modality 0, the next two for
    /// modality 1; the others are shared. Empty: all are shared.
    pub modality_experts: String,
    /// The fate of a choice whose expert has no room.
    pub overflow: Overflow,
    /// Tokens that share a capacity (GShard's local groups); 0: all tokens of a microbatch, those of all ranks.
    pub local_group: usize,
    /// Ids of tokens that the model knows, for schemes with a table of them: no setting, but set by whoever makes a layer.
    #[serde(skip)]
    pub num_token_ids: usize,
    /// The settings that schemes have of their own.
    #[serde(flatten)]
    pub schemes: Schemes,
}

impl Default for RouterConfig {
    fn default() -> Self {
        Self {
            kind: RouterKind::default(),
            scores: ScoreFunction::Softmax,
            expert_bias: false,
            bias_update_rate: Ramp::constant(1e-3),
            num_groups: 1,
            top_groups: 1,
            group_score: GroupScore::Max,
            routed_scale: 1.0,
            sparsemixer_jitter: 0.0,
            noise_std: Ramp::ZERO,
            input_dropout: Ramp::ZERO,
            temperature: Ramp::constant(1.0),
            random_share: 0.0,
            random_fade: 0.1,
            zero_experts: 0,
            copy_experts: 0,
            constant_experts: 0,
            null_experts: 0,
            gate_residual: false,
            free_ratio: 0.75,
            modality_boundaries: String::new(),
            modality_experts: String::new(),
            overflow: Overflow::Drop,
            local_group: 0,
            num_token_ids: 0,
            schemes: Schemes::default(),
        }
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
