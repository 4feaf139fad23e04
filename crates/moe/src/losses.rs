//! Losses on the router: the auxiliary balance loss, per layer or pooled over the layers, and the z-loss.
//!
//! Their gradients reach the router through the probabilities and the log-sum-exps alone; which expert was chosen has no
//! gradient. Values are without their coefficient, so that runs with different coefficients can be compared; gradients
//! are multiplied by the `scale` given, which is the coefficient times whatever else the whole loss is scaled by.

use std::ops::Range;

use crate::{LayerStats, ModalityStats};

/// What the losses say of one layer's router, for [`MoeLayer::backward`](crate::MoeLayer::backward).
#[derive(Clone, Debug, PartialEq, Default)]
pub struct LossGrad {
    /// `[E]`: gradient of each probability of any token (the same for all tokens). Empty for none.
    pub balance: Vec<f32>,
    /// Gradient of the mean over the tokens of the squared log-sum-exp.
    pub z: f32,
    /// Gradient of the mean over the sequences of the sequence-wise loss, [`LayerStats::sequence_loss`]. The forward pass
    /// must have been told the sequences' length.
    pub sequence: f32,
    /// Gradient of GShard's loss, [`LayerStats::gshard_loss`], the mean over the local groups of all ranks. The forward pass must have
    /// been told that it counts, if there are several.
    pub gshard: f32,
    /// `[E]`: gradient of each expert's importance, [`LayerStats::importance`]. Empty for none.
    pub importance: Vec<f32>,
    /// `[E]`: gradient of each expert's smooth load, [`LayerStats::smooth_load`]. Empty for none.
    pub load: Vec<f32>,
    /// Gradient of the L1 loss on gates ([`RouterConfig::l1_is_balanced`](crate::RouterConfig::l1_is_balanced)) times its weight,
    /// which is state: what the whole loss is scaled by.
    pub l1: f32,
    /// `[E]`: what a gate of each expert counts in it, [`l1_loads`]. Empty for one each.
    pub l1_loads: Vec<f32>,
    /// `[M]`: gradient of the entropy of each token's distribution, by the token's modality. Empty for none.
    pub entropy: Vec<f32>,
    /// `[M, E]`: as `balance`, by the token's modality. Empty for none.
    pub modality_balance: Vec<f32>,
}

impl LossGrad {
    /// What the losses say of a pass whose tokens are this share, 0 to 1, of those that their means are taken over: tokens of
    /// other ranks are the rest.
    pub fn of_share(&mut self, share: f32) {
        self.z *= share;
        self.sequence *= share;
        self.l1 *= share;
    }

    /// Whether nothing but balance and z-loss has a gradient.
    pub(crate) fn is_simple(&self) -> bool {
        self.sequence == 0.0 && self.is_simple_by_parts()
    }

    /// Whether nothing but balance, of the whole and of sequences, and z-loss has a gradient.
    pub(crate) fn is_simple_by_parts(&self) -> bool {
        self.gshard == 0.0
            && self.importance.is_empty()
            && self.load.is_empty()
            && self.l1 == 0.0
            && self.entropy.is_empty()
            && self.modality_balance.is_empty()
    }
}

/// `[E]`: what a gate of each expert counts in the L1 loss of ReLU routing that balances, too: its tokens over its share of
/// them, `E / (K T) n_e` (Wang et al., "ReMoE", 2412.14711, equation 11). Counts have no gradient.
#[must_use]
pub fn l1_loads(stats: &LayerStats, top_k: usize) -> Vec<f32> {
    let counts = &stats.tokens_per_expert;
    let scale = counts.len() as f64 / (top_k * stats.num_tokens).max(1) as f64;
    counts.iter().map(|&count| (f64::from(count) * scale) as f32).collect()
}

/// A balance loss over the layers of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct BalanceLoss {
    /// The loss, without a coefficient.
    pub value: f64,
    /// For each layer `[E]` what [`LossGrad::balance`] takes.
    pub gradients: Vec<Vec<f32>>,
}

