//! Routing statistics of a layer: loads, drops, probabilities, entropies, and published measures of load balance.

use crate::MoeConfig;

/// The routing of one MoE layer over the tokens of one pass, or of several passes after [`merge`](Self::merge).
#[derive(Clone, Debug, PartialEq)]
pub struct LayerStats {
    /// T, the number of tokens.
    pub num_tokens: usize,
    /// Choices, dropped ones included: T K where every token has K experts.
    pub num_choices: usize,
    /// Choices that were dropped because their expert was full.
    pub num_dropped: usize,
    /// Choices that were rerouted to another expert because the chosen one was full.
    pub num_rerouted: usize,
    /// `[E]`: choices that name each expert, dropped ones included.
    pub tokens_per_expert: Vec<u32>,
    /// `[E]`: rows of each expert, after dropping.
    pub kept_per_expert: Vec<u32>,
    /// `[G]`: tokens with at least one expert in each of the router's groups, dropped choices included; empty if
    /// there is one group.
    pub tokens_per_group: Vec<u32>,
    /// `[E]`: mean over the tokens of their distribution over the experts.
    pub mean_prob: Vec<f32>,
    /// Mean over the tokens of the entropy of that distribution, in nats.
    pub mean_entropy: f64,
    /// Mean over the tokens of the squared log-sum-exp of the logits: the router z-loss without its coefficient.
    pub z: f64,
    /// Mean over tokens and experts of the squared logit; 0 for a router without logits.
    pub mean_squared_logit: f64,
    /// Mean over the sequences of the sequence-wise balance loss (DeepSeek-V3), without its coefficient: 1 when
    /// balanced; 0 where it is not computed.
    pub sequence_loss: f64,
    /// Mean over the router's local groups of GShard's balance loss: `1/E^2` when balanced.
    pub gshard_loss: f64,
    /// `[E]`: the sum of the weights of each expert's choices, dropped ones included (Shazeer's importance).
    pub importance: Vec<f64>,
    /// `[E]`: the smooth load under noise (Shazeer); empty without noise on the logits.
    pub smooth_load: Vec<f64>,
    /// The tokens of each modality; empty where there is one.
    pub modalities: Vec<ModalityStats>,
    /// The zero-computation experts, which the balance loss weighs differently.
    pub zero_computation: ZeroComputationShare,
}

/// The tokens of one modality in one MoE layer.
#[derive(Clone, Debug, PartialEq)]
pub struct ModalityStats {
    /// Tokens.
    pub num_tokens: usize,
    /// `[E]`: mean of their distributions over the experts.
    pub mean_prob: Vec<f32>,
    /// Mean of the entropies of their distributions, in nats.
    pub mean_entropy: f64,
}

/// A layer's zero-computation experts and their weight in the balance loss.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ZeroComputationShare {
    /// The number of zero, copy and constant experts.
    pub num_zero_computation: usize,
    /// The factor on their part of the loss (MoE++'s tau).
    pub ratio: f64,
    /// The number of null experts, each of which has their mean load in the loss (AdaMoE).
    pub num_null: usize,
}

impl ZeroComputationShare {
    /// Reads the numbers of experts from `config`.
    #[must_use]
    pub fn from_config(config: &MoeConfig) -> Self {
        let router = &config.router;
        let num_null = router.null_experts;
        Self {
            num_zero_computation: router.num_zero_computation() - num_null,
            ratio: f64::from(router.zero_computation_ratio),
            num_null,
        }
    }

    /// Returns the loads that the balance loss uses: null experts get their mean load, the other zero-computation
    /// experts theirs times `ratio`.
    #[must_use]
    pub fn balanced(&self, loads: &[f64]) -> Vec<f64> {
        let mut loads = loads.to_vec();
        let first_null = loads.len().saturating_sub(self.num_null);
        let first_zero_computation = first_null.saturating_sub(self.num_zero_computation);
        loads[first_zero_computation..first_null].iter_mut().for_each(|load| *load *= self.ratio);
        let mean = loads[first_null..].iter().sum::<f64>() / self.num_null.max(1) as f64;
        loads[first_null..].fill(mean);
        loads
    }
}

