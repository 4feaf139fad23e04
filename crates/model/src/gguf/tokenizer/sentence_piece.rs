//! SentencePiece BPE in a GGUF file.

use std::collections::HashMap;

use serde_json::{Value as Json, json};

use super::super::GgufFile;
use super::super::error::GgufError;
use super::super::value::Value;
use super::vocab;

/// The longest token that is accepted, in bytes: each token is split at every position.
const MAX_TOKEN_BYTES: usize = 1024;

impl GgufFile {
    /// Rebuilds the tokenizer. SentencePiece BPE has scores instead of merges: every way to make a token from two
    /// others becomes a merge, in descending order of scores, as in the converter of `transformers`.
    pub(super) fn sentence_piece(&self) -> Result<Json, GgufError> {
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
            "pre_tokenizer": null, "post_processor": self.post_processor(true)?,
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
