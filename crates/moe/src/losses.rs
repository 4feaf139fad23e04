//! Auxiliary losses on the router: balance losses per layer, per group or pooled over the layers, entropy losses and
//! the z-loss.
//!
//! Gradients reach the router through the probabilities and the log-sum-exps alone; the discrete choice of experts
//! has no gradient. Values exclude the coefficient, so that runs with different coefficients can be compared.
//! Gradients are multiplied by `scale`: the coefficient times the scale of the whole loss.

use std::ops::Range;

use crate::{LayerStats, ModalityStats};

/// The gradients of all auxiliary losses with respect to one layer's router statistics: the input of
/// [`MoeLayer::backward`](crate::MoeLayer::backward).
#[derive(Clone, Debug, PartialEq, Default)]
pub struct LossGrad {
    /// `[E]`: gradient of a token's probabilities, equal for all tokens. Empty for none.
    pub balance: Vec<f32>,
    /// Gradient of the mean over the tokens of the squared log-sum-exp.
    pub z: f32,
    /// Gradient of the mean over the sequences of the sequence-wise loss, [`LayerStats::sequence_loss`]. The forward
    /// pass must have been given the sequences' length.
    pub sequence: f32,
    /// Gradient of GShard's loss, [`LayerStats::gshard_loss`], a mean over the local groups of all ranks. If there
    /// are several groups, the forward pass must have been asked to compute it.
    pub gshard: f32,
    /// `[E]`: gradient of each expert's importance, [`LayerStats::importance`]. Empty for none.
    pub importance: Vec<f32>,
    /// `[E]`: gradient of each expert's smooth load, [`LayerStats::smooth_load`]. Empty for none.
    pub load: Vec<f32>,
    /// Scale of the L1 loss on ReLU gates ([`RouterConfig::l1_is_balanced`](crate::RouterConfig::l1_is_balanced)).
    /// Its coefficient is router state and is multiplied in by the layer.
    pub l1: f32,
    /// `[E]`: weight of each expert's gates in the L1 loss, [`l1_loads`]. Empty for 1 each.
    pub l1_loads: Vec<f32>,
    /// `[M]`: gradient of the entropy of a token's distribution, by the token's modality. Empty for none.
    pub entropy: Vec<f32>,
    /// `[M, E]`: gradient of a token's probabilities, by the token's modality. Empty for none.
    pub modality_balance: Vec<f32>,
}

impl LossGrad {
    /// Scales the losses that are means over tokens by `share`, 0 to 1: this pass's part of all tokens, where other
    /// ranks have the rest.
    pub fn scale_to_share(&mut self, share: f32) {
        self.z *= share;
        self.sequence *= share;
        self.l1 *= share;
    }

    /// Returns whether only the balance loss and the z-loss have a gradient.
    pub(crate) fn is_simple(&self) -> bool {
        self.sequence == 0.0 && self.is_simple_by_parts()
    }

    /// Returns whether only the balance loss, the sequence-wise loss and the z-loss have a gradient.
    pub(crate) fn is_simple_by_parts(&self) -> bool {
        self.gshard == 0.0
            && self.importance.is_empty()
            && self.load.is_empty()
            && self.l1 == 0.0
            && self.entropy.is_empty()
            && self.modality_balance.is_empty()
    }
}

/// Returns `[E]`: the weight of each expert's gates in the balancing L1 loss of ReLU routing, `E / (K T) n_e`: its
/// tokens over its even share (Wang et al., "ReMoE", 2412.14711, equation 11). The counts have no gradient.
#[must_use]
pub fn l1_loads(stats: &LayerStats, top_k: usize) -> Vec<f32> {
    let counts = &stats.tokens_per_expert;
    let scale = counts.len() as f64 / (top_k * stats.num_tokens).max(1) as f64;
    counts.iter().map(|&count| (f64::from(count) * scale) as f32).collect()
}

/// A balance loss over the layers of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct BalanceLoss {
    /// The loss, without its coefficient.
    pub value: f64,
    /// `[E]` for each layer: the value of [`LossGrad::balance`].
    pub gradients: Vec<Vec<f32>>,
}

/// Sums Switch's auxiliary loss over the layers: `E sum_i f_i P_i` for each, with `f_i` the share of the layer's
/// choices that name expert i (before dropping) and `P_i` its mean probability. A balanced layer adds 1; one that
/// sends everything to one expert with certainty adds E. With K = 1 this is equation 4 of Switch (2101.03961) without
/// alpha.
#[must_use]
pub fn balance_loss_per_layer(layers: &[&LayerStats], scale: f32) -> BalanceLoss {
    let mut loss = BalanceLoss { value: 0.0, gradients: Vec::with_capacity(layers.len()) };
    for layer in layers {
        let num_experts = layer.num_experts() as f64;
        let per_choice = if layer.num_choices == 0 { 0.0 } else { num_experts / layer.num_choices as f64 };
        let loads: Vec<f64> = layer.tokens_per_expert.iter().map(|&n| f64::from(n) * per_choice).collect();
        loss.add(layer, &layer.zero_computation.balanced(&loads), scale);
    }
    loss
}

