//! Repair of Python's JSON: `NaN` and infinities become null, lone surrogates U+FFFD.
//!
//! Python's `json` writes a missing number as `NaN`, and half of a UTF-16 pair as `\ud83d`. Neither is valid JSON,
//! but readers of data sets accept both.

use std::cell::Cell;
use std::io::{self, Read};

/// The longest run of bytes that is examined together: two escapes.
const LOOKAHEAD: usize = 12;

/// Words that are not valid JSON.
const NUMBERS: [&[u8]; 3] = [b"NaN", b"Infinity", b"-Infinity"];

/// A reader that replaces such words and escapes.
pub(super) struct Repaired<'c, R> {
    reader: R,
    num_surrogates: &'c Cell<u64>,
    input: Vec<u8>,
    output: Vec<u8>,
    given: usize,
    is_in_string: bool,
}

impl<'c, R: Read> Repaired<'c, R> {
    /// Makes a reader that counts lone surrogates in `num_surrogates`.
    pub(super) fn new(reader: R, num_surrogates: &'c Cell<u64>) -> Self {
        Self { reader, num_surrogates, input: Vec::new(), output: Vec::new(), given: 0, is_in_string: false }
    }

    /// Repairs the buffered bytes, except a run that may continue.
    fn turn(&mut self, is_end: bool) {
        let input = std::mem::take(&mut self.input);
        let mut rest = &input[..];
        while !rest.is_empty() && (is_end || rest.len() >= LOOKAHEAD) {
            rest = &rest[self.turn_run(rest)..];
        }
        self.input = rest.to_vec();
    }

    /// Repairs the start of `rest`, and returns the number of bytes consumed.
    fn turn_run(&mut self, rest: &[u8]) -> usize {
        if !self.is_in_string {
            if let Some(word) = NUMBERS.into_iter().find(|word| rest.starts_with(word)) {
                self.output.extend_from_slice(b"null");
                return word.len();
            }
            self.is_in_string = rest[0] == b'"';
            self.output.push(rest[0]);
            return 1;
        }
        match rest[0] {
            b'\\' => self.turn_escape(rest),
            b'"' => {
                self.is_in_string = false;
                self.output.push(b'"');
                1
            }
            _ => {
                let end = rest.iter().position(|byte| matches!(byte, b'"' | b'\\')).unwrap_or(rest.len());
                self.output.extend_from_slice(&rest[..end]);
                end
            }
        }
    }

    fn turn_escape(&mut self, rest: &[u8]) -> usize {
        let (is_lone, taken) = match unit(rest) {
            Some(0xd800..0xdc00) => match unit(&rest[6..]) {
                Some(0xdc00..0xe000) => (false, 12),
                _ => (true, 6),
            },
            Some(0xdc00..0xe000) => (true, 6),
            _ => (false, rest.len().min(2)),
        };
        if is_lone {
            self.num_surrogates.set(self.num_surrogates.get() + 1);
            self.output.extend_from_slice(b"\\ufffd");
        } else {
            self.output.extend_from_slice(&rest[..taken]);
        }
        taken
    }
}

/// Returns the UTF-16 unit of an escape at the start of `rest`.
fn unit(rest: &[u8]) -> Option<u32> {
    let digits = rest.strip_prefix(b"\\u")?.get(..4)?;
    let is_hex = digits.iter().all(u8::is_ascii_hexdigit);
    is_hex.then(|| u32::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()).flatten()
}

impl<R: Read> Read for Repaired<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.given == self.output.len() {
            self.given = 0;
            self.output.clear();
            let start = self.input.len();
            self.input.resize(start + (1 << 16), 0);
            let read = self.reader.read(&mut self.input[start..]);
            self.input.truncate(start + *read.as_ref().unwrap_or(&0));
            let is_end = read? == 0;
            self.turn(is_end);
            if is_end && self.output.is_empty() {
                return Ok(0);
            }
        }
        let count = buffer.len().min(self.output.len() - self.given);
        buffer[..count].copy_from_slice(&self.output[self.given..self.given + count]);
        self.given += count;
        Ok(count)
    }
}

/// Repairs a whole line, and counts its lone surrogates.
pub(super) fn line(line: &str) -> (String, u64) {
    let num_surrogates = Cell::new(0);
    let mut repaired = String::new();
    // Reading from memory does not fail, and the replacements are text like the rest.
    let _ = Repaired::new(line.as_bytes(), &num_surrogates).read_to_string(&mut repaired);
    (repaired, num_surrogates.get())
}
