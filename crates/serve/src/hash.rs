//! Hashes that name the content of a block of keys and values.

/// A 256-bit hash of a block's tokens and of all that its keys and values depend on: the tokens before, the adapter
/// and the salt.
///
/// BLAKE3, so that nobody can make two prompts with the same hash (as was possible with 64-bit hashes,
/// CVE-2025-25183).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash([u8; 32]);

impl BlockHash {
    /// Returns the hash before the first block of a sequence. Sequences with different salts or adapters share no
    /// block.
    #[must_use]
    pub fn root(salt: &[u8], adapter: Option<u32>) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&adapter.map_or(u64::MAX, u64::from).to_le_bytes());
        hasher.update(salt);
        Self(*hasher.finalize().as_bytes())
    }

    /// Returns the hash of a full block with `tokens` that follows the block or root of this hash.
    #[must_use]
    pub fn of_next(&self, tokens: &[u32]) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.0);
        for token in tokens {
            hasher.update(&token.to_le_bytes());
        }
        Self(*hasher.finalize().as_bytes())
    }
}
