//! The sampling settings of `generate` and `chat`: from the command line first, then from the model's files, then defaults.

use std::fmt::Display;

use moeworks_model::generation::{Penalties, Sampler, SamplingDefaults, SamplingOptions};

use crate::args::SamplingArgs;
use crate::failure::Failure;

/// The temperature where nobody says another.
const TEMPERATURE: f32 = 0.8;

/// A value, from the strongest place that has one.
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

/// Settings that are resolved.
pub(crate) struct Sampling {
    pub(crate) options: SamplingOptions,
    /// The settings that are not defaults, with where each comes from, and the seed.
    pub(crate) description: String,
}

impl Sampling {
    /// Resolves the settings. `defaults` are those of `file`.
    pub(crate) fn resolve(
        args: &SamplingArgs,
        defaults: &SamplingDefaults,
        file: &'static str,
    ) -> Result<Self, Failure> {
        let none = SamplingDefaults::default();
        let defaults = if args.no_model_sampling { &none } else { defaults };
        let mut picked = Picked { said: Vec::new(), file };
        let asks_for_sampling = args.top_k.is_some() || args.top_p.is_some() || args.min_p.is_some();
        let temperature = match (defaults.is_greedy, asks_for_sampling) {
            (true, false) => Some(0.0),
            (true, true) => Some(defaults.temperature.unwrap_or(1.0)),
            (false, _) => defaults.temperature,
        };
        let of_args = match args.penalty_last_n {
            Some(..-1) => return Err(Failure::input("--penalty-last-n must be at least 0, or -1 for all tokens")),
            last => last,
        };
        let of_file = defaults.penalty_last.and_then(|last| i64::try_from(last).ok());
        let last = picked.pick("penalty_last_n", of_args, of_file, -1);
        let penalties = Penalties {
            repetition: picked.pick("repetition_penalty", args.repetition_penalty, defaults.repetition_penalty, 1.0),
            presence: picked.pick("presence_penalty", args.presence_penalty, None, 0.0),
            frequency: picked.pick("frequency_penalty", args.frequency_penalty, None, 0.0),
            last: usize::try_from(last).ok(),
        };
        let options = SamplingOptions {
            temperature: picked.pick("temperature", args.temperature, temperature, TEMPERATURE),
            top_k: picked.pick("top_k", args.top_k, defaults.top_k, 0),
            top_p: picked.pick("top_p", args.top_p, defaults.top_p, 1.0),
            min_p: picked.pick("min_p", args.min_p, defaults.min_p, 0.0),
            penalties,
            seed: args.seed,
        };
        if !picked.said.iter().any(|said| said.starts_with("temperature")) {
            picked.said.push(format!("temperature {TEMPERATURE} (default)"));
        }
        picked.said.push(format!("seed {}", args.seed));
        Ok(Self { options, description: picked.said.join(", ") })
    }

    pub(crate) fn sampler(&self) -> Result<Sampler, Failure> {
        Ok(Sampler::new(self.options)?)
    }
}

/// Warns of settings of a model's file that would change its text and are not used.
pub(crate) fn warn_of_unused(args: &SamplingArgs, defaults: &SamplingDefaults, file: &str) {
    if !args.no_model_sampling && !defaults.unused.is_empty() {
        tracing::warn!("{file}: not used here: {}", defaults.unused.join(", "));
    }
}

/// The texts that end an answer: those of the command line and those of the model's files.
pub(crate) fn stop_texts(
    given: &[String],
    args: &SamplingArgs,
    defaults: &SamplingDefaults,
) -> Result<Vec<String>, Failure> {
    if given.iter().any(String::is_empty) {
        return Err(Failure::input("--stop is empty: give the text before which an answer ends"));
    }
    let of_file = if args.no_model_sampling { &[][..] } else { &defaults.stop_texts };
    Ok(given.iter().chain(of_file).cloned().collect())
}