/// The auxiliary loss of Switch for each layer, added up: `sum over layers of E sum_i f_i P_i`, with `f_i` the share of
/// the layer's choices that name expert i (before dropping) and `P_i` the mean probability. A balanced layer adds 1, one
/// that sends everything to one expert with certainty adds E. With K = 1 this is equation 4 of Switch (2101.03961)
/// without alpha.
#[must_use]
pub fn balance_loss_per_layer(layers: &[&LayerStats], scale: f32) -> BalanceLoss {
    let mut loss = BalanceLoss { value: 0.0, gradients: Vec::with_capacity(layers.len()) };
    for layer in layers {
        let num_experts = layer.num_experts() as f64;
        let per_choice = if layer.num_choices == 0 { 0.0 } else { num_experts / layer.num_choices as f64 };
        let loads: Vec<f64> = layer.tokens_per_expert.iter().map(|&n| f64::from(n) * per_choice).collect();
        loss.add(layer, &layer.free.balanced(&loads), scale);
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

/// The auxiliary loss of GShard for each layer, added up: [`LayerStats::gshard_loss`], which takes its means over each local
/// group. A balanced layer adds `1/E^2`. Its gradient is [`LossGrad::gshard`]; those of the result are empty.
#[must_use]
pub fn balance_loss_gshard(layers: &[&LayerStats]) -> BalanceLoss {
    let value = layers.iter().map(|layer| layer.gshard_loss).sum();
    BalanceLoss { value, gradients: vec![Vec::new(); layers.len()] }
}

/// The device-level balance loss of DeepSeek-V2 (2405.04434) for each layer, added up: `sum over groups of f_g P_g`, with
/// `f_g` the mean over the group's experts of their share of the choices times E and `P_g` the sum of their mean
/// probabilities. Experts are in `num_groups` groups of consecutive ones. A balanced layer adds 1.
#[must_use]
pub fn balance_loss_of_groups(layers: &[&LayerStats], num_groups: usize, scale: f32) -> BalanceLoss {
    loss_of_groups(layers, num_groups, scale, |layer, _, group| {
        let sum = |loads: &[u32]| loads.iter().map(|&n| f64::from(n)).sum::<f64>();
        let computing = &layer.tokens_per_expert[..layer.num_computing()];
        let even = sum(computing).max(1.0) / computing.len() as f64;
        sum(&computing[group.clone()]) / (even * group.len() as f64)
    })
}

/// The communication balance loss of DeepSeek-V2 (2405.04434, equations 29 to 31) for each layer, added up: `sum over groups of
/// f_g P_g`, with `f_g` the tokens that at least one expert of the group has, [`LayerStats::tokens_per_group`], times
/// `num_groups / (top_groups T)`, and `P_g` as in [`balance_loss_of_groups`]. A balanced layer whose tokens each go to
/// `top_groups` groups adds 1.
#[must_use]
pub fn communication_loss(layers: &[&LayerStats], (num_groups, top_groups): (usize, usize), scale: f32) -> BalanceLoss {
    loss_of_groups(layers, num_groups, scale, |layer, index, _| {
        let sent = f64::from(layer.tokens_per_group.get(index).copied().unwrap_or(0));
        sent * num_groups as f64 / (top_groups.max(1) * layer.num_tokens.max(1)) as f64
    })
}

/// For each layer `sum over groups of load P_g`, with `load` of a layer, a group's index and its experts. Experts without
/// computation are in no group.
fn loss_of_groups(
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

/// The squared coefficient of variation of `values` and its gradient times `scale`: the importance loss of
/// [`LayerStats::importance`] and the load loss of [`LayerStats::smooth_load`] (Shazeer et al., 1701.06538). 0 without values.
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

/// What [`entropy_loss`] weighs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EntropyRule {
    /// Weight of the mean entropy of the tokens' distributions, to be small: each token is to be decided (LIMoE's local
    /// loss; the loss of top-p routing).
    pub local: f32,
    /// Weight of what the entropy of the mean distribution lacks to `min_entropy` (LIMoE's global loss).
    pub global: f32,
    /// Tau, in nats.
    pub min_entropy: f64,
}

/// The entropy losses of one layer.
#[derive(Clone, Debug, PartialEq)]
pub struct EntropyLoss {
    /// The mean entropy of the tokens, added up over the modalities, without its weight.
    pub local: f64,
    /// `max(0, tau - H(mean distribution))`, added up over the modalities, without its weight.
    pub global: f64,
    /// What [`LossGrad::entropy`] takes.
    pub entropy: Vec<f32>,
    /// What [`LossGrad::modality_balance`] takes.
    pub modality_balance: Vec<f32>,
}

/// The local and the global entropy loss of LIMoE (Mustafa et al., 2206.02770, equations 2 and 3) of one layer, each
/// modality by itself; a layer without modalities is one.
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

/// The auxiliary loss of the `transformers` library (`load_balancing_loss_func`): the tokens of all layers are pooled,
/// `E sum_i f_i P_i` with `f_i` the choices of expert i over the number of tokens and `P_i` the mean probability. Balanced
/// routing gives K, not 1. All layers must have the same number of experts; no layer gives 0.
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

/// The router z-loss (ST-MoE, 2202.08906) of each layer, added up, without its coefficient: the mean over the tokens of
/// the squared log-sum-exp of the logits. A layer's [`LossGrad::z`] is the coefficient (times the scale of the loss).
#[must_use]
pub fn z_loss(layers: &[&LayerStats]) -> f64 {
    layers.iter().map(|layer| layer.z).sum()
}
