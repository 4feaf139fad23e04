//! Token ids as pieces of text that can be shown.

use std::ops::Range;

use moeworks_infer::generation::TextStream;
use moeworks_model::{Tokenizer, TokenizerError};

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
    let (mut pieces, mut stream, mut start) = (Vec::new(), TextStream::new(tokenizer), 0);
    let mut text = String::new();
    for (at, &id) in ids.iter().enumerate() {
        text += &stream.push(id)?;
        let end = at + 1 - stream.num_pending();
        if end > start {
            pieces.push(Piece { text: std::mem::take(&mut text), tokens: start..end });
            start = end;
        }
    }
    text += &stream.finish()?;
    if start < ids.len() {
        pieces.push(Piece { text, tokens: start..ids.len() });
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
