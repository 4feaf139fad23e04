//! The `tokenizers` library, set up from a `tokenizer.json`.
//!
//! Most tokenizers of language models cut text by regular expressions and merge the bytes of each part. These take a
//! fast path that does not track the origin of each token in the text; a test compares it with the library.

use std::collections::HashMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{OnceLock, PoisonError, RwLock};

use serde_json::Value;
use tokenizers::models::bpe::BPE;
use tokenizers::{
    DecoderWrapper, Model, ModelWrapper, NormalizerWrapper, PostProcessorWrapper, TokenizerBuilder, TokenizerImpl,
};

use super::byte_level::byte_alphabet;
use super::division::Division;
use super::oniguruma::translate;

/// The largest number of words whose ids are cached, and the longest of these in bytes.
const MAX_WORDS: usize = 1 << 16;
const MAX_WORD_BYTES: usize = 64;

type Library = TokenizerImpl<ModelWrapper, NormalizerWrapper, Division, PostProcessorWrapper, DecoderWrapper>;

/// The interpretation of a special token's spelling in a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spelling {
    /// Plain text.
    Text,
    /// The special token.
    Token,
}

/// A tokenizer of the library that neither adds tokens to a text nor truncates nor pads it.
pub(super) struct Engine {
    text: Library,
    /// The library for [`Spelling::Token`], made on first use.
    tokens: OnceLock<Library>,
    /// The characters that stand for bytes, if the fast path applies.
    alphabet: Option<Vec<char>>,
    /// The cache of the fast path: words with their ids.
    words: RwLock<HashMap<Box<str>, Box<[u32]>>>,
}

impl Engine {
    /// Sets up the engine of a `tokenizer.json`. A panic of the library becomes an error.
    pub(super) fn new(value: &Value) -> Result<Self, String> {
        catch_unwind(AssertUnwindSafe(|| Self::build(value)))
            .unwrap_or_else(|_| Err("the tokenizers library cannot read it".to_owned()))
    }

    fn build(value: &Value) -> Result<Self, String> {
        let mut rest = value.clone();
        let division = Division::new(&rest["pre_tokenizer"].take())?;
        for part in ["truncation", "padding", "post_processor"] {
            rest[part] = Value::Null;
        }
        translate_all(&mut rest["normalizer"])?;
        translate_all(&mut rest["decoder"])?;
        let has_other_tokens = added_tokens(value).any(|token| token["special"] != Value::Bool(true));
        let read: tokenizers::Tokenizer = serde_json::from_value(rest).map_err(|error| error.to_string())?;
        let is_plain = is_plain_bpe(read.get_model());
        let has_normalizer = read.get_normalizer().is_some();
        let mut text: Library = TokenizerBuilder::new()
            .with_model(read.get_model().clone())
            .with_normalizer(read.get_normalizer().cloned())
            .with_decoder(read.get_decoder().cloned())
            .with_added_vocabulary(read.get_added_vocabulary().clone())
            .with_pre_tokenizer(division)
            .build()
            .map_err(|error| error.to_string())?;
        text.set_encode_special_tokens(true);
        let has_cuts = text.get_pre_tokenizer().is_some_and(|division| division.cuts().is_some());
        let is_short = is_plain && has_cuts && !has_normalizer && !has_other_tokens;
        Ok(Self { text, tokens: OnceLock::new(), alphabet: is_short.then(byte_alphabet), words: RwLock::default() })
    }

    /// Returns the id of a token of the model or an added one.
    pub(super) fn id_of(&self, token: &str) -> Option<u32> {
        self.text.token_to_id(token)
    }

    /// Encodes a text.
    pub(super) fn encode(&self, text: &str, spelling: Spelling) -> Result<Vec<u32>, String> {
        match (spelling, &self.alphabet) {
            (Spelling::Text, Some(alphabet)) => self.encode_words(text, alphabet),
            (Spelling::Text, None) => encode(&self.text, text),
            (Spelling::Token, _) => encode(self.tokens.get_or_init(|| self.reading_tokens()), text),
        }
    }

    fn reading_tokens(&self) -> Library {
        let mut library = self.text.clone();
        library.set_encode_special_tokens(false);
        library
    }

