//! Conversion of UTF-16 and UTF-32 to UTF-8. Windows programs write UTF-16, which a byte order mark tells.

use std::io::{self, Read};

/// An encoding in units of 2 or 4 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wide {
    unit_bytes: usize,
    is_big_endian: bool,
}

impl Wide {
    /// Returns the encoding that the byte order mark at the start of a file tells, and the length of the mark.
    pub(super) fn detect(start: &[u8]) -> Option<(Self, usize)> {
        let wide = |unit_bytes, is_big_endian| Some((Self { unit_bytes, is_big_endian }, unit_bytes));
        match start {
            [0xff, 0xfe, 0, 0, ..] => wide(4, false),
            [0, 0, 0xfe, 0xff, ..] => wide(4, true),
            [0xff, 0xfe, ..] => wide(2, false),
            [0xfe, 0xff, ..] => wide(2, true),
            _ => None,
        }
    }

    fn unit(self, bytes: &[u8]) -> u32 {
        let fold = |number: u32, byte: &u8| (number << 8) | u32::from(*byte);
        if self.is_big_endian { bytes.iter().fold(0, fold) } else { bytes.iter().rev().fold(0, fold) }
    }
}

/// A reader that converts text of a wide encoding, without its mark, to UTF-8. Invalid characters become U+FFFD.
pub(super) struct Narrow<R> {
    reader: R,
    wide: Wide,
    /// Bytes that are read and not yet converted.
    rest: Vec<u8>,
    text: Vec<u8>,
    given: usize,
}

impl<R: Read> Narrow<R> {
    pub(super) fn new(reader: R, wide: Wide) -> Self {
        Self { reader, wide, rest: Vec::new(), text: Vec::new(), given: 0 }
    }

    /// Converts the buffered bytes, except a character that may continue.
    fn turn(&mut self, is_end: bool) {
        let (size, wide) = (self.wide.unit_bytes, self.wide);
        let whole = self.rest.len() / size;
        let unit = |i: usize| wide.unit(&self.rest[i * size..(i + 1) * size]);
        let mut i = 0;
        while i < whole {
            let first = unit(i);
            let is_high = size == 2 && (0xd800..0xdc00).contains(&first);
            if is_high && i + 1 == whole && !is_end {
                break;
            }
            let low = if is_high && i + 1 < whole { unit(i + 1) } else { 0 };
            let is_pair = (0xdc00..0xe000).contains(&low);
            let code = if is_pair { 0x10000 + ((first - 0xd800) << 10) + (low - 0xdc00) } else { first };
            i += 1 + usize::from(is_pair);
            let character = char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER);
            self.text.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes());
        }
        self.rest.drain(..i * size);
        if is_end && !self.rest.is_empty() {
            self.rest.clear();
            self.text.extend_from_slice(char::REPLACEMENT_CHARACTER.encode_utf8(&mut [0; 4]).as_bytes());
        }
    }
}

impl<R: Read> Read for Narrow<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.given == self.text.len() {
            (self.given, self.text) = (0, std::mem::take(&mut self.text));
            self.text.clear();
            let start = self.rest.len();
            self.rest.resize(start + (1 << 16), 0);
            let read = self.reader.read(&mut self.rest[start..]);
            self.rest.truncate(start + *read.as_ref().unwrap_or(&0));
            let is_end = read? == 0;
            self.turn(is_end);
            if is_end && self.text.is_empty() {
                return Ok(0);
            }
        }
        let count = buffer.len().min(self.text.len() - self.given);
        buffer[..count].copy_from_slice(&self.text[self.given..self.given + count]);
        self.given += count;
        Ok(count)
    }
}

#[cfg(test)]
#[path = "wide_tests.rs"]
mod tests;
