//! Tokenizers: plain bytes, BPE trained on given texts, or any `tokenizer.json`.
//!
//! A tokenizer of any kind is the text of a `tokenizer.json` that Hugging Face's libraries read, and saving writes
//! that text. The `tokenizers` crate encodes and decodes, except for plain bytes, where an id is a byte.
//!
//! Text is encoded as text: the spelling of a special token does not become that token. Tokens around a text, such as
//! one that begins it, are added by the methods that say so ([`Tokenizer::encode_prompt`]).

mod byte_level;
mod division;
mod engine;
mod gpt2_files;
mod load;
mod oniguruma;
mod pattern;
mod special;
mod stop_tokens;
mod token_table;
mod train;

use std::path::{Path, PathBuf};
use std::{fs, io};

use engine::{Engine, Spelling};
use serde_json::Value;
use special::Additions;

use crate::file_kind;
use crate::path_advice::tokenizer_advice;

pub(crate) use special::{NamedToken, template};
pub(crate) use stop_tokens::is_known_end;
pub use token_table::{TokenBytes, TokenTable};

/// The special token that begins and ends texts in tokenizers trained here.
const END_OF_TEXT: &str = "<|endoftext|>";

/// The largest `tokenizer.json` that is read, in bytes.
const MAX_FILE_BYTES: u64 = 256 << 20;

/// The bound of ids; larger ones would need tables of absurd size.
const MAX_ID: u64 = 1 << 24;

/// A mark after the first character of text that spells a special token but must not become one. Unicode reserves it
/// for use inside programs.
const GUARD: char = '\u{FDD0}';

/// The special token before the name of a channel, in tokenizers whose models answer in channels.
const CHANNEL: &str = "<|channel|>";

/// Errors of tokenizers.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// The file cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is too large for a tokenizer.
    #[error("{}: {bytes} bytes, but a tokenizer.json has at most {MAX_FILE_BYTES}", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
    },
    /// The text is not a usable tokenizer.
    #[error("{origin}: not a usable tokenizer: {reason}")]
    Invalid {
        /// The origin of the text, such as a file.
        origin: String,
        /// The fault.
        reason: String,
    },
    /// The vocabulary is smaller than the alphabet.
    #[error("vocab_size = {vocab_size}: a BPE vocabulary needs at least 257 tokens, 256 bytes and {END_OF_TEXT}")]
    VocabularyTooSmall {
        /// The size asked for.
        vocab_size: usize,
    },
    /// The library failed to encode or decode.
    #[error("the tokenizer failed: {0}")]
    Failed(String),
}

/// A tokenizer: encodes text as ids and decodes ids.
pub struct Tokenizer {
    engine: Engine,
    /// The `tokenizer.json`.
    json: String,
    /// The `tokenizer_config.json`.
    config_json: String,
    is_bytes: bool,
    vocab_size: usize,
    special_tokens: Vec<String>,
    /// The ids that are added around a text.
    additions: Additions,
    /// True if a conversation also gets the ids before a text, unless its template has spelled them.
    begins_chats: bool,
    bos_id: Option<u32>,
    eos_id: Option<u32>,
    /// The ids of tokens that are known to end an answer.
    known_ends: Vec<u32>,
    /// The sorted ids that stand for single bytes.
    byte_tokens: Vec<u32>,
    sentinels: Vec<u32>,
}

impl Tokenizer {
    /// Returns the size of the vocabulary: ids are below it.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Returns the id that ends a text, if the tokenizer has one.
    #[must_use]
    pub fn eos_id(&self) -> Option<u32> {
        self.eos_id
    }

    /// Returns the ids that begin every text, such as a BOS token: those that `transformers` adds for a folder, and
    /// llama.cpp for a file. Empty if there are none.
    #[must_use]
    pub fn text_start(&self) -> &[u32] {
        &self.additions.before
    }

    /// Returns the ids at which generation stops: `configured`, the end of a text, and tokens whose names are known
    /// to end answers.
    #[must_use]
    pub fn stop_ids(&self, configured: &[u32]) -> Vec<u32> {
        let mut ids = Vec::new();
        for id in self.eos_id.iter().chain(configured).chain(&self.known_ends) {
            if !ids.contains(id) {
                ids.push(*id);
            }
        }
        ids
    }

    /// Returns the sentinel ids of T5's tokenizers (`<extra_id_0>` and so on), which stand for spans left out of a
    /// text; empty for other tokenizers.
    #[must_use]
    pub fn sentinels(&self) -> &[u32] {
        &self.sentinels
    }

    /// Returns true if the model answers in channels, as GPT-OSS does (OpenAI's harmony format).
    #[must_use]
    pub fn has_channels(&self) -> bool {
        self.special_tokens.iter().any(|token| token == CHANNEL)
    }

    /// Returns true if every id is a byte.
    #[must_use]
    pub fn is_bytes(&self) -> bool {
        self.is_bytes
    }

    /// Returns true if an id stands for a single byte, which may be a part of a character.
    #[must_use]
    pub fn is_byte_token(&self, id: u32) -> bool {
        self.byte_tokens.binary_search(&id).is_ok()
    }

    /// Returns true if an id contributes to decoded text; special tokens do so only with `shows_special`.
    #[must_use]
    pub fn is_shown(&self, id: u32, shows_special: bool) -> bool {
        self.engine.is_shown(id, shows_special)
    }

    /// Returns the `tokenizer.json`.
    #[must_use]
    pub fn json(&self) -> &str {
        &self.json
    }

