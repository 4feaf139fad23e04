//! The bytes that single tokens stand for.

use std::collections::HashMap;

use serde_json::Value;

use super::Tokenizer;
use super::byte_level::byte_alphabet;

/// The character that stands for a blank in SentencePiece's vocabularies.
const BLANK: char = '\u{2581}';

/// The bytes that each token of a vocabulary stands for. A token may be a part of a character, so that its bytes are
/// no text.
///
/// Special tokens have the bytes of their spelling.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenTable {
    tokens: Vec<TokenBytes>,
}

/// The bytes of a token.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenBytes {
    /// The bytes; none where the vocabulary has no such token.
    pub bytes: Box<[u8]>,
    /// Says whether it is a special token, which no text spells.
    pub is_special: bool,
}

/// The way in which a vocabulary spells bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Spelling {
    /// A character for each byte (GPT-2).
    ByteLevel,
    /// A sign for blanks, and `<0xE2>` for single bytes (SentencePiece).
    SentencePiece,
    /// Plain text.
    Plain,
}

impl TokenTable {
    /// Number of tokens.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Returns whether there is no token.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// The bytes of token `id`; none for an id that is not in the vocabulary.
    #[must_use]
    pub fn bytes(&self, id: u32) -> &[u8] {
        self.tokens.get(id as usize).map_or(&[], |token| &token.bytes)
    }

    /// Returns whether token `id` is a special one.
    #[must_use]
    pub fn is_special(&self, id: u32) -> bool {
        self.tokens.get(id as usize).is_some_and(|token| token.is_special)
    }

    /// The tokens in the order of their ids.
    pub fn iter(&self) -> impl Iterator<Item = &TokenBytes> {
        self.tokens.iter()
    }
}

impl FromIterator<TokenBytes> for TokenTable {
    fn from_iter<I: IntoIterator<Item = TokenBytes>>(tokens: I) -> Self {
        Self { tokens: tokens.into_iter().collect() }
    }
}

impl Tokenizer {
    /// Makes the table of the bytes of all tokens. It takes a while where the vocabulary is large.
    #[must_use]
    pub fn token_table(&self) -> TokenTable {
        let value: Value = serde_json::from_str(self.json()).unwrap_or_default();
        let spelling = Spelling::of_tokenizer(&value);
        let alphabet = byte_alphabet().into_iter().zip(0..=255).collect();
        let mut tokens = vec![TokenBytes::default(); self.vocab_size()];
        let mut set = |id: u64, token: TokenBytes| {
            if let Some(place) = usize::try_from(id).ok().and_then(|id| tokens.get_mut(id)) {
                *place = token;
            }
        };
        let vocab = &value["model"]["vocab"];
        for (token, id) in vocab.as_object().into_iter().flatten() {
            let bytes = spelling.bytes(token, &alphabet);
            set(id.as_u64().unwrap_or(u64::MAX), TokenBytes { bytes, is_special: false });
        }
        for (id, entry) in vocab.as_array().into_iter().flatten().enumerate() {
            let bytes = spelling.bytes(entry[0].as_str().unwrap_or_default(), &alphabet);
            set(id as u64, TokenBytes { bytes, is_special: false });
        }
        for added in value["added_tokens"].as_array().into_iter().flatten() {
            let bytes = added["content"].as_str().unwrap_or_default().as_bytes().into();
            let is_special = added["special"] == Value::Bool(true);
            set(added["id"].as_u64().unwrap_or(u64::MAX), TokenBytes { bytes, is_special });
        }
        TokenTable { tokens }
    }
}

impl Spelling {
    fn of_tokenizer(value: &Value) -> Self {
        let (decoder, division) = (&value["decoder"], &value["pre_tokenizer"]);
        let has = |kind: &str| has_type(decoder, kind) || has_type(division, kind);
        if has("ByteLevel") {
            Self::ByteLevel
        } else if has("ByteFallback") || has("Metaspace") || value["model"]["type"] == "Unigram" {
            Self::SentencePiece
        } else {
            Self::Plain
        }
    }

    fn bytes(self, token: &str, alphabet: &HashMap<char, u8>) -> Box<[u8]> {
        let of_alphabet = || token.chars().map(|c| alphabet.get(&c).copied()).collect::<Option<Box<[u8]>>>();
        let single = || u8::from_str_radix(token.strip_prefix("<0x")?.strip_suffix('>')?, 16).ok();
        let bytes = match self {
            Self::ByteLevel => of_alphabet(),
            Self::SentencePiece => single().map(|byte| [byte].into()),
            Self::Plain => None,
        };
        bytes.unwrap_or_else(|| match self {
            Self::SentencePiece => token.replace(BLANK, " ").into_bytes().into(),
            _ => token.as_bytes().into(),
        })
    }
}

/// Returns whether a part of a `tokenizer.json`, or one inside of it, is of this type.
fn has_type(part: &Value, kind: &str) -> bool {
    let inner = ["decoders", "pretokenizers"].iter().filter_map(|name| part.get(name)?.as_array()).flatten();
    part.get("type").is_some_and(|own| own == kind) || inner.into_iter().any(|part| has_type(part, kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(json: &Value) -> Vec<Box<[u8]>> {
        let (spelling, alphabet) = (Spelling::of_tokenizer(json), byte_alphabet().into_iter().zip(0..=255).collect());
        let vocab = json["model"]["vocab"].as_array().unwrap();
        vocab.iter().map(|token| spelling.bytes(token.as_str().unwrap(), &alphabet)).collect()
    }

    #[test]
    fn tokens_of_byte_level_and_sentence_piece_vocabularies_are_their_bytes() {
        let levels = serde_json::json!({"decoder": {"type": "Sequence", "decoders": [{"type": "ByteLevel"}]},
                                        "model": {"vocab": ["Ġa", "Ã", "©", "Ċ"]}});
        assert_eq!(texts(&levels), [b" a"[..].into(), b"\xc3"[..].into(), b"\xa9"[..].into(), b"\n"[..].into()]);
        let pieces = serde_json::json!({"decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]},
                                        "model": {"vocab": ["\u{2581}a", "<0xC3>", "é"]}});
        assert_eq!(texts(&pieces), [b" a"[..].into(), b"\xc3"[..].into(), "é".as_bytes().into()]);
        let table = Tokenizer::bytes().token_table();
        assert_eq!((table.len(), table.bytes(200), table.bytes(999)), (257, &[200][..], &[][..]));
        assert!(table.is_special(256) && !table.is_special(97));
    }
}
