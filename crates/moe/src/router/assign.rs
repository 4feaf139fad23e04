//! Routing decisions over all tokens: expert choice, balanced assignment by auction, and Sinkhorn's iteration.
//!
//! Scores are `[T, E]`, finite. Results do not depend on the number of threads: ties go to the lower index, and sums
//! are split into blocks by shape alone.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use moeworks_ops::Context;
use moeworks_ops::router_rows::{Offer, best_offers};

use super::blocks;

/// Chooses for each expert the `count` tokens with its highest scores, highest first: `[E][count]` (expert choice,
/// 2202.09368).
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

/// A slot of an expert in the auction: its price and the token that has it.
#[derive(Clone, Copy, PartialEq)]
struct Place {
    price: f32,
    token: Option<u32>,
}

impl Eq for Place {}

/// Orders the cheapest place as the greatest; among equal prices a free one, then the one with the lower token.
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

/// Rounds of the auction. The first has an increment of an eighth of the scores' range, each further one a fifth of
/// the previous.
const AUCTION_ROUNDS: usize = 5;

/// The number of bidders from which bids are computed on several threads.
const MANY_BIDDERS: usize = 512;

/// Assigns each token to an expert so that the sum of the scores is maximal and the experts' loads differ by at most
/// one; the first experts take the remainder. This is Bertsekas' auction, as in BASE layers (2103.16716).
///
/// In each step all tokens without a place bid for the expert of highest score less price, by as much as it exceeds
/// their second best. An expert's places go to the highest bids, and its price is that of its cheapest place. A round
/// begins with all places empty and all of an expert's places at its current price. Keeping the prices of single
/// places would take ten times the bids, because tokens would evict each other one by one. The sum is within `T`
/// times the last increment of the optimum, that is `T/5000` times the scores' range, whatever the initial prices.
pub(crate) fn auction(ctx: &Context, scores: &[f32], num_experts: usize) -> Vec<u32> {
    let num_tokens = scores.len() / num_experts;
    let (low, high) = scores.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(l, h), &s| (l.min(s), h.max(s)));
    // Prices reach some multiples of the range and must stay finite.
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

/// Returns the price of an expert's cheapest place; infinite if it has none.
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
            let blocks = blocks::split_mut(&mut offers, 1).zip(blocks::split(&waiting, 1));
            blocks::for_each(ctx, blocks, |_, (offers, tokens)| {
                best_offers(ctx.isa(), scores, &prices, tokens, offers);
            });
        }
        next.clear();
        for (&token, &Offer { expert, lead }) in waiting.iter().zip(&offers) {
            let lead = if lead.is_finite() { lead } else { 0.0 };
            let price = next_price(prices[expert as usize], lead + increment);
            let cheapest = experts[expert as usize].peek_mut();
            // An earlier bid of this step may have raised the price.
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

/// Raises a price, at least by one unit in the last place.
fn next_price(price: f32, rise: f32) -> f32 {
    let next = price + rise;
    if next > price { next } else { price.next_up() }
}

/// The maximum of iterations of [`sinkhorn`].
const SINKHORN_ITERATIONS: usize = 100;
/// The mean relative change of the columns' factors below which [`sinkhorn`] ends.
const SINKHORN_TOLERANCE: f64 = 1e-4;

/// Returns the logarithms of the experts' factors c in the balanced matrix `r_t exp(logit_te) c_e`, whose rows sum to
/// 1/T and columns to 1/E. This is Sinkhorn's iteration as in Megatron-LM.
pub(crate) fn sinkhorn(ctx: &Context, logits: &[f32], num_experts: usize) -> Vec<f32> {
    let num_tokens = logits.len() / num_experts;
    // Each row is divided by its largest entry; the row's factor absorbs that.
    let mut matrix = vec![0.0; logits.len()];
    let rows = blocks::split_mut(&mut matrix, num_experts).zip(blocks::split(logits, num_experts));
    blocks::for_each(ctx, rows, |_, (matrix, logits)| {
        for (row, logits) in matrix.chunks_mut(num_experts).zip(logits.chunks(num_experts)) {
            let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            row.iter_mut().zip(logits).for_each(|(a, logit)| *a = (logit - top).exp());
        }
    });
    let mut factors = vec![1.0_f64; num_experts];
    let mut partial = vec![0.0_f64; num_tokens.div_ceil(blocks::ROWS) * num_experts];
    for _ in 0..SINKHORN_ITERATIONS {
        let sums = partial.chunks_mut(num_experts).zip(blocks::split(&matrix, num_experts));
        blocks::for_each(ctx, sums, |_, (sums, rows)| column_sums(rows, &factors, num_tokens, sums));
        let mut sums = vec![0.0_f64; num_experts];
        for part in partial.chunks(num_experts) {
            sums.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
        }
        // The bounds keep factors finite: a column near 0 would let r grow without bound, and if all others are near
        // 0, this column's factor would fall to 0.
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

/// Sums the columns of some rows, each row scaled so that its product with `factors` is `1/T`.
fn column_sums(rows: &[f32], factors: &[f64], num_tokens: usize, sums: &mut [f64]) {
    sums.fill(0.0);
    for row in rows.chunks(factors.len()) {
        let r = 1.0 / (num_tokens as f64 * inner(row, factors));
        sums.iter_mut().zip(row).for_each(|(sum, &a)| *sum += r * f64::from(a));
    }
}

/// Computes the inner product with eight partial sums, which the compiler vectorises.
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