impl BalanceLoss {
    /// Adds a layer's `sum_i w_i P_i`.
    fn add(&mut self, layer: &LayerStats, weights: &[f64], scale: f32) {
        self.value += weights.iter().zip(&layer.mean_prob).map(|(w, &p)| w * f64::from(p)).sum::<f64>();
        let per_token = f64::from(scale) / layer.num_tokens.max(1) as f64;
        self.gradients.push(weights.iter().map(|w| (w * per_token) as f32).collect());
    }
}

/// Sums GShard's auxiliary loss over the layers: [`LayerStats::gshard_loss`], a mean over local groups. A balanced
/// layer adds `1/E^2`. Its gradient is [`LossGrad::gshard`], so the gradients of the result are empty.
#[must_use]
pub fn balance_loss_gshard(layers: &[&LayerStats]) -> BalanceLoss {
    let value = layers.iter().map(|layer| layer.gshard_loss).sum();
    BalanceLoss { value, gradients: vec![Vec::new(); layers.len()] }
}

/// Sums the device-level balance loss of DeepSeek-V2 (2405.04434) over the layers: `sum over groups of f_g P_g` for
/// each. `f_g` is the mean, over the experts of group g, of their share of the choices times E. `P_g` is the sum of
/// their mean probabilities. A group has consecutive experts. A balanced layer adds 1.
#[must_use]
pub fn group_balance_loss(layers: &[&LayerStats], num_groups: usize, scale: f32) -> BalanceLoss {
    group_loss(layers, num_groups, scale, |layer, _, group| {
        let sum = |loads: &[u32]| loads.iter().map(|&n| f64::from(n)).sum::<f64>();
        let computing = &layer.tokens_per_expert[..layer.num_computing()];
        let even = sum(computing).max(1.0) / computing.len() as f64;
        sum(&computing[group.clone()]) / (even * group.len() as f64)
    })
}

/// Sums the communication balance loss of DeepSeek-V2 (2405.04434, equations 29 to 31) over the layers: `sum over
/// groups of f_g P_g` for each. `f_g` is the number of tokens sent to group g, [`LayerStats::tokens_per_group`],
/// times `num_groups / (top_groups T)`; `P_g` is as in [`group_balance_loss`]. A balanced layer whose tokens each
/// go to `top_groups` groups adds 1.
#[must_use]
pub fn communication_loss(layers: &[&LayerStats], num_groups: usize, top_groups: usize, scale: f32) -> BalanceLoss {
    group_loss(layers, num_groups, scale, |layer, index, _| {
        let sent = f64::from(layer.tokens_per_group.get(index).copied().unwrap_or(0));
        sent * num_groups as f64 / (top_groups.max(1) * layer.num_tokens.max(1)) as f64
    })
}

/// Sums `load(layer, index, experts) P_g` over the groups of each layer. Zero-computation experts are in no group.
fn group_loss(
    layers: &[&LayerStats],
    num_groups: usize,
    scale: f32,
    load: impl Fn(&LayerStats, usize, Range<usize>) -> f64,
) -> BalanceLoss {
    let mut loss = BalanceLoss { value: 0.0, gradients: Vec::with_capacity(layers.len()) };
    for layer in layers {
        let computing = layer.num_computing();
        let size = computing.div_ceil(num_groups.max(1)).max(1);
        let mut weights = vec![0.0; layer.num_experts()];
        for (index, start) in (0..computing).step_by(size).enumerate() {
            let group = start..(start + size).min(computing);
            weights[group.clone()].fill(load(layer, index, group));
        }
        loss.add(layer, &weights, scale);
    }
    loss
}

/// Returns the squared coefficient of variation of `values` and its gradient times `scale`: the importance loss of
/// [`LayerStats::importance`] and the load loss of [`LayerStats::smooth_load`] (Shazeer et al., 1701.06538). 0
/// without values.
#[must_use]
pub fn cv_squared(values: &[f64], scale: f32) -> (f64, Vec<f32>) {
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n.max(1.0);
    if mean == 0.0 {
        return (0.0, vec![0.0; values.len()]);
    }
    let variance = values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
    let gradient = |x: &f64| 2.0 * (x - mean) / (n * mean.powi(2)) - 2.0 * variance / (n * mean.powi(3));
    let gradients = values.iter().map(|x| (gradient(x) * f64::from(scale)) as f32).collect();
    (variance / mean.powi(2), gradients)
}

