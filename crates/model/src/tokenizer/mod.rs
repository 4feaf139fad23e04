//! Tokenizers: plain bytes, BPE trained on given texts, or any `tokenizer.json`.
//!
//! Whatever the kind, a tokenizer is the text of a `tokenizer.json` in the form that Hugging Face's libraries read, and
//! saving writes that text. The `tokenizers` crate encodes and decodes, except for plain bytes, where an id is a byte and
//! no machinery is needed. Text is encoded as text: the spelling of a special token in it does not become that token. What belongs
//! around a text, such as a token that begins it, is added where a method says so ([`Tokenizer::encode_prompt`]).

mod byte_level;
mod division;
mod ends;
mod engine;
mod load;
mod older;
mod oniguruma;
mod pattern;
mod special;
mod train;

use std::path::{Path, PathBuf};
use std::{fs, io};

use engine::{Engine, Spelling};
use serde_json::Value;
use special::Additions;

use crate::foreign;
use crate::instead::instead_of_tokenizer;

pub(crate) use ends::is_known_end;
pub(crate) use special::template;

/// The special token of the tokenizers made here: it begins and ends texts.
const END_OF_TEXT: &str = "<|endoftext|>";

/// The largest `tokenizer.json` that is read, in bytes.
const MAX_FILE_BYTES: u64 = 256 << 20;

/// Ids are below this; larger ones would make tables of absurd size.
const MAX_ID: u64 = 1 << 24;

/// Stands behind the first character of what spells a special token but is none. No character: Unicode keeps it for use
/// inside programs.
const GUARD: char = '\u{FDD0}';

/// The special token before the name of a channel, of tokenizers whose models answer in channels.
const CHANNEL: &str = "<|channel|>";

/// What can go wrong with a tokenizer.
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
    /// The file is larger than any tokenizer.
    #[error("{}: {bytes} bytes, but a tokenizer.json has at most {MAX_FILE_BYTES}", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its size.
        bytes: u64,
    },
    /// The text is no tokenizer that can be used.
    #[error("{origin}: not a usable tokenizer: {reason}")]
    Invalid {
        /// The file, or what else the text came from.
        origin: String,
        /// What is wrong.
        reason: String,
    },
    /// A vocabulary smaller than the alphabet.
    #[error("vocab_size = {vocab_size}: a BPE vocabulary needs at least 257 tokens, 256 bytes and {END_OF_TEXT}")]
    VocabularyTooSmall {
        /// The size asked for.
        vocab_size: usize,
    },
    /// Text could not be encoded or ids not decoded.
    #[error("the tokenizer fails: {0}")]
    Failed(String),
}

/// Text to ids and back.
pub struct Tokenizer {
    engine: Engine,
    /// The `tokenizer.json`.
    json: String,
    /// The `tokenizer_config.json`.
    config_json: String,
    is_bytes: bool,
    vocab_size: usize,
    special_tokens: Vec<String>,
    /// The ids that belong around a text.
    additions: Additions,
    /// Whether a conversation gets what belongs before a text too, if its template has not spelled it.
    begins_chats: bool,
    bos_id: Option<u32>,
    eos_id: Option<u32>,
    /// The ids of tokens that are known to end an answer.
    known_ends: Vec<u32>,
    /// The ids that stand for single bytes of a character, in order.
    byte_tokens: Vec<u32>,
    sentinels: Vec<u32>,
}

impl Tokenizer {
    /// Ids are from 0 to below this.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The id that ends a text, if the tokenizer has one.
    #[must_use]
    pub fn eos_id(&self) -> Option<u32> {
        self.eos_id
    }

    /// The ids that belong before every text, as `transformers` adds them to a folder's and llama.cpp to a file's: a token that
    /// begins it, or nothing.
    #[must_use]
    pub fn text_start(&self) -> &[u32] {
        &self.additions.before
    }

    /// The ids at which generation stops: `configured`, the end of a text, and those whose names are known to end an answer.
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

    /// The ids that stand for spans left out of a text, `<extra_id_0>` and so on in T5's tokenizers; none in others.
    #[must_use]
    pub fn sentinels(&self) -> &[u32] {
        &self.sentinels
    }

    /// Whether answers come in channels, as GPT-OSS gives them (OpenAI's harmony format).
    #[must_use]
    pub fn has_channels(&self) -> bool {
        self.special_tokens.iter().any(|token| token == CHANNEL)
    }

    /// Whether an id is a byte.
    #[must_use]
    pub fn is_bytes(&self) -> bool {
        self.is_bytes
    }

