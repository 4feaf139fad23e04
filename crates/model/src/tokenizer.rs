//! Tokenizers: plain bytes, BPE trained on given texts, or any `tokenizer.json`.
//!
//! Whatever the kind, a tokenizer is the text of a `tokenizer.json` in the form that Hugging Face's libraries read, and
//! saving writes that text. The `tokenizers` crate encodes and decodes, except for plain bytes, where an id is a byte and
//! no machinery is needed. Text is encoded as text: the spelling of a special token in it does not become that token.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::{fs, io};

use serde_json::{Value, json};
use tokenizers::Trainer;
use tokenizers::pipeline::{EncodeOptions, Override, PipelineTokenizer, PreTokenizer, PreTokenizerScratch};
use tokenizers::trainers::BpeTrainer;
use tokenizers::vocab::bucket_added_vocabulary::AddedToken;

use crate::chat::CHANNEL;

/// The special token of the tokenizers made here: it begins and ends texts.
const END_OF_TEXT: &str = "<|endoftext|>";

/// Names that end texts in tokenizers that do not say which token does.
const KNOWN_EOS: [&str; 6] = [END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "<|eot_id|>"];

/// The largest `tokenizer.json` that is read, in bytes.
const MAX_FILE_BYTES: u64 = 256 << 20;

/// Ids are below this; larger ones would make tables of absurd size.
const MAX_ID: u64 = 1 << 24;

/// Stands behind the first character of what spells a special token but is none. No character: Unicode keeps it for use
/// inside programs.
const GUARD: char = '\u{FDD0}';

/// Pieces of text that the trainer counts words in, in bytes.
const TRAINING_PIECE: usize = 1 << 16;

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
    inner: PipelineTokenizer,
    /// The `tokenizer.json`.
    json: String,
    /// The `tokenizer_config.json`.
    config_json: String,
    is_bytes: bool,
    vocab_size: usize,
    special_tokens: Vec<String>,
    eos_id: Option<u32>,
    sentinels: Vec<u32>,
}

impl Tokenizer {
    /// One id a byte, and `<|endoftext|>` as id 256.
    #[must_use]
    pub fn bytes() -> Self {
        let alphabet = byte_alphabet();
        let vocab = alphabet.iter().zip(0..).map(|(&c, id)| (c.to_string(), id)).collect();
        let json = byte_level_json(&vocab, &[], 256, false);
        Self::from_text(json, None, "the byte tokenizer").expect("the byte tokenizer is a constant and tested")
    }

    /// Byte-level BPE of `vocab_size` tokens trained on `texts`: `<|endoftext|>` (id 0), the 256 bytes, then merges, the most
    /// frequent pair first and the lowest ids first among equals, so that the same texts give the same tokenizer. Fewer
    /// tokens result if no pair is left that occurs twice.
    pub fn train_bpe(texts: &[&str], vocab_size: usize) -> Result<Self, TokenizerError> {
        if vocab_size < 257 {
            return Err(TokenizerError::VocabularyTooSmall { vocab_size });
        }
        let alphabet = byte_alphabet();
        // A tokenizer without merges, for its division of text into words.
        let words = Self::from_text(byte_level_json(&byte_vocab(&alphabet), &[], 0, true), None, "BPE")?;
        let pre_tokenizer = words.inner.get_pre_tokenizer();
        let mut trainer = BpeTrainer::builder()
            .show_progress(false)
            .vocab_size(vocab_size)
            .min_frequency(2)
            .special_tokens(vec![AddedToken::from(END_OF_TEXT, true)])
            .initial_alphabet(alphabet.iter().copied().collect())
            .build();
        let split = |text: &str| {
            let (mut spans, mut scratch) = (Vec::new(), PreTokenizerScratch::default());
            pre_tokenizer.pre_tokenize(text, &mut scratch, &mut spans)?;
            let word = |bytes: &[u8]| bytes.iter().map(|&byte| alphabet[usize::from(byte)]).collect();
            Ok(spans.iter().map(|span| word(&text.as_bytes()[span.start as usize..span.end as usize])).collect())
        };
        trainer.feed(texts.iter().flat_map(|text| pieces(text)), split).map_err(failed)?;
        let (vocab, merges, _) = trainer.train_vocab().map_err(failed)?;
        let vocab: BTreeMap<String, u32> = vocab.into_iter().map(|(token, id)| (token.to_string(), id)).collect();
        let merges: Vec<_> = merges.into_iter().map(|(a, b)| (a.to_string(), b.to_string())).collect();
        Self::from_text(byte_level_json(&vocab, &merges, 0, true), None, "the trained BPE")
    }

