//! Conversion of token ids to pieces of text that can be shown.

use std::ops::Range;

use moeworks_infer::generation::TextStream;
use moeworks_model::{Tokenizer, TokenizerError};

/// Tokens whose texts cannot be separated: usually one, several where they are the bytes of one character.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// The text of the tokens; empty for a special token.
    pub(super) text: String,
    /// The positions of the tokens.
    pub(super) tokens: Range<usize>,
}

/// Cuts `ids` into pieces of whole characters. Bytes that are not valid UTF-8 become U+FFFD.
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

/// Names a token for lists: blanks and control characters as signs, bytes that are not a character in hexadecimal.
pub(super) fn label(tokenizer: &Tokenizer, id: u32) -> Result<String, TokenizerError> {
    let text = tokenizer.decode(&[id])?;
    Ok(match u8::try_from(id) {
        Ok(byte) if tokenizer.is_bytes() && !byte.is_ascii() => format!("0x{byte:02X}"),
        // The token has no text, or is a part of a character.
        _ if text.is_empty() || text.contains(char::REPLACEMENT_CHARACTER) => format!("⟨{id}⟩"),
        _ => text.chars().map(sign).collect(),
    })
}

/// Returns the character itself, or a sign in place of an invisible one or one that changes the direction of the
/// text.
fn sign(c: char) -> char {
    match c {
        ' ' => '␣',
        '\n' => '↵',
        _ => visible(c),
    }
}

/// Replaces a character that cannot be shown: a control character by its picture, a direction mark by a dot.
/// Newlines, tabs and blanks are unchanged.
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
