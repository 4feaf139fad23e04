//! Errors of reading and writing model folders.

use std::fmt;
use std::io;
use std::path::PathBuf;

use moeworks_moe::ConfigError;
use moeworks_tensor::BLOCK_LEN;

use super::family::supported;
use crate::key_names::{OF_CONFIG_JSON, with_file_keys};
use crate::safetensors::SafetensorsError;
use crate::tokenizer::TokenizerError;

/// A folder that cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A file cannot be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// `config.json` is not JSON or lacks a key, or a key has another type than it must.
    #[error("{}: {reason}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// The fault, and what would be right.
        reason: String,
    },
    /// A setting is out of range.
    #[error("{}: {}", path.display(), with_file_keys(source, OF_CONFIG_JSON))]
    Setting {
        /// The file.
        path: PathBuf,
        /// The setting, and what would be right.
        source: ConfigError,
    },
    /// An unsupported model family.
    #[error("{}: model_type {model_type:?} is not supported; supported are: {}", path.display(), supported())]
    UnknownFamily {
        /// The file.
        path: PathBuf,
        /// The `model_type` of the file.
        model_type: String,
    },
    /// The weights' files are damaged, or a tensor is missing or of an unsupported type.
    #[error(transparent)]
    Safetensors(#[from] SafetensorsError),
    /// A tensor has another shape than the configuration gives.
    #[error("{}: tensor {tensor:?} has shape {found:?}, but config.json implies {expected:?}", path.display())]
    WrongShape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its shape.
        found: Vec<usize>,
        /// The shape it should have.
        expected: Vec<usize>,
    },
    /// The length of rows is not a multiple of the block length.
    #[error("{}: tensor {tensor:?} has rows of {cols} values, not a multiple of the block length {BLOCK_LEN}", path.display())]
    PartOfBlock {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The length of its rows by the configuration.
        cols: usize,
    },
    /// A tensor that the configured model does not have; to ignore it would change the results.
    #[error("{}: unexpected tensor {tensor:?} for model_type {model_type}", path.display())]
    UnexpectedTensor {
        /// The folder.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The family.
        model_type: &'static str,
    },
}

/// A folder that cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// A file or the folder cannot be written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// No matrix can be written in the blocks that were asked for.
    #[error(
        "{}: no matrix can be quantized: rows must be whole blocks of {BLOCK_LEN} weights, and experts are meant only where \
         there are some",
        path.display()
    )]
    NoBlocks {
        /// The folder.
        path: PathBuf,
    },
    /// A number is too large for the type to write. Nothing was written.
    #[error("{}: {misfit}", path.display())]
    DoesNotFit {
        /// The folder.
        path: PathBuf,
        /// The number.
        misfit: DoesNotFit,
    },
    /// The folder that the model came from cannot be read again.
    #[error(transparent)]
    Origin(#[from] LoadError),
    /// The tokenizer cannot be written.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// A number that is too large for the type to write.
#[derive(Clone, Debug, PartialEq)]
pub struct DoesNotFit {
    /// The tensor's name on disk; of matrices in blocks, our name.
    pub tensor: String,
    /// The first such number.
    pub value: f32,
    /// Its index, outermost dim first.
    pub place: Vec<usize>,
    /// The type to write.
    pub dtype: String,
}

impl fmt::Display for DoesNotFit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tensor, value, place, dtype } = self;
        if value.is_finite() {
            let advice = "nothing was written; choose a wider type, or --clamp to write the nearest number that fits";
            return write!(f, "tensor {tensor:?}: {value:e} at {place:?} does not fit {dtype}: {advice}");
        }
        write!(f, "tensor {tensor:?}: {value} at {place:?} cannot be quantized to {dtype}; nothing was written")
    }
}
