//! Texts and tokens without an answer: `/tokenize`, `/detokenize` and `/tokenizer_info`.

use serde_json::{Value, json};

use super::served::ServedModel;
use crate::api::{ApiError, DetokenizeRequest, ErrorKind, Prompt, TokenizeRequest, TokenizeText};

/// Answers `/tokenize`.
pub(crate) fn tokenize(served: &ServedModel, body: &[u8]) -> Result<Value, ApiError> {
    let TokenizeRequest { model, text, returns_pieces } = TokenizeRequest::parse(body)?;
    served.check_name(model.as_deref())?;
    let ids = match text {
        // A text without a token is nothing to continue, but here it is an answer.
        TokenizeText::Text(text, options) if text.is_empty() && !options.adds_special_tokens => Vec::new(),
        TokenizeText::Text(text, options) => served.encode_prompt(&Prompt::Text(text), options)?,
        TokenizeText::Chat(prompt) => served.encode_chat(&prompt)?,
    };
    let pieces = if returns_pieces { Some(pieces(served, &ids)?) } else { None };
    Ok(json!({"count": ids.len(), "max_model_len": served.context(), "tokens": ids, "token_strs": pieces}))
}

/// The text of each token.
fn pieces(served: &ServedModel, ids: &[u32]) -> Result<Vec<String>, ApiError> {
    ids.iter().map(|&id| decode(served, &[id])).collect()
}

fn decode(served: &ServedModel, ids: &[u32]) -> Result<String, ApiError> {
    let text = served.model.tokenizer.decode_with_special(ids);
    text.map_err(|error| ApiError::new(ErrorKind::Internal, error.to_string()))
}

/// Answers `/detokenize`. The text has the names that vLLM and llama.cpp give it.
pub(crate) fn detokenize(served: &ServedModel, body: &[u8]) -> Result<Value, ApiError> {
    let DetokenizeRequest { model, tokens } = DetokenizeRequest::parse(body, served.model.tokenizer.vocab_size())?;
    served.check_name(model.as_deref())?;
    let text = decode(served, &tokens)?;
    Ok(json!({"prompt": text, "content": text}))
}

/// Answers `/tokenizer_info`: the tokenizer's configuration, with the template that is in use.
pub(crate) fn tokenizer_info(served: &ServedModel) -> Value {
    let tokenizer = &served.model.tokenizer;
    let mut info: Value = serde_json::from_str(tokenizer.config_json()).unwrap_or_default();
    if !info.is_object() {
        info = json!({});
    }
    info["chat_template"] = served.template.as_ref().map(|template| template.source()).into();
    info["vocab_size"] = tokenizer.vocab_size().into();
    info["eos_token_id"] = tokenizer.eos_id().into();
    info
}
