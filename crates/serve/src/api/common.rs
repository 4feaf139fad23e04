//! The fields that completions and chat completions have in common.

use serde_json::Value;

use super::fields::Fields;
use super::{ApiError, ErrorKind, ExpertsFrom, Sampling};

/// Answers to a prompt at most.
pub const MAX_CHOICES: usize = 128;

/// Bytes of a short text, such as the name of a model or of a user, at most.
const MAX_NAME: usize = 1024;

/// Fields that are accepted and change no answer: notes of the client for itself, or for a service that keeps accounts.
const IGNORED: [&str; 7] =
    ["user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"];

/// Fields that would change an answer and are not supported yet. They may be there if they ask for nothing.
const UNSUPPORTED: [&str; 25] = [
    "top_logprobs",
    "prompt_logprobs",
    "regex",
    "grammar",
    "ebnf",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_decoding_backend",
    "guided_whitespace_pattern",
    "structured_outputs",
    "json_schema",
    "include_stop_str_in_output",
    "echo",
    "bad_words",
    "allowed_token_ids",
    "truncate_prompt_tokens",
    "use_beam_search",
    "functions",
    "function_call",
    "prediction",
    "audio",
    "web_search_options",
    "logits_processors",
];

/// The fields that completions and chat completions have in common.
#[derive(Clone, Debug, PartialEq)]
pub struct Common {
    /// The model by its name; none for the one that is served.
    pub model: Option<String>,
    /// Answers to each prompt.
    pub num_choices: usize,
    /// Says how tokens are drawn, and where an answer ends.
    pub sampling: Sampling,
    /// Whether the answer comes piece by piece.
    pub is_stream: bool,
    /// Whether a stream ends with the number of tokens.
    pub includes_usage: bool,
    /// Whether each piece of a stream has the number of tokens so far.
    pub has_continuous_usage: bool,
    /// Lower ones are served first.
    pub priority: i32,
    /// Requests of different salts share no keys and values.
    pub cache_salt: Option<String>,
    /// Whether the keys and values of other requests may be used.
    pub uses_prefix_cache: bool,
    /// Whether the answer has the ids of its tokens.
    pub returns_token_ids: bool,
    /// The first token whose experts the answer has; none for none.
    pub routed_experts: Option<ExpertsFrom>,
}

impl Common {
    pub(super) fn take(fields: &mut Fields) -> Result<Self, ApiError> {
        fields.ignore(&IGNORED);
        refuse_unsupported(fields)?;
        let most = MAX_CHOICES as i64;
        let num_choices = fields.integer("n", 1..=most)?.map_or(1, |n| n as usize);
        if let Some(best_of) = fields.count("best_of", 0)?.filter(|&best_of| best_of != num_choices) {
            let message = format!("best_of = {best_of}: is supported only where it is n, {num_choices}");
            return Err(ApiError::new(ErrorKind::Unsupported, message).of("best_of"));
        }
        let is_stream = fields.bool("stream")?.unwrap_or(false);
        let (includes_usage, has_continuous_usage) = stream_options(fields, is_stream)?;
        Ok(Self {
            model: fields.text("model", MAX_NAME)?,
            num_choices,
            sampling: Sampling::take(fields)?,
            is_stream,
            includes_usage,
            has_continuous_usage,
            priority: fields.integer("priority", i64::from(i32::MIN)..=i64::from(i32::MAX))?.map_or(0, |n| n as i32),
            cache_salt: fields.text("cache_salt", MAX_NAME)?,
            uses_prefix_cache: fields.bool("cache_prompt")?.unwrap_or(true),
            returns_token_ids: fields.bool("return_token_ids")?.unwrap_or(false),
            routed_experts: ExpertsFrom::take(fields)?,
        })
    }
}

/// Refuses what the server cannot do.
fn refuse_unsupported(fields: &mut Fields) -> Result<(), ApiError> {
    fields.refuse(&UNSUPPORTED)?;
    // 0 asks for the log-probability of each token.
    if let Some(value) = fields.take("logprobs").filter(|value| *value != Value::Bool(false)) {
        return Err(fields.unsupported("logprobs", &value));
    }
    if fields.bool("skip_special_tokens")? == Some(false) {
        return Err(fields.unsupported("skip_special_tokens", &Value::Bool(false)));
    }
    if let Some(value) = fields.take("spaces_between_special_tokens").filter(|value| !value.is_boolean()) {
        return Err(fields.wrong("spaces_between_special_tokens", &value, "true or false"));
    }
    if let Some(mut format) = fields.object("response_format")? {
        let kind = format.take("type").unwrap_or_default();
        if kind != "text" {
            return Err(format.unsupported("type", &kind));
        }
        format.finish()?;
    }
    Ok(())
}

/// Takes whether a stream has the number of tokens: in the end, and in each piece.
fn stream_options(fields: &mut Fields, is_stream: bool) -> Result<(bool, bool), ApiError> {
    let Some(mut options) = fields.object("stream_options")? else { return Ok((false, false)) };
    if !is_stream {
        let message = "stream_options: is for streams only; set stream to true or leave it out";
        return Err(ApiError::new(ErrorKind::Invalid, message).of("stream_options"));
    }
    let in_the_end = options.bool("include_usage")?.unwrap_or(false);
    let in_each = options.bool("continuous_usage_stats")?.unwrap_or(false);
    // Padding against listeners is a service's own; asking for none changes nothing.
    options.refuse(&["include_obfuscation"])?;
    options.finish()?;
    Ok((in_the_end, in_the_end && in_each))
}
