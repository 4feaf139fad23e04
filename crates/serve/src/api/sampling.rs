//! The fields that say how tokens are drawn, and where an answer ends.

use moeworks_infer::constraint::Constraint;
use moeworks_infer::generation::{LogitRules, Sampler, SamplingOptions, SamplingSettings, TokenBias};
use moeworks_infer::open::FileDefaults;
use serde_json::Value;

use super::fields::{Fields, Range, integer};
use super::{ApiError, ErrorKind};

/// The most likely tokens that `top_k` names at most.
const MAX_TOP_K: i64 = 262_144;
/// Texts and tokens that end an answer, at most.
const MAX_STOPS: usize = 16;
const MAX_STOP_BYTES: usize = 256;
const MAX_STOP_IDS: usize = 64;
/// Tokens with a bias at most.
const MAX_BIASES: usize = 1024;
const MAX_BIAS: f64 = 100.0;
/// The temperature where neither the request nor the model's files name one, as OpenAI has it.
const TEMPERATURE: f32 = 1.0;

/// The drawing of tokens and the end of an answer. A setting that is none comes from the model's files, or is the
/// default of OpenAI.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sampling {
    /// Tokens of an answer at most.
    pub max_tokens: Option<usize>,
    /// Tokens of an answer before which it does not end.
    pub min_tokens: usize,
    /// The settings of the sampler that are given, but for the seed.
    pub settings: SamplingSettings,
    /// Seed of the random numbers; none for another one each time.
    pub seed: Option<u64>,
    /// Added to the logits of tokens.
    pub logit_bias: Vec<TokenBias>,
    /// Texts that end an answer and are not part of it.
    pub stops: Vec<String>,
    /// Tokens that end an answer besides the model's own.
    pub stop_ids: Vec<u32>,
    /// Says whether an answer goes on behind the model's own stop tokens.
    pub ignores_stop_ids: bool,
}

impl Sampling {
    pub(super) fn take(fields: &mut Fields) -> Result<Self, ApiError> {
        Ok(Self {
            max_tokens: max_tokens(fields)?,
            min_tokens: fields.count("min_tokens", 0)?.unwrap_or(0),
            settings: settings(fields)?,
            seed: seed(fields)?,
            logit_bias: logit_bias(fields)?,
            stops: stops(fields)?,
            stop_ids: stop_ids(fields)?,
            ignores_stop_ids: fields.bool("ignore_eos")?.unwrap_or(false),
        })
    }

    /// Checks the tokens that it names against a vocabulary.
    ///
    /// # Errors
    /// If the vocabulary does not have one.
    pub fn check_vocabulary(&self, vocab_size: usize) -> Result<(), ApiError> {
        let biased = self.logit_bias.iter().map(|bias| ("logit_bias", bias.id));
        let stopping = self.stop_ids.iter().map(|&id| ("stop_token_ids", id));
        match biased.chain(stopping).find(|&(_, id)| id as usize >= vocab_size) {
            Some((name, id)) => Err(no_token(name, id, vocab_size)),
            None => Ok(()),
        }
    }

    /// Returns the tokens that end an answer. `model_stop_ids` end the model's texts.
    #[must_use]
    pub fn all_stop_ids(&self, model_stop_ids: &[u32]) -> Vec<u32> {
        let of_model = if self.ignores_stop_ids { &[][..] } else { model_stop_ids };
        self.stop_ids.iter().chain(of_model).copied().collect()
    }

    /// Makes the sampler of an answer that `end_ids` end, and that is held to a form.
    ///
    /// # Errors
    /// If a setting of the model's files is out of range.
    pub fn sampler(
        &self,
        seed: u64,
        defaults: &FileDefaults,
        end_ids: Vec<u32>,
        constraint: Option<Constraint>,
    ) -> Result<Sampler, ApiError> {
        let options = SamplingOptions { seed, ..self.options(defaults) };
        let rules = LogitRules { biases: self.logit_bias.clone(), end_ids, min_tokens: self.min_tokens as u64 };
        let sampler = Sampler::new(options)
            .map_err(|error| ApiError::new(ErrorKind::Invalid, error.to_string()).of(error.setting))?;
        let sampler = sampler.with_rules(rules);
        Ok(match constraint {
            Some(constraint) => sampler.with_constraint(constraint),
            None => sampler,
        })
    }

    fn options(&self, defaults: &FileDefaults) -> SamplingOptions {
        let of_file = &defaults.sampling;
        let temperature = (!of_file.is_greedy && of_file.temperature.is_none()).then_some(TEMPERATURE);
        let temperature = self.settings.temperature.or(temperature);
        SamplingSettings { temperature, ..self.settings.clone() }.resolve(defaults).options
    }
}

