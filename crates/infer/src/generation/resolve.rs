//! The resolution of sampling settings: the user's values first, then the model's files, then defaults.

use std::fmt::Display;

use super::{Penalties, SamplingDefaults, SamplingOptions};
use crate::open::FileDefaults;

/// The default temperature.
const TEMPERATURE: f32 = 0.8;

/// The user's settings; `None` leaves a value to the model's files or a default.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplingSettings {
    /// The divisor of the logits.
    pub temperature: Option<f32>,
    /// The number of most likely tokens that are sampled; 0 for all.
    pub top_k: Option<usize>,
    /// The least total probability of the most likely tokens that are sampled.
    pub top_p: Option<f32>,
    /// The least probability of a sampled token, relative to the most likely one.
    pub min_p: Option<f32>,
    /// The repetition penalty of CTRL; 1 for none.
    pub repetition_penalty: Option<f32>,
    /// The amount subtracted from the logits of tokens in the answer.
    pub presence_penalty: Option<f32>,
    /// The amount subtracted from a token's logit for each time that it is in the answer.
    pub frequency_penalty: Option<f32>,
    /// The number of last tokens that penalties count; below 0 for all.
    pub penalty_last: Option<i64>,
    /// The seed of the random numbers.
    pub seed: u64,
    /// True if recommendations of the model's files are ignored.
    pub ignores_model: bool,
}

/// The collected values with their origins.
struct Picked {
    /// The settings with their origins, for messages.
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

/// The settings with every value decided.
#[derive(Clone, Debug, PartialEq)]
pub struct ResolvedSampling {
    /// The values.
    pub options: SamplingOptions,
    /// A description of the settings that are not defaults, with their origins, and of the seed.
    pub description: String,
}

impl SamplingSettings {
    /// Decides every value. `defaults` are those of the model's files.
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

    /// Returns the temperature of the model's files: 0 if they ask for the most likely token and the user does not
    /// ask for sampling.
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