    /// The tokenizer of a `tokenizer.json`, with the `tokenizer_config.json` beside it if there is one. Where it is not there
    /// but GPT-2's older files are, `vocab.json` and `merges.txt`, that of these.
    pub fn from_file(path: &Path) -> Result<Self, TokenizerError> {
        let config_path = path.with_file_name("tokenizer_config.json");
        let config = if config_path.exists() { Some(read_text(&config_path)?) } else { None };
        let older = ["vocab.json", "merges.txt"].map(|name| path.with_file_name(name));
        let json = if !path.exists() && older.iter().all(|path| path.exists()) {
            json_of_older(&older, config.as_deref())?
        } else {
            read_text(path)?
        };
        Self::from_text(json, config, &path.display().to_string())
    }

    /// The tokenizer of a model folder.
    pub fn from_dir(dir: &Path) -> Result<Self, TokenizerError> {
        Self::from_file(&dir.join("tokenizer.json"))
    }

    pub(crate) fn from_text(json: String, config: Option<String>, origin: &str) -> Result<Self, TokenizerError> {
        let invalid = |reason: String| TokenizerError::Invalid { origin: origin.to_owned(), reason };
        let value: Value = serde_json::from_str(&json).map_err(|error| invalid(error.to_string()))?;
        let ids = ids_by_token(&value).map_err(invalid)?;
        let config_value: Value = match &config {
            None => Value::Null,
            Some(text) => serde_json::from_str(text).map_err(|e| invalid(format!("tokenizer_config.json: {e}")))?,
        };
        // The crate states errors for what it does not know; should a file make it panic all the same, that is an error too.
        let read = || {
            let mut canonical = value.clone();
            tokenizers::canonicalize_value(&mut canonical).map_err(|error| error.to_string())?;
            tokenizers::from_json(&canonical.to_string()).map_err(|error| error.to_string())
        };
        let inner = catch_unwind(AssertUnwindSafe(read))
            .unwrap_or_else(|_| Err("the tokenizers library cannot read it".to_owned()))
            .map_err(invalid)?;
        let vocab_size = ids.values().max().map_or(0, |&id| id as usize + 1);
        let eos_id = eos_token(&config_value).map_or_else(
            || KNOWN_EOS.iter().find_map(|token| ids.get(*token).copied()),
            |token| ids.get(&token).copied(),
        );
        let eos_token = eos_id.and_then(|eos| ids.iter().find(|(_, id)| **id == eos).map(|(token, _)| token.clone()));
        let is_bytes = is_byte_tokenizer(&value, &ids);
        let config_json = config.unwrap_or_else(|| default_config(eos_token.as_deref()));
        let sentinels = (0..).map_while(|i| ids.get(&format!("<extra_id_{i}>")).copied()).collect();
        let special_tokens = special_tokens(&value);
        Ok(Self { inner, json, config_json, is_bytes, vocab_size, special_tokens, eos_id, sentinels })
    }

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

    /// The ids that stand for spans left out of a text, `<extra_id_0>` and so on in T5's tokenizers; none in others.
    #[must_use]
    pub fn sentinels(&self) -> &[u32] {
        &self.sentinels
    }

    /// Whether answers come in channels, as GPT-OSS gives them: see [`final_message`](crate::chat::final_message).
    #[must_use]
    pub fn has_channels(&self) -> bool {
        self.special_tokens.iter().any(|token| token == CHANNEL)
    }

    /// Whether an id is a byte.
    #[must_use]
    pub fn is_bytes(&self) -> bool {
        self.is_bytes
    }

    /// The `tokenizer.json`: what identifies the tokenizer, for caches.
    #[must_use]
    pub fn json(&self) -> &str {
        &self.json
    }

