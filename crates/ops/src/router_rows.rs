//! Row-wise operations of routers besides [`softmax_top_k`](crate::top_k::softmax_top_k), with the vector
//! instructions of the machine: softmax, the deviations of noise, the smooth choice under noise, and the bids of an
//! auction.

use crate::simd::{LANES, Level, kernel, sum_lanes};
use crate::vmath;

/// Statistics of a row's softmax.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RowSums {
    /// The log of the sum of exponentials of the logits.
    pub lse: f32,
    /// The entropy of the distribution, in nats.
    pub entropy: f32,
}

kernel! {
    /// Writes the softmax of each row of `logits` to `probs`. There are as many rows as `sums` has entries. A logit
    /// of negative infinity has probability 0. A row with NaN, with positive infinity, or with negative infinity
    /// alone becomes NaN.
    pub fn softmax_rows<S: Level>(logits: &[f32], probs: &mut [f32], sums: &mut [RowSums]) {
        let width = logits.len() / sums.len().max(1);
        let rows = logits.chunks_exact(width.max(1)).zip(probs.chunks_exact_mut(width.max(1)));
        for ((logits, probs), sums) in rows.zip(sums) {
            *sums = softmax::<S>(logits, probs);
        }
    }
}

#[inline(always)]
fn softmax<S: Level>(logits: &[f32], probs: &mut [f32]) -> RowSums {
    /// e^x is 0 below this: bounds a distance in the entropy, where 0 times infinity would be NaN.
    const FAR: f32 = -104.0;
    let mut tops = [f32::NEG_INFINITY; LANES];
    for logits in logits.chunks(LANES) {
        tops.iter_mut().zip(logits).for_each(|(top, &x)| *top = if x > *top { x } else { *top });
    }
    let top = tops.iter().fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a });
    let (mut totals, mut moments) = ([0.0; LANES], [0.0; LANES]);
    for (logits, probs) in logits.chunks(LANES).zip(probs.chunks_mut(LANES)) {
        let sums = totals.iter_mut().zip(&mut moments);
        for ((p, &logit), (total, moment)) in probs.iter_mut().zip(logits).zip(sums) {
            let distance = logit - top;
            *p = vmath::exp::<S>(distance);
            *total += *p;
            *moment = S::mul_add(*p, if distance < FAR { FAR } else { distance }, *moment);
        }
    }
    let total = sum_lanes(totals);
    let scale = 1.0 / total;
    probs.iter_mut().for_each(|p| *p *= scale);
    let log_total = total.ln();
    RowSums { lse: top + log_total, entropy: log_total - sum_lanes(moments) * scale }
}

kernel! {
    /// Computes `ln(1 + e^x)` of each of `raw`, with a relative error of at most 3e-7.
    pub fn softplus<S: Level>(raw: &[f32], to: &mut [f32]) {
        for (to, &x) in to.iter_mut().zip(raw) {
            *to = vmath::softplus::<S>(x);
        }
    }
}

kernel! {
    /// Computes the probability, within 3e-7, that a normal number of mean `means[i]` and deviation `deviations[i]`
    /// is above `thresholds[i]`.
    pub fn normal_above<S: Level>(means: &[f32], deviations: &[f32], thresholds: &[f32], to: &mut [f32]) {
        for (((to, &mean), &deviation), &threshold) in to.iter_mut().zip(means).zip(deviations).zip(thresholds) {
            *to = vmath::normal::<S>((mean - threshold) / deviation).0;
        }
    }
}

/// A bidder's best expert and its lead.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Offer {
    /// The expert of the highest score less price, the lowest index at a tie.
    pub expert: u32,
    /// The lead over the second best; infinite if there is no other expert.
    pub lead: f32,
}

kernel! {
    /// Computes the offer of each of `tokens`, whose scores are rows of `scores`, as long as `prices`.
    pub fn best_offers<S: Level>(scores: &[f32], prices: &[f32], tokens: &[u32], offers: &mut [Offer]) {
        let width = prices.len();
        for (offer, &token) in offers.iter_mut().zip(tokens) {
            *offer = best_offer(&scores[token as usize * width..][..width], prices);
        }
    }
}

/// The best and the second best of some experts, lane by lane.
struct Bests {
    first: [f32; LANES],
    second: [f32; LANES],
    expert: [u32; LANES],
}

#[inline(always)]
fn best_offer(scores: &[f32], prices: &[f32]) -> Offer {
    const OUT: [f32; LANES] = [f32::NEG_INFINITY; LANES];
    let mut bests = Bests { first: OUT, second: OUT, expert: [0; LANES] };
    let ((scores, rest), (prices, rest_prices)) = (scores.as_chunks::<LANES>(), prices.as_chunks::<LANES>());
    let mut first = 0;
    for (scores, prices) in scores.iter().zip(prices) {
        bests.take(first, scores, prices);
        first += LANES as u32;
    }
    if !rest.is_empty() {
        let (mut scores, mut prices) = (OUT, [0.0; LANES]);
        scores[..rest.len()].copy_from_slice(rest);
        prices[..rest.len()].copy_from_slice(rest_prices);
        bests.take(first, &scores, &prices);
    }
    bests.best()
}

impl Bests {
    #[inline(always)]
    fn take(&mut self, index: u32, scores: &[f32; LANES], prices: &[f32; LANES]) {
        for lane in 0..LANES {
            let (value, first) = (scores[lane] - prices[lane], self.first[lane]);
            let is_better = value > first;
            let loser = if is_better { first } else { value };
            self.second[lane] = if loser > self.second[lane] { loser } else { self.second[lane] };
            self.first[lane] = if is_better { value } else { first };
            self.expert[lane] = if is_better { index + lane as u32 } else { self.expert[lane] };
        }
    }

    /// Reduces the lanes by halves.
    #[inline(always)]
    fn best(mut self) -> Offer {
        let mut width = LANES / 2;
        while width > 0 {
            for lane in 0..width {
                let (a, b) = (self.first[lane], self.first[lane + width]);
                let (at, other) = (self.expert[lane], self.expert[lane + width]);
                let is_better = (b > a) | ((b == a) & (other < at));
                let loser = if is_better { a } else { b };
                let (c, d) = (self.second[lane], self.second[lane + width]);
                let second = if d > c { d } else { c };
                self.second[lane] = if loser > second { loser } else { second };
                self.first[lane] = if is_better { b } else { a };
                self.expert[lane] = if is_better { other } else { at };
            }
            width /= 2;
        }
        Offer { expert: self.expert[0], lead: self.first[0] - self.second[0] }
    }
}

#[cfg(test)]
#[path = "router_rows_tests.rs"]
mod tests;