fn settings(fields: &mut Fields) -> Result<SamplingSettings, ApiError> {
    Ok(SamplingSettings {
        temperature: fields.number("temperature", Range::closed(0.0..=2.0))?,
        // Other servers know two values for all tokens.
        top_k: fields.integer("top_k", -1..=MAX_TOP_K)?.map(|k| usize::try_from(k).unwrap_or(0)),
        top_p: fields.number("top_p", Range::above(0.0..=1.0))?,
        min_p: fields.number("min_p", Range::closed(0.0..=1.0))?,
        repetition_penalty: fields.number("repetition_penalty", Range::above(0.0..=10.0))?,
        presence_penalty: fields.number("presence_penalty", Range::closed(-2.0..=2.0))?,
        frequency_penalty: fields.number("frequency_penalty", Range::closed(-2.0..=2.0))?,
        ..SamplingSettings::default()
    })
}

/// Returns the error of a token that a vocabulary does not have.
pub(super) fn no_token(name: &str, id: u32, vocab_size: usize) -> ApiError {
    let message = format!("{name}: {id} is no token: the vocabulary has the tokens 0 to {}", vocab_size - 1);
    ApiError::new(ErrorKind::Invalid, message).of(name)
}

/// Takes the limit on tokens, which has two names.
fn max_tokens(fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    let (old, new) = (fields.count("max_tokens", 0)?, fields.count("max_completion_tokens", 0)?);
    match (old, new) {
        (Some(old), Some(new)) if old != new => {
            let message = format!("max_completion_tokens = {new}: differs from max_tokens, {old}; give one of them");
            Err(ApiError::new(ErrorKind::Invalid, message).of("max_completion_tokens"))
        }
        (old, new) => Ok(new.or(old)),
    }
}

fn seed(fields: &mut Fields) -> Result<Option<u64>, ApiError> {
    let Some(value) = fields.take("seed") else { return Ok(None) };
    let of_integer = || integer(&value).map(|seed| seed as u64);
    match value.as_u64().or_else(of_integer) {
        // Another seed each time, as other servers have it.
        Some(u64::MAX) => Ok(None),
        Some(seed) => Ok(Some(seed)),
        None => Err(fields.wrong("seed", &value, "a whole number of 64 bits")),
    }
}

fn logit_bias(fields: &mut Fields) -> Result<Vec<TokenBias>, ApiError> {
    let expected = format!("an object from at most {MAX_BIASES} token ids to numbers from -{MAX_BIAS} to {MAX_BIAS}");
    let Some(value) = fields.take("logit_bias") else { return Ok(Vec::new()) };
    let entry = |(id, bias): (&String, &Value)| {
        let bias = bias.as_f64().filter(|bias| bias.abs() <= MAX_BIAS)? as f32;
        Some(TokenBias { id: id.parse().ok()?, bias })
    };
    let entries = value.as_object().filter(|map| map.len() <= MAX_BIASES);
    let biases = entries.and_then(|map| map.iter().map(entry).collect());
    biases.ok_or_else(|| fields.wrong("logit_bias", &value, &expected))
}

fn stops(fields: &mut Fields) -> Result<Vec<String>, ApiError> {
    let expected = format!("a text or at most {MAX_STOPS} texts, of 1 to {MAX_STOP_BYTES} bytes each");
    let Some(value) = fields.take("stop") else { return Ok(Vec::new()) };
    let text =
        |value: &Value| value.as_str().filter(|text| (1..=MAX_STOP_BYTES).contains(&text.len())).map(str::to_owned);
    let stops = match &value {
        Value::Array(values) if values.len() <= MAX_STOPS => values.iter().map(text).collect(),
        Value::Array(_) => None,
        // Some clients send an empty text for none.
        Value::String(one) if one.is_empty() => Some(Vec::new()),
        one => text(one).map(|text| vec![text]),
    };
    stops.ok_or_else(|| fields.wrong("stop", &value, &expected))
}

fn stop_ids(fields: &mut Fields) -> Result<Vec<u32>, ApiError> {
    let expected = format!("a list of at most {MAX_STOP_IDS} token ids");
    let Some(value) = fields.take("stop_token_ids") else { return Ok(Vec::new()) };
    let values = value.as_array().filter(|values| values.len() <= MAX_STOP_IDS);
    let ids = values.and_then(|values| values.iter().map(token_id).collect());
    ids.ok_or_else(|| fields.wrong("stop_token_ids", &value, &expected))
}

/// The number of a token.
pub(super) fn token_id(value: &Value) -> Option<u32> {
    u32::try_from(integer(value)?).ok()
}
