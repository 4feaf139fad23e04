//! The settings of a router: the scheme and its numbers.

use serde::{Deserialize, Serialize};

use crate::Ramp;
use crate::config::ConfigError;
use crate::overflow::Overflow;

/// How tokens and experts find each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RouterKind {
    /// Each token takes the K experts with the highest scores.
    #[default]
    TopK,
    /// The one expert with the highest probability (Fedus et al., "Switch Transformers", 2101.03961); K is 1.
    Switch,
    /// In training logits get normal noise whose deviation is `softplus(x W_noise^T)`, learned (Shazeer et al., 1701.06538).
    NoisyTopK,
    /// The best two; the second one only sometimes, as [`SecondExpert`] says (Lepikhin et al., "GShard", 2006.16668); K is 2.
    Gshard,
    /// Logits are cosines of a projection of the token and a vector of each expert over a learned temperature (Hwang et
    /// al., "Tutel", 2206.03382; Liu et al., "Swin V2", 2111.09883).
    Cosine,
    /// In training logits get Gumbel noise, and the weights are 1/K forward and those of the softmax backward
    /// (straight-through; Jang et al., 1611.01144).
    Gumbel,
    /// Experts choose tokens, each K T / E of them (Zhou et al., 2202.09368). Outside training tokens choose.
    ExpertChoice,
    /// The assignment of highest total score that gives each expert equally many tokens (Lewis et al., "BASE layers",
    /// 2103.16716), weighed by the sigmoid of the logit; K is 1. Outside training tokens choose.
    Base,
    /// The K best of the logits balanced by Sinkhorn's iteration (Clark et al., 2202.01169, as in Megatron-LM). Outside
    /// training tokens choose.
    Sinkhorn,
    /// Experts by a hash of the token's id, with equal weights (Roller et al., 2106.04426), as [`RouterConfig::hash`] says;
    /// nothing is learned.
    Hash,
    /// The fewest experts whose probabilities add up to [`RouterConfig::top_p`] (Huang et al., 2403.07652).
    TopP,
    /// All experts whose logit is positive, weighed by it (Wang et al., "ReMoE", 2412.14711); an adaptive L1 loss holds the
    /// mean at K.
    Relu,
    /// A tree of clusters above the experts: a token scores the clusters, opens the likeliest, and takes the K likeliest of
    /// the experts in these, by the product of the probabilities along the way (2510.02345; more levels as in
    /// [`RouterConfig::tree`]). It costs `G + B E/G` products of length D where others cost E.
    Hierarchical,
}

/// When a token's second expert is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SecondExpert {
    /// Always.
    Always,
    /// In training with a probability of its normalised weight over the threshold, at most 1 (GShard with 0.5, ST-MoE with
    /// 0.2); outside training always.
    #[default]
    Random,
    /// Where its normalised weight is above the threshold.
    Threshold,
}

/// Which experts the ids of tokens go to ([`RouterKind::Hash`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HashTable {
    /// Random ones.
    #[default]
    Random,
    /// Those of a table that a run makes of the frequencies of its training tokens, so that experts get equally many:
    /// [`balanced_hash`](crate::balanced_hash). Ids that it does not have go to random ones.
    Balanced,
    /// Those of a table that a run makes of the embeddings of a trained model, so that ids with near embeddings go to the same
    /// ones: [`clustered_hash`](crate::clustered_hash).
    Clustered,
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
    pub bias_update_rate: Ramp,
    /// Groups of consecutive experts, such as those of one device; divides E.
    pub num_groups: usize,
    /// Groups that a token's experts may be in.
    pub top_groups: usize,
    /// What groups are chosen by.
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
    /// When a token's second expert is used ([`RouterKind::Gshard`]).
    pub second: SecondExpert,
    /// Its threshold, above 0 to 1.
    pub second_threshold: f32,
    /// Which experts ids go to ([`RouterKind::Hash`]).
    pub hash: HashTable,
    /// Ids of the table of [`HashTable::Balanced`] and [`HashTable::Clustered`], those of a model's vocabulary: no setting, but set by whoever makes a layer.
    #[serde(skip)]
    pub hash_ids: usize,
    /// Width of the projection; 0: 256 as in Tutel, or D where that is less ([`RouterKind::Cosine`]).
    pub cosine_dim: usize,
    /// The temperature that the learned one starts from ([`RouterKind::Cosine`]); it never falls below 0.01.
    pub cosine_temperature: f32,
    /// The sum of probabilities that is enough ([`RouterKind::TopP`]).
    pub top_p: f32,
    /// How many clusters the first level has, how many each of these has, and so on, such as "8" or "4, 4"; the last ones
    /// share the experts evenly. Empty: one level of about as many clusters as each has experts
    /// ([`RouterKind::Hierarchical`]).
    pub tree: String,
    /// B: clusters that a token opens at each level; 0: K ([`RouterKind::Hierarchical`]).
    pub tree_beam: usize,
    /// The weight of the L1 loss that a run starts from ([`RouterKind::Relu`]).
    pub l1_start: f32,
    /// The factor by which it changes in a step.
    pub l1_rate: f32,
    /// Whether that loss counts an expert's gates as often as it has more than its share of the tokens, so that it balances
    /// them too (ReMoE, section 3.4, equations 10 and 11): [`l1_loads`](crate::l1_loads).
    pub l1_balanced: bool,
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
    /// How many experts are reserved for each modality, such as "4, 2": the first four for modality 0, the next two for
    /// modality 1; the others are shared. Empty: all are shared.
    pub modality_experts: String,
    /// What becomes of a choice whose expert has no room.
    pub overflow: Overflow,
    /// Tokens that share a capacity (GShard's local groups); 0: all tokens of a microbatch, those of all ranks.
    pub local_group: usize,
}

