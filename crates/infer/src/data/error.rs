//! Errors of data.

use std::io;
use std::path::PathBuf;

/// Data that cannot be used. Every message is one line: which file, what is wrong, what would be right.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// A path that does not exist.
    #[error("{}: no such file or folder", path.display())]
    Missing {
        /// The path.
        path: PathBuf,
    },
    /// A glob that is malformed or matches nothing.
    #[error("{pattern}: {problem}")]
    Glob {
        /// The glob.
        pattern: String,
        /// The fault.
        problem: String,
    },
    /// A file or folder that cannot be read.
    #[error("{}: cannot be read: {source}", path.display())]
    Unreadable {
        /// The path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A pipe, a device or a socket.
    #[error("{}: is {kind}; must be a file, a folder or a glob", path.display())]
    Special {
        /// The path.
        path: PathBuf,
        /// Its kind.
        kind: &'static str,
    },
    /// A file without a byte.
    #[error("{}: is empty; must hold text", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// A file whose beginning is no text.
    #[error("{}: is binary (a NUL at byte {offset}); must be UTF-8 text, JSON lines or Parquet", path.display())]
    Binary {
        /// The file.
        path: PathBuf,
        /// The place of the first NUL, from 0, after decompression.
        offset: u64,
    },
    /// Text that is not UTF-8.
    #[error("{}: not UTF-8 at byte {offset}; must be converted to UTF-8, as by iconv -f latin1 -t utf-8", path.display())]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// The place of the first wrong byte, from 0, after decompression.
        offset: u64,
    },
    /// An archive, a compression or another format that is not read.
    #[error("{}: is {kind}, which is not read; {remedy}", path.display())]
    Packed {
        /// The file.
        path: PathBuf,
        /// Its kind.
        kind: &'static str,
        /// The way to make it readable.
        remedy: &'static str,
    },
    /// A weight that is none, or that other sources lack.
    #[error("--data {path}: {problem}")]
    Weight {
        /// The source as given.
        path: String,
        /// The fault.
        problem: String,
    },
    /// Reading was asked to stop.
    #[error("stopped while data was read")]
    Stopped,
    /// A JSON line or a Parquet file that does not hold what it should.
    #[error("{}{place}: {problem}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// The place in the file: `:line`, or nothing.
        place: String,
        /// The fault and what would be right.
        problem: String,
    },
    /// A file that changed between the two times that it was read.
    #[error("{}: was changed while it was read; start again when it stays as it is", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// Folders in which no text was found.
    #[error("{place}: no text found{skipped}; give text files, .jsonl or .parquet with --data")]
    NoText {
        /// The place where it was looked for.
        place: String,
        /// The files that were passed over, as ` (3 files skipped ...)`, or nothing.
        skipped: String,
    },
    /// A tokenizer without the tokens that a model with an encoder is trained by.
    #[error("the tokenizer has no {missing}: it must be T5's")]
    NoSpans {
        /// The tokens that it lacks.
        missing: &'static str,
    },
    /// A document that the tokenizer refuses.
    #[error("{}: cannot be tokenised: {problem}", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// The tokenizer's reason.
        problem: String,
    },
    /// A cache file that cannot be written.
    #[error("{}: tokenised data cannot be written: {source}; data.cache_dir names another folder", path.display())]
    Cache {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}
