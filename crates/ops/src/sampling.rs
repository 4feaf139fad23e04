//! Drawing a token from logits.
//!
//! The order of the filters is that of `transformers`: temperature, top-k, top-p, min-p. Ties go to the lowest id,
//! and tokens are drawn in the order of ids, so a result depends on the logits, the filters and the drawn number
//! alone.

use moeworks_tensor::Tensor;

use crate::cuda::{self, On};
use crate::deferred::Deferred;
use crate::simd::{LANES, kernel};
use crate::vmath::exp;
use crate::{Context, Isa};

/// The filters of a draw.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Filters {
    /// The divisor of the logits; 0 always takes the most likely token.
    pub temperature: f32,
    /// Keeps the k most likely tokens; 0 keeps all.
    pub top_k: usize,
    /// Keeps the most likely tokens that together have this probability, the one that reaches it included; 1 keeps
    /// all.
    pub top_p: f32,
    /// Keeps tokens at least this many times as likely as the most likely one; 0 keeps all.
    pub min_p: f32,
}

/// A drawn token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drawn {
    /// The token.
    pub id: u32,
    /// Some logit is NaN.
    pub has_nan: bool,
}

/// Draws the token at the share `drawn` (from 0 to below 1) of the weights that the filters leave. `logits` (f32) has
/// one entry for each token of the vocabulary, at least one; NaN counts as impossible. On a GPU the logits stay
/// there, and weights below 2^-40 of the largest count as 0.
#[must_use]
pub fn draw(ctx: &Context, logits: &Tensor, filters: &Filters, drawn: f32) -> Drawn {
    draw_each(ctx, logits, filters, &[drawn]).wait()[0]
}

/// Drawn tokens. On a GPU they are there for its next step before the host knows them.
#[derive(Clone, Debug)]
pub struct DrawnTokens {
    ids: Tensor,
    in_host: Deferred<Vec<Drawn>>,
    vocabulary: usize,
}

impl DrawnTokens {
    /// Returns the tokens: `[R]` u32, all below [`vocabulary`](Self::vocabulary).
    #[must_use]
    pub fn ids(&self) -> &Tensor {
        &self.ids
    }

    /// Returns the number of tokens of the vocabulary.
    #[must_use]
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// Returns the drawn token of each row once the host has it. Waits for no work that was queued on a GPU
    /// afterwards.
    #[must_use]
    pub fn wait(&self) -> &[Drawn] {
        &self.in_host
    }
}

/// Draws a token for each row of `logits` `[R, V]` as [`draw`] does, with R drawn numbers.
#[must_use]
pub fn draw_each(ctx: &Context, logits: &Tensor, filters: &Filters, drawn: &[f32]) -> DrawnTokens {
    assert!(
        !logits.is_empty() && logits.len().is_multiple_of(drawn.len()),
        "{} draws of {:?}",
        drawn.len(),
        logits.shape()
    );
    let vocabulary = logits.len() / drawn.len();
    if let Some(on) = On::of(ctx) {
        let (ids, in_host) = cuda::sampling::draw_each(on, logits, filters, drawn);
        return DrawnTokens { ids, in_host, vocabulary };
    }
    let of_row = |(logits, &drawn): (&[f32], &f32)| {
        let has_nan = logits.iter().any(|logit| logit.is_nan());
        let id = if filters.temperature == 0.0 { None } else { filters.draw(ctx.isa(), logits, f64::from(drawn)) };
        Drawn { id: id.unwrap_or_else(|| most_likely(logits)), has_nan }
    };
    let drawn: Vec<Drawn> = logits.f32s().chunks_exact(vocabulary).zip(drawn).map(of_row).collect();
    let ids: Vec<u32> = drawn.iter().map(|drawn| drawn.id).collect();
    DrawnTokens { ids: Tensor::from_slice(ctx.pool(), &[ids.len()], &ids), in_host: Deferred::now(drawn), vocabulary }
}

/// A token that may be drawn, and its weight relative to the most likely one's.
#[derive(Clone, Copy)]
struct Candidate {
    id: u32,
    weight: f32,
}

impl Filters {
    fn draw(&self, isa: Isa, logits: &[f32], drawn: f64) -> Option<u32> {
        let weights = relative_weights(isa, logits, self.temperature);
        if self.top_k == 0 && self.top_p == 1.0 && self.min_p == 0.0 {
            return drawn_of_all(&weights, drawn);
        }
        let candidates = self.candidates(logits, &weights);
        let total: f64 = candidates.iter().map(|c| f64::from(c.weight)).sum();
        let mut left = drawn * total;
        let reaches = |c: &&Candidate| {
            left -= f64::from(c.weight);
            left < 0.0
        };
        candidates.iter().find(reaches).or(candidates.last()).map(|c| c.id)
    }