    /// Encodes a text by the fast path.
    fn encode_words(&self, text: &str, alphabet: &[char]) -> Result<Vec<u32>, String> {
        let cuts = self.text.get_pre_tokenizer().and_then(Division::cuts).unwrap_or_default();
        let mut words = vec![text];
        for pattern in cuts {
            words = words.into_iter().map(|word| parts(word, pattern)).collect::<Result<Vec<_>, _>>()?.concat();
        }
        let (mut ids, mut new_words) = (Vec::new(), HashMap::new());
        let known = self.words.read().unwrap_or_else(PoisonError::into_inner);
        for word in words {
            if let Some(known) = known.get(word) {
                ids.extend_from_slice(known);
                continue;
            }
            if let Some(range) = new_words.get(word).cloned() {
                ids.extend_from_within(range);
                continue;
            }
            let start = ids.len();
            let spelled: String = word.bytes().map(|byte| alphabet[usize::from(byte)]).collect();
            let tokens = self.text.get_model().tokenize(&spelled).map_err(|error| error.to_string())?;
            ids.extend(tokens.into_iter().map(|token| token.id));
            new_words.insert(word, start..ids.len());
        }
        drop(known);
        self.remember(&new_words, &ids);
        Ok(ids)
    }

    /// Caches the ids of words, up to the cache's limit and unless another thread holds it.
    fn remember(&self, words: &HashMap<&str, Range<usize>>, ids: &[u32]) {
        let Ok(mut known) = self.words.try_write() else { return };
        let room = MAX_WORDS.saturating_sub(known.len());
        for (word, range) in words.iter().filter(|(word, _)| word.len() <= MAX_WORD_BYTES).take(room) {
            known.insert((*word).into(), ids[range.clone()].into());
        }
    }

    /// Encodes a text by the library, for tests of the fast path.
    #[cfg(test)]
    pub(super) fn encode_by_library(&self, text: &str) -> Result<Vec<u32>, String> {
        encode(&self.text, text)
    }

    /// Returns true if an id contributes to decoded text.
    pub(super) fn is_shown(&self, id: u32, shows_special: bool) -> bool {
        let is_special = |token: &String| self.text.get_added_vocabulary().is_special_token(token);
        self.text.id_to_token(id).is_some_and(|token| shows_special || !is_special(&token))
    }

    /// Decodes ids; unknown ids contribute nothing.
    pub(super) fn decode(&self, ids: &[u32], shows_special: bool) -> Result<String, String> {
        // Some decoders fail on an empty list.
        if !ids.iter().any(|&id| self.is_shown(id, shows_special)) {
            return Ok(String::new());
        }
        self.text.decode(ids, !shows_special).map_err(|error| error.to_string())
    }
}

fn encode(library: &Library, text: &str) -> Result<Vec<u32>, String> {
    let encoding = library.encode_fast(text, false).map_err(|error| error.to_string())?;
    Ok(encoding.get_ids().to_vec())
}

/// Cuts a word at every match of a pattern.
fn parts<'a>(word: &'a str, pattern: &super::pattern::Pattern) -> Result<Vec<&'a str>, String> {
    let (mut parts, mut end) = (Vec::new(), 0);
    for span in pattern.find_all(word)? {
        parts.extend([&word[end..span.start], &word[span.start..span.end]]);
        end = span.end;
    }
    parts.push(&word[end..]);
    parts.retain(|part| !part.is_empty());
    Ok(parts)
}

/// Returns true if a model does nothing but merge.
fn is_plain_bpe(model: &ModelWrapper) -> bool {
    let ModelWrapper::BPE(BPE { dropout: None, unk_token: None, byte_fallback: false, .. }) = model else {
        return false;
    };
    true
}

/// Iterates over the entries of `added_tokens`.
pub(super) fn added_tokens(value: &Value) -> impl Iterator<Item = &Value> {
    value["added_tokens"].as_array().into_iter().flatten()
}

/// Translates every regular expression in `value` to the syntax of the library's engine.
fn translate_all(value: &mut Value) -> Result<(), String> {
    match value {
        Value::Object(fields) => {
            if let Some(Value::String(source)) = fields.get_mut("Regex") {
                *source = translate(source)?;
            }
            fields.values_mut().try_for_each(translate_all)
        }
        Value::Array(items) => items.iter_mut().try_for_each(translate_all),
        _ => Ok(()),
    }
}

#[cfg(test)]
#[path = "engine_tests.rs"]
mod tests;