    /// The ids of a text, no special token added. Long texts are encoded on several threads, with the same result.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        if self.is_bytes {
            return Ok(text.bytes().map(u32::from).collect());
        }
        let encodings = self.inner.encode(text, &as_text()).wait().map_err(failed)?;
        Ok(encodings.iter().flat_map(|encoding| encoding.ids().iter().map(|&id| u32::from(id))).collect())
    }

    /// The ids of a text for an encoder to read: the spelling of a special token is that token, and what the tokenizer has for
    /// the ends of a text is added, such as T5's `</s>`.
    pub fn encode_source(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let options = EncodeOptions { add_special_tokens: true, encode_special_tokens: false, ..as_text() };
        let encodings = self.inner.encode(text, &options).wait().map_err(failed)?;
        Ok(encodings.iter().flat_map(|encoding| encoding.ids().iter().map(|&id| u32::from(id))).collect())
    }

    /// The ids of many texts, on several threads.
    pub fn encode_batch(&self, texts: &[&str]) -> Result<Vec<Vec<u32>>, TokenizerError> {
        if self.is_bytes {
            return texts.iter().map(|text| self.encode(text)).collect();
        }
        let encodings = self.inner.encode(texts, &as_text()).wait().map_err(failed)?;
        Ok(encodings.iter().map(|encoding| encoding.ids().iter().map(|&id| u32::from(id)).collect()).collect())
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

    /// The ids of a text in which the spelling of a special token is that token, but where [`Tokenizer::guard`] marked it.
    /// Nothing is added.
    pub fn encode_rendered(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let options = EncodeOptions { encode_special_tokens: false, ..as_text() };
        let mut ids = Vec::new();
        for part in text.split(GUARD).filter(|part| !part.is_empty()) {
            let encodings = self.inner.encode(part, &options).wait().map_err(failed)?;
            ids.extend(encodings.iter().flat_map(|encoding| encoding.ids().iter().map(|&id| u32::from(id))));
        }
        Ok(ids)
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
        self.inner.decode(ids, true).map_err(failed)
    }

    /// As [`Tokenizer::decode`], with special tokens as they are spelled.
    pub fn decode_with_special(&self, ids: &[u32]) -> Result<String, TokenizerError> {
        self.inner.decode(ids, false).map_err(failed)
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

/// Special tokens neither added nor recognised, nothing cut or padded.
fn as_text() -> EncodeOptions {
    EncodeOptions {
        add_special_tokens: false,
        encode_special_tokens: true,
        padding: Override::Off,
        truncation: Override::Off,
    }
}

fn failed(error: impl ToString) -> TokenizerError {
    TokenizerError::Failed(error.to_string())
}

fn read_text(path: &Path) -> Result<String, TokenizerError> {
    let io = |source| TokenizerError::Io { path: path.to_owned(), source };
    let metadata = fs::metadata(path).map_err(io)?;
    if !metadata.is_file() {
        return Err(io(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")));
    }
    if metadata.len() > MAX_FILE_BYTES {
        return Err(TokenizerError::TooLarge { path: path.to_owned(), bytes: metadata.len() });
    }
    fs::read_to_string(path).map_err(io)
}

/// Every token of the model and every added one, checked, before any table is made of them.
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
        // Unigram: pairs of token and score, the id is the place.
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

/// The spellings of special tokens.
fn special_tokens(value: &Value) -> Vec<String> {
    let added = value.get("added_tokens").and_then(Value::as_array).into_iter().flatten();
    let special = added.filter(|token| token.get("special").and_then(Value::as_bool) == Some(true));
    let spelled = special.filter_map(|token| Some(token.get("content")?.as_str()?.to_owned()));
    spelled.filter(|token| !token.is_empty()).collect()
}

fn eos_token(config: &Value) -> Option<String> {
    let token = config.get("eos_token")?;
    token.as_str().or_else(|| token.get("content")?.as_str()).map(str::to_owned)
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

fn pretty(value: &Value) -> String {
    format!("{value:#}\n")
}

/// The character that stands for each byte in byte-level vocabularies (GPT-2): itself if it is printable, else one from
/// U+0100 on.
fn byte_alphabet() -> Vec<char> {
    let mut next = 256;
    let stand_in = |byte: u8| {
        if matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff) {
            char::from(byte)
        } else {
            next += 1;
            char::from_u32(next - 1).unwrap_or(char::REPLACEMENT_CHARACTER)
        }
    };
    (0..=255).map(stand_in).collect()
}

/// The bytes behind `<|endoftext|>`.
fn byte_vocab(alphabet: &[char]) -> BTreeMap<String, u32> {
    let special = (END_OF_TEXT.to_owned(), 0);
    alphabet.iter().zip(1..).map(|(&c, id)| (c.to_string(), id)).chain([special]).collect()
}

/// The `tokenizer.json` of a byte-level BPE, divided into words by GPT-2's rule or not at all.
fn byte_level_json(
    vocab: &BTreeMap<String, u32>,
    merges: &[(String, String)],
    special_id: u32,
    has_words: bool,
) -> String {
    let mut by_id: Vec<(&String, &u32)> = vocab.iter().collect();
    by_id.sort_by_key(|(_, id)| **id);
    let byte_level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": has_words,
    });
    pretty(&json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [{
            "id": special_id, "content": END_OF_TEXT, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        }],
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": by_id.into_iter().map(|(token, id)| (token.clone(), Value::from(*id))).collect::<serde_json::Map<_, _>>(),
            "merges": merges,
        },
    }))
}

