//! From text to batches of tokens.
//!
//! [`Sources`] finds files and reads their documents as a stream; [`TokenStore`] keeps their tokens in a memory-mapped
//! cache file; [`Dataset`] cuts the tokens into training and validation windows and says which windows make up a batch.
//! Only the last of these matters while training runs, and it is a pure function of (tokens, seed, position): a resumed
//! run asks for the same position and gets the same batch, however far it is.

#[cfg(test)]
mod bounds_tests;
mod cache;
mod checkout;
mod dataset;
mod decode;
mod error;
mod jsonl;
mod order;
mod parquet;
mod sources;
mod spans;
mod text;
mod windows;

pub use cache::{CachePlace, TokenStore};
pub use dataset::{Batch, Dataset, DatasetOptions, IGNORE, evaluation_batches};
pub use error::DataError;
pub use order::Permutation;
pub use sources::{Piece, Sources};
pub use spans::{SpanLengths, SpanPair, SpanRule, leave_out_spans, span_batches};
pub use windows::{Split, Windows};

/// What the data needs of a tokenizer.
pub trait Encode: Sync {
    /// Appends the ids of `text`, with no special token added. The error says why the text cannot be encoded.
    fn encode(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), String>;

    /// The token that ends a document, if there is one.
    fn eos(&self) -> Option<u32>;

    /// Ids are below this.
    fn vocab_size(&self) -> usize;

    /// A hash of everything that decides which ids a text gets.
    fn fingerprint(&self) -> u128;
}
