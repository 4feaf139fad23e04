//! The special tokens of a GGUF file, with llama.cpp's defaults.

use serde_json::Value as Json;

use super::super::GgufFile;
use super::super::error::GgufError;
use super::super::value::Value;
use crate::tokenizer::{NamedToken, template};

/// The default ids of the tokens that begin and end texts in SentencePiece vocabularies.
const SENTENCE_PIECE_IDS: [(&str, usize); 2] = [("bos", 1), ("eos", 2)];

impl GgufFile {
    fn is_sentence_piece(&self) -> bool {
        self.keys().get("tokenizer.ggml.model").and_then(Value::as_text) == Some("llama")
    }

    /// Returns the id that the file gives the token `name`. -1 is none, and so is an id beyond the vocabulary, with a
    /// warning.
    pub(super) fn token_id(&self, name: &str) -> Result<Option<usize>, GgufError> {
        let key = format!("tokenizer.ggml.{name}_token_id");
        if self.keys().get(&key).and_then(Value::as_f64) == Some(-1.0) {
            return Ok(None);
        }
        let (id, num_tokens) = (self.optional(&key, Value::as_usize, "a whole number")?, self.tokens()?.len());
        if let Some(beyond) = id.filter(|&id| id >= num_tokens) {
            let path = self.path().display();
            tracing::warn!("{path}: {key} = {beyond} is not below the vocabulary's size, {num_tokens}: ignored");
        }
        Ok(id.filter(|&id| id < num_tokens))
    }

    /// Returns the token that begins (`bos`) or ends (`eos`) texts, with its id.
    pub(super) fn special_token(&self, name: &str) -> Result<Option<NamedToken<'_>>, GgufError> {
        let tokens = self.tokens()?;
        let default = SENTENCE_PIECE_IDS.iter().find(|(known, _)| self.is_sentence_piece() && *known == name);
        let default = default.map(|&(_, id)| id).filter(|&id| id < tokens.len());
        let id = self.token_id(name)?.or(default);
        Ok(id.and_then(|id| Some(NamedToken { name: &tokens[id], id: u32::try_from(id).ok()? })))
    }

    /// Returns a `post_processor` of `tokenizer.json` that adds the special tokens; `adds_bos` is the file's default.
    pub(super) fn post_processor(&self, adds_bos: bool) -> Result<Json, GgufError> {
        let is_asked = |key: &str, default: bool| -> Result<bool, GgufError> {
            Ok(self.optional(key, Value::as_bool, "a truth value")?.unwrap_or(default))
        };
        let bos = self.added("bos", is_asked("tokenizer.ggml.add_bos_token", adds_bos)?)?;
        let eos = self.added("eos", is_asked("tokenizer.ggml.add_eos_token", false)?)?;
        Ok(if bos.is_none() && eos.is_none() { Json::Null } else { template(bos, eos) })
    }

    /// Returns the token `name` if it is to be added.
    fn added(&self, name: &str, is_asked: bool) -> Result<Option<NamedToken<'_>>, GgufError> {
        if !is_asked {
            return Ok(None);
        }
        let token = self.special_token(name)?;
        if token.is_none() {
            let path = self.path().display();
            tracing::warn!(
                "{path}: tokenizer.ggml.add_{name}_token asks for a token, but tokenizer.ggml.{name}_token_id names none"
            );
        }
        Ok(token)
    }
}
