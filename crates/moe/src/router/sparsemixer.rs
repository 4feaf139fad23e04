//! Sparsemixer (Liu et al., 2409.12136, after 2304.08612 and 2310.00811), as in `modeling_phimoe.py` of transformers: the two
//! experts of a token and their weights, and the estimate of the router's gradient.
//!
//! For each choice the experts whose logit s has `(top - s) / max(|s|, top) <= 2 jitter` are close, `top` the highest logit;
//! the second choice goes without the first one's expert. After training the choice is the highest, and its weight its share
//! in a softmax over the close ones. In training it is drawn from that softmax, and the weight of one that is not the
//! highest counts a third, but for one in four: with that, the gradient of the softmax's share, which is what backward
//! takes, estimates that of the expected output by Heun's third-order method.

use moeworks_tensor::Random;

use super::input::Draw;
use crate::NO_EXPERT;

/// The factor on the weight of a choice that is not the highest, in transformers' digits of a third.
const THIRD: f32 = 0.3333;
/// The share of choices on which it stands.
const THIRD_SHARE: f32 = 0.75;

/// The rule of a pass.
#[derive(Clone, Copy)]
pub(crate) struct Sparsemixer {
    pub(super) jitter: f32,
    /// In training.
    pub(super) random: Option<Random>,
    /// The position of the first token, by which it draws.
    pub(super) first: usize,
}

impl Sparsemixer {
    /// The two experts of token `t` with these `logits`; `gates` is room for as many.
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

    /// The weights of the experts `ids` of token `t`; `gates` is room.
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

    /// Adds to `dlogits` the gradient of the logits from that of the weights; `gates` is room.
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

    /// Writes each expert's share in the softmax over the close ones, those `before` left out, and returns the highest.
    fn shares(&self, logits: &[f32], before: &[u32], gates: &mut [f32]) -> u32 {
        let is_out = |expert: usize| before.iter().any(|&id| id as usize == expert);
        let left = || logits.iter().enumerate().filter(|&(expert, _)| !is_out(expert));
        let mut highest = (NO_EXPERT, f32::NEG_INFINITY);
        for (expert, &logit) in left() {
            // The first stands where none is a number, so that this shows.
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

/// The expert that `uniform`, from 0 to below 1, falls on; none if the shares are no numbers.
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
