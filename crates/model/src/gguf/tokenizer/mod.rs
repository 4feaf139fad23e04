//! The tokenizer in a GGUF file, rebuilt as the `tokenizer.json` that it was made from.

mod pre;
mod sentence_piece;
mod special;

use serde_json::{Value as Json, json};

use super::GgufFile;
use super::error::GgufError;
use super::value::{Numbers, Value};
use crate::tokenizer::{Tokenizer, is_known_end};
use pre::{Pre, byte_level};

/// Kinds of tokens (`tokenizer.ggml.token_type`): control tokens never result from text; user-defined ones are
/// matched before all others.
const CONTROL: usize = 3;
const USER_DEFINED: usize = 4;

impl GgufFile {
    /// Builds the tokenizer: byte-level BPE (`gpt2`) or SentencePiece BPE (`llama`).
    pub fn tokenizer(&self) -> Result<Tokenizer, GgufError> {
        let json = match self.key("tokenizer.ggml.model", Value::as_text, "text")? {
            "gpt2" => self.byte_level()?,
            "llama" => self.sentence_piece()?,
            other => {
                let reason = format!(
                    "is {other:?}: must be \"gpt2\" (byte-level BPE) or \"llama\" (SentencePiece BPE), which the \
                     architectures read here have"
                );
                return Err(self.wrong_key("tokenizer.ggml.model", reason));
            }
        };
        let [bos, eos] =
            [self.special_token("bos")?, self.special_token("eos")?].map(|token| token.map(|token| token.name));
        let mut config = json!({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": false,
            "bos_token": bos,
            "eos_token": eos,
        });
        if let Some(template) = self.chat_template() {
            config["chat_template"] = json!(template);
        }
        let origin = self.path().display().to_string();
        Tokenizer::from_gguf(format!("{json:#}\n"), format!("{config:#}\n"), &origin)
            .map_err(|source| GgufError::Tokenizer { path: self.path().to_owned(), source })
    }

    /// Returns the ids that end a text: those that the file names, and those that its `tokenizer` knows.
    pub fn stop_ids(&self, tokenizer: &Tokenizer) -> Result<Vec<u32>, GgufError> {
        let mut ids = Vec::new();
        for end in ["eos", "eot", "eom"] {
            ids.extend(self.token_id(end)?.and_then(|id| u32::try_from(id).ok()));
        }
        Ok(tokenizer.stop_ids(&ids))
    }

    fn tokens(&self) -> Result<&[String], GgufError> {
        self.key(
            "tokenizer.ggml.tokens",
            |value| if let Value::Texts(t) = value { Some(&t[..]) } else { None },
            "texts",
        )
    }

    /// Returns the entries of `added_tokens`: tokens that are not made by merges.
    fn added_tokens(&self, tokens: &[String]) -> Result<Json, GgufError> {
        let types: Option<&Numbers> = self.optional(
            "tokenizer.ggml.token_type",
            |value| if let Value::Numbers(numbers) = value { Some(numbers) } else { None },
            "whole numbers",
        )?;
        let kind = |id: usize| types?.get(id)?.as_usize();
        let entry = |(id, token): (usize, &String)| {
            // A token that ends answers is a control token whatever the file says.
            let kind = if is_known_end(token) { Some(CONTROL) } else { kind(id) };
            let kind = kind.filter(|&kind| kind == CONTROL || kind == USER_DEFINED)?;
            Some(json!({
                "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": kind == CONTROL,
            }))
        };
        Ok(tokens.iter().enumerate().filter_map(entry).collect())
    }

    fn byte_level(&self) -> Result<Json, GgufError> {
        let tokens = self.tokens()?;
        let pre = self.pre()?;
        let merges = self.key(
            "tokenizer.ggml.merges",
            |value| if let Value::Texts(merges) = value { Some(merges) } else { None },
            "texts",
        )?;
        let merges: Vec<Json> = merges
            .iter()
            .map(|merge| merge.split_once(' ').map(|(left, right)| json!([left, right])))
            .collect::<Option<_>>()
            .ok_or_else(|| self.wrong_key("tokenizer.ggml.merges", "a merge must be two tokens and a space".into()))?;
        Ok(json!({
            "version": "1.0", "truncation": null, "padding": null,
            "added_tokens": self.added_tokens(tokens)?,
            "normalizer": pre.normalizer(), "pre_tokenizer": pre.pre_tokenizer(),
            "post_processor": self.post_processor(pre.adds_bos)?, "decoder": byte_level(true),
            "model": {
                "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                "ignore_merges": pre.ignores_merges, "vocab": vocab(tokens), "merges": merges,
            },
        }))
    }

    /// Returns the file's division of text into words.
    fn pre(&self) -> Result<&'static Pre, GgufError> {
        let name = self.optional("tokenizer.ggml.pre", Value::as_text, "text")?.unwrap_or("");
        let pre = Pre::from_name(name).ok_or_else(|| {
            let known: Vec<&str> = Pre::names().collect();
            self.wrong_key("tokenizer.ggml.pre", format!("is {name:?}: must be one of {}", known.join(", ")))
        })?;
        if pre.is_default() {
            let path = self.path().display();
            let what = if name.is_empty() { "is missing".to_owned() } else { format!("is {name:?}") };
            tracing::warn!(
                "{path}: tokenizer.ggml.pre {what}: how the model divides text is not known, and it may answer worse; convert \
                 it again with a current llama.cpp"
            );
        }
        Ok(pre)
    }
}

fn vocab(tokens: &[String]) -> Json {
    tokens
        .iter()
        .enumerate()
        .map(|(id, token)| (token.clone(), Json::from(id)))
        .collect::<serde_json::Map<_, _>>()
        .into()
}