impl LayerStats {
    /// Creates the statistics of no token, for `num_experts` experts: the start of [`merge`](Self::merge).
    #[must_use]
    pub fn empty(num_experts: usize) -> Self {
        Self {
            num_tokens: 0,
            num_choices: 0,
            num_dropped: 0,
            num_rerouted: 0,
            tokens_per_expert: vec![0; num_experts],
            kept_per_expert: vec![0; num_experts],
            tokens_per_group: Vec::new(),
            mean_prob: vec![0.0; num_experts],
            mean_entropy: 0.0,
            z: 0.0,
            mean_squared_logit: 0.0,
            sequence_loss: 0.0,
            gshard_loss: 0.0,
            importance: vec![0.0; num_experts],
            smooth_load: Vec::new(),
            modalities: Vec::new(),
            zero_computation: ZeroComputationShare::default(),
        }
    }

    /// Adds the tokens of another pass through the same layer. Panics if the numbers of experts differ.
    pub fn merge(&mut self, other: &Self) {
        assert_eq!(self.tokens_per_expert.len(), other.tokens_per_expert.len(), "merged layers' numbers of experts");
        let total = self.num_tokens + other.num_tokens;
        if total == 0 {
            return;
        }
        let share = other.num_tokens as f64 / total as f64;
        let mean = |a: f64, b: f64| a + (b - a) * share;
        self.num_tokens = total;
        self.num_choices += other.num_choices;
        self.num_dropped += other.num_dropped;
        self.num_rerouted += other.num_rerouted;
        self.tokens_per_group.resize(self.tokens_per_group.len().max(other.tokens_per_group.len()), 0);
        for (counts, others) in [
            (&mut self.tokens_per_expert, &other.tokens_per_expert),
            (&mut self.kept_per_expert, &other.kept_per_expert),
            (&mut self.tokens_per_group, &other.tokens_per_group),
        ] {
            counts.iter_mut().zip(others).for_each(|(a, b)| *a = a.saturating_add(*b));
        }
        for (a, &b) in self.mean_prob.iter_mut().zip(&other.mean_prob) {
            *a = mean(f64::from(*a), f64::from(b)) as f32;
        }
        self.mean_entropy = mean(self.mean_entropy, other.mean_entropy);
        self.z = mean(self.z, other.z);
        self.mean_squared_logit = mean(self.mean_squared_logit, other.mean_squared_logit);
        self.sequence_loss = mean(self.sequence_loss, other.sequence_loss);
        self.gshard_loss = mean(self.gshard_loss, other.gshard_loss);
        self.importance.iter_mut().zip(&other.importance).for_each(|(a, b)| *a += b);
        if self.smooth_load.is_empty() {
            self.smooth_load = vec![0.0; other.smooth_load.len()];
        }
        self.smooth_load.iter_mut().zip(&other.smooth_load).for_each(|(a, b)| *a += b);
        self.merge_modalities(other);
        self.zero_computation = other.zero_computation;
    }

    fn merge_modalities(&mut self, other: &Self) {
        if self.modalities.is_empty() {
            self.modalities.clone_from(&other.modalities);
            return;
        }
        for (a, b) in self.modalities.iter_mut().zip(&other.modalities) {
            let share = b.num_tokens as f64 / (a.num_tokens + b.num_tokens).max(1) as f64;
            a.num_tokens += b.num_tokens;
            a.mean_entropy += (b.mean_entropy - a.mean_entropy) * share;
            for (a, &b) in a.mean_prob.iter_mut().zip(&b.mean_prob) {
                *a += ((f64::from(b) - f64::from(*a)) * share) as f32;
            }
        }
        // `other` may have tokens of modalities that this pass has not seen.
        let known = self.modalities.len();
        self.modalities.extend(other.modalities.iter().skip(known).cloned());
    }

    /// Returns E, the number of experts.
    #[must_use]
    pub fn num_experts(&self) -> usize {
        self.tokens_per_expert.len()
    }

    /// Returns the number of experts that compute; they come first.
    #[must_use]
    pub fn num_computing(&self) -> usize {
        self.num_experts().saturating_sub(self.zero_computation.num_zero_computation + self.zero_computation.num_null)
    }

    /// Returns the share of the choices that were dropped, 0 to 1.
    #[must_use]
    pub fn drop_rate(&self) -> f64 {
        share(self.num_dropped as u64, self.num_choices as u64)
    }

    /// Returns the share of the choices that were rerouted, 0 to 1.
    #[must_use]
    pub fn reroute_rate(&self) -> f64 {
        share(self.num_rerouted as u64, self.num_choices as u64)
    }

    /// Returns the root mean square of the logits. Logits that grow without bound saturate the softmax; the router
    /// z-loss counteracts that.
    #[must_use]
    pub fn logit_rms(&self) -> f64 {
        self.mean_squared_logit.sqrt()
    }

