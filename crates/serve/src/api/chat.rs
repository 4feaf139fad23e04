//! The request of `/v1/chat/completions`.

use moeworks_infer::chat::Message;
use serde_json::{Map, Value};

use super::fields::Fields;
use super::json::parse_object;
use super::{ApiError, Common, ErrorKind, messages, template_variables};

/// A conversation to answer.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatPrompt {
    /// The messages; at least one.
    pub messages: Vec<Message>,
    /// Whether the beginning of an answer stands behind them.
    pub add_generation_prompt: bool,
    /// Whether the answer goes on with the last message.
    pub continue_final_message: bool,
    /// Further variables of the template.
    pub variables: Map<String, Value>,
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
        let mut fields = Fields::new(parse_object(body)?);
        let common = Common::take(&mut fields)?;
        refuse_unsupported(&mut fields)?;
        let prompt = ChatPrompt::take(&mut fields)?;
        fields.finish()?;
        Ok(Self { prompt, common })
    }
}

impl ChatPrompt {
    pub(super) fn take(fields: &mut Fields) -> Result<Self, ApiError> {
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
        })
    }
}

/// Refuses what the server cannot do.
fn refuse_unsupported(fields: &mut Fields) -> Result<(), ApiError> {
    if let Some(value) = fields.take("tool_choice").filter(|value| value != "none" && value != "auto") {
        return Err(fields.unsupported("tool_choice", &value));
    }
    if let Some(value) = fields.take("modalities").filter(|value| *value != Value::from(vec!["text"])) {
        return Err(fields.unsupported("modalities", &value));
    }
    fields.refuse(&["tools", "documents", "chat_template", "suffix", "verbosity"])
}