    /// Returns the tokens that the filters leave, by id, with weights relative to the most likely one's.
    fn candidates(&self, logits: &[f32], weights: &[f32]) -> Vec<Candidate> {
        let Self { top_k, top_p, min_p, .. } = *self;
        let all = (0..).zip(weights).map(|(id, &weight)| Candidate { id, weight });
        let mut possible: Vec<Candidate> = all.filter(|c| c.weight > 0.0).collect();
        if top_k > 0 && top_k < possible.len() {
            let logit = |c: &Candidate| logits[c.id as usize];
            possible.select_nth_unstable_by(top_k - 1, |a, b| logit(b).total_cmp(&logit(a)).then(a.id.cmp(&b.id)));
            possible.truncate(top_k);
        }
        if top_p < 1.0 {
            keep_nucleus(&mut possible, f64::from(top_p));
        }
        possible.retain(|c| c.weight >= min_p);
        possible.sort_unstable_by_key(|c| c.id);
        possible
    }
}

/// Keeps the fewest of the likeliest tokens that have at least this share of all weights. A vocabulary is large and a
/// nucleus small, so only as many tokens are sorted as it takes.
fn keep_nucleus(weights: &mut Vec<Candidate>, share: f64) {
    let enough = share * weights.iter().map(|w| f64::from(w.weight)).sum::<f64>();
    let order = |a: &Candidate, b: &Candidate| b.weight.total_cmp(&a.weight).then(a.id.cmp(&b.id));
    let mut len = 64;
    loop {
        len = len.min(weights.len());
        if len < weights.len() {
            weights.select_nth_unstable_by(len, order);
        }
        weights[..len].sort_unstable_by(order);
        let mut sum = 0.0;
        let before = weights[..len].iter().take_while(|w| {
            let is_wanted = sum < enough;
            sum += f64::from(w.weight);
            is_wanted
        });
        let count = before.count();
        if sum >= enough || len == weights.len() {
            weights.truncate(count.max(1));
            return;
        }
        len *= 8;
    }
}

/// Returns the token at the share `drawn` of all weights: finds its block first, then the token.
fn drawn_of_all(weights: &[f32], drawn: f64) -> Option<u32> {
    const BLOCK: usize = 256;
    let mut left = drawn * weights.chunks(BLOCK).map(sum).sum::<f64>();
    let mut last = None;
    for (block, ids) in weights.chunks(BLOCK).zip((0..).step_by(BLOCK)) {
        let of_block = sum(block);
        if left >= of_block {
            left -= of_block;
            continue;
        }
        for (&weight, id) in block.iter().zip(ids..).filter(|w| *w.0 > 0.0) {
            left -= f64::from(weight);
            last = Some(id);
            if left < 0.0 {
                return last;
            }
        }
    }
    last.or_else(|| weights.iter().rposition(|&weight| weight > 0.0).map(|id| id as u32))
}

/// Returns the sum of some weights, in an order that suits vectors.
fn sum(weights: &[f32]) -> f64 {
    let (blocks, rest) = weights.as_chunks::<8>();
    let mut sums = [0.0_f32; 8];
    for block in blocks {
        sums.iter_mut().zip(block).for_each(|(sum, weight)| *sum += weight);
    }
    sums.iter().chain(rest).map(|&weight| f64::from(weight)).sum()
}

fn most_likely(logits: &[f32]) -> u32 {
    let mut best = (0, f32::NEG_INFINITY);
    for (id, &logit) in (0..).zip(logits) {
        if logit > best.1 {
            best = (id, logit);
        }
    }
    best.0
}

/// Returns `exp((l - max) / temperature)` of every logit in f32, and 0 for NaN. `temperature` is above 0. If the
/// largest logit is infinite, it and its equals have weight 1 and all others 0.
fn relative_weights(isa: Isa, logits: &[f32], temperature: f32) -> Vec<f32> {
    let max = largest(isa, logits);
    if max == f32::INFINITY {
        return logits.iter().map(|&logit| if logit == max { 1.0 } else { 0.0 }).collect();
    }
    let mut weights = vec![0.0; logits.len()];
    weights_kernel(isa, logits, max, temperature, &mut weights);
    weights
}

kernel! {
    /// Returns the largest element, ignoring NaN.
    fn largest<S: Level>(values: &[f32]) -> f32 {
        let mut most = [f32::NEG_INFINITY; LANES];
        let (blocks, rest) = values.as_chunks::<LANES>();
        for block in blocks {
            for (most, &value) in most.iter_mut().zip(block) {
                *most = if value > *most { value } else { *most };
            }
        }
        most.iter().chain(rest).fold(f32::NEG_INFINITY, |most, &value| if value > most { value } else { most })
    }
}

kernel! {
    fn weights_kernel<S: Level>(logits: &[f32], max: f32, temperature: f32, weights: &mut [f32]) {
        for (weight, &logit) in weights.iter_mut().zip(logits) {
            let relative = exp::<S>((logit - max) / temperature);
            *weight = if logit > f32::NEG_INFINITY { relative } else { 0.0 };
        }
    }
}

#[cfg(test)]
#[path = "sampling_tests.rs"]
mod tests;
