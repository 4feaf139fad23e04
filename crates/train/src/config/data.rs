//! The settings of training text and its tokenizer.

use std::path::{Path, PathBuf};

use moeworks_infer::data::{CachePlace, DataFormat, TextOptions};
use moeworks_moe::{Range, settings};
use serde::{Deserialize, Serialize};

use super::RunConfig;

settings! {
    /// Training text and its tokenizer.
    #[serde(deny_unknown_fields, default)]
    pub struct DataConfig in "data." {
        /// Text files, folders, globs, .jsonl, .json, .csv, .parquet, also .gz and .zst; - is standard input; []: the text of this
        /// checkout. A weight behind each, such as "books=0.3", says in what proportion training draws from them.
        ///
        /// Paths are relative to the folder that the program is started in.
        paths: Vec<String> = Vec::new();
        /// auto: by names and first bytes; or text, json (rows), csv or parquet for all files.
        format: DataFormat = DataFormat::Auto;
        /// bytes, bpe (trained on the data) or the path of a tokenizer.json.
        tokenizer: TokenizerChoice = TokenizerChoice::Bytes;
        /// Tokens of a tokenizer trained on the data.
        ///
        /// At least one for each byte and one that ends a document.
        bpe_vocab_size: usize = 8192, in Range::whole(257..=1 << 24);
        /// Whether the documents of a sequence are separate: no token sees another document, positions begin at 0 in each, and
        /// the first token of a document is not predicted from the one before.
        ///
        /// See [`Batch::separate_documents`](moeworks_infer::data::Batch::separate_documents).
        separate_documents: bool = false;
        /// Share of the tokens held out for validation, 0 to 0.5.
        validation_fraction: f64 = 0.05, in Range::number(0.0..=0.5);
        /// Seed that chooses the held-out tokens, independent of train.seed.
        ///
        /// It alone chooses them for a text and a sequence length: the seed of training has no part in it.
        validation_seed: u64 = 1, in Range::COUNT;
        /// Field of JSON rows and column of CSV and Parquet files that holds the text; a.b is field b within a.
        text_field: String = "text".into();
        /// Run or model whose embeddings model.router.hash = "clustered" clusters.
        #[serde(serialize_with = "super::as_text")]
        hash_embeddings: PathBuf = PathBuf::new();
        /// Folder of tokenised data; "": moeworks in the user's cache folder.
        #[serde(serialize_with = "super::as_text")]
        cache_dir: PathBuf = PathBuf::new();
    }
}

impl RunConfig {
    /// The folders for tokenised data: `data.cache_dir`, or else the user's, if there is one, and then `cache` in the folder of runs.
    #[must_use]
    pub fn cache_place(&self, user: Option<&Path>) -> CachePlace {
        let folder = &self.data.cache_dir;
        if folder.as_os_str().is_empty() {
            CachePlace::from_user(user, self.run.out.join("cache"))
        } else {
            CachePlace::from_folder(folder)
        }
    }
}

impl DataConfig {
    /// The texts that the settings name.
    #[must_use]
    pub fn texts(&self) -> TextOptions {
        TextOptions { paths: self.paths.clone(), format: self.format, text_field: self.text_field.clone() }
    }
}

/// How text becomes tokens; written as `"bytes"`, `"bpe"` or a path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum TokenizerChoice {
    /// A token for each byte.
    Bytes,
    /// Byte-pair encoding trained on the data.
    Bpe,
    /// A `tokenizer.json`.
    File(String),
}

impl From<String> for TokenizerChoice {
    fn from(text: String) -> Self {
        match text.as_str() {
            "bytes" => Self::Bytes,
            "bpe" => Self::Bpe,
            _ => Self::File(text),
        }
    }
}

impl From<TokenizerChoice> for String {
    fn from(choice: TokenizerChoice) -> Self {
        match choice {
            TokenizerChoice::Bytes => "bytes".into(),
            TokenizerChoice::Bpe => "bpe".into(),
            TokenizerChoice::File(path) => path,
        }
    }
}
