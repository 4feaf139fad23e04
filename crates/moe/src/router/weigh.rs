//! The weights of a token's experts from their gates, and backward.

use super::scheme::Weighing;
use crate::{MoeConfig, NO_EXPERT, ScoreOrder};

/// A small number added to the sum that normalises weights (DeepSeek-V3).
const WEIGHT_EPS: f32 = 1e-20;

/// The rule from gates to the weights of a token's experts.
#[derive(Clone, Copy)]
pub(crate) struct WeightRule {
    /// True if weights are divided by their sum.
    pub(super) is_normalized: bool,
    pub(super) scale: f32,
    /// The first null expert. Null experts have no weight and do not count in the sum.
    pub(super) first_null: usize,
    /// True for weights of one over the number of experts; backward as if they were the gates.
    is_equal: bool,
}

impl WeightRule {
    /// Reads the rule from `config`.
    pub(crate) fn from_config(config: &MoeConfig) -> Self {
        let router = &config.router;
        Self {
            is_normalized: is_normalized(config),
            scale: router.routed_scale,
            first_null: config.num_experts + router.num_zero_computation() - router.null_experts,
            is_equal: router.scheme().weighing() == Weighing::Equal,
        }
    }

    fn counts(self, id: u32) -> bool {
        id != NO_EXPERT && (id as usize) < self.first_null
    }

    pub(crate) fn weigh(self, gates: &[f32], ids: &[u32], weights: &mut [f32]) {
        let count = ids.iter().filter(|&&id| self.counts(id)).count();
        for (weight, &id) in weights.iter_mut().zip(ids) {
            *weight = match self.counts(id) {
                false => 0.0,
                // A non-finite gate must show in the output.
                true if self.is_equal && gates[id as usize].is_finite() => 1.0 / count as f32,
                true => gates[id as usize],
            };
        }
        let sum = if self.is_normalized && !self.is_equal { weights.iter().sum::<f32>() + WEIGHT_EPS } else { 1.0 };
        weights.iter_mut().for_each(|weight| *weight *= self.scale / sum);
    }

    /// Adds the gradient of a token's gates, given its experts `ids` and their `weights`.
    pub(crate) fn backward(self, ids: &[u32], weights: &[f32], gates: &[f32], dweights: &[f32], dgates: &mut [f32]) {
        let chosen = || ids.iter().zip(weights).zip(dweights).filter(|((id, _), _)| self.counts(**id));
        if !self.is_normalized || self.is_equal {
            chosen().for_each(|((&id, _), dweight)| dgates[id as usize] += self.scale * dweight);
            return;
        }
        let sum: f32 = chosen().map(|((&id, _), _)| gates[id as usize]).sum::<f32>() + WEIGHT_EPS;
        for ((&id, _), &dweight) in chosen() {
            // Sums differences, which keep their digits even if one weight is nearly 1.
            let centered: f32 = chosen().map(|((_, weight), other)| weight * (dweight - other)).sum();
            dgates[id as usize] += centered / sum;
        }
    }
}

/// Returns whether weights are normalised. A softmax over the chosen logits equals the softmax over all, divided by
/// its sum over the chosen.
pub(crate) fn is_normalized(config: &MoeConfig) -> bool {
    let is_fixed = config.router.scheme().weighing() == Weighing::GatesAsTheyAre;
    !is_fixed && (config.normalize_weights || config.score_order == ScoreOrder::TopKThenSoftmax)
}
