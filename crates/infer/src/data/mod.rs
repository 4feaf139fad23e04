//! Reading of text and its tokens.
//!
//! [`Sources`] finds files and reads their documents as a stream. [`TokenStore`] keeps their tokens in a
//! memory-mapped cache file. [`evaluation_batches`] and [`span_batches`] iterate over all of them in order. The
//! training crate adds random order, windows and mixtures of several sources.

mod batch;
#[cfg(test)]
mod bounds_tests;
mod cache;
mod checkout;
mod csv;
mod decode;
mod encode;
mod error;
mod foreign;
mod gzip;
mod input;
mod json;
mod notes;
mod options;
mod parquet;
mod repair;
mod rows;
mod search;
mod sources;
mod spans;
mod spool;
mod summary;
mod text;
mod watch;
mod weighted;
mod wide;

pub use batch::{Batch, IGNORE, evaluation_batches};
pub use cache::{CachePlace, TokenStore};
pub use encode::Encode;
pub use error::DataError;
pub use notes::Notes;
pub use options::{DataFormat, TextOptions};
pub use sources::{Piece, Sources};
pub use spans::{SpanLengths, SpanPair, SpanRule, SpanTokensError, leave_out_spans, span_batches};
pub use spool::{STDIN, is_piped, is_stdin};
pub use summary::ReadSummary;
pub use watch::{ReadPhase, ReadProgress, Watch};
pub use weighted::WeightedPath;
