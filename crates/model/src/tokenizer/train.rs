//! Training of byte-level BPE.

use std::borrow::Cow;
use std::collections::BTreeMap;

use regex_automata::Span;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::{AddedToken, Trainer};

use super::byte_level::{byte_alphabet, byte_level_json};
use super::division::word_pattern;
use super::{END_OF_TEXT, Tokenizer, TokenizerError, failed};

/// The size in bytes of the pieces in which the trainer counts words.
const TRAINING_PIECE: usize = 1 << 16;

impl Tokenizer {
    /// Trains byte-level BPE with `vocab_size` tokens on `texts`: `<|endoftext|>` (id 0), the 256 bytes, then merges,
    /// the most frequent pair first and the lowest ids first among equals, so that the same texts give the same
    /// tokenizer. The result has fewer tokens if no pair that occurs twice is left.
    pub fn train_bpe(texts: &[&str], vocab_size: usize) -> Result<Self, TokenizerError> {
        if vocab_size < 257 {
            return Err(TokenizerError::VocabularyTooSmall { vocab_size });
        }
        let alphabet = byte_alphabet();
        let mut trainer = BpeTrainer::builder()
            .show_progress(false)
            .vocab_size(vocab_size)
            .min_frequency(2)
            .special_tokens(vec![AddedToken::from(END_OF_TEXT, true)])
            .initial_alphabet(alphabet.iter().copied().collect())
            .build();
        let words = word_pattern().map_err(failed)?;
        let split = |text: &str| {
            let spelled =
                |span: Span| text[span.start..span.end].bytes().map(|byte| alphabet[usize::from(byte)]).collect();
            Ok(words.find_all(text)?.into_iter().map(spelled).collect())
        };
        trainer.feed(texts.iter().flat_map(|text| pieces(text)), split).map_err(failed)?;
        let mut model = BPE::default();
        trainer.train(&mut model).map_err(failed)?;
        let vocab: BTreeMap<String, u32> = model.get_vocab().into_iter().collect();
        let merges = serde_json::to_value(&model).map_err(failed)?["merges"].take();
        Self::from_text(byte_level_json(&vocab, &merges, 0, true), None, "the trained BPE")
    }
}

/// Splits a text into pieces of about [`TRAINING_PIECE`] bytes, after line ends where possible.
fn pieces(text: &str) -> impl Iterator<Item = Cow<'_, str>> + Send {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let end = rest.floor_char_boundary(TRAINING_PIECE.min(rest.len()));
        let end = if end == rest.len() { end } else { rest[..end].rfind('\n').map_or(end, |newline| newline + 1) };
        let (piece, tail) = rest.split_at(end);
        rest = tail;
        Some(Cow::Borrowed(piece))
    })
}
