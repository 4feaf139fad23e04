//! Errors of the data of a run.

use moeworks_infer::data::DataError;

/// An error of data that cannot be trained on. Every message is one line: the data, the problem, what would be valid.
#[derive(Debug, thiserror::Error)]
pub enum DatasetError {
    /// The data cannot be read.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The data has fewer tokens than a sequence.
    #[error(
        "{place}: {tokens} tokens, but a sequence needs {needed} (train.seq_len + 1); \
             give more data or lower train.seq_len"
    )]
    TooShort {
        /// The data.
        place: String,
        /// The actual number of tokens.
        tokens: u64,
        /// The required number of tokens.
        needed: u64,
    },
    /// Separate documents are asked for, but the tokenizer does not mark where they end.
    #[error(
        "data.separate_documents = true: the tokenizer has no token that ends a document; must be false, or another tokenizer's"
    )]
    NoSeparator,
}