    /// Encodes a text without adding special tokens.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        if self.is_bytes {
            return Ok(text.bytes().map(u32::from).collect());
        }
        self.engine.encode(text, Spelling::Text).map_err(failed)
    }

    /// Encodes a prompt, which the model is to continue: the ids that begin a text, then the text. The ids that end a
    /// text are left off. With `reads_special` the spelling of a special token becomes that token, and a text that
    /// spells its own beginning gets no second one. An empty prompt becomes the token that begins a text, or else the
    /// one that ends it.
    pub fn encode_prompt(&self, text: &str, reads_special: bool) -> Result<Vec<u32>, TokenizerError> {
        let ids = if reads_special { self.encode_spelled(text)? } else { self.encode(text)? };
        let mut ids = self.with_start(ids);
        if ids.is_empty() {
            ids.extend(self.bos_id.or(self.eos_id));
        }
        Ok(ids)
    }

    /// Encodes a text for an encoder. The spelling of a special token becomes that token, and the ids that begin and
    /// end a text, such as T5's `</s>`, are added.
    pub fn encode_source(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let Additions { before, after } = &self.additions;
        Ok([before, &self.encode_spelled(text)?[..], after].concat())
    }

    /// Encodes several texts.
    pub fn encode_batch(&self, texts: &[&str]) -> Result<Vec<Vec<u32>>, TokenizerError> {
        texts.iter().map(|text| self.encode(text)).collect()
    }

    /// Marks a user's text so that [`Tokenizer::encode_rendered`] makes no special tokens of it.
    #[must_use]
    pub fn guard(&self, text: &str) -> String {
        let mut guarded = String::with_capacity(text.len());
        for (at, c) in text.char_indices().filter(|(_, c)| *c != GUARD) {
            guarded.push(c);
            if self.special_tokens.iter().any(|token| text[at..].starts_with(token)) {
                guarded.push(GUARD);
            }
        }
        guarded
    }

    /// Encodes a conversation that a chat template has rendered. The spelling of a special token becomes that token,
    /// except where [`Tokenizer::guard`] marked it. The template spells the beginning; only for tokenizers from GGUF
    /// files is a missing one added, as in llama.cpp.
    pub fn encode_rendered(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let mut ids = Vec::new();
        for part in text.split(GUARD).filter(|part| !part.is_empty()) {
            ids.extend(self.encode_spelled(part)?);
        }
        Ok(if self.begins_chats { self.with_start(ids) } else { ids })
    }

    /// Encodes a text in which the spelling of a special token becomes that token.
    pub fn encode_spelled(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        self.engine.encode(text, Spelling::Token).map_err(failed)
    }

    /// Adds the ids that begin a text, unless `ids` begin with them.
    fn with_start(&self, ids: Vec<u32>) -> Vec<u32> {
        let before = &self.additions.before;
        if ids.starts_with(before) { ids } else { [before, &ids[..]].concat() }
    }

    /// Returns the `tokenizer_config.json`.
    #[must_use]
    pub fn config_json(&self) -> &str {
        &self.config_json
    }

    /// Decodes `ids`, leaving out special tokens. Bytes that are not valid UTF-8 become U+FFFD, and unknown ids
    /// contribute nothing.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        if self.is_bytes {
            let bytes: Vec<u8> = ids.iter().filter_map(|&id| u8::try_from(id).ok()).collect();
            return Ok(String::from_utf8_lossy(&bytes).into_owned());
        }
        self.engine.decode(ids, false).map_err(failed)
    }

    /// Decodes `ids`, spelling special tokens.
    pub fn decode_with_special(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        self.engine.decode(ids, true).map_err(failed)
    }

    /// Writes `tokenizer.json` and `tokenizer_config.json` to `dir`.
    pub fn save(&self, dir: &Path) -> Result<(), TokenizerError> {
        for (name, text) in [("tokenizer.json", &self.json), ("tokenizer_config.json", &self.config_json)] {
            let path = dir.join(name);
            crate::files::write_whole(&path, text.as_bytes()).map_err(|source| TokenizerError::Io { path, source })?;
        }
        Ok(())
    }
}

fn failed(error: impl ToString) -> TokenizerError {
    TokenizerError::Failed(error.to_string())
}

fn read_text(path: &Path) -> Result<String, TokenizerError> {
    let io = |source| TokenizerError::Io { path: path.to_owned(), source };
    let metadata = fs::metadata(path).map_err(|error| io(with_advice(error, path)))?;
    if !metadata.is_file() {
        return Err(io(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")));
    }
    if metadata.len() > MAX_FILE_BYTES {
        return Err(TokenizerError::TooLarge { path: path.to_owned(), bytes: metadata.len() });
    }
    let invalid = |reason| TokenizerError::Invalid { origin: path.display().to_string(), reason };
    let no_text = |reason| io(io::Error::new(io::ErrorKind::InvalidData, reason));
    let text = file_kind::utf8(fs::read(path).map_err(io)?).map_err(|reason: String| no_text(reason))?;
    if text.is_empty() {
        return Err(invalid("EOF: this file is empty: download it again".to_owned()));
    }
    // A real tokenizer is not one of the kinds of files that are recognized by their first bytes.
    let what = (text.len() < 4096).then(|| file_kind::describe(text.as_bytes())).flatten();
    what.map_or(Ok(text), |what| Err(invalid(format!("this is {what}"))))
}

/// Adds to the system's error on a missing `tokenizer.json` what the folder has instead.
fn with_advice(error: io::Error, path: &Path) -> io::Error {
    let is_missing = error.kind() == io::ErrorKind::NotFound && path.ends_with("tokenizer.json");
    match path.parent().filter(|_| is_missing) {
        Some(dir) => io::Error::new(error.kind(), format!("missing{}", tokenizer_advice(dir))),
        None => error,
    }
}

fn pretty(value: &Value) -> String {
    format!("{value:#}\n")
}
