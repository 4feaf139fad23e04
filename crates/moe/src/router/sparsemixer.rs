//! SparseMixer (Liu et al., 2409.12136, after 2304.08612 and 2310.00811), as in `modeling_phimoe.py` of transformers:
//! a token's two experts, their weights, and an estimate of the router's gradient.
//!
//! For each choice the candidates are the experts whose logit s has `(top - s) / max(|s|, top) <= 2 jitter`, with
//! `top` the highest logit. The second choice excludes the first one's expert. In inference the choice is the highest
//! logit, weighted by its share in a softmax over the candidates. In training the choice is drawn from that softmax;
//! the weight of a choice that is not the highest is multiplied by a third with a probability of 3/4. Backward takes
//! the gradient of the softmax share, which then estimates the gradient of the expected output by Heun's third-order
//! method.

use moeworks_tensor::Random;

use super::input::Draw;
use crate::NO_EXPERT;

/// The factor on the weight of a choice that is not the highest, with the digits that transformers uses for a third.
const THIRD: f32 = 0.3333;
/// The probability of that factor.
const THIRD_SHARE: f32 = 0.75;

/// The parameters of SparseMixer in a pass.
#[derive(Clone, Copy)]
pub(crate) struct Sparsemixer {
    pub(super) jitter: f32,
    /// The source of random choices; none outside training.
    pub(super) random: Option<Random>,
    /// The index of the first token in the random stream.
    pub(super) first: usize,
}

impl Sparsemixer {
    /// Chooses the two experts of token `t` with these `logits`; `gates` is scratch of the same length.
    pub(super) fn choose(&self, t: usize, logits: &[f32], gates: &mut [f32], ids: &mut [u32]) {
        let count = ids.len();
        for choice in 0..count {
            let (before, rest) = ids.split_at_mut(choice);
            let highest = self.shares(logits, before, gates);
            let drawn =
                |random: Random| drawn(gates, random.uniform(Draw::Ranking.at((self.first + t) * count + choice)));
            rest[0] = self.random.and_then(drawn).unwrap_or(highest);
        }
    }

    /// Computes the weights of the experts `ids` of token `t`; `gates` is scratch.
    pub(super) fn weigh(&self, t: usize, logits: &[f32], gates: &mut [f32], ids: &[u32], weights: &mut [f32]) {
        for (choice, (&id, weight)) in ids.iter().zip(weights).enumerate() {
            let highest = self.shares(logits, &ids[..choice], gates);
            let share = gates.get(id as usize).copied().unwrap_or(0.0);
            let counts = self.random.is_none_or(|random| {
                id == highest || random.uniform(Draw::Second.at((self.first + t) * ids.len() + choice)) > THIRD_SHARE
            });
            *weight = if counts { share } else { THIRD * share };
        }
    }

    /// Adds to `dlogits` the gradient of the logits from that of the weights; `gates` is scratch.
    pub(super) fn backward(
        &self,
        logits: &[f32],
        gates: &mut [f32],
        ids: &[u32],
        dweights: &[f32],
        dlogits: &mut [f32],
    ) {
        for (choice, (&id, dweight)) in ids.iter().zip(dweights).enumerate() {
            self.shares(logits, &ids[..choice], gates);
            let Some(&share) = gates.get(id as usize) else { continue };
            for (expert, (d, gate)) in dlogits.iter_mut().zip(&*gates).enumerate() {
                let own = if expert == id as usize { 1.0 } else { 0.0 };
                *d += dweight * share * (own - gate);
            }
        }
    }

    /// Writes each candidate's softmax share to `gates`, excluding the experts `before`. Returns the expert of the
    /// highest logit.
    fn shares(&self, logits: &[f32], before: &[u32], gates: &mut [f32]) -> u32 {
        let is_out = |expert: usize| before.iter().any(|&id| id as usize == expert);
        let left = || logits.iter().enumerate().filter(|&(expert, _)| !is_out(expert));
        let mut highest = (NO_EXPERT, f32::NEG_INFINITY);
        for (expert, &logit) in left() {
            // If all are NaN the first is taken, so that the NaN shows in the output.
            if highest.0 == NO_EXPERT || logit > highest.1 {
                highest = (expert as u32, logit);
            }
        }
        let top = highest.1;
        let is_far = |s: f32| (top - s) / s.abs().max(top) > 2.0 * self.jitter;
        gates.fill(0.0);
        left().filter(|&(_, &s)| !is_far(s)).for_each(|(expert, &s)| gates[expert] = (s - top).exp());
        let sum: f32 = gates.iter().sum();
        gates.iter_mut().for_each(|gate| *gate /= sum);
        highest.0
    }
}

/// Returns the expert at `uniform`, in [0, 1), of the cumulated shares; none if the shares are NaN.
fn drawn(shares: &[f32], uniform: f32) -> Option<u32> {
    let mut left = uniform;
    let mut last = None;
    for (expert, &share) in (0..).zip(shares) {
        if share > 0.0 {
            last = Some(expert);
            left -= share;
            if left < 0.0 {
                break;
            }
        }
    }
    last
}

#[cfg(test)]
#[path = "sparsemixer_tests.rs"]
mod tests;
