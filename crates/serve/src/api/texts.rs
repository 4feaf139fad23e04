//! The requests of `/tokenize` and `/detokenize`, as vLLM and as llama.cpp have them.

use serde_json::Value;

use super::completion::missing;
use super::fields::Fields;
use super::form::Ordered;
use super::json::parse_object;
use super::sampling::{no_token, token_id};
use super::{ApiError, ChatPrompt, PromptOptions};

/// The longest name of a model.
const MAX_NAME: usize = 1024;

/// A text to make tokens of.
#[derive(Clone, Debug, PartialEq)]
pub enum TokenizeText {
    /// A text, and how it becomes tokens.
    Text(String, PromptOptions),
    /// A conversation.
    Chat(ChatPrompt),
}

/// The request of `/tokenize`.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenizeRequest {
    /// The model by its name.
    pub model: Option<String>,
    /// The text.
    pub text: TokenizeText,
    /// Says whether the answer has the text of each token.
    pub returns_pieces: bool,
}

/// The request of `/detokenize`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DetokenizeRequest {
    /// The model by its name.
    pub model: Option<String>,
    /// The tokens.
    pub tokens: Vec<u32>,
}

impl TokenizeRequest {
    /// Reads a body: `prompt` (vLLM), `content` (llama.cpp) or `messages`.
    ///
    /// # Errors
    /// Names the first field that is wrong or not known.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        let (mut fields, ordered) = (Fields::new(parse_object(body)?), Ordered::new(body));
        let model = fields.text("model", MAX_NAME)?;
        let of_vllm = fields.bool("return_token_strs")?;
        let returns_pieces = of_vllm.or(fields.bool("with_pieces")?).unwrap_or(false);
        let text = match fields.take("prompt").or_else(|| fields.take("content")) {
            Some(Value::String(text)) => TokenizeText::Text(text, text_options(&mut fields)?),
            Some(other) => return Err(ApiError::field("prompt", &other, "a text")),
            None => TokenizeText::Chat(chat(&mut fields, &ordered)?),
        };
        fields.finish()?;
        Ok(Self { model, text, returns_pieces })
    }
}

/// Reads how a text becomes tokens; llama.cpp has another name for one of the fields.
fn text_options(fields: &mut Fields) -> Result<PromptOptions, ApiError> {
    let of_llama_cpp = fields.bool("add_special")?;
    let options = PromptOptions::take(fields)?;
    Ok(PromptOptions { adds_special_tokens: of_llama_cpp.unwrap_or(options.adds_special_tokens), ..options })
}

fn chat(fields: &mut Fields, ordered: &Ordered<'_>) -> Result<ChatPrompt, ApiError> {
    fields.refuse(&["chat_template", "add_special_tokens"])?;
    ChatPrompt::take(fields, ordered).map_err(|error| {
        let is_missing = error == missing("messages");
        if is_missing {
            ApiError { message: "prompt or messages is missing".to_owned(), ..missing("prompt") }
        } else {
            error
        }
    })
}

impl DetokenizeRequest {
    /// Reads a body. The tokens are to be of a vocabulary of this size.
    ///
    /// # Errors
    /// Names the first field that is wrong or not known.
    pub fn parse(body: &[u8], vocab_size: usize) -> Result<Self, ApiError> {
        let mut fields = Fields::new(parse_object(body)?);
        let model = fields.text("model", MAX_NAME)?;
        let value = fields.take("tokens").ok_or_else(|| missing("tokens"))?;
        let ids = value.as_array().and_then(|values| values.iter().map(token_id).collect::<Option<Vec<u32>>>());
        let tokens = ids.ok_or_else(|| ApiError::field("tokens", &value, "a list of token ids"))?;
        if let Some(&id) = tokens.iter().find(|&&id| id as usize >= vocab_size) {
            return Err(no_token("tokens", id, vocab_size));
        }
        fields.finish()?;
        Ok(Self { model, tokens })
    }
}
