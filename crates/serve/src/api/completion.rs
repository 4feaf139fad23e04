//! The request of `/v1/completions`.

use serde_json::Value;

use super::common::MAX_LOGPROBS;
use super::fields::{Fields, integer};
use super::form::Ordered;
use super::json::parse_object;
use super::sampling::{no_token, token_id};
use super::{ApiError, Common, ErrorKind};

/// Prompts of a request at most.
const MAX_PROMPTS: usize = 2048;

/// The most tokens of an answer where a request does not say, as OpenAI has it.
const DEFAULT_TOKENS: usize = 16;

/// A text to continue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// A text.
    Text(String),
    /// Token ids, at least one.
    Tokens(Vec<u32>),
}

/// Says how the text of a prompt becomes tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptOptions {
    /// Says whether the tokens that belong before a text are added.
    pub adds_special_tokens: bool,
    /// Says whether a special token that the text spells becomes this token.
    pub reads_special_tokens: bool,
}

impl PromptOptions {
    pub(super) fn take(fields: &mut Fields) -> Result<Self, ApiError> {
        Ok(Self {
            adds_special_tokens: fields.bool("add_special_tokens")?.unwrap_or(true),
            reads_special_tokens: fields.bool("parse_special")?.unwrap_or(false),
        })
    }
}

/// The request of `/v1/completions`.
#[derive(Clone, Debug, PartialEq)]
pub struct CompletionRequest {
    /// The texts to continue; at least one.
    pub prompts: Vec<Prompt>,
    /// Says how their texts become tokens.
    pub options: PromptOptions,
    /// Tokens of an answer at most; 0 for the prompt alone.
    pub max_tokens: usize,
    /// Says whether the prompt stands before the answer.
    pub echoes: bool,
    /// The fields that chats have, too.
    pub common: Common,
}

impl CompletionRequest {
    /// Reads a body.
    ///
    /// # Errors
    /// Names the first field that is wrong, not known or not supported.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let (mut fields, ordered) = (Fields::new(parse_object(body)?), Ordered::new(body));
        fields.refuse(&["suffix"])?;
        let mut common = Common::take(&mut fields, &ordered)?;
        common.num_logprobs = logprobs(&mut fields)?;
        let echoes = fields.bool("echo")?.unwrap_or(false);
        let options = PromptOptions::take(&mut fields)?;
        let prompt = fields.take("prompt").ok_or_else(|| missing("prompt"))?;
        let prompts = prompts(prompt)?;
        fields.finish()?;
        let max_tokens = common.sampling.max_tokens.unwrap_or(DEFAULT_TOKENS);
        Ok(Self { prompts, options, max_tokens, echoes, common })
    }
}

impl Prompt {
    /// Reads one prompt: a text, or tokens.
    pub(super) fn one(value: &Value) -> Result<Self, ApiError> {
        prompt(value).ok_or_else(|| ApiError::field("prompt", value, "a text or a list of token ids, not empty"))
    }

    /// Checks the tokens against a vocabulary.
    pub(crate) fn check_vocabulary(&self, vocab_size: usize) -> Result<(), ApiError> {
        let Self::Tokens(ids) = self else { return Ok(()) };
        match ids.iter().find(|&&id| id as usize >= vocab_size) {
            Some(&id) => Err(no_token("prompt", id, vocab_size)),
            None => Ok(()),
        }
    }
}

/// Takes the number of likely tokens that are named beside each token. 0 asks for the log-probability of the token
/// alone.
fn logprobs(fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    fields.refuse(&["top_logprobs"])?;
    match fields.take("logprobs") {
        None | Some(Value::Bool(false)) => Ok(None),
        Some(value) => match integer(&value).filter(|count| (0..=MAX_LOGPROBS).contains(count)) {
            Some(count) => Ok(Some(count as usize)),
            None => Err(fields.wrong("logprobs", &value, &format!("a whole number from 0 to {MAX_LOGPROBS}"))),
        },
    }
}

/// Returns the error of a field that must be there.
pub(super) fn missing(name: &str) -> ApiError {
    ApiError::new(ErrorKind::Invalid, format!("{name} is missing")).of(name)
}

/// Reads a text, a list of texts, tokens, or a list of tokens.
fn prompts(value: Value) -> Result<Vec<Prompt>, ApiError> {
    let wrong = |value: &Value| {
        ApiError::field(
            "prompt",
            value,
            "a text, a list of texts, a list of token ids or a list of such lists, none empty",
        )
    };
    let prompts = match &value {
        Value::String(text) => Some(vec![Prompt::Text(text.clone())]),
        Value::Array(values) if values.len() > MAX_PROMPTS && !values[0].is_number() => {
            let message = format!("prompt: {} prompts: must be at most {MAX_PROMPTS}", values.len());
            return Err(ApiError::new(ErrorKind::Invalid, message).of("prompt"));
        }
        Value::Array(values) if values.first().is_some_and(Value::is_number) => tokens(&value).map(|one| vec![one]),
        Value::Array(values) if !values.is_empty() => values.iter().map(prompt).collect(),
        _ => None,
    };
    prompts.ok_or_else(|| wrong(&value))
}

fn prompt(value: &Value) -> Option<Prompt> {
    match value {
        Value::String(text) => Some(Prompt::Text(text.clone())),
        other => tokens(other),
    }
}

fn tokens(value: &Value) -> Option<Prompt> {
    let ids: Vec<u32> = value.as_array()?.iter().map(token_id).collect::<Option<_>>()?;
    (!ids.is_empty()).then_some(Prompt::Tokens(ids))
}
