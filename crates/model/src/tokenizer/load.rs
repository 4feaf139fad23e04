//! Loading and checking tokenizers.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};

use super::byte_level::{byte_alphabet, byte_level_json, is_byte_tokenizer};
use super::engine::{Engine, added_tokens};
use super::gpt2_files::gpt2_json;
use super::special::{additions, named_token};
use super::stop_tokens::{TEXT_ENDS, known_ends};
use super::{MAX_ID, Tokenizer, TokenizerError, pretty, read_text};

impl Tokenizer {
    /// Returns the byte tokenizer: one id per byte, and `<|endoftext|>` as id 256.
    #[must_use]
    pub fn bytes() -> Self {
        let alphabet = byte_alphabet();
        let vocab = alphabet.iter().zip(0..).map(|(&c, id)| (c.to_string(), id)).collect();
        let json = byte_level_json(&vocab, &json!([]), 256, false);
        Self::from_text(json, None, "the byte tokenizer").expect("the byte tokenizer is a constant and tested")
    }

    /// Reads a `tokenizer.json` and, if present, the `tokenizer_config.json` beside it. Without a `tokenizer.json`,
    /// GPT-2's older files `vocab.json` and `merges.txt` are read.
    pub fn from_file(path: &Path) -> Result<Self, TokenizerError> {
        let config_path = path.with_file_name("tokenizer_config.json");
        let config = if config_path.exists() { Some(read_text(&config_path)?) } else { None };
        let older = ["vocab.json", "merges.txt"].map(|name| path.with_file_name(name));
        let origin = path.display().to_string();
        if !path.exists() && older.iter().all(|path| path.exists()) {
            let json = gpt2_json(&older, config.as_deref())?;
            return Self::from_parts(json, config, &origin, true);
        }
        Self::from_text(read_text(path)?, config, &origin)
    }

    /// Reads the tokenizer of a model folder.
    pub fn from_dir(dir: &Path) -> Result<Self, TokenizerError> {
        Self::from_file(&dir.join("tokenizer.json"))
    }

    /// Builds the tokenizer of a GGUF file from its translation to a `tokenizer.json`.
    pub(crate) fn from_gguf(json: String, config: String, origin: &str) -> Result<Self, TokenizerError> {
        Ok(Self { begins_chats: true, ..Self::from_text(json, Some(config), origin)? })
    }

    pub(crate) fn from_text(json: String, config: Option<String>, origin: &str) -> Result<Self, TokenizerError> {
        Self::from_parts(json, config, origin, false)
    }

    /// Builds the tokenizer of a `tokenizer.json` and a `tokenizer_config.json`. With `has_flags_only` the former was
    /// generated, and only the latter knows which tokens are added around a text.
    fn from_parts(
        mut json: String,
        config: Option<String>,
        origin: &str,
        has_flags_only: bool,
    ) -> Result<Self, TokenizerError> {
        let invalid = |reason: String| TokenizerError::Invalid { origin: origin.to_owned(), reason };
        let mut value: Value = serde_json::from_str(&json).map_err(|error| invalid(error.to_string()))?;
        let mut ids = ids_by_token(&value).map_err(invalid)?;
        let config_value: Value = match &config {
            None => Value::Null,
            Some(text) => serde_json::from_str(text).map_err(|e| invalid(format!("tokenizer_config.json: {e}")))?,
        };
        let engine = Engine::new(&value).map_err(invalid)?;
        // The library numbers added tokens itself if the model does not have them.
        for token in added_tokens(&value).filter_map(|token| token["content"].as_str()) {
            ids.extend(engine.id_of(token).map(|id| (token.to_owned(), id)));
        }
        let processor = value["post_processor"].clone();
        let additions = additions(&mut value, &config_value, has_flags_only, |token| ids.get(token).copied());
        let additions = additions.map_err(invalid)?;
        if value["post_processor"] != processor {
            json = pretty(&value);
        }
        let eos_id = named_token(&config_value, "eos_token").map_or_else(
            || TEXT_ENDS.iter().find_map(|token| ids.get(*token).copied()),
            |token| ids.get(token).copied(),
        );
        let eos_token = eos_id.and_then(|eos| ids.iter().find(|(_, id)| **id == eos).map(|(token, _)| token.clone()));
        let bos_id = named_token(&config_value, "bos_token").and_then(|token| ids.get(token).copied());
        let added: Vec<&str> = added_tokens(&value).filter_map(|token| token["content"].as_str()).collect();
        let known_ends = known_ends(|name| added.contains(&name));
        Ok(Self {
            is_bytes: is_byte_tokenizer(&value, &ids),
            vocab_size: ids.values().max().map_or(0, |&id| id as usize + 1),
            special_tokens: special_tokens(&value),
            known_ends: known_ends.iter().filter_map(|name| ids.get(*name).copied()).collect(),
            byte_tokens: byte_tokens(&value, &ids),
            sentinels: (0..).map_while(|i| ids.get(&format!("<extra_id_{i}>")).copied()).collect(),
            config_json: config.unwrap_or_else(|| default_config(eos_token.as_deref())),
            begins_chats: false,
            engine,
            json,
            additions,
            bos_id,
            eos_id,
        })
    }
}

