//! The tokenizer as the data needs it.

use moeworks_model::Tokenizer;
use xxhash_rust::xxh3::xxh3_128;

/// A tokenizer as the data needs it.
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
        // Tokens made before anything was added stay usable where nothing is.
        let start: Vec<u8> = Self::text_start(self).iter().flat_map(|id| id.to_le_bytes()).collect();
        if start.is_empty() { fingerprint } else { fingerprint ^ xxh3_128(&start) }
    }
}
