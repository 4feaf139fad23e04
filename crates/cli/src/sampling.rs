//! The sampling settings of `generate` and `chat`, from the command line and the model's files.

use std::sync::Arc;

use moeworks_infer::constraint::{Constraint, Vocabulary};
use moeworks_infer::generation::{LogitRules, ResolvedSampling, Sampler};
use moeworks_infer::open::{FileDefaults, Model};
use moeworks_serve::server::NamedForm;

use crate::args::SamplingArgs;
use crate::failure::Failure;

/// The resolved sampling settings.
pub(crate) struct Sampling {
    pub(crate) sampler: Sampler,
    /// A description of the settings that are not defaults, with the origin of each, and of the seed.
    pub(crate) description: String,
    /// The texts before which an answer stops: those of the command line and those of the model's files.
    pub(crate) stops: Vec<String>,
    /// The largest number of tokens of an answer in the model's files, if they have one and are used.
    pub(crate) limit_of_model: Option<usize>,
}

impl Sampling {
    /// Resolves the settings; `stops` are the texts given by `--stop`.
    pub(crate) fn resolve(args: &SamplingArgs, stops: &[String], defaults: &FileDefaults) -> Result<Self, Failure> {
        if args.penalty_last_n.is_some_and(|last| last < -1) {
            return Err(Failure::input("--penalty-last-n must be at least 0, or -1 for all tokens"));
        }
        let settings = args.settings();
        let ResolvedSampling { options, description } = settings.resolve(defaults);
        let sampler = Sampler::new(options)?;
        if stops.iter().any(String::is_empty) {
            return Err(Failure::input("--stop is empty: give the text before which an answer ends"));
        }
        let stops = settings.stop_texts(stops, defaults);
        let limit_of_model = defaults.sampling.max_new_tokens.filter(|_| !args.no_model_sampling);
        Ok(Self { sampler, description, stops, limit_of_model })
    }

    /// Holds answers of `model` to a form.
    pub(crate) fn hold_to(&mut self, form: NamedForm, model: &Model) -> Result<(), Failure> {
        let NamedForm { field, form } = form;
        let vocabulary = Arc::new(Vocabulary::new(&model.tokenizer.token_table()));
        let constraint =
            Constraint::new(form, vocabulary).map_err(|error| Failure::input(format!("{field}: {error}")))?;
        let rules = LogitRules { end_ids: model.stop_ids.clone(), ..LogitRules::default() };
        self.sampler = self.sampler.clone().with_rules(rules).with_constraint(constraint);
        Ok(())
    }
}

/// Warns of settings in a model's file that would change its text but are not supported.
pub(crate) fn warn_of_unused(args: &SamplingArgs, defaults: &FileDefaults) {
    let FileDefaults { sampling, file } = defaults;
    if !args.no_model_sampling && !sampling.unused.is_empty() {
        tracing::warn!("{file}: not used here: {}", sampling.unused.join(", "));
    }
}