    /// Returns the [`cv`] of the tokens per expert.
    #[must_use]
    pub fn cv(&self) -> f64 {
        cv(&self.tokens_per_expert)
    }

    /// Returns the [`load_entropy`] of the tokens per expert.
    #[must_use]
    pub fn load_entropy(&self) -> f64 {
        load_entropy(&self.tokens_per_expert)
    }

    /// Returns the entropy of the mean probabilities, in nats.
    #[must_use]
    pub fn mean_prob_entropy(&self) -> f64 {
        self.mean_prob.iter().map(|&p| f64::from(p)).map(|p| if p > 0.0 { -p * p.ln() } else { 0.0 }).sum()
    }

    /// Returns the [`expert_diversity`] of the tokens per expert.
    #[must_use]
    pub fn expert_diversity(&self) -> f64 {
        expert_diversity(&self.tokens_per_expert)
    }

    /// Returns the [`num_dead_experts`] of the tokens per expert.
    #[must_use]
    pub fn num_dead_experts(&self) -> usize {
        num_dead_experts(&self.tokens_per_expert)
    }

    /// Returns the [`dead_expert_frac`] of the tokens per expert.
    #[must_use]
    pub fn dead_expert_frac(&self) -> f64 {
        dead_expert_frac(&self.tokens_per_expert)
    }

    /// Returns the [`max_over_mean`] of the tokens per expert.
    #[must_use]
    pub fn max_over_mean(&self) -> f64 {
        max_over_mean(&self.tokens_per_expert)
    }

    /// Returns the [`e_max_violation`] of the tokens per expert.
    #[must_use]
    pub fn e_max_violation(&self) -> f64 {
        e_max_violation(&self.tokens_per_expert)
    }
}

/// A count of tokens: u32 in one pass, u64 in sums over many.
pub trait Load: Copy + Into<u64> {}

impl<N: Copy + Into<u64>> Load for N {}

/// Returns `part / whole`, or 0 if `whole` is 0.
#[must_use]
pub fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// Returns the coefficient of variation of a load: population standard deviation over mean. 0 for an even load and
/// for none; `sqrt(E - 1)` if one expert has everything.
#[must_use]
pub fn cv<N: Load>(load: &[N]) -> f64 {
    let mean = mean(load);
    if mean == 0.0 {
        return 0.0;
    }
    let variance = counts(load).map(|n| (n - mean).powi(2)).sum::<f64>() / load.len() as f64;
    variance.sqrt() / mean
}

/// Returns the entropy of a load as a distribution over the experts, in nats: `ln E` if even, 0 if one expert has
/// everything.
#[must_use]
pub fn load_entropy<N: Load>(load: &[N]) -> f64 {
    let total = counts(load).sum::<f64>();
    counts(load).map(|n| if n > 0.0 { -(n / total) * (n / total).ln() } else { 0.0 }).sum()
}

/// Returns the effective share of experts in use, `exp(entropy of the load) / E`: 1 for an even load, `1 / E` if one
/// expert has everything, 0 without a load.
#[must_use]
pub fn expert_diversity<N: Load>(load: &[N]) -> f64 {
    if num_dead_experts(load) == load.len() { 0.0 } else { load_entropy(load).exp() / load.len() as f64 }
}

/// Counts the experts that no token chose.
#[must_use]
pub fn num_dead_experts<N: Load>(load: &[N]) -> usize {
    load.iter().filter(|&&n| n.into() == 0).count()
}

/// Returns the share of the experts that no token chose, 0 to 1.
#[must_use]
pub fn dead_expert_frac<N: Load>(load: &[N]) -> f64 {
    share(num_dead_experts(load) as u64, load.len() as u64)
}

/// Returns the largest load over the mean load: 1 if even, E if one expert has everything; 1 without a load.
#[must_use]
pub fn max_over_mean<N: Load>(load: &[N]) -> f64 {
    let mean = mean(load);
    if mean == 0.0 { 1.0 } else { counts(load).fold(0.0, f64::max) / mean }
}

/// Returns `max / mean - 1` of the load: MaxVio of Wang et al. (2408.15664).
#[must_use]
pub fn e_max_violation<N: Load>(load: &[N]) -> f64 {
    max_over_mean(load) - 1.0
}

fn counts<N: Load>(load: &[N]) -> impl Iterator<Item = f64> + '_ {
    load.iter().map(|&n| n.into() as f64)
}

fn mean<N: Load>(load: &[N]) -> f64 {
    if load.is_empty() { 0.0 } else { counts(load).sum::<f64>() / load.len() as f64 }
}
