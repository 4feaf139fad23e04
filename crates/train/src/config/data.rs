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
        /// Text files, folders, globs, .jsonl, .json, .csv, .parquet, also .gz and .zst; - is standard input; []: the
        /// text of this checkout. A weight after a path, such as "books=0.3", sets the proportion in which training
        /// draws from it.
        ///
        /// Paths are relative to the folder in which the program is started.
        paths: Vec<String> = Vec::new();
        /// Format of the files: auto (by names and first bytes), text, json (rows), csv or parquet.
        format: DataFormat = DataFormat::Auto;
        /// bytes, bpe (trained on the data) or the path of a tokenizer.json.
        tokenizer: TokenizerChoice = TokenizerChoice::Bytes;
        /// Vocabulary size of a tokenizer trained on the data.
        ///
        /// At least one token for each byte, and one that ends a document.
        bpe_vocab_size: usize = 8192, in Range::whole(257..=1 << 24);
        /// Separates the documents of a sequence: no token attends to another document, positions start at 0 in each,
        /// and the first token of a document is not predicted from the previous one.
        ///
        /// See [`Batch::separate_documents`](moeworks_infer::data::Batch::separate_documents).
        separate_documents: bool = false;
        /// Share of the tokens held out for validation, 0 to 0.5.
        validation_fraction: f64 = 0.05, in Range::number(0.0..=0.5);
        /// Seed that chooses the held-out tokens, independent of train.seed.
        validation_seed: u64 = 1, in Range::COUNT;
        /// Field of JSON rows and column of CSV and Parquet files that holds the text; a.b is field b within a.
        text_field: String = "text".into();
        /// Run or model whose embeddings are clustered for model.router.hash = "clustered".
        #[serde(serialize_with = "super::as_text")]
        hash_embeddings: PathBuf = PathBuf::new();
        /// Folder of tokenised data; "": moeworks in the user's cache folder.
        #[serde(serialize_with = "super::as_text")]
        cache_dir: PathBuf = PathBuf::new();
    }
}

impl RunConfig {
    /// Returns the folder of tokenised data: `data.cache_dir`, else the user's cache folder, if there is one, and
    /// then `cache` in the folder of runs.
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
    /// Returns the texts that the settings name.
    #[must_use]
    pub fn texts(&self) -> TextOptions {
        TextOptions { paths: self.paths.clone(), format: self.format, text_field: self.text_field.clone() }
    }
}

/// The tokenizer of the training text; written as `"bytes"`, `"bpe"` or a path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum TokenizerChoice {
    /// One token per byte.
    Bytes,
    /// Byte-pair encoding trained on the data.
    Bpe,
    /// The `tokenizer.json` at this path.
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
