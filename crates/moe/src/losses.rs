//! Losses on the router: the auxiliary balance loss, per layer or pooled over the layers, and the z-loss.
//!
//! Their gradients reach the router through the probabilities and the log-sum-exps alone; which expert was chosen has no
//! gradient. Values are without their coefficient, so that runs with different coefficients can be compared; gradients
//! are multiplied by the `scale` given, which is the coefficient times whatever else the whole loss is scaled by.

use crate::LayerStats;

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
}

impl LossGrad {
    /// Whether nothing but balance and z-loss has a gradient.
    pub(crate) fn is_simple(&self) -> bool {
        self.sequence == 0.0
    }
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
        let weights = layer.tokens_per_expert.iter().map(|&n| f64::from(n) * per_choice);
        loss.value += weights.clone().zip(&layer.mean_prob).map(|(w, &p)| w * f64::from(p)).sum::<f64>();
        let per_token = f64::from(scale) / layer.num_tokens.max(1) as f64;
        loss.gradients.push(weights.map(|w| (w * per_token) as f32).collect());
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
