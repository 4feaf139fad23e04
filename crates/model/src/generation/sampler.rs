//! Drawing tokens, one after the other.

use moeworks_moe::ConfigError;
use moeworks_ops::Context;
use moeworks_ops::sampling::{Drawn, DrawnTokens, Filters, draw_each};
use moeworks_tensor::{Purpose, Random, Tensor};

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
    filters: Filters,
    random: Random,
    num_drawn: u64,
}

impl Sampler {
    /// A sampler. Fails if an option is out of range.
    pub fn new(options: SamplingOptions) -> Result<Self, ConfigError> {
        let SamplingOptions { temperature, top_k, top_p, min_p, seed } = options;
        if !(temperature >= 0.0 && temperature.is_finite()) {
            return Err(ConfigError::new("temperature", temperature, "must be a number of at least 0"));
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return Err(ConfigError::new("top_p", top_p, "must be above 0 and at most 1"));
        }
        if !(0.0..=1.0).contains(&min_p) {
            return Err(ConfigError::new("min_p", min_p, "must be from 0 to 1"));
        }
        let filters = Filters { temperature, top_k, top_p, min_p };
        Ok(Self { filters, random: Random::new(seed, Purpose::Sampling, 0), num_drawn: 0 })
    }

    /// The next token. `logits` (f32) has one entry a token of the vocabulary, at least one; an entry that is not a number counts
    /// as impossible, and it is said.
    #[must_use]
    pub fn sample(&mut self, ctx: &Context, logits: &Tensor) -> Drawn {
        self.sample_each(ctx, logits, 1).wait()[0]
    }

    /// The next token of each of `count` sequences, whose logits are one row behind the other.
    #[must_use]
    pub fn sample_each(&mut self, ctx: &Context, logits: &Tensor, count: usize) -> DrawnTokens {
        let draws: Vec<f32> = (self.num_drawn..).take(count).map(|position| self.random.uniform(position)).collect();
        self.num_drawn += count as u64;
        draw_each(ctx, logits, &self.filters, &draws)
    }
}
