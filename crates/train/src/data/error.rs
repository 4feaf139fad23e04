//! Errors of the data of a run.

use moeworks_infer::data::DataError;

/// Data that cannot be trained on. Every message is one line: which data, what is wrong, what would be right.
#[derive(Debug, thiserror::Error)]
pub enum DatasetError {
    /// Data that cannot be read.
    #[error(transparent)]
    Data(#[from] DataError),
    /// Fewer tokens than a sequence has.
    #[error(
        "{place}: {tokens} tokens, but a sequence needs {needed} (train.seq_len + 1); \
             give more data or lower train.seq_len"
    )]
    TooShort {
        /// The data.
        place: String,
        /// Tokens that there are.
        tokens: u64,
        /// Tokens that are needed.
        needed: u64,
    },
    /// Separate documents and a tokenizer that does not mark where they end.
    #[error(
        "data.separate_documents = true: the tokenizer has no token that ends a document; must be false, or another tokenizer's"
    )]
    NoSeparator,
}