/// The weights of the entropy losses.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EntropyRule {
    /// Weight of the mean entropy of the tokens' distributions, which should be small (LIMoE's local loss; the loss
    /// of top-p routing).
    pub local: f32,
    /// Weight of `max(0, tau - H(mean distribution))` (LIMoE's global loss).
    pub global: f32,
    /// Tau: the least entropy of the mean distribution, in nats.
    pub min_entropy: f64,
}

/// The entropy losses of one layer.
#[derive(Clone, Debug, PartialEq)]
pub struct EntropyLoss {
    /// The mean entropy of the tokens, summed over the modalities, without its weight.
    pub local: f64,
    /// `max(0, tau - H(mean distribution))`, summed over the modalities, without its weight.
    pub global: f64,
    /// The value of [`LossGrad::entropy`].
    pub entropy: Vec<f32>,
    /// The value of [`LossGrad::modality_balance`].
    pub modality_balance: Vec<f32>,
}

/// Computes the local and the global entropy loss of one layer for each modality (LIMoE, Mustafa et al., 2206.02770,
/// equations 2 and 3). A layer without modalities counts as a single one.
#[must_use]
pub fn entropy_loss(layer: &LayerStats, rule: &EntropyRule) -> EntropyLoss {
    let whole = [ModalityStats {
        num_tokens: layer.num_tokens,
        mean_prob: layer.mean_prob.clone(),
        mean_entropy: layer.mean_entropy,
    }];
    let modalities = if layer.modalities.is_empty() { &whole } else { &layer.modalities[..] };
    let mut loss = EntropyLoss { local: 0.0, global: 0.0, entropy: Vec::new(), modality_balance: Vec::new() };
    for modality in modalities {
        let per_token = 1.0 / modality.num_tokens.max(1) as f64;
        let terms = modality.mean_prob.iter().map(|&p| f64::from(p)).filter(|&p| p > 0.0);
        let lacking =
            if modality.num_tokens == 0 { 0.0 } else { rule.min_entropy + terms.map(|p| p * p.ln()).sum::<f64>() };
        loss.local += modality.mean_entropy;
        loss.global += lacking.max(0.0);
        loss.entropy.push((f64::from(rule.local) * per_token) as f32);
        let global = if lacking > 0.0 { f64::from(rule.global) * per_token } else { 0.0 };
        // d(-H)/dP = ln P + 1.
        let gradient = |&p: &f32| (global * (f64::from(p.max(f32::MIN_POSITIVE)).ln() + 1.0)) as f32;
        loss.modality_balance.extend(modality.mean_prob.iter().map(gradient));
    }
    loss
}

/// Computes the auxiliary loss of the `transformers` library (`load_balancing_loss_func`). The tokens of all layers
/// are pooled: `E sum_i f_i P_i` with `f_i` the choices of expert i over the number of tokens and `P_i` the mean
/// probability. Balanced routing gives K, not 1. All layers must have the same number of experts; without layers the
/// loss is 0.
#[must_use]
pub fn balance_loss_pooled(layers: &[&LayerStats], scale: f32) -> BalanceLoss {
    let num_experts = layers.first().map_or(0, |layer| layer.num_experts());
    let num_tokens = layers.iter().map(|layer| layer.num_tokens).sum::<usize>().max(1) as f64;
    let mut counts = vec![0.0; num_experts];
    let mut probs = vec![0.0; num_experts];
    for layer in layers {
        assert_eq!(layer.num_experts(), num_experts, "pooled layers' numbers of experts");
        counts.iter_mut().zip(&layer.tokens_per_expert).for_each(|(sum, &n)| *sum += f64::from(n));
        let weight = layer.num_tokens as f64;
        probs.iter_mut().zip(&layer.mean_prob).for_each(|(sum, &p)| *sum += weight * f64::from(p));
    }
    let factor = num_experts as f64 / (num_tokens * num_tokens);
    let value = counts.iter().zip(&probs).map(|(n, p)| n * p).sum::<f64>() * factor;
    let gradient: Vec<f32> = counts.iter().map(|n| (n * factor * f64::from(scale)) as f32).collect();
    BalanceLoss { value, gradients: vec![gradient; layers.len()] }
}

/// Sums the router z-loss over the layers, without its coefficient: the mean over the tokens of the squared
/// log-sum-exp of the logits (ST-MoE, 2202.08906). Its gradient is [`LossGrad::z`]: the coefficient times the scale
/// of the loss.
#[must_use]
pub fn z_loss(layers: &[&LayerStats]) -> f64 {
    layers.iter().map(|layer| layer.z).sum()
}
