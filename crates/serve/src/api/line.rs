//! A line of a file of prompts: a request without a server.

use serde_json::Value;

use super::completion::missing;
use super::fields::Fields;
use super::form::Ordered;
use super::json::parse_object;
use super::{ApiError, ChatPrompt, ErrorKind, FormRequest, Prompt, PromptOptions, Sampling};

/// Bytes of an id at most.
const MAX_ID: usize = 1024;

/// A line of a file of prompts.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    /// Names the answer: a text or a whole number.
    pub id: Option<Value>,
    /// The text or conversation to answer.
    pub prompt: LinePrompt,
    /// Says how tokens are drawn, and where the answer ends.
    pub sampling: Sampling,
    /// The form that the answer is held to, if it has one of its own.
    pub form: Option<FormRequest>,
}

/// The text or conversation of a line.
#[derive(Clone, Debug, PartialEq)]
pub enum LinePrompt {
    /// A text to continue, and how it becomes tokens.
    Text(Prompt, PromptOptions),
    /// A conversation.
    Chat(ChatPrompt),
}

impl Line {
    /// Reads a line: `prompt` or `messages`, with the fields of requests that say how an answer is drawn.
    ///
    /// # Errors
    /// Names the first field that is wrong or not known.
    pub fn parse(line: &[u8]) -> Result<Self, ApiError> {
        let (mut fields, ordered) = (Fields::new(parse_object(line)?), Ordered::new(line));
        let id = fields.take("id");
        if let Some(wrong) = id.as_ref().filter(|id| !is_id(id)) {
            return Err(ApiError::field("id", wrong, &format!("a text of at most {MAX_ID} bytes or a whole number")));
        }
        let sampling = Sampling::take(&mut fields)?;
        let form = FormRequest::take(&mut fields, &ordered)?;
        let prompt = match fields.take("prompt") {
            Some(value) => LinePrompt::Text(Prompt::one(&value)?, PromptOptions::take(&mut fields)?),
            None => LinePrompt::Chat(conversation(&mut fields, &ordered)?),
        };
        fields.finish()?;
        Ok(Self { id, prompt, sampling, form })
    }
}

/// Takes a conversation. No answer has to be a call: calls are not read from the answers of a file.
fn conversation(fields: &mut Fields, ordered: &Ordered<'_>) -> Result<ChatPrompt, ApiError> {
    let prompt = ChatPrompt::take(fields, ordered).map_err(of_both)?;
    match prompt.tools.form() {
        Some(_) => {
            Err(ApiError::new(ErrorKind::Unsupported, "tool_choice: must be none or auto in a file").of("tool_choice"))
        }
        None => Ok(prompt),
    }
}

/// Names both fields where one of them has to be there.
fn of_both(error: ApiError) -> ApiError {
    let is_missing = error == missing("messages");
    if is_missing { ApiError { message: "prompt or messages is missing".to_owned(), ..error } } else { error }
}

fn is_id(value: &Value) -> bool {
    value.as_str().is_some_and(|text| text.len() <= MAX_ID) || value.is_i64() || value.is_u64()
}
