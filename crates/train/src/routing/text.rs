//! Token ids as pieces of text that can be shown.

use std::ops::Range;

use moeworks_model::{Tokenizer, TokenizerError};

/// Bytes of the longest character, and so of the tokens that may have to wait for its end.
const MAX_CHAR_BYTES: usize = 4;

/// Tokens whose text belongs together: one as a rule, several where they are the bytes of one character.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// Their text; empty for a special token.
    pub(super) text: String,
    /// Their positions.
    pub(super) tokens: Range<usize>,
}

/// Cuts `ids` into pieces of whole characters. Bytes that are no character come as U+FFFD.
pub(super) fn pieces(tokenizer: &Tokenizer, ids: &[u32]) -> Result<Vec<Piece>, TokenizerError> {
    let mut pieces: Vec<Piece> = Vec::new();
    let mut start = 0;
    for end in 1..=ids.len() {
        // Decoders may look at the token before, so that its text is decoded along and taken off again.
        let before = pieces.last().map_or(start..start, |piece| piece.tokens.clone());
        let known = tokenizer.decode(&ids[before.clone()])?;
        let text = tokenizer.decode(&ids[before.start..end])?;
        let text = text.get(known.len()..).unwrap_or_default();
        let may_go_on = text.ends_with(char::REPLACEMENT_CHARACTER) && end - start < MAX_CHAR_BYTES && end < ids.len();
        if !may_go_on {
            pieces.push(Piece { text: text.to_owned(), tokens: start..end });
            start = end;
        }
    }
    Ok(pieces)
}

/// A token by itself, for lists: blanks and control characters as signs, bytes that are no character in hexadecimal.
pub(super) fn label(tokenizer: &Tokenizer, id: u32) -> Result<String, TokenizerError> {
    let text = tokenizer.decode(&[id])?;
    Ok(match u8::try_from(id) {
        Ok(byte) if tokenizer.is_bytes() && !byte.is_ascii() => format!("0x{byte:02X}"),
        // Nothing, or a part of a character.
        _ if text.is_empty() || text.contains(char::REPLACEMENT_CHARACTER) => format!("⟨{id}⟩"),
        _ => text.chars().map(sign).collect(),
    })
}

/// What stands for a character where it would not be seen, or would turn what follows around.
fn sign(c: char) -> char {
    match c {
        ' ' => '␣',
        '\n' => '↵',
        _ => visible(c),
    }
}

/// A character that a page can show: control characters as their pictures, marks of direction as a dot. Line ends, tabs
/// and blanks stay.
pub(super) fn visible(c: char) -> char {
    match c {
        '\n' | '\t' => c,
        '\0'..='\u{1f}' => char::from_u32(0x2400 + c as u32).unwrap_or('·'),
        '\u{7f}' => '␡',
        '\u{80}'..='\u{9f}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => '·',
        _ => c,
    }
}

#[cfg(test)]
#[path = "text_tests.rs"]
mod tests;
