//! Choices that tokens do not make alone: experts choose tokens, or both are assigned to each other.
//!
//! Scores are `[T, E]`, finite. All results are the same on any number of threads: ties go to the lower index, sums are cut
//! by shape.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use moeworks_ops::Context;
use moeworks_ops::router_rows::{Offer, best_offers};

use super::blocks;

/// The `count` tokens with the highest score of each expert, highest first (2202.09368): `[E][count]`.
pub(crate) fn expert_choice(ctx: &Context, scores: &[f32], num_experts: usize, count: usize) -> Vec<Vec<u32>> {
    let num_tokens = scores.len() / num_experts;
    let count = count.min(num_tokens);
    let mut chosen = vec![Vec::new(); num_experts];
    blocks::for_each(ctx, chosen.iter_mut(), |expert, tokens| {
        let column: Vec<f32> = scores.iter().skip(expert).step_by(num_experts).copied().collect();
        let order = |&a: &u32, &b: &u32| column[b as usize].total_cmp(&column[a as usize]).then(a.cmp(&b));
        tokens.extend(0..num_tokens as u32);
        if count > 0 && count < num_tokens {
            tokens.select_nth_unstable_by(count - 1, order);
        }
        tokens.truncate(count);
        tokens.sort_unstable_by(order);
    });
    chosen
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

/// Bidders from which on bids are worth the other threads.
const MANY_BIDDERS: usize = 512;

/// The expert of each token so that the sum of the scores is the highest and the experts' loads differ by at most one,
/// the first experts taking what does not divide: an auction for places (Bertsekas), as in BASE layers (2103.16716).
///
/// All tokens without a place bid at once for the expert of highest score less price, so much that they would be as content
/// with their second best; an expert's places go to the highest bids, and its price is that of its cheapest place. A round
/// begins with no token at any place and with all places of an expert at that price: where they keep their own, tokens push
/// each other along them, at ten times the bids. The sum is within `T` times the last increment of the best, that is `T`
/// times 1/5000 of the scores' range, whatever the prices that a round begins with.
pub(crate) fn auction(ctx: &Context, scores: &[f32], num_experts: usize) -> Vec<u32> {
    let num_tokens = scores.len() / num_experts;
    let (low, high) = scores.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(l, h), &s| (l.min(s), h.max(s)));
    // Prices are some ranges high, which must be numbers.
    if high.max(-low) > f32::MAX / 1024.0 {
        let smaller: Vec<f32> = scores.iter().map(|score| score / 1024.0).collect();
        return auction(ctx, &smaller, num_experts);
    }
    let range = (high - low).max(f32::MIN_POSITIVE);
    let mut experts: Vec<BinaryHeap<Place>> = (0..num_experts)
        .map(|e| num_tokens / num_experts + usize::from(e < num_tokens % num_experts))
        .map(|size| vec![Place { price: 0.0, token: None }; size].into())
        .collect();
    let mut chosen = vec![0; num_tokens];
    let mut increment = range / 8.0;
    for _ in 0..AUCTION_ROUNDS {
        for places in &mut experts {
            let price = price_of(places);
            *places = vec![Place { price, token: None }; places.len()].into();
        }
        auction_round(ctx, scores, &mut experts, increment, &mut chosen);
        increment /= 5.0;
    }
    chosen
}

/// The price of an expert's cheapest place; infinite without any.
fn price_of(places: &BinaryHeap<Place>) -> f32 {
    places.peek().map_or(f32::INFINITY, |place| place.price)
}

