//! The sampling settings of an answer: from what is given first, then from the model's files, then defaults.

use std::fmt::Display;

use super::{Penalties, SamplingDefaults, SamplingOptions};
use crate::open::FileDefaults;

/// The temperature where nobody says another.
const TEMPERATURE: f32 = 0.8;

/// Settings as they are given; none where the model's files or a default decide.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplingSettings {
    /// Divides the logits.
    pub temperature: Option<f32>,
    /// Only the k likeliest tokens; 0 for all.
    pub top_k: Option<usize>,
    /// Only the likeliest tokens that together have this probability.
    pub top_p: Option<f32>,
    /// Only tokens at least this many times as likely as the likeliest.
    pub min_p: Option<f32>,
    /// The penalty of CTRL; 1 for none.
    pub repetition_penalty: Option<f32>,
    /// Subtracted from the logits of tokens that the answer has.
    pub presence_penalty: Option<f32>,
    /// Subtracted from the logit of a token for each time that the answer has it.
    pub frequency_penalty: Option<f32>,
    /// The last tokens that penalties count, this many; below 0 for all.
    pub penalty_last: Option<i64>,
    /// Seed of the random numbers.
    pub seed: u64,
    /// Whether what the model's files recommend is left out.
    pub ignores_model: bool,
}

/// A value from the strongest place that has one.
struct Picked {
    /// The settings with where each comes from, for people.
    said: Vec<String>,
    /// The file that has defaults.
    file: &'static str,
}

impl Picked {
    fn pick<T: Copy + Display>(&mut self, name: &str, given: Option<T>, of_file: Option<T>, default: T) -> T {
        let (value, origin) = match (given, of_file) {
            (Some(value), _) => (value, "given"),
            (None, Some(value)) => (value, self.file),
            (None, None) => return default,
        };
        self.said.push(format!("{name} {value} ({origin})"));
        value
    }
}

/// Settings with every value decided.
#[derive(Clone, Debug, PartialEq)]
pub struct ResolvedSampling {
    /// The values.
    pub options: SamplingOptions,
    /// The settings that are not defaults, with where each comes from, and the seed.
    pub description: String,
}

impl SamplingSettings {
    /// Decides every value. `defaults` are the model's.
    #[must_use]
    pub fn resolve(&self, defaults: &FileDefaults) -> ResolvedSampling {
        let (file, none) = (defaults.file, SamplingDefaults::default());
        let defaults = if self.ignores_model { &none } else { &defaults.sampling };
        let mut picked = Picked { said: Vec::new(), file };
        let penalties = self.penalties(defaults, &mut picked);
        let options = SamplingOptions {
            temperature: picked.pick("temperature", self.temperature, self.temperature_of(defaults), TEMPERATURE),
            top_k: picked.pick("top_k", self.top_k, defaults.top_k, 0),
            top_p: picked.pick("top_p", self.top_p, defaults.top_p, 1.0),
            min_p: picked.pick("min_p", self.min_p, defaults.min_p, 0.0),
            penalties,
            seed: self.seed,
        };
        if !picked.said.iter().any(|said| said.starts_with("temperature")) {
            picked.said.push(format!("temperature {TEMPERATURE} (default)"));
        }
        picked.said.push(format!("seed {}", self.seed));
        ResolvedSampling { options, description: picked.said.join(", ") }
    }

    /// Returns the temperature of the model's files: 0 where they ask for the likeliest token and nobody asks for
    /// sampling.
    fn temperature_of(&self, defaults: &SamplingDefaults) -> Option<f32> {
        let asks_for_sampling = self.top_k.is_some() || self.top_p.is_some() || self.min_p.is_some();
        match (defaults.is_greedy, asks_for_sampling) {
            (true, false) => Some(0.0),
            (true, true) => Some(defaults.temperature.unwrap_or(1.0)),
            (false, _) => defaults.temperature,
        }
    }

    fn penalties(&self, defaults: &SamplingDefaults, picked: &mut Picked) -> Penalties {
        let of_file = defaults.penalty_last.and_then(|last| i64::try_from(last).ok());
        let last = picked.pick("penalty_last_n", self.penalty_last, of_file, -1);
        Penalties {
            repetition: picked.pick("repetition_penalty", self.repetition_penalty, defaults.repetition_penalty, 1.0),
            presence: picked.pick("presence_penalty", self.presence_penalty, None, 0.0),
            frequency: picked.pick("frequency_penalty", self.frequency_penalty, None, 0.0),
            last: usize::try_from(last).ok(),
        }
    }

    /// Returns the texts that end an answer: `given`, and those of the model's files.
    #[must_use]
    pub fn stop_texts(&self, given: &[String], defaults: &FileDefaults) -> Vec<String> {
        let of_file = if self.ignores_model { &[][..] } else { &defaults.sampling.stop_texts };
        given.iter().chain(of_file).cloned().collect()
    }
}
