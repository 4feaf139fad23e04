//! Where text comes from and how it becomes tokens, as settings.

use std::path::PathBuf;

use moeworks_infer::data::{CachePlace, DataFormat, TextOptions};
use serde::{Deserialize, Serialize};

use super::RunConfig;

/// Where text comes from and how it becomes tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DataConfig {
    /// Files, folders and globs, relative to the folder that the program is started in, and `-` for standard input; empty for the
    /// text of the checkout that the program stands in. With a weight behind each, such as `books=0.3`, training draws from them in
    /// proportion.
    pub paths: Vec<String>,
    /// How files hold documents.
    pub format: DataFormat,
    /// How text becomes tokens.
    pub tokenizer: TokenizerChoice,
    /// Tokens of a tokenizer that is trained on the data (`tokenizer = "bpe"`).
    pub bpe_vocab_size: usize,
    /// Share of the tokens held out for validation, 0 to 0.5.
    pub validation_fraction: f64,
    /// Which tokens those are: the same text and sequence length give the same ones whatever the seed of training is.
    pub validation_seed: u64,
    /// Field of a JSON line and column of a Parquet file that holds the text.
    pub text_field: String,
    /// The run or model folder whose embeddings `router.hash = "clustered"` clusters; empty for none.
    #[serde(serialize_with = "super::as_text")]
    pub hash_embeddings: PathBuf,
    /// Folder of tokenised data; empty for the user's cache folder.
    #[serde(serialize_with = "super::as_text")]
    pub cache_dir: PathBuf,
}

impl Default for DataConfig {
    fn default() -> Self {
        Self {
            paths: Vec::new(),
            format: DataFormat::Auto,
            tokenizer: TokenizerChoice::Bytes,
            bpe_vocab_size: 8192,
            validation_fraction: 0.05,
            validation_seed: 1,
            text_field: "text".into(),
            hash_embeddings: PathBuf::new(),
            cache_dir: PathBuf::new(),
        }
    }
}

impl RunConfig {
    /// The folders for tokenised data: `data.cache_dir`, or else those of the user and then `cache` in the folder of runs.
    #[must_use]
    pub fn cache_place(&self) -> CachePlace {
        let folder = &self.data.cache_dir;
        if folder.as_os_str().is_empty() {
            CachePlace::of_user(self.run.out.join("cache"))
        } else {
            CachePlace::at(folder)
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
