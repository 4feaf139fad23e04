//! What can be wrong with a safetensors file or a folder of them.

use std::io;
use std::path::PathBuf;

use super::FileDType;
use crate::instead::instead_of_weights;

/// A file that is not what it should be. Each kind of fault is a variant, named with the file and the tensor.
#[derive(Debug, thiserror::Error)]
pub enum SafetensorsError {
    /// The file cannot be opened.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file ends before its header does.
    #[error("{}: {len} bytes, but the header alone needs {needed}: the file is cut short, empty or not safetensors; download it again", path.display())]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Its bytes.
        len: u64,
        /// The bytes that the header asks for.
        needed: u64,
    },
    /// The header's length is absurd.
    #[error("{}: a header of {len} bytes, but at most 100 MB are allowed", path.display())]
    HeaderTooLarge {
        /// The file.
        path: PathBuf,
        /// The length given.
        len: u64,
    },
    /// The header is not JSON of the right form: not UTF-8, no object, a name twice, metadata that is no text, and so on.
    #[error("{}: bad header: {reason}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A type that the format does not have.
    #[error("{}: tensor {tensor:?}: unknown type {dtype:?}", path.display())]
    UnknownDType {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The type's name.
        dtype: String,
    },
    /// Shape times type overflows or is no whole number of bytes.
    #[error("{}: tensor {tensor:?}: {dtype} of shape {shape:?} has no size in whole bytes below 2^63", path.display())]
    Size {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: FileDType,
        /// Its shape.
        shape: Vec<u64>,
    },
    /// The range of bytes does not have the size that shape and type give.
    #[error("{}: tensor {tensor:?}: shape and type need {expected} bytes, its offsets span {found}", path.display())]
    SizeMismatch {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The bytes needed.
        expected: u64,
        /// The bytes between the offsets.
        found: u64,
    },
    /// Offsets that are not in order or beyond the end of the file.
    #[error(
        "{}: tensor {tensor:?}: offsets {begin} to {end}, but the file has {data_len} bytes of data: it is cut short or damaged",
        path.display()
    )]
    OffsetsOutOfRange {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its first byte.
        begin: u64,
        /// The byte behind its last.
        end: u64,
        /// Bytes behind the header.
        data_len: u64,
    },
    /// Two tensors share bytes.
    #[error("{}: tensors {first:?} and {second:?} overlap", path.display())]
    Overlap {
        /// The file.
        path: PathBuf,
        /// One tensor.
        first: String,
        /// The other.
        second: String,
    },
    /// Bytes that belong to no tensor.
    #[error("{}: bytes {begin} to {end} of the data belong to no tensor", path.display())]
    Hole {
        /// The file.
        path: PathBuf,
        /// The first of them.
        begin: u64,
        /// The one behind the last.
        end: u64,
    },
    /// A tensor that is not there.
    #[error("{}: no tensor {tensor:?}", path.display())]
    Missing {
        /// The file or folder.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A type that cannot be used here.
    #[error("{}: tensor {tensor:?} is {dtype}, but weights must be F32, BF16 or F16", path.display())]
    UnsupportedDType {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: FileDType,
    },
    /// Another kind of file.
    #[error("{}: not a safetensors file: this is {what}", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What it is, and what to do.
        what: String,
    },
    /// A folder without weights that can be read.
    #[error("{}: no model.safetensors and no model.safetensors.index.json{}", path.display(), instead_of_weights(path))]
    NoWeights {
        /// The folder.
        path: PathBuf,
    },
    /// The index of a folder in parts is wrong.
    #[error("{}: {reason}", path.display())]
    Index {
        /// The index.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
}
