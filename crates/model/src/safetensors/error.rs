//! Errors of reading safetensors files and folders of them.

use std::io;
use std::path::PathBuf;

use super::FileDType;
use crate::path_advice::weights_advice;

/// A safetensors file that cannot be used. Every variant names the file, and the tensor where there is one.
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
    #[error("{}: {len} bytes, but the header alone needs {needed}: the file is truncated, empty or not safetensors; download it again", path.display())]
    Truncated {
        /// The file.
        path: PathBuf,
        /// Its size in bytes.
        len: u64,
        /// The bytes that the header asks for.
        needed: u64,
    },
    /// The header's length is beyond the limit.
    #[error("{}: a header of {len} bytes, but at most 100 MB are allowed", path.display())]
    HeaderTooLarge {
        /// The file.
        path: PathBuf,
        /// The length given.
        len: u64,
    },
    /// The header is not JSON of the right form: not UTF-8, not an object, a duplicate name, metadata that is not
    /// text, and so on.
    #[error("{}: bad header: {reason}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// The fault.
        reason: String,
    },
    /// An unknown element type.
    #[error("{}: tensor {tensor:?}: unknown type {dtype:?}", path.display())]
    UnknownDType {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The type's name.
        dtype: String,
    },
    /// The size that follows from shape and type overflows or is not a whole number of bytes.
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
    /// The range of bytes has another size than shape and type require.
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
    /// Offsets are out of order or beyond the end of the file.
    #[error(
        "{}: tensor {tensor:?}: offsets {begin} to {end}, but the file has {data_len} bytes of data: it is truncated or damaged",
        path.display()
    )]
    OffsetsOutOfRange {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its first byte.
        begin: u64,
        /// The byte after its last.
        end: u64,
        /// The number of bytes after the header.
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
    /// Some bytes belong to no tensor.
    #[error("{}: bytes {begin} to {end} of the data belong to no tensor", path.display())]
    Hole {
        /// The file.
        path: PathBuf,
        /// The first of these bytes.
        begin: u64,
        /// The byte after the last.
        end: u64,
    },
    /// A tensor is missing.
    #[error("{}: tensor {tensor:?} is missing", path.display())]
    Missing {
        /// The file or folder.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// An element type that weights cannot have.
    #[error("{}: tensor {tensor:?} is {dtype}, but weights must be F32, BF16 or F16", path.display())]
    UnsupportedDType {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its type.
        dtype: FileDType,
    },
    /// The file has another format.
    #[error("{}: not a safetensors file: this is {what}", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// The format, and what to do.
        what: String,
    },
    /// A folder without safetensors weights.
    #[error("{}: no model.safetensors and no model.safetensors.index.json{}", path.display(), weights_advice(path))]
    NoWeights {
        /// The folder.
        path: PathBuf,
    },
    /// The index of a folder with several weight files is wrong.
    #[error("{}: {reason}", path.display())]
    Index {
        /// The index.
        path: PathBuf,
        /// The fault.
        reason: String,
    },
}
