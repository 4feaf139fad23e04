//! Plain text files as documents, in pieces of bounded size.

use std::io::{ErrorKind, Read};
use std::ops::ControlFlow;
use std::path::Path;

use super::input::Input;
use super::sources::Visit;
use super::{DataError, Piece, decode};

/// The bytes of a piece: many tokens, but little memory.
const PIECE_BYTES: usize = 1 << 20;

/// The bytes at the end of a piece in which a good place to cut is searched.
const CUT_BYTES: usize = 1 << 16;

/// The first bytes of a file in which a NUL means that it is not text.
const BINARY_BYTES: usize = 1024;

pub(super) const BOM: &[u8] = b"\xef\xbb\xbf";

/// Reads a text file as one document. The byte order mark at the start is left out; line ends are kept.
pub(super) fn read(input: Input<'_>, visit: &mut Visit<'_>) -> Result<ControlFlow<()>, DataError> {
    let path = input.path;
    let mut reader = decode::open_text(input)?;
    let mut buffer = Vec::with_capacity(PIECE_BYTES);
    // The position of the buffer in the content.
    let mut offset = 0u64;
    loop {
        let at_end = fill(path, &mut reader, &mut buffer)?;
        if offset == 0 {
            if let Some(nul) = buffer.iter().take(BINARY_BYTES).position(|&byte| byte == 0) {
                return Err(DataError::Binary { path: path.into(), offset: nul as u64 });
            }
            if buffer.starts_with(BOM) {
                buffer.drain(..BOM.len());
                offset = BOM.len() as u64;
            }
        }
        let text = valid_text(path, &buffer, offset, at_end)?;
        if at_end {
            return if text.is_empty() {
                Ok(ControlFlow::Continue(()))
            } else {
                visit(Piece { text, ends_document: true, path })
            };
        }
        let cut = cut_before(text);
        if visit(Piece { text: &text[..cut], ends_document: false, path })?.is_break() {
            return Ok(ControlFlow::Break(()));
        }
        offset += cut as u64;
        buffer.drain(..cut);
    }
}

/// Passes a document in memory to `visit`, in pieces if it is long. An empty one is skipped.
pub(super) fn give(mut text: &str, input: &Input<'_>, visit: &mut Visit<'_>) -> Result<ControlFlow<()>, DataError> {
    let path = input.path;
    while text.len() > PIECE_BYTES {
        let (piece, rest) = text.split_at(cut_before(&text[..text.floor_char_boundary(PIECE_BYTES)]));
        if visit(Piece { text: piece, ends_document: false, path })?.is_break() {
            return Ok(ControlFlow::Break(()));
        }
        text = rest;
    }
    if text.is_empty() { Ok(ControlFlow::Continue(())) } else { visit(Piece { text, ends_document: true, path }) }
}

/// Fills the buffer to the size of a piece. Returns whether the content ends there.
fn fill(path: &Path, reader: &mut dyn Read, buffer: &mut Vec<u8>) -> Result<bool, DataError> {
    let mut filled = buffer.len();
    buffer.resize(PIECE_BYTES, 0);
    while filled < PIECE_BYTES {
        match reader.read(&mut buffer[filled..]) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(decode::unreadable(path, error)),
        }
    }
    buffer.truncate(filled);
    Ok(filled < PIECE_BYTES)
}

/// Returns the text in the buffer, without a character that the end of the buffer cuts.
fn valid_text<'b>(path: &Path, buffer: &'b [u8], offset: u64, at_end: bool) -> Result<&'b str, DataError> {
    match std::str::from_utf8(buffer) {
        Ok(text) => Ok(text),
        Err(error) if error.error_len().is_none() && !at_end => {
            Ok(std::str::from_utf8(&buffer[..error.valid_up_to()]).unwrap_or_default())
        }
        Err(error) => Err(DataError::NotUtf8 { path: path.into(), offset: offset + error.valid_up_to() as u64 }),
    }
}

/// Returns the best place to cut a full piece, so that a tokenizer that works word by word gives the same tokens as
/// for the whole: before a single space between letters, otherwise after a line end, otherwise between characters. It
/// is above 0 and below the length, so that the last piece is never empty.
fn cut_before(text: &str) -> usize {
    let bytes = text.as_bytes();
    let from = bytes.len().saturating_sub(CUT_BYTES).max(1);
    let between_words =
        |i: &usize| bytes[*i] == b' ' && bytes[*i - 1].is_ascii_alphabetic() && bytes[*i + 1].is_ascii_alphabetic();
    let last = bytes.len() - 1;
    (from..last)
        .rev()
        .find(between_words)
        .or_else(|| (from..last).rev().find(|&i| bytes[i - 1] == b'\n'))
        .or_else(|| (from..=last).rev().find(|&i| text.is_char_boundary(i)))
        .unwrap_or(last)
}

#[cfg(test)]
#[path = "text_tests.rs"]
mod tests;
