//! The sampler, which draws tokens one after another.

use moeworks_moe::ConfigError;
use moeworks_ops::Context;
use moeworks_ops::sampling::{Drawn, DrawnTokens, Filters, draw_each};
use moeworks_tensor::{Purpose, Random, Tensor};

use super::LogitRules;
use super::penalties::{History, Penalties};
use crate::constraint::{Constraint, ConstraintError};

/// The options by which tokens are drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingOptions {
    /// The divisor of the logits; 0 always takes the most likely token.
    pub temperature: f32,
    /// The number of most likely tokens that are sampled; 0 for all.
    pub top_k: usize,
    /// The least total probability of the most likely tokens that are sampled, including the one that reaches it; 1
    /// for all.
    pub top_p: f32,
    /// The least probability of a sampled token, relative to the most likely one; 0 for all.
    pub min_p: f32,
    /// Penalties on tokens that have occurred.
    pub penalties: Penalties,
    /// The seed of the random numbers.
    pub seed: u64,
}

impl Default for SamplingOptions {
    fn default() -> Self {
        Self { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, penalties: Penalties::default(), seed: 0 }
    }
}

/// A sampler, which draws tokens one after another.
#[derive(Clone, Debug)]
pub struct Sampler {
    filters: Filters,
    /// The tokens so far, if penalties count them.
    history: Option<History>,
    rules: LogitRules,
    /// The form that the text is held to, before its first token.
    form: Option<Constraint>,
    /// The place of the text in its form.
    constraint: Option<Constraint>,
    /// Says why the text cannot keep to its form, once it cannot.
    failure: Option<ConstraintError>,
    random: Random,
    num_drawn: u64,
    /// The tokens drawn in the current sequence.
    sequence_len: u64,
}

impl Sampler {
    /// Makes a sampler. Fails if an option is out of range.
    pub fn new(options: SamplingOptions) -> Result<Self, ConfigError> {
        let SamplingOptions { temperature, top_k, top_p, min_p, penalties, seed } = options;
        if !(temperature >= 0.0 && temperature.is_finite()) {
            return Err(ConfigError::new("temperature", temperature, "must be a number of at least 0"));
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return Err(ConfigError::new("top_p", top_p, "must be above 0 and at most 1"));
        }
        if !(0.0..=1.0).contains(&min_p) {
            return Err(ConfigError::new("min_p", min_p, "must be from 0 to 1"));
        }
        check_penalties(&penalties)?;
        let filters = Filters { temperature, top_k, top_p, min_p };
        let history = (!penalties.are_none()).then(|| History::new(penalties));
        let random = Random::new(seed, Purpose::Sampling, 0);
        Ok(Self {
            filters,
            history,
            rules: LogitRules::default(),
            form: None,
            constraint: None,
            failure: None,
            random,
            num_drawn: 0,
            sequence_len: 0,
        })
    }

    /// Adds rules for single tokens.
    #[must_use]
    pub fn with_rules(self, rules: LogitRules) -> Self {
        Self { rules, ..self }
    }

    /// Draws only what keeps to a form; each sequence has it.
    #[must_use]
    pub fn with_constraint(self, constraint: Constraint) -> Self {
        Self { form: Some(constraint.clone()), constraint: Some(constraint), ..self }
    }

    /// Returns whether the sequence has its form and can do nothing but end.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.constraint.as_ref().is_some_and(Constraint::is_complete)
    }

    /// The reason why the sequence cannot keep to its form, once it cannot: the token that was drawn last is none
    /// then.
    #[must_use]
    pub fn failure(&self) -> Option<&ConstraintError> {
        self.failure.as_ref()
    }

    /// Begins a sequence with `prompt`, whose tokens the repetition penalty counts. The random numbers continue.
    pub fn begin(&mut self, prompt: &[u32]) {
        self.sequence_len = 0;
        (self.constraint, self.failure) = (self.form.clone(), None);
        if let Some(history) = &mut self.history {
            history.begin(prompt);
        }
    }

    /// Returns whether a token depends on those before it, so that it cannot be drawn before the host knows them.
    #[must_use]
    pub fn counts_tokens(&self) -> bool {
        self.history.is_some() || !self.rules.are_none() || self.constraint.is_some()
    }

    /// Draws the next token of the sequence. `logits` (f32) has one entry for each token of the vocabulary, at least
    /// one. NaN counts as impossible, and the result says that there was one.
    #[must_use]
    pub fn sample(&mut self, ctx: &Context, logits: &Tensor) -> Drawn {
        if !self.counts_tokens() {
            return self.sample_each(ctx, logits, 1).wait()[0];
        }
        let mut changed = Tensor::from_slice(ctx.pool(), logits.shape(), logits.f32s());
        if let Some(history) = &self.history {
            history.apply(changed.f32s_mut());
        }
        self.rules.apply(changed.f32s_mut(), self.sequence_len);
        self.sequence_len += 1;
        if let Some(constraint) = &mut self.constraint {
            self.failure = constraint.apply(changed.f32s_mut(), &self.rules.end_ids).err();
        }
        let drawn = self.sample_each(ctx, &changed, 1).wait()[0];
        if let Some(history) = &mut self.history {
            history.push(drawn.id);
        }
        if let (Some(constraint), None) = (&mut self.constraint, &self.failure) {
            self.failure = constraint.push(drawn.id).err();
        }
        drawn
    }

    /// Draws the next token of each of `count` sequences, whose logits are consecutive rows. Penalties and rules do
    /// not apply.
    #[must_use]
    pub fn sample_each(&mut self, ctx: &Context, logits: &Tensor, count: usize) -> DrawnTokens {
        let draws: Vec<f32> = (self.num_drawn..).take(count).map(|position| self.random.uniform(position)).collect();
        self.num_drawn += count as u64;
        draw_each(ctx, logits, &self.filters, &draws)
    }
}

fn check_penalties(penalties: &Penalties) -> Result<(), ConfigError> {
    let Penalties { repetition, presence, frequency, .. } = *penalties;
    if !(repetition > 0.0 && repetition.is_finite()) {
        return Err(ConfigError::new("repetition_penalty", repetition, "must be a number above 0 (1 for none)"));
    }
    for (name, value) in [("presence_penalty", presence), ("frequency_penalty", frequency)] {
        if !value.is_finite() {
            return Err(ConfigError::new(name, value, "must be a number (0 for none)"));
        }
    }
    Ok(())
}
