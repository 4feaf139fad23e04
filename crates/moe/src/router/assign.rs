//! Choices that tokens do not make alone: experts choose tokens, or both are assigned to each other.
//!
//! Scores are `[T, E]`, finite. All results are the same on any number of threads: ties go to the lower index, sums are cut
//! by shape.

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::collections::VecDeque;

/// The `count` tokens with the highest score of each expert, highest first (2202.09368): `[E][count]`.
pub(crate) fn expert_choice(scores: &[f32], num_experts: usize, count: usize) -> Vec<Vec<u32>> {
    let num_tokens = scores.len() / num_experts;
    let count = count.min(num_tokens);
    let of_expert = |e: usize| {
        let score = |t: u32| scores[t as usize * num_experts + e];
        let order = |&a: &u32, &b: &u32| score(b).total_cmp(&score(a)).then(a.cmp(&b));
        let mut tokens: Vec<u32> = (0..num_tokens as u32).collect();
        if count > 0 && count < num_tokens {
            tokens.select_nth_unstable_by(count - 1, order);
        }
        tokens.truncate(count);
        tokens.sort_unstable_by(order);
        tokens
    };
    (0..num_experts).map(of_expert).collect()
}

/// A place at an expert: its price and who has it.
#[derive(Clone, Copy, PartialEq)]
struct Place {
    price: f32,
    token: Option<u32>,
}

impl Eq for Place {}

/// The cheapest place is the greatest; of places of one price the one that has been taken first is.
impl Ord for Place {
    fn cmp(&self, other: &Self) -> Ordering {
        other.price.total_cmp(&self.price).then_with(|| other.token.cmp(&self.token))
    }
}

impl PartialOrd for Place {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Rounds of the auction, each with a fifth of the increment before, the first with an eighth of the range of the scores.
const AUCTION_ROUNDS: usize = 5;

/// The expert of each token so that the sum of the scores is the highest and the experts' loads differ by at most one,
/// the first experts taking what does not divide: an auction for places (Bertsekas), as in BASE layers (2103.16716).
///
/// Tokens bid for the expert of highest score less price, so much that they would be as content with their second best;
/// a place goes to the higher bid. The sum is within `T` times the last increment of the best, that is `T` times
/// 1/5000 of the scores' range.
pub(crate) fn auction(scores: &[f32], num_experts: usize) -> Vec<u32> {
    let num_tokens = scores.len() / num_experts;
    let (low, high) = scores.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(l, h), &s| (l.min(s), h.max(s)));
    let range = (high - low).max(f32::MIN_POSITIVE);
    let mut experts: Vec<BinaryHeap<Place>> = (0..num_experts)
        .map(|e| num_tokens / num_experts + usize::from(e < num_tokens % num_experts))
        .map(|size| vec![Place { price: 0.0, token: None }; size].into())
        .collect();
    let mut chosen = vec![0; num_tokens];
    let mut increment = range / 8.0;
    for _ in 0..AUCTION_ROUNDS {
        for places in &mut experts {
            *places = places.drain().map(|place| Place { token: None, ..place }).collect();
        }
        auction_round(scores, &mut experts, increment, &mut chosen);
        increment /= 5.0;
    }
    chosen
}

fn auction_round(scores: &[f32], experts: &mut [BinaryHeap<Place>], increment: f32, chosen: &mut [u32]) {
    let num_experts = experts.len();
    let mut prices: Vec<f32> =
        experts.iter().map(|places| places.peek().map_or(f32::INFINITY, |place| place.price)).collect();
    let mut waiting: VecDeque<u32> = (0..chosen.len() as u32).collect();
    while let Some(token) = waiting.pop_front() {
        let scores = &scores[token as usize * num_experts..][..num_experts];
        let (mut best, mut first, mut second) = (0, f32::NEG_INFINITY, f32::NEG_INFINITY);
        for (e, (score, price)) in scores.iter().zip(&prices).enumerate() {
            let value = score - price;
            if value > first {
                (best, first, second) = (e, value, first);
            } else if value > second {
                second = value;
            }
        }
        let lead = if second == f32::NEG_INFINITY { 0.0 } else { first - second };
        let price = next_price(prices[best], lead + increment);
        let evicted = experts[best].pop().and_then(|place| place.token);
        experts[best].push(Place { price, token: Some(token) });
        prices[best] = experts[best].peek().map_or(f32::INFINITY, |place| place.price);
        chosen[token as usize] = best as u32;
        waiting.extend(evicted);
    }
}

/// A price that has risen, also where the rise is lost in rounding.
fn next_price(price: f32, rise: f32) -> f32 {
    let next = price + rise;
    if next > price { next } else { price.next_up() }
}

/// Iterations of [`sinkhorn`] at most.
const SINKHORN_ITERATIONS: usize = 100;
/// The mean change of the columns' factors, times E, below which it ends.
const SINKHORN_TOLERANCE: f64 = 1e-4;

/// The logarithm of each expert's factor c in the balanced matrix `r_t exp(logit_te) c_e`, whose rows add up to 1/T and
/// columns to 1/E: Sinkhorn's iteration, as in Megatron-LM.
pub(crate) fn sinkhorn(logits: &[f32], num_experts: usize) -> Vec<f32> {
    let num_tokens = logits.len() / num_experts;
    // Each row over its largest, which the row's factor makes good.
    let mut matrix = Vec::with_capacity(logits.len());
    for row in logits.chunks(num_experts) {
        let top = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        matrix.extend(row.iter().map(|logit| (logit - top).exp()));
    }
    let mut factors = vec![1.0_f64; num_experts];
    for _ in 0..SINKHORN_ITERATIONS {
        let mut sums = vec![0.0_f64; num_experts];
        for row in matrix.chunks(num_experts) {
            let total: f64 = row.iter().zip(&factors).map(|(&a, c)| f64::from(a) * c).sum();
            let r = 1.0 / (num_tokens as f64 * total);
            sums.iter_mut().zip(row).for_each(|(sum, &a)| *sum += r * f64::from(a));
        }
        // The sum of r over all tokens would grow without bound where a column is nearly 0.
        let next: Vec<f64> = sums.iter().map(|sum| 1.0 / (num_experts as f64 * sum.max(1e-30))).collect();
        let change: f64 = next.iter().zip(&factors).map(|(a, b)| (a / b - 1.0).abs()).sum::<f64>();
        factors = next;
        if change / (num_experts as f64) < SINKHORN_TOLERANCE {
            break;
        }
    }
    factors.iter().map(|c| c.ln() as f32).collect()
}

#[cfg(test)]
#[path = "assign_tests.rs"]
mod tests;
