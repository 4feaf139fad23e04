//! The tokenizer in a GGUF file, as the `tokenizer.json` that it was made from.

use std::collections::HashMap;

use serde_json::{Value as Json, json};

use super::GgufFile;
use super::error::GgufError;
use super::value::{Numbers, Value};
use crate::tokenizer::Tokenizer;

/// Kinds of tokens (`tokenizer.ggml.token_type`): those that text never becomes, and those that are matched before all else.
const CONTROL: usize = 3;
const USER_DEFINED: usize = 4;

/// The longest token of a SentencePiece vocabulary: each is tried to be cut everywhere.
const MAX_TOKEN_BYTES: usize = 1024;

/// How byte-level tokenizers divide text into words, by `tokenizer.ggml.pre`.
const WORDS: [(&[&str], &str); 3] = [
    (
        &["llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx"],
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    (
        &["qwen2", "deepseek-r1-qwen", "stablelm2"],
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    (&["", "default", "gpt-2", "gpt2", "olmo", "phi-2", "mpt", "jais"], ""),
];

impl GgufFile {
    /// The tokenizer: byte-level BPE (`gpt2`) or SentencePiece BPE (`llama`).
    pub fn tokenizer(&self) -> Result<Tokenizer, GgufError> {
        let json = match self.key("tokenizer.ggml.model", Value::as_text, "text")? {
            "gpt2" => self.byte_level()?,
            "llama" => self.sentence_piece()?,
            other => {
                let reason = format!("is {other:?}: must be \"gpt2\" or \"llama\"");
                return Err(self.wrong_key("tokenizer.ggml.model", reason));
            }
        };
        let token = |key: &str| -> Result<Json, GgufError> {
            let id = self.optional(key, Value::as_usize, "a whole number")?;
            Ok(id.and_then(|id| self.tokens().ok()?.get(id)).map_or(Json::Null, |token| json!(token)))
        };
        let mut config = json!({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": false,
            "bos_token": token("tokenizer.ggml.bos_token_id")?,
            "eos_token": token("tokenizer.ggml.eos_token_id")?,
        });
        if let Some(template) = self.chat_template() {
            config["chat_template"] = json!(template);
        }
        let origin = self.path().display().to_string();
        Tokenizer::from_text(format!("{json:#}\n"), Some(format!("{config:#}\n")), &origin)
            .map_err(|source| GgufError::Tokenizer { path: self.path().to_owned(), source })
    }

    /// The ids at which the model ends what it says.
    pub fn stop_ids(&self) -> Result<Vec<u32>, GgufError> {
        let mut ids = Vec::new();
        for end in ["eos", "eot", "eom"] {
            let key = format!("tokenizer.ggml.{end}_token_id");
            let id = self.optional(&key, Value::as_usize, "a whole number")?;
            ids.extend(id.and_then(|id| u32::try_from(id).ok()).filter(|id| !ids.contains(id)));
        }
        Ok(ids)
    }

    fn tokens(&self) -> Result<&[String], GgufError> {
        self.key(
            "tokenizer.ggml.tokens",
            |value| if let Value::Texts(t) = value { Some(&t[..]) } else { None },
            "texts",
        )
    }

    /// The entries of `added_tokens`: tokens that no merge makes.
    fn added_tokens(&self, tokens: &[String]) -> Result<Json, GgufError> {
        let types: Option<&Numbers> = self.optional(
            "tokenizer.ggml.token_type",
            |value| if let Value::Numbers(numbers) = value { Some(numbers) } else { None },
            "whole numbers",
        )?;
        let kind = |id: usize| types?.get(id)?.as_usize();
        let entry = |(id, token): (usize, &String)| {
            let kind = kind(id).filter(|&kind| kind == CONTROL || kind == USER_DEFINED)?;
            Some(json!({
                "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": kind == CONTROL,
            }))
        };
        Ok(tokens.iter().enumerate().filter_map(entry).collect())
    }

    fn byte_level(&self) -> Result<Json, GgufError> {
        let tokens = self.tokens()?;
        let pre = self.optional("tokenizer.ggml.pre", Value::as_text, "text")?.unwrap_or("");
        let words = WORDS.iter().find(|(names, _)| names.contains(&pre)).map(|(_, words)| *words).ok_or_else(|| {
            let known: Vec<&str> = WORDS.iter().flat_map(|(names, _)| names.iter().copied()).skip(1).collect();
            self.wrong_key("tokenizer.ggml.pre", format!("is {pre:?}: must be one of {}", known.join(", ")))
        })?;
        let byte_level = |use_regex: bool| {
            json!({
                "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex,
            })
        };
        let pre_tokenizer = if words.is_empty() {
            byte_level(true)
        } else {
            let split = json!({
                "type": "Split", "pattern": { "Regex": words }, "behavior": "Isolated", "invert": false,
            });
            json!({ "type": "Sequence", "pretokenizers": [split, byte_level(false)] })
        };
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
            "normalizer": null, "pre_tokenizer": pre_tokenizer, "post_processor": null, "decoder": byte_level(true),
            "model": {
                "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                "ignore_merges": pre.starts_with("llama"), "vocab": vocab(tokens), "merges": merges,
            },
        }))
    }

    /// SentencePiece's BPE has scores instead of merges: every way to make a token from two others is one, the highest
    /// score first, as the converter of `transformers` has it.
    fn sentence_piece(&self) -> Result<Json, GgufError> {
        let tokens = self.tokens()?;
        let scores = self.key(
            "tokenizer.ggml.scores",
            |value| if let Value::Numbers(numbers) = value { Some(numbers) } else { None },
            "numbers",
        )?;
        if scores.len() != tokens.len() {
            let reason = format!("has {} scores: must have one for each of {} tokens", scores.len(), tokens.len());
            return Err(self.wrong_key("tokenizer.ggml.scores", reason));
        }
        if let Some(token) = tokens.iter().find(|token| token.len() > MAX_TOKEN_BYTES) {
            let reason = format!("has a token of {} bytes: must be of at most {MAX_TOKEN_BYTES}", token.len());
            return Err(self.wrong_key("tokenizer.ggml.tokens", reason));
        }
        let ids: HashMap<&str, usize> = tokens.iter().enumerate().map(|(id, token)| (token.as_str(), id)).collect();
        let mut merges = Vec::new();
        for (id, token) in tokens.iter().enumerate() {
            let score = scores.get(id).and_then(|score| score.as_f64()).unwrap_or(f64::NEG_INFINITY);
            let splits = token.char_indices().skip(1).map(|(at, _)| token.split_at(at));
            let mut ways: Vec<_> =
                splits.filter_map(|(l, r)| Some((*ids.get(l)?, *ids.get(r)?))).map(|(l, r)| (score, l, r)).collect();
            ways.sort_by_key(|&(_, left, right)| (left, right));
            merges.extend(ways);
        }
        let len = |id: usize| tokens[id].chars().count();
        merges.sort_by(|a, b| {
            b.0.total_cmp(&a.0).then_with(|| len(b.1).cmp(&len(a.1))).then_with(|| len(b.2).cmp(&len(a.2)))
        });
        let merges: Vec<Json> = merges.iter().map(|&(_, left, right)| json!([tokens[left], tokens[right]])).collect();
        let has_prefix =
            self.optional("tokenizer.ggml.add_space_prefix", Value::as_bool, "a truth value")?.unwrap_or(true);
        let spaces = json!({ "type": "Replace", "pattern": { "String": " " }, "content": "\u{2581}" });
        let normalizers =
            if has_prefix { json!([{ "type": "Prepend", "prepend": "\u{2581}" }, spaces]) } else { json!([spaces]) };
        let unknown = self.optional("tokenizer.ggml.unknown_token_id", Value::as_usize, "a whole number")?.unwrap_or(0);
        Ok(json!({
            "version": "1.0", "truncation": null, "padding": null,
            "added_tokens": self.added_tokens(tokens)?,
            "normalizer": { "type": "Sequence", "normalizers": normalizers },
            "pre_tokenizer": null, "post_processor": null,
            "decoder": { "type": "Sequence", "decoders": [
                { "type": "Replace", "pattern": { "String": "\u{2581}" }, "content": " " },
                { "type": "ByteFallback" }, { "type": "Fuse" },
                { "type": "Strip", "content": " ", "start": usize::from(has_prefix), "stop": 0 },
            ]},
            "model": {
                "type": "BPE", "dropout": null, "unk_token": tokens.get(unknown), "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
                "vocab": vocab(tokens), "merges": merges,
            },
        }))
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