/// The `tokenizer.json` of a vocabulary and its merges, which are GPT-2's unless the configuration beside them says otherwise:
/// how text is divided into words is not in these files.
fn json_of_older([vocab_path, merges_path]: &[PathBuf; 2], config: Option<&str>) -> Result<String, TokenizerError> {
    let invalid = |path: &Path, reason: String| TokenizerError::Invalid { origin: path.display().to_string(), reason };
    let config: Value = config.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
    let class = config["tokenizer_class"].as_str().unwrap_or("GPT2Tokenizer");
    if !["GPT2Tokenizer", "GPT2TokenizerFast"].contains(&class) {
        return Err(invalid(
            vocab_path,
            format!("a {class} needs its tokenizer.json; this file does for GPT-2's alone"),
        ));
    }
    let vocab: BTreeMap<String, u32> =
        serde_json::from_str(&read_text(vocab_path)?).map_err(|error| invalid(vocab_path, error.to_string()))?;
    let end = vocab.get(END_OF_TEXT).copied().filter(|&id| u64::from(id) < MAX_ID);
    let end =
        end.ok_or_else(|| invalid(vocab_path, format!("it must have {END_OF_TEXT:?}, with an id below {MAX_ID}")))?;
    let text = read_text(merges_path)?;
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with("#version"));
    let merges: Option<Vec<_>> =
        lines.map(|line| line.split_once(' ').map(|(left, right)| (left.to_owned(), right.to_owned()))).collect();
    let merges = merges.ok_or_else(|| invalid(merges_path, "a line must be two tokens and a space".to_owned()))?;
    Ok(byte_level_json(&vocab, &merges, end, true))
}

/// Whether each id below 256 is that byte and nothing else decides: then encoding needs no machinery.
fn is_byte_tokenizer(value: &Value, ids: &BTreeMap<String, u32>) -> bool {
    let is_plain = ["normalizer", "post_processor"].iter().all(|part| value.get(part).is_none_or(Value::is_null));
    let model = value.get("model");
    let has_no_merges = model.and_then(|m| m.get("merges")).and_then(Value::as_array).is_some_and(Vec::is_empty);
    let vocab_len = model.and_then(|m| m.get("vocab")).and_then(Value::as_object).map(serde_json::Map::len);
    let pre = value.get("pre_tokenizer");
    let is_byte_level =
        |part: Option<&Value>| part.and_then(|p| p.get("type")).and_then(Value::as_str) == Some("ByteLevel");
    let has_no_prefix = pre.and_then(|p| p.get("add_prefix_space")) == Some(&Value::Bool(false));
    let only_special_added = value
        .get("added_tokens")
        .and_then(Value::as_array)
        .is_none_or(|added| added.iter().all(|token| token.get("special") == Some(&Value::Bool(true))));
    let is_identity = || byte_alphabet().iter().zip(0..).all(|(c, byte)| ids.get(&c.to_string()) == Some(&byte));
    is_plain
        && has_no_merges
        && vocab_len == Some(256)
        && has_no_prefix
        && only_special_added
        && is_byte_level(pre)
        && is_byte_level(value.get("decoder"))
        && is_identity()
}

/// Pieces of about [`TRAINING_PIECE`] bytes, cut behind line ends where there are any.
fn pieces(text: &str) -> impl Iterator<Item = Cow<'_, str>> + Send {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let end = rest.floor_char_boundary(TRAINING_PIECE.min(rest.len()));
        let end = if end == rest.len() { end } else { rest[..end].rfind('\n').map_or(end, |newline| newline + 1) };
        let (piece, tail) = rest.split_at(end);
        rest = tail;
        Some(Cow::Borrowed(piece))
    })
}
