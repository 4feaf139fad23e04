//! Reading a file of prompts, all of it before anything is computed.

use std::sync::Arc;

use moeworks_infer::constraint::Constraint;
use moeworks_infer::generation::{
    LogitRules, Sampler, SamplingOptions, SamplingSettings, TokenLimit, TokenLimits, max_new_tokens,
};
use serde_json::Value;

use super::PromptInfo;
use crate::api::{ApiError, ErrorKind, FormRequest, Line, LinePrompt, Sampling};
use crate::engine::Request;
use crate::server::{Forms, NamedForm, ServedModel};

/// The settings of prompts that do not give their own.
#[derive(Clone, Debug, Default)]
pub struct BatchDefaults {
    /// Tokens of an answer at most.
    pub max_tokens: Option<TokenLimit>,
    /// Says how tokens are drawn. A prompt without a seed has the sum of this one and its number, from 0.
    pub settings: SamplingSettings,
    /// Texts that end an answer, besides those of a prompt.
    pub stops: Vec<String>,
    /// True if a special token that a text spells becomes this token.
    pub reads_special: bool,
    /// The form that answers are held to.
    pub form: Option<NamedForm>,
}

/// A prompt of a file.
pub struct BatchPrompt {
    /// Names the answer; the number of the line, from 1, where it has no id.
    pub id: Value,
    /// The figures that its answer's line has of it.
    pub info: PromptInfo,
    /// The request to the engine; none if no token is asked for.
    pub request: Option<Request>,
}

/// A line that is no prompt.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {message}")]
pub struct BatchError {
    /// The number of the line, from 1.
    pub line: usize,
    /// The fault and what would be right.
    pub message: String,
}

/// Reads prompts, one a line; empty lines are passed over.
///
/// # Errors
/// Names the first line that is wrong.
pub fn read(served: &ServedModel, text: &[u8], defaults: &BatchDefaults) -> Result<Vec<BatchPrompt>, BatchError> {
    let text = text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text);
    let (forms, mut prompts) = (Forms::default(), Vec::new());
    for (index, line) in text.split(|&byte| byte == b'\n').enumerate() {
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        let line = Place { number: index + 1, index: prompts.len(), line, forms: &forms };
        let prompt = prompt(served, &line, defaults);
        prompts.push(prompt.map_err(|error| BatchError { line: line.number, message: in_a_file(error) })?);
    }
    Ok(prompts)
}

/// A line with its number in the file, from 1, and that of its prompt, from 0.
struct Place<'a> {
    number: usize,
    index: usize,
    line: &'a [u8],
    /// The forms of the lines before it.
    forms: &'a Forms,
}

impl Place<'_> {
    /// The beginning of an answer that is held to its line's form, or that of the command.
    fn constraint(
        &self,
        served: &ServedModel,
        own: Option<&FormRequest>,
        given: Option<&NamedForm>,
        is_chat: bool,
    ) -> Result<Option<Constraint>, ApiError> {
        let form = match own {
            Some(own) => NamedForm { field: own.field.clone(), form: self.forms.form(own)? },
            None => match given {
                Some(given) => given.clone(),
                None => return Ok(None),
            },
        };
        let tokenizer = &served.model.tokenizer;
        let vocabulary = self.forms.vocabulary(|| Arc::new(tokenizer.token_table()));
        form.constraint(vocabulary, is_chat && tokenizer.has_channels()).map(Some)
    }
}

/// The message of an error in the words of a file.
fn in_a_file(error: ApiError) -> String {
    match error.message.strip_prefix("the body: ") {
        Some(message) => message.replace(" at line 1 column", " at column"),
        None => error.message,
    }
}

