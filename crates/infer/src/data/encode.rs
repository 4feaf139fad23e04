//! The interface of a tokenizer for reading data.

use moeworks_model::Tokenizer;
use xxhash_rust::xxh3::xxh3_128;

/// A tokenizer for reading data.
pub trait Encode: Sync {
    /// Appends the ids of `text` without special tokens. The error says why the text cannot be encoded.
    fn encode(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), String>;

    /// Returns the tokens that begin every document, usually one or none.
    fn text_start(&self) -> &[u32] {
        &[]
    }

    /// Returns the token that ends a document, if there is one.
    fn eos(&self) -> Option<u32>;

    /// Returns the bound of the ids.
    fn vocab_size(&self) -> usize;

    /// Returns a hash of everything that determines the ids of a text.
    fn fingerprint(&self) -> u128;
}

impl Encode for Tokenizer {
    fn encode(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), String> {
        ids.extend(Self::encode(self, text).map_err(|error| error.to_string())?);
        Ok(())
    }

    fn text_start(&self) -> &[u32] {
        Self::text_start(self)
    }

    fn eos(&self) -> Option<u32> {
        self.eos_id()
    }

    fn vocab_size(&self) -> usize {
        Self::vocab_size(self)
    }

    fn fingerprint(&self) -> u128 {
        let fingerprint = xxh3_128(self.json().as_bytes());
        // Cache files from before this was added stay usable if there are no such tokens.
        let start: Vec<u8> = Self::text_start(self).iter().flat_map(|id| id.to_le_bytes()).collect();
        if start.is_empty() { fingerprint } else { fingerprint ^ xxh3_128(&start) }
    }
}