    /// Whether an id stands for one byte, which may be a part of a character.
    #[must_use]
    pub fn is_byte_token(&self, id: u32) -> bool {
        self.byte_tokens.binary_search(&id).is_ok()
    }

    /// Whether an id takes part in the text of ids, as a special token does only where these are shown.
    #[must_use]
    pub fn is_shown(&self, id: u32, shows_special: bool) -> bool {
        self.engine.is_shown(id, shows_special)
    }

    /// The `tokenizer.json`.
    #[must_use]
    pub fn json(&self) -> &str {
        &self.json
    }

    /// The ids of a text, no special token added.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        if self.is_bytes {
            return Ok(text.bytes().map(u32::from).collect());
        }
        self.engine.encode(text, Spelling::Text).map_err(failed)
    }

    /// The ids of a text that a model is to continue: what belongs before a text, and the text. What belongs behind a text, such as
    /// a token that ends it, is left off, since the text goes on. With `reads_special`, the spelling of a special token is that
    /// token, and a text that spells its own beginning gets no second one. An empty text is what texts begin with, or else follow.
    pub fn encode_prompt(&self, text: &str, reads_special: bool) -> Result<Vec<u32>, TokenizerError> {
        let ids = if reads_special { self.encode_spelled(text)? } else { self.encode(text)? };
        let mut ids = self.with_start(ids);
        if ids.is_empty() {
            ids.extend(self.bos_id.or(self.eos_id));
        }
        Ok(ids)
    }

    /// The ids of a text for an encoder to read: the spelling of a special token is that token, and what the tokenizer has for
    /// the ends of a text is added, such as T5's `</s>`.
    pub fn encode_source(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let Additions { before, after } = &self.additions;
        Ok([before, &self.encode_spelled(text)?[..], after].concat())
    }

    /// The ids of many texts.
    pub fn encode_batch(&self, texts: &[&str]) -> Result<Vec<Vec<u32>>, TokenizerError> {
        texts.iter().map(|text| self.encode(text)).collect()
    }

    /// A text that somebody wrote, marked so that [`Tokenizer::encode_rendered`] makes no special token of it.
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

    /// The ids of a conversation as its template spells it: the spelling of a special token is that token, but where
    /// [`Tokenizer::guard`] marked it. The template says with what a conversation begins; only to one from a GGUF file is that added
    /// if it does not, as llama.cpp has it.
    pub fn encode_rendered(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let mut ids = Vec::new();
        for part in text.split(GUARD).filter(|part| !part.is_empty()) {
            ids.extend(self.encode_spelled(part)?);
        }
        Ok(if self.begins_chats { self.with_start(ids) } else { ids })
    }

    /// The ids of a text in which the spelling of a special token is that token.
    pub fn encode_spelled(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        self.engine.encode(text, Spelling::Token).map_err(failed)
    }

    /// Ids with what belongs before a text, unless they begin with it.
    fn with_start(&self, ids: Vec<u32>) -> Vec<u32> {
        let before = &self.additions.before;
        if ids.starts_with(before) { ids } else { [before, &ids[..]].concat() }
    }

    /// The `tokenizer_config.json`.
    #[must_use]
    pub fn config_json(&self) -> &str {
        &self.config_json
    }

    /// The text of `ids`, without special tokens. Bytes that are no character come as U+FFFD, ids that the vocabulary does
    /// not have as nothing.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        if self.is_bytes {
            let bytes: Vec<u8> = ids.iter().filter_map(|&id| u8::try_from(id).ok()).collect();
            return Ok(String::from_utf8_lossy(&bytes).into_owned());
        }
        self.engine.decode(ids, false).map_err(failed)
    }

    /// The text of `ids`, with special tokens as they are spelled.
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
    let text = foreign::utf8(fs::read(path).map_err(io)?).map_err(|reason: String| no_text(reason))?;
    if text.is_empty() {
        return Err(invalid("EOF: this file is empty: download it again".to_owned()));
    }
    // A whole tokenizer is none of the kinds of file that are known by their first bytes.
    let what = (text.len() < 4096).then(|| foreign::what(text.as_bytes())).flatten();
    what.map_or(Ok(text), |what| Err(invalid(format!("this is {what}"))))
}

/// What the system says, and for a tokenizer.json that is not there what its folder has instead.
fn with_advice(error: io::Error, path: &Path) -> io::Error {
    let is_missing = error.kind() == io::ErrorKind::NotFound && path.ends_with("tokenizer.json");
    match path.parent().filter(|_| is_missing) {
        Some(dir) => io::Error::new(error.kind(), format!("not there{}", instead_of_tokenizer(dir))),
        None => error,
    }
}

fn pretty(value: &Value) -> String {
    format!("{value:#}\n")
}
