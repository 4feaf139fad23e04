//! Errors of records of routing.

use std::io;
use std::path::{Path, PathBuf};

/// An error of writing or reading a record of routing.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The file cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The file is something else.
    #[error("{}: is no record of routing; it must begin with {:?}", path.display(), "MOEROUTE")]
    NotARecord {
        /// The file.
        path: PathBuf,
    },
    /// The file is of a later version.
    #[error("{}: is a record of routing of version {found}; this program reads version {expected}", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u16,
        /// The version that is read.
        expected: u16,
    },
    /// The header is cut, damaged or contradictory.
    #[error("{}: the header of the record {problem}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// The problem, as the end of a sentence.
        problem: String,
    },
    /// The model has no MoE layer.
    #[error("{model}: is a dense model; it has no MoE layer whose routing could be recorded")]
    Dense {
        /// The model's name.
        model: String,
    },
    /// A block cannot be written in this format.
    #[error("{what} = {value}: {expected}")]
    Block {
        /// The name of the size.
        what: &'static str,
        /// Its value.
        value: u64,
        /// The values that would be right.
        expected: String,
    },
    /// The file that is to be continued is of another model.
    #[error("{}: is the record of another model ({problem}); give another file", path.display())]
    OtherModel {
        /// The file.
        path: PathBuf,
        /// The difference.
        problem: String,
    },
    /// A Parquet file cannot be written.
    #[error("{}: {problem}", path.display())]
    Parquet {
        /// The file.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
}

impl RecordError {
    /// Returns a function that makes an error of `path` from one of the system.
    pub(super) fn io(path: &Path) -> impl Fn(io::Error) -> Self + '_ {
        move |source| Self::Io { path: path.to_owned(), source }
    }
}