/// Returns the sorted ids of byte tokens such as `<0x0A>`, if the decoder turns these into bytes.
fn byte_tokens(value: &Value, ids: &BTreeMap<String, u32>) -> Vec<u32> {
    if !has_byte_fallback(&value["decoder"]) {
        return Vec::new();
    }
    let mut tokens: Vec<u32> = (0..=255_u8).filter_map(|byte| ids.get(&format!("<0x{byte:02X}>")).copied()).collect();
    tokens.sort_unstable();
    tokens
}

fn has_byte_fallback(decoder: &Value) -> bool {
    let parts = decoder["decoders"].as_array().into_iter().flatten();
    decoder["type"] == "ByteFallback" || parts.into_iter().any(has_byte_fallback)
}

/// Lists every token of the model and every added one. Ids are checked before any table is allocated for them.
fn ids_by_token(value: &Value) -> Result<BTreeMap<String, u32>, String> {
    let mut ids = BTreeMap::new();
    let mut add = |token: &str, id: Option<u64>| match id {
        Some(id) if id < MAX_ID => {
            ids.insert(token.to_owned(), id as u32);
            Ok(())
        }
        _ => Err(format!("token {token:?}: its id must be a whole number below {MAX_ID}")),
    };
    match value.get("model").and_then(|model| model.get("vocab")) {
        Some(Value::Object(vocab)) => vocab.iter().try_for_each(|(token, id)| add(token, id.as_u64()))?,
        // A Unigram vocabulary is a list of tokens with scores; the id is the index.
        Some(Value::Array(vocab)) => vocab.iter().zip(0..).try_for_each(|(entry, id)| {
            let token =
                entry.get(0).and_then(Value::as_str).ok_or_else(|| format!("vocabulary entry {id} has no token"))?;
            add(token, Some(id))
        })?,
        _ => return Err("no vocabulary (model.vocab)".to_owned()),
    }
    for (index, token) in value.get("added_tokens").and_then(Value::as_array).into_iter().flatten().enumerate() {
        let content = token.get("content").and_then(Value::as_str);
        let content = content.ok_or_else(|| format!("added_tokens[{index}] has no content"))?;
        add(content, token.get("id").and_then(Value::as_u64))?;
    }
    Ok(ids)
}

/// Returns the spellings of special tokens.
fn special_tokens(value: &Value) -> Vec<String> {
    let special = added_tokens(value).filter(|token| token["special"] == Value::Bool(true));
    let spelled = special.filter_map(|token| Some(token["content"].as_str()?.to_owned()));
    spelled.filter(|token| !token.is_empty()).collect()
}

fn default_config(eos: Option<&str>) -> String {
    let mut config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": false,
        "model_max_length": 1_000_000_000_000_000_000_u64,
    });
    if let Some(eos) = eos {
        config["bos_token"] = eos.into();
        config["eos_token"] = eos.into();
    }
    pretty(&config)
}
