//! From text to batches of tokens.
//!
//! [`Mix`] says which sources there are and how much each counts; [`Sources`] finds the files of one and reads their documents as a
//! stream; [`TokenStore`] keeps their tokens in a memory-mapped
//! cache file; [`Dataset`] cuts the tokens into training and validation windows and says which windows make up a batch.
//! Only the last of these matters while training runs, and it is a pure function of (tokens, seed, position): a resumed
//! run asks for the same position and gets the same batch, however far it is.

mod blend;
#[cfg(test)]
mod bounds_tests;
mod cache;
mod checkout;
mod csv;
mod dataset;
mod decode;
mod error;
mod foreign;
mod gzip;
mod input;
mod json;
mod mix;
mod notes;
mod order;
mod parquet;
mod repair;
mod rows;
mod search;
mod sources;
mod spans;
mod spool;
mod text;
mod watch;
mod wide;
mod windows;

pub use blend::{Blend, BlendCursor};
pub use cache::{CachePlace, TokenStore};
pub use dataset::{Batch, Dataset, DatasetOptions, IGNORE, Part, evaluation_batches};
pub use error::DataError;
pub use mix::{Mix, ReadSummary};
pub use notes::Notes;
pub use order::Permutation;
pub use sources::{Piece, Sources};
pub use spans::{SpanLengths, SpanPair, SpanRule, leave_out_spans, span_batches};
pub use spool::is_piped;
pub(crate) use spool::{STDIN, is_stdin};
pub use watch::{ReadPhase, ReadProgress, Watch};
pub use windows::{Split, Windows};

/// What the data needs of a tokenizer.
pub trait Encode: Sync {
    /// Appends the ids of `text`, with no special token added. The error says why the text cannot be encoded.
    fn encode(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), String>;

    /// The tokens that begin every document; as a rule one or none.
    fn text_start(&self) -> &[u32] {
        &[]
    }

    /// The token that ends a document, if there is one.
    fn eos(&self) -> Option<u32>;

    /// Ids are below this.
    fn vocab_size(&self) -> usize;

    /// A hash of everything that decides which ids a text gets.
    fn fingerprint(&self) -> u128;
}
