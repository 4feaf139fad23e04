//! The request of `/v1/completions`.

use serde_json::Value;

use super::fields::Fields;
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
    /// As text.
    Text(String),
    /// As tokens; at least one.
    Tokens(Vec<u32>),
}

/// Says how the text of a prompt becomes tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptOptions {
    /// Whether the tokens that belong before a text are added.
    pub adds_special_tokens: bool,
    /// Whether a special token that the text spells becomes this token.
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
    /// Tokens of an answer at most.
    pub max_tokens: usize,
    /// The fields that chats have, too.
    pub common: Common,
}

impl CompletionRequest {
    /// Reads a body.
    ///
    /// # Errors
    /// Names the first field that is wrong, not known or not supported.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::new(parse_object(body)?);
        if let Some(value) = fields.take("suffix") {
            return Err(fields.unsupported("suffix", &value));
        }
        let common = Common::take(&mut fields)?;
        let options = PromptOptions::take(&mut fields)?;
        let prompt = fields.take("prompt").ok_or_else(|| missing("prompt"))?;
        let prompts = prompts(prompt)?;
        fields.finish()?;
        Ok(Self { prompts, options, max_tokens: common.sampling.max_tokens.unwrap_or(DEFAULT_TOKENS), common })
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