fn prompt(served: &ServedModel, place: &Place<'_>, defaults: &BatchDefaults) -> Result<BatchPrompt, ApiError> {
    let Line { id, prompt, sampling, form } = Line::parse(place.line)?;
    sampling.check_vocabulary(served.model.tokenizer.vocab_size())?;
    let is_chat = matches!(prompt, LinePrompt::Chat(_));
    let constraint = place.constraint(served, form.as_ref(), defaults.form.as_ref(), is_chat)?;
    let tokens = match prompt {
        LinePrompt::Text(text, mut options) => {
            options.reads_special_tokens |= defaults.reads_special;
            served.encode_prompt(&text, options)?
        }
        LinePrompt::Chat(chat) => served.encode_chat(&chat)?,
    };
    let num_tokens = tokens.len();
    let asked = sampling.max_tokens.map(TokenLimit::Tokens).or(defaults.max_tokens);
    let limits = TokenLimits { asked, of_model: of_model(served, defaults) };
    let max_new_tokens = max_new_tokens(&served.model, num_tokens, limits)
        .map_err(|error| ApiError::new(ErrorKind::TooLong, error.to_string()))?;
    if num_tokens.saturating_add(max_new_tokens) > served.max_sequence_tokens {
        let most = served.max_sequence_tokens;
        let message =
            format!("prompt and answer of {num_tokens} and {max_new_tokens} tokens: there is room for {most}");
        return Err(ApiError::new(ErrorKind::TooLong, message));
    }
    let start = Start { tokens, max_new_tokens, index: place.index, constraint };
    let request = start.request(served, &sampling, defaults)?;
    Ok(BatchPrompt {
        id: id.unwrap_or_else(|| place.number.into()),
        info: PromptInfo { num_tokens, is_chat },
        request: (max_new_tokens > 0).then_some(request),
    })
}

/// Tokens of an answer at most by the model's files, where they count.
fn of_model(served: &ServedModel, defaults: &BatchDefaults) -> Option<usize> {
    served.defaults.sampling.max_new_tokens.filter(|_| !defaults.settings.ignores_model)
}

/// The beginning of an answer.
struct Start {
    tokens: Vec<u32>,
    max_new_tokens: usize,
    /// The number of the prompt, from 0.
    index: usize,
    constraint: Option<Constraint>,
}

impl Start {
    fn request(self, served: &ServedModel, line: &Sampling, given: &BatchDefaults) -> Result<Request, ApiError> {
        let settings = over(&line.settings, &given.settings);
        let seed = line.seed.unwrap_or(given.settings.seed.wrapping_add(self.index as u64));
        let options = SamplingOptions { seed, ..settings.resolve(&served.defaults).options };
        let sampler = Sampler::new(options)
            .map_err(|error| ApiError::new(ErrorKind::Invalid, error.to_string()).of(error.setting))?;
        let stop_ids = line.all_stop_ids(&served.model.stop_ids);
        let rules = LogitRules {
            biases: line.logit_bias.clone(),
            end_ids: stop_ids.clone(),
            min_tokens: line.min_tokens as u64,
        };
        let sampler = sampler.with_rules(rules);
        let stops: Vec<String> = line.stops.iter().chain(&given.stops).cloned().collect();
        Ok(Request {
            prompt: self.tokens,
            max_new_tokens: self.max_new_tokens,
            sampler: match self.constraint {
                Some(constraint) => sampler.with_constraint(constraint),
                None => sampler,
            },
            stops: settings.stop_texts(&stops, &served.defaults),
            stop_ids,
            priority: 0,
            salt: Vec::new(),
            experts_from: None,
            shows_special: false,
            logprobs: None,
        })
    }
}

/// The settings of a line, and where it has none those of the command.
fn over(line: &SamplingSettings, given: &SamplingSettings) -> SamplingSettings {
    SamplingSettings {
        temperature: line.temperature.or(given.temperature),
        top_k: line.top_k.or(given.top_k),
        top_p: line.top_p.or(given.top_p),
        min_p: line.min_p.or(given.min_p),
        repetition_penalty: line.repetition_penalty.or(given.repetition_penalty),
        presence_penalty: line.presence_penalty.or(given.presence_penalty),
        frequency_penalty: line.frequency_penalty.or(given.frequency_penalty),
        ..given.clone()
    }
}
