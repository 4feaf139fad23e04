//! What can go wrong with a model folder.

use std::fmt;
use std::io;
use std::path::PathBuf;

use moeworks_moe::ConfigError;
use moeworks_tensor::BLOCK_LEN;

use super::family::supported;
use crate::safetensors::SafetensorsError;
use crate::tokenizer::TokenizerError;
use crate::words::{OF_CONFIG_JSON, in_words};

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
        /// What is wrong and what would be right.
        reason: String,
    },
    /// A setting is out of range.
    #[error("{}: {}", path.display(), in_words(source, OF_CONFIG_JSON))]
    Setting {
        /// The file.
        path: PathBuf,
        /// Which, and what would be right.
        source: ConfigError,
    },
    /// A model family that is not known.
    #[error("{}: model_type {model_type:?} is not supported; these are: {}", path.display(), supported())]
    UnknownFamily {
        /// The file.
        path: PathBuf,
        /// The family.
        model_type: String,
    },
    /// The weights' files are damaged, or a tensor is missing or of a type that cannot be used.
    #[error(transparent)]
    Safetensors(#[from] SafetensorsError),
    /// A tensor has another shape than the configuration gives.
    #[error("{}: tensor {tensor:?} has shape {found:?}, but config.json makes it {expected:?}", path.display())]
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
    /// Blocks that hold more than a row, or not all of it.
    #[error("{}: tensor {tensor:?} has rows of {cols} values, but blocks of {BLOCK_LEN} make only multiples of that", path.display())]
    PartOfBlock {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The length of its rows by the configuration.
        cols: usize,
    },
    /// A tensor that the configured model does not have, so that ignoring it would change the results.
    #[error("{}: tensor {tensor:?} has no place in a {model_type} model", path.display())]
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
    /// Matrices were to be written in blocks, but none can be.
    #[error(
        "{}: no matrix can be quantized: rows must be whole blocks of {BLOCK_LEN} weights, and experts are meant only where \
         there are some",
        path.display()
    )]
    NoBlocks {
        /// The folder.
        path: PathBuf,
    },
    /// A number that is too large for the type that it was to be written in. Nothing was written.
    #[error("{}: {misfit}", path.display())]
    DoesNotFit {
        /// The folder.
        path: PathBuf,
        /// Which number.
        misfit: DoesNotFit,
    },
    /// The folder that the model came from cannot be read again.
    #[error(transparent)]
    Origin(#[from] LoadError),
    /// The tokenizer cannot be written.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}

/// A number that is too large for the type that it was to be written in.
#[derive(Clone, Debug, PartialEq)]
pub struct DoesNotFit {
    /// The tensor's name, on disk or, of matrices in blocks, ours.
    pub tensor: String,
    /// The first such number.
    pub value: f32,
    /// Where it is, outermost dim first.
    pub place: Vec<usize>,
    /// The type.
    pub dtype: String,
}

impl fmt::Display for DoesNotFit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tensor, value, place, dtype } = self;
        if value.is_finite() {
            let advice = "nothing was written; choose a wider type, or --clamp to write the nearest number that fits";
            return write!(f, "tensor {tensor:?}: {value:e} at {place:?} does not fit {dtype}: {advice}");
        }
        write!(f, "tensor {tensor:?}: {value} at {place:?} cannot be in blocks of {dtype}; nothing was written")
    }
}
