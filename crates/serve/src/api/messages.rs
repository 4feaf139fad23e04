//! The messages of a conversation.

use moeworks_infer::chat::Message;
use serde_json::Value;

use super::completion::missing;
use super::fields::Fields;
use super::{ApiError, ErrorKind, tools};

/// Messages of a conversation at most.
const MAX_MESSAGES: usize = 2048;
/// Bytes of a name at most.
const MAX_NAME: usize = 256;
/// The roles that speak in a conversation.
const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];

/// Fields of messages that clients send back as they got them, empty where the answer had none.
const UNSUPPORTED: [&str; 6] = ["function_call", "refusal", "audio", "annotations", "reasoning", "reasoning_content"];

/// Takes the messages of a request.
pub(super) fn take(fields: &mut Fields) -> Result<Vec<Message>, ApiError> {
    let value = fields.take("messages").ok_or_else(|| missing("messages"))?;
    let Value::Array(values) = value else { return Err(ApiError::field("messages", &value, "a list of messages")) };
    if values.is_empty() || values.len() > MAX_MESSAGES {
        let message = format!("messages: {} messages: must be from 1 to {MAX_MESSAGES}", values.len());
        return Err(ApiError::new(ErrorKind::Invalid, message).of("messages"));
    }
    let read = |(index, value)| message(Fields::nested(format!("messages[{index}]"), value)?);
    values.into_iter().enumerate().map(read).collect()
}

fn message(mut fields: Fields) -> Result<Message, ApiError> {
    let role = fields.take("role").ok_or_else(|| missing(&fields.name("role")))?;
    let expected = format!("one of {}", ROLES.join(", "));
    let Some(role) = role.as_str().filter(|role| ROLES.contains(role)) else {
        return Err(fields.wrong("role", &role, &expected));
    };
    fields.refuse(&UNSUPPORTED)?;
    let name = fields.text("name", MAX_NAME)?;
    let content = match fields.take("content") {
        Some(value) => content(&fields, value)?,
        // An answer that was empty.
        None if role == "assistant" => String::new(),
        None => return Err(missing(&fields.name("content"))),
    };
    let (tool_calls, tool_call_id) = (tools::calls(&mut fields)?, fields.text("tool_call_id", MAX_NAME)?);
    for (value, name, of_role) in
        [(tool_calls.is_some(), "tool_calls", "assistant"), (tool_call_id.is_some(), "tool_call_id", "tool")]
    {
        if value && role != of_role {
            let message = format!("{}: belongs to messages of role {of_role}", fields.name(name));
            return Err(ApiError::new(ErrorKind::Invalid, message).of(&fields.name(name)));
        }
    }
    fields.finish()?;
    Ok(Message { name, tool_calls, tool_call_id, ..Message::new(role, content) })
}

/// Reads the text of a message, which may be in parts, a line each.
fn content(fields: &Fields, value: Value) -> Result<String, ApiError> {
    match value {
        Value::String(text) => Ok(text),
        Value::Array(parts) => {
            let place = |index| format!("{}[{index}]", fields.name("content"));
            let read = |(index, value)| part(Fields::nested(place(index), value)?);
            let texts: Vec<String> = parts.into_iter().enumerate().map(read).collect::<Result<_, _>>()?;
            Ok(texts.join("\n"))
        }
        other => Err(fields.wrong("content", &other, "a text or a list of parts")),
    }
}

fn part(mut fields: Fields) -> Result<String, ApiError> {
    let kind = fields.take("type").ok_or_else(|| missing(&fields.name("type")))?;
    if kind != "text" {
        return Err(fields.unsupported("type", &kind));
    }
    let text = fields.take("text").ok_or_else(|| missing(&fields.name("text")))?;
    let Value::String(text) = text else { return Err(fields.wrong("text", &text, "a text")) };
    fields.finish()?;
    Ok(text)
}
