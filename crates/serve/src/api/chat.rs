//! The request of `/v1/chat/completions`.

use moeworks_infer::chat::Message;
use serde_json::{Map, Value};

use super::common::MAX_LOGPROBS;
use super::fields::Fields;
use super::form::Ordered;
use super::json::parse_object;
use super::{ApiError, Common, ErrorKind, Tools, messages, template_variables};

/// A conversation to answer.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatPrompt {
    /// The messages; at least one.
    pub messages: Vec<Message>,
    /// Says whether the beginning of an answer stands behind them.
    pub add_generation_prompt: bool,
    /// Says whether the answer goes on with the last message.
    pub continue_final_message: bool,
    /// Further variables of the template.
    pub variables: Map<String, Value>,
    /// The tools that the model may call.
    pub tools: Tools,
}

/// The request of `/v1/chat/completions`.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatRequest {
    /// The conversation.
    pub prompt: ChatPrompt,
    /// The fields that completions have, too.
    pub common: Common,
}

impl ChatRequest {
    /// Reads a body.
    ///
    /// # Errors
    /// Names the first field that is wrong, not known or not supported.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let (mut fields, ordered) = (Fields::new(parse_object(body)?), Ordered::new(body));
        let mut common = Common::take(&mut fields, &ordered)?;
        common.num_logprobs = logprobs(&mut fields)?;
        refuse_unsupported(&mut fields)?;
        if let Some(0) = common.sampling.max_tokens {
            return Err(ApiError::field("max_tokens", &0.into(), "a whole number of at least 1"));
        }
        let prompt = ChatPrompt::take(&mut fields, &ordered)?;
        if let (Some(form), Some(_)) = (&common.form, prompt.tools.form()) {
            let message = format!("tool_choice: {} is given, too; an answer has one form", form.field);
            return Err(ApiError::new(ErrorKind::Invalid, message).of("tool_choice"));
        }
        fields.finish()?;
        Ok(Self { prompt, common })
    }
}

impl ChatPrompt {
    pub(super) fn take(fields: &mut Fields, ordered: &Ordered<'_>) -> Result<Self, ApiError> {
        let continue_final_message = fields.bool("continue_final_message")?.unwrap_or(false);
        let add_generation_prompt = fields.bool("add_generation_prompt")?.unwrap_or(!continue_final_message);
        if continue_final_message && add_generation_prompt {
            let message = "continue_final_message: the answer goes on with the last message, or begins one \
                           (add_generation_prompt), not both";
            return Err(ApiError::new(ErrorKind::Invalid, message).of("continue_final_message"));
        }
        Ok(Self {
            messages: messages::take(fields)?,
            add_generation_prompt,
            continue_final_message,
            variables: template_variables::take(fields)?,
            tools: Tools::take(fields, ordered)?,
        })
    }
}

/// Takes the number of likely tokens that are named beside each token.
fn logprobs(fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    let is_wanted = fields.bool("logprobs")?.unwrap_or(false);
    let count = fields.integer("top_logprobs", 0..=MAX_LOGPROBS)?;
    match count {
        Some(1..) if !is_wanted => {
            let message = "top_logprobs: needs logprobs = true";
            Err(ApiError::new(ErrorKind::Invalid, message).of("top_logprobs"))
        }
        _ => Ok(is_wanted.then_some(count.unwrap_or(0) as usize)),
    }
}

/// Refuses what the server cannot do.
fn refuse_unsupported(fields: &mut Fields) -> Result<(), ApiError> {
    if let Some(value) = fields.take("modalities").filter(|value| *value != Value::from(vec!["text"])) {
        return Err(fields.unsupported("modalities", &value));
    }
    fields.refuse(&["documents", "chat_template", "suffix", "verbosity"])
}