impl Default for RouterConfig {
    fn default() -> Self {
        Self {
            kind: RouterKind::TopK,
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
            second: SecondExpert::Random,
            second_threshold: 0.5,
            hash: HashTable::Random,
            hash_ids: 0,
            cosine_dim: 0,
            cosine_temperature: 0.5,
            top_p: 0.4,
            tree: String::new(),
            tree_beam: 0,
            l1_start: 1e-8,
            l1_rate: 1.2,
            l1_balanced: true,
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
        }
    }
}

impl RouterConfig {
    /// Whether a trained model chooses by softmax over linear logits and the highest K, nothing more.
    #[must_use]
    pub fn is_plain_at_inference(&self) -> bool {
        matches!(self.kind, RouterKind::TopK | RouterKind::Switch | RouterKind::ExpertChoice)
            && self.temperature.end == 1.0
            && self.is_softmax_top_k()
    }

    /// Whether tokens, where they choose, take the highest K by softmax over logits, whatever these are, and weigh them by it.
    pub(crate) fn is_softmax_top_k(&self) -> bool {
        use RouterKind::{Cosine, ExpertChoice, Gshard, NoisyTopK, Switch, TopK};
        matches!(self.kind, TopK | Switch | ExpertChoice | Gshard | NoisyTopK | Cosine)
            && self.scores == ScoreFunction::Softmax
            && !self.expert_bias
            && self.top_groups == self.num_groups
            && self.routed_scale == 1.0
            && self.sparsemixer_jitter == 0.0
            && self.num_free() == 0
            && !self.gate_residual
            && self.modality_experts.is_empty()
    }

    /// Whether tokens, where they choose, take the highest K by softmax or sigmoid, by bias and groups, and weigh them by their scores.
    pub(crate) fn is_score_top_k(&self) -> bool {
        use RouterKind::{Base, Cosine, ExpertChoice, Gshard, NoisyTopK, Sinkhorn, Switch, TopK};
        matches!(self.kind, TopK | Switch | ExpertChoice | Gshard | NoisyTopK | Cosine | Base | Sinkhorn)
            && self.sparsemixer_jitter == 0.0
            && self.modality_experts.is_empty()
    }

    /// Experts without computation; they come after all others.
    #[must_use]
    pub fn num_free(&self) -> usize {
        self.zero_experts + self.copy_experts + self.constant_experts + self.null_experts
    }

    /// Whether tokens are weighed against each other in training, so that no token chooses for itself.
    pub(crate) fn is_joint(&self) -> bool {
        matches!(self.kind, RouterKind::ExpertChoice | RouterKind::Base | RouterKind::Sinkhorn)
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

    /// Children of the root, of each cluster of the first level, and so on down to the experts.
    pub(crate) fn tree_arities(&self, num_experts: usize) -> Result<Vec<usize>, ConfigError> {
        let mut arities: Vec<usize> = numbers("router.tree", &self.tree)?;
        if arities.is_empty() {
            let root = num_experts.isqrt();
            // The divisor that comes next to the root from below; a prime number of experts is a flat tree.
            arities.extend((2..=root).rev().find(|&clusters| num_experts.is_multiple_of(clusters)));
        }
        let clusters = arities.iter().try_fold(1_usize, |all, &n| all.checked_mul(n));
        let clusters = clusters.filter(|&n| n > 0 && num_experts.is_multiple_of(n) && arities.iter().all(|&n| n > 1));
        let Some(clusters) = clusters else {
            let expected = format!(
                "must be numbers of at least 2 whose product divides the number of experts, {num_experts}, such as \"4, 2\""
            );
            return Err(ConfigError::new("router.tree", format!("{:?}", self.tree), expected));
        };
        arities.push(num_experts / clusters);
        Ok(arities)
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

/// How many modalities there are, by where they begin and by the experts reserved for them.
pub(crate) fn num_modalities(boundaries: &[u32], reserved: &[usize]) -> usize {
    if boundaries.is_empty() { reserved.len().max(1) } else { boundaries.len() + 1 }
}

fn numbers<T: std::str::FromStr>(setting: &'static str, text: &str) -> Result<Vec<T>, ConfigError> {
    if text.trim().is_empty() {
        return Ok(Vec::new());
    }
    let wrong = || ConfigError::new(setting, format!("{text:?}"), "must be whole numbers with commas between");
    text.split(',').map(|word| word.trim().parse().map_err(|_| wrong())).collect()
}
