//! The tokens of a model in the order of their bytes, so that those that begin alike are looked at once.

use moeworks_model::TokenTable;

use super::ConstraintError;

/// The tokens of a model, as constraints look at them.
#[derive(Debug)]
pub struct Vocabulary {
    bytes: Vec<u8>,
    tokens: Vec<Token>,
    table: TokenTable,
}

/// A token in the order of bytes.
#[derive(Clone, Copy, Debug)]
struct Token {
    id: u32,
    start: u32,
    len: u32,
    /// Bytes that it has in common with the token before.
    shared: u32,
}

/// A set of tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct TokenMask {
    words: Vec<u64>,
}

impl TokenMask {
    pub(super) fn contains(&self, id: usize) -> bool {
        self.words.get(id / 64).is_some_and(|word| word >> (id % 64) & 1 == 1)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.words.iter().all(|&word| word == 0)
    }

    pub(super) fn num_bytes(&self) -> usize {
        self.words.len() * 8
    }

    fn insert(&mut self, id: u32) {
        self.words[id as usize / 64] |= 1 << (id % 64);
    }
}

impl Vocabulary {
    /// Sorts the tokens of a table. Special tokens and those without bytes are never part of a constrained text.
    #[must_use]
    pub fn new(table: &TokenTable) -> Self {
        let mut order: Vec<u32> = (0..table.len() as u32).collect();
        order.retain(|&id| !table.bytes(id).is_empty() && !table.is_special(id));
        order.sort_by_key(|&id| table.bytes(id));
        let (mut bytes, mut tokens, mut before) = (Vec::new(), Vec::with_capacity(order.len()), &[][..]);
        for id in order {
            let own = table.bytes(id);
            let shared = own.iter().zip(before).take_while(|(a, b)| a == b).count();
            tokens.push(Token { id, start: bytes.len() as u32, len: own.len() as u32, shared: shared as u32 });
            bytes.extend_from_slice(own);
            before = own;
        }
        Self { bytes, tokens, table: table.clone() }
    }

    /// The bytes of a token.
    pub(super) fn token_bytes(&self, id: u32) -> &[u8] {
        self.table.bytes(id)
    }

    /// Returns whether a token is never part of a constrained text.
    pub(super) fn is_special(&self, id: u32) -> bool {
        self.table.is_special(id) || self.table.bytes(id).is_empty()
    }

    /// Finds the tokens whose bytes lead from the state `start` to some state, by the steps of `next`.
    pub(super) fn mask(
        &self,
        mut next: impl FnMut(u32, u8) -> Result<Option<u32>, ConstraintError>,
        start: u32,
    ) -> Result<TokenMask, ConstraintError> {
        let mut mask = TokenMask { words: vec![0; self.table.len().div_ceil(64)] };
        // The states behind each byte of the token at hand, the first before all; the last byte that was taken.
        let mut states = vec![start];
        for token in &self.tokens {
            let shared = token.shared as usize;
            if shared >= states.len() {
                // It begins with bytes that cannot come.
                continue;
            }
            states.truncate(shared + 1);
            let rest = &self.bytes[token.start as usize + shared..(token.start + token.len) as usize];
            let mut is_possible = true;
            for &byte in rest {
                match next(states[states.len() - 1], byte)? {
                    Some(state) => states.push(state),
                    None => {
                        is_possible = false;
                        break;
                    }
                }
            }
            if is_possible {
                mask.insert(token.id);
            }
        }
        Ok(mask)
    }
}