fn auction_round(ctx: &Context, scores: &[f32], experts: &mut [BinaryHeap<Place>], increment: f32, chosen: &mut [u32]) {
    let mut prices: Vec<f32> = experts.iter().map(price_of).collect();
    let mut waiting: Vec<u32> = (0..chosen.len() as u32).collect();
    let mut next = Vec::new();
    let mut offers = vec![Offer::default(); waiting.len()];
    while !waiting.is_empty() {
        offers.truncate(waiting.len());
        if waiting.len() < MANY_BIDDERS {
            best_offers(ctx.isa(), scores, &prices, &waiting, &mut offers);
        } else {
            let blocks = blocks::of_mut(&mut offers, 1).zip(blocks::of(&waiting, 1));
            blocks::for_each(ctx, blocks, |_, (offers, tokens)| {
                best_offers(ctx.isa(), scores, &prices, tokens, offers);
            });
        }
        next.clear();
        for (&token, &Offer { expert, lead }) in waiting.iter().zip(&offers) {
            let lead = if lead.is_finite() { lead } else { 0.0 };
            let price = next_price(prices[expert as usize], lead + increment);
            let cheapest = experts[expert as usize].peek_mut();
            // Somebody may have bid more in the meantime.
            if let Some(mut place) = cheapest.filter(|place| price > place.price) {
                let evicted = std::mem::replace(&mut *place, Place { price, token: Some(token) });
                next.extend(evicted.token);
                chosen[token as usize] = expert;
            } else {
                next.push(token);
            }
        }
        for &Offer { expert, .. } in &offers {
            prices[expert as usize] = price_of(&experts[expert as usize]);
        }
        std::mem::swap(&mut waiting, &mut next);
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
pub(crate) fn sinkhorn(ctx: &Context, logits: &[f32], num_experts: usize) -> Vec<f32> {
    let num_tokens = logits.len() / num_experts;
    // Each row over its largest, which the row's factor makes good.
    let mut matrix = vec![0.0; logits.len()];
    let rows = blocks::of_mut(&mut matrix, num_experts).zip(blocks::of(logits, num_experts));
    blocks::for_each(ctx, rows, |_, (matrix, logits)| {
        for (row, logits) in matrix.chunks_mut(num_experts).zip(logits.chunks(num_experts)) {
            let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            row.iter_mut().zip(logits).for_each(|(a, logit)| *a = (logit - top).exp());
        }
    });
    let mut factors = vec![1.0_f64; num_experts];
    let mut partial = vec![0.0_f64; num_tokens.div_ceil(blocks::ROWS) * num_experts];
    for _ in 0..SINKHORN_ITERATIONS {
        let sums = partial.chunks_mut(num_experts).zip(blocks::of(&matrix, num_experts));
        blocks::for_each(ctx, sums, |_, (sums, rows)| column_sums(rows, &factors, num_tokens, sums));
        let mut sums = vec![0.0_f64; num_experts];
        for part in partial.chunks(num_experts) {
            sums.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
        }
        // The sum of r over all tokens would grow without bound where a column is nearly 0; where all others are, its factor
        // would fall to 0.
        let factor = |sum: &f64| (1.0 / (num_experts as f64 * sum.max(1e-30))).max(1e-200);
        let next: Vec<f64> = sums.iter().map(factor).collect();
        let change: f64 = next.iter().zip(&factors).map(|(a, b)| (a / b - 1.0).abs()).sum::<f64>();
        factors = next;
        if change / (num_experts as f64) < SINKHORN_TOLERANCE {
            break;
        }
    }
    factors.iter().map(|c| c.ln() as f32).collect()
}

/// The sums of some rows' columns, each row times the factor that makes it add up to `1/T` with the columns' factors.
fn column_sums(rows: &[f32], factors: &[f64], num_tokens: usize, sums: &mut [f64]) {
    sums.fill(0.0);
    for row in rows.chunks(factors.len()) {
        let r = 1.0 / (num_tokens as f64 * inner(row, factors));
        sums.iter_mut().zip(row).for_each(|(sum, &a)| *sum += r * f64::from(a));
    }
}

/// The inner product, in lanes that vectors can hold.
fn inner(row: &[f32], factors: &[f64]) -> f64 {
    const LANES: usize = 8;
    let mut lanes = [0.0; LANES];
    let (row, factors) = (row.chunks_exact(LANES), factors.chunks_exact(LANES));
    let rest: f64 = row.remainder().iter().zip(factors.remainder()).map(|(&a, c)| f64::from(a) * c).sum();
    for (row, factors) in row.zip(factors) {
        for lane in 0..LANES {
            lanes[lane] += f64::from(row[lane]) * factors[lane];
        }
    }
    lanes.iter().sum::<f64>() + rest
}

#[cfg(test)]
#[path = "assign_tests.rs"]
mod tests;
