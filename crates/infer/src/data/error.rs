//! Errors of data.

use std::io;
use std::path::PathBuf;

/// Data that cannot be used. Every message is one line: the file, the problem, and what would be right.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// The path does not exist.
    #[error("{}: no such file or folder", path.display())]
    Missing {
        /// The path.
        path: PathBuf,
    },
    /// The glob is malformed or matches nothing.
    #[error("{pattern}: {problem}")]
    Glob {
        /// The glob.
        pattern: String,
        /// The problem.
        problem: String,
    },
    /// The file or folder cannot be read.
    #[error("{}: cannot be read: {source}", path.display())]
    Unreadable {
        /// The path.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The path is a pipe, a device or a socket.
    #[error("{}: is {kind}; must be a file, a folder or a glob", path.display())]
    Special {
        /// The path.
        path: PathBuf,
        /// Its kind.
        kind: &'static str,
    },
    /// The file is empty.
    #[error("{}: is empty; must hold text", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// The beginning of the file is not text.
    #[error("{}: is binary (a NUL at byte {offset}); must be UTF-8 text, JSON lines or Parquet", path.display())]
    Binary {
        /// The file.
        path: PathBuf,
        /// The position of the first NUL, from 0, after decompression.
        offset: u64,
    },
    /// The text is not UTF-8.
    #[error("{}: not UTF-8 at byte {offset}; must be converted to UTF-8, as by iconv -f latin1 -t utf-8", path.display())]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// The position of the first wrong byte, from 0, after decompression.
        offset: u64,
    },
    /// The file is an archive or has an unsupported compression or format.
    #[error("{}: is {kind}, which is not supported; {remedy}", path.display())]
    Packed {
        /// The file.
        path: PathBuf,
        /// Its kind.
        kind: &'static str,
        /// The way to make it readable.
        remedy: &'static str,
    },
    /// The weight of a source is not valid, or other sources have none.
    #[error("--data {path}: {problem}")]
    Weight {
        /// The source as given.
        path: String,
        /// The problem.
        problem: String,
    },
    /// Reading was interrupted.
    #[error("stopped while data was read")]
    Stopped,
    /// A row of JSON or a Parquet file does not hold what it should.
    #[error("{}{place}: {problem}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// The place in the file: `:line`, or nothing.
        place: String,
        /// The problem, with what would be right.
        problem: String,
    },
    /// The file changed between the two times that it was read.
    #[error("{}: was changed while it was read; start again when it stays as it is", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
    },
    /// No text was found in the folders.
    #[error("{place}: no text found{skipped}; give text files, .jsonl or .parquet with --data")]
    NoText {
        /// The place that was searched.
        place: String,
        /// The files that were skipped, as ` (3 files skipped ...)`, or nothing.
        skipped: String,
    },
    /// The tokenizer refuses a document.
    #[error("{}: cannot be tokenised: {problem}", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// The tokenizer's reason.
        problem: String,
    },
    /// The cache file cannot be written.
    #[error("{}: tokenised data cannot be written: {source}; data.cache_dir names another folder", path.display())]
    Cache {
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
}
