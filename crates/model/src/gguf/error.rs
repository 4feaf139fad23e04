//! What can be wrong with a GGUF file.

use std::io;
use std::path::{Path, PathBuf};

use moeworks_moe::ConfigError;

use super::blocks::GgmlType;
use super::config::supported;
use crate::instead::cut_by_bytes;
use crate::tokenizer::TokenizerError;
use crate::words::{OF_GGUF, in_words};

/// A GGUF file that cannot be used. Each kind of fault is a variant that names the file.
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
    /// The file does not begin as a GGUF file of a version that is read.
    #[error("{}: not a GGUF file of version 2 or 3: {reason}", path.display())]
    NotGguf {
        /// The file.
        path: PathBuf,
        /// What is there instead.
        reason: String,
    },
    /// The file ends before something that its header announces.
    #[error("{}: the file ends inside {what}: it is cut short{}", path.display(), rest_of_cut(path))]
    Truncated {
        /// The file.
        path: PathBuf,
        /// What was being read.
        what: String,
    },
    /// A part of a model in several files that is missing, or that is not what its name says.
    #[error("{}: {reason}", path.display())]
    Parts {
        /// The file.
        path: PathBuf,
        /// What is wrong and what would be right.
        reason: String,
    },
    /// A number or a name in the header that cannot be.
    #[error("{}: bad header: {reason}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// Elements of a type that is not read.
    #[error("{}: tensor {tensor:?}: element type {number} is not supported; these are: {}", path.display(), GgmlType::supported())]
    UnsupportedType {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The type's number.
        number: u32,
    },
    /// An architecture that is not known.
    #[error("{}: architecture {architecture:?} is not supported; these are: {}", path.display(), supported())]
    UnknownArchitecture {
        /// The file.
        path: PathBuf,
        /// What the file says.
        architecture: String,
    },
    /// A key that is missing or has another type than it must.
    #[error("{}: {key}: {reason}", path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// What is wrong and what would be right.
        reason: String,
    },
    /// A setting is out of range.
    #[error("{}: {}", path.display(), in_words(source, OF_GGUF))]
    Setting {
        /// The file.
        path: PathBuf,
        /// Which, and what would be right.
        source: ConfigError,
    },
    /// A tensor that the model needs is not there.
    #[error("{}: no tensor {tensor:?}", path.display())]
    MissingTensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A tensor has another shape than the configuration gives.
    #[error("{}: tensor {tensor:?} has shape {found:?}, but the header's keys make it {expected:?}", path.display())]
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
    /// A tensor that the configured model does not have, so that ignoring it would change the results.
    #[error("{}: tensor {tensor:?} has no place in a {architecture} model", path.display())]
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

/// What to do with a file that ends too early.
fn rest_of_cut(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let advice = cut_by_bytes(&name).unwrap_or_else(|| "download it again".to_owned());
    format!("; {advice}")
}
