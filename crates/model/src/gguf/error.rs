//! Errors of reading GGUF files.

use std::io;
use std::path::{Path, PathBuf};

use moeworks_moe::ConfigError;

use super::blocks::GgmlType;
use super::config::supported;
use crate::key_names::{OF_GGUF, with_file_keys};
use crate::path_advice::split_file_advice;
use crate::tokenizer::TokenizerError;

/// A GGUF file that cannot be used. Every variant names the file.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    /// The file cannot be opened.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file does not begin like a GGUF file of a supported version.
    #[error("{}: not a GGUF file of version 2 or 3: {reason}", path.display())]
    NotGguf {
        /// The file.
        path: PathBuf,
        /// The content found instead.
        reason: String,
    },
    /// The file ends before its header says so.
    #[error("{}: truncated inside {what}{}", path.display(), rest_of_cut(path))]
    Truncated {
        /// The file.
        path: PathBuf,
        /// The part that was being read.
        what: String,
    },
    /// A part of a model in several files is missing, or does not match its name.
    #[error("{}: {reason}", path.display())]
    Parts {
        /// The file.
        path: PathBuf,
        /// The fault, and what would be right.
        reason: String,
    },
    /// The header has an invalid number or name.
    #[error("{}: bad header: {reason}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// The fault.
        reason: String,
    },
    /// A tensor has an unsupported element type.
    #[error("{}: tensor {tensor:?}: element type {number} is not supported; supported are: {}", path.display(), GgmlType::supported())]
    UnsupportedType {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The type's number.
        number: u32,
    },
    /// An unsupported architecture.
    #[error("{}: architecture {architecture:?} is not supported; supported are: {}", path.display(), supported())]
    UnknownArchitecture {
        /// The file.
        path: PathBuf,
        /// The architecture of the file.
        architecture: String,
    },
    /// A key is missing, or its value is of another type or out of range.
    #[error("{}: {key}: {reason}", path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// The fault, and what would be right.
        reason: String,
    },
    /// A setting is out of range.
    #[error("{}: {}", path.display(), with_file_keys(source, OF_GGUF))]
    Setting {
        /// The file.
        path: PathBuf,
        /// The setting, and what would be right.
        source: ConfigError,
    },
    /// A tensor that the model needs is missing.
    #[error("{}: tensor {tensor:?} is missing", path.display())]
    MissingTensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A tensor has another shape than the configuration implies.
    #[error("{}: tensor {tensor:?} has shape {found:?}, but the header's keys imply {expected:?}", path.display())]
    WrongShape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its shape, outermost first.
        found: Vec<usize>,
        /// The shape it should have.
        expected: Vec<usize>,
    },
    /// A tensor that the configured model does not have; to ignore it would change the results.
    #[error("{}: unexpected tensor {tensor:?} for architecture {architecture}", path.display())]
    UnexpectedTensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The architecture.
        architecture: String,
    },
    /// The tokenizer cannot be used.
    #[error("{}: {source}", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// Why.
        source: TokenizerError,
    },
}

/// Returns advice for a file that ends too early.
fn rest_of_cut(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let advice = split_file_advice(&name).unwrap_or_else(|| "download it again".to_owned());
    format!("; {advice}")
}
