//! Drawing a token from logits.
//!
//! The order of the filters is that of `transformers`: temperature, top-k, top-p, min-p. Ties go to the lowest id, so a
//! result depends on the logits, the options and the seed alone.

use moeworks_moe::ConfigError;
use moeworks_ops::Isa;
use moeworks_ops::sampling::relative_weights;
use moeworks_tensor::{Purpose, Random};

/// How tokens are drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingOptions {
    /// Divides the logits; 0 takes the most likely token always.
    pub temperature: f32,
    /// Only the k most likely tokens; 0 for all.
    pub top_k: usize,
    /// Only the most likely tokens that together have this probability, the one that reaches it included; 1 for all.
    pub top_p: f32,
    /// Only tokens at least this many times as likely as the most likely one; 0 for all.
    pub min_p: f32,
    /// Seed of the random numbers.
    pub seed: u64,
}

impl Default for SamplingOptions {
    fn default() -> Self {
        Self { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0 }
    }
}

/// Draws tokens, one after the other.
#[derive(Clone, Debug)]
pub struct Sampler {
    options: SamplingOptions,
    random: Random,
    num_drawn: u64,
}

impl Sampler {
    /// A sampler. Fails if an option is out of range.
    pub fn new(options: SamplingOptions) -> Result<Self, ConfigError> {
        let SamplingOptions { temperature, top_p, min_p, seed, .. } = options;
        if !(temperature >= 0.0 && temperature.is_finite()) {
            return Err(ConfigError::new("temperature", temperature, "must be a number of at least 0"));
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return Err(ConfigError::new("top_p", top_p, "must be above 0 and at most 1"));
        }
        if !(0.0..=1.0).contains(&min_p) {
            return Err(ConfigError::new("min_p", min_p, "must be from 0 to 1"));
        }
        Ok(Self { options, random: Random::new(seed, Purpose::Sampling, 0), num_drawn: 0 })
    }

    /// The next token. `logits` has one entry a token of the vocabulary, at least one; an entry that is not a number counts
    /// as impossible.
    #[must_use]
    pub fn sample(&mut self, logits: &[f32]) -> u32 {
        let position = self.num_drawn;
        self.num_drawn += 1;
        if self.options.temperature == 0.0 {
            return most_likely(logits);
        }
        let drawn = f64::from(self.random.uniform(position));
        let weights = relative_weights(Isa::detect(), logits, self.options.temperature);
        let SamplingOptions { top_k, top_p, min_p, .. } = self.options;
        let is_free = top_k == 0 && top_p == 1.0 && min_p == 0.0;
        let id = if is_free { drawn_of_all(&weights, drawn) } else { self.drawn_of_likely(logits, &weights, drawn) };
        id.unwrap_or_else(|| most_likely(logits))
    }

    /// The token at the share `drawn` of the weights that the filters leave.
    fn drawn_of_likely(&self, logits: &[f32], weights: &[f32], drawn: f64) -> Option<u32> {
        let candidates = self.candidates(logits, weights);
        let total: f64 = candidates.iter().map(|c| f64::from(c.1)).sum();
        let mut left = drawn * total;
        let reaches = |c: &&(u32, f32)| {
            left -= f64::from(c.1);
            left < 0.0
        };
        candidates.iter().find(reaches).or(candidates.last()).map(|c| c.0)
    }

    /// The tokens that the filters leave, with weights relative to the most likely one's.
    fn candidates(&self, logits: &[f32], weights: &[f32]) -> Vec<(u32, f32)> {
        let SamplingOptions { top_k, top_p, min_p, .. } = self.options;
        let mut possible: Vec<(u32, f32)> = (0..).zip(weights.iter().copied()).filter(|c| c.1 > 0.0).collect();
        if top_k > 0 && top_k < possible.len() {
            let logit = |c: &(u32, f32)| logits[c.0 as usize];
            possible.select_nth_unstable_by(top_k - 1, |a, b| logit(b).total_cmp(&logit(a)).then(a.0.cmp(&b.0)));
            possible.truncate(top_k);
        }
        if top_p < 1.0 {
            keep_nucleus(&mut possible, f64::from(top_p));
        }
        possible.retain(|c| c.1 >= min_p);
        possible
    }
}

/// Keeps the fewest of the likeliest tokens that have at least this share of all weights. A vocabulary is large and a nucleus
/// small: no more is put in order than it takes.
fn keep_nucleus(weights: &mut Vec<(u32, f32)>, share: f64) {
    let enough = share * weights.iter().map(|w| f64::from(w.1)).sum::<f64>();
    let order = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
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
            sum += f64::from(w.1);
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

/// The token at the share `drawn` of all weights: first the block that it is in, then the token.
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

/// The sum of some weights, in an order that vectors can take.
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
