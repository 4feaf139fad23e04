//! JSON checked character by character, as it comes.

use serde_json::Value;

/// Objects and lists inside one another at most, as in `serde_json`.
const MAX_DEPTH: usize = 128;
/// Bytes of a number at most.
const MAX_SCALAR: usize = 512;

/// The text is not JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Malformed;

/// The part of JSON that a character belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// A blank between other parts.
    Blank,
    /// The key of a member of an object, quotes included.
    Key,
    /// A bracket, a colon or a comma.
    Mark,
    /// A text, a number or a word.
    Scalar,
}

/// The part that has to come next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expected {
    Value,
    ValueOrEnd,
    Key,
    KeyOrEnd,
    Colon,
    CommaOrEnd,
    /// The rest of a text in quotes.
    Text {
        is_key: bool,
        escape: Escape,
    },
    /// The rest of a number or a word.
    Scalar,
    Nothing,
}

/// The place in an escape such as `\n` or `\u00e9`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Escape {
    Outside,
    Begun,
    /// So many digits are to come.
    Digits(u8),
}

/// A reader of one value.
#[derive(Clone, Debug)]
pub(super) struct Scanner {
    /// The objects (true) and lists (false) that are open, the outermost first.
    open: Vec<bool>,
    expected: Expected,
    /// The number or word so far.
    scalar: String,
}

impl Scanner {
    pub(super) fn new() -> Self {
        Self { open: Vec::new(), expected: Expected::Value, scalar: String::new() }
    }

    /// The number of objects and lists that are open.
    pub(super) fn depth(&self) -> usize {
        self.open.len()
    }

    /// Takes a character and returns the part that it belongs to. Control characters in texts are let through.
    pub(super) fn push(&mut self, c: char) -> Result<Part, Malformed> {
        match self.expected {
            Expected::Text { is_key, escape } => self.text(c, is_key, escape),
            Expected::Scalar if is_of_scalar(c) => {
                self.scalar.push(c);
                if self.scalar.len() <= MAX_SCALAR { Ok(Part::Scalar) } else { Err(Malformed) }
            }
            Expected::Scalar => {
                serde_json::from_str::<Value>(&self.scalar).map_err(|_| Malformed)?;
                self.expected = Expected::CommaOrEnd;
                self.push(c)
            }
            _ if matches!(c, ' ' | '\t' | '\n' | '\r') => Ok(Part::Blank),
            expected => self.begin(expected, c),
        }
    }

    /// Takes the first character of a part.
    fn begin(&mut self, expected: Expected, c: char) -> Result<Part, Malformed> {
        use Expected::{Colon, CommaOrEnd, Key, KeyOrEnd, Value, ValueOrEnd};
        let is_in_object = self.open.last() == Some(&true);
        let (next, part) = match (expected, c) {
            (Value | ValueOrEnd, '{') => (self.open(true)?, Part::Mark),
            (Value | ValueOrEnd, '[') => (self.open(false)?, Part::Mark),
            (Value | ValueOrEnd, '"') => (text(false), Part::Scalar),
            (Value | ValueOrEnd, c) if is_of_scalar(c) => {
                self.scalar = c.into();
                (Expected::Scalar, Part::Scalar)
            }
            (Key | KeyOrEnd, '"') => (text(true), Part::Key),
            (Colon, ':') => (Value, Part::Mark),
            (CommaOrEnd, ',') => (if is_in_object { Key } else { Value }, Part::Mark),
            (KeyOrEnd, '}') | (ValueOrEnd, ']') => (self.close(), Part::Mark),
            (CommaOrEnd, '}') if is_in_object => (self.close(), Part::Mark),
            (CommaOrEnd, ']') if !is_in_object => (self.close(), Part::Mark),
            _ => return Err(Malformed),
        };
        self.expected = next;
        Ok(part)
    }

    fn open(&mut self, is_object: bool) -> Result<Expected, Malformed> {
        if self.open.len() >= MAX_DEPTH {
            return Err(Malformed);
        }
        self.open.push(is_object);
        Ok(if is_object { Expected::KeyOrEnd } else { Expected::ValueOrEnd })
    }

    fn close(&mut self) -> Expected {
        self.open.pop();
        if self.open.is_empty() { Expected::Nothing } else { Expected::CommaOrEnd }
    }

    /// Takes a character of a text in quotes.
    fn text(&mut self, c: char, is_key: bool, escape: Escape) -> Result<Part, Malformed> {
        let escape = match (escape, c) {
            (Escape::Outside, '"') => {
                self.expected = if is_key { Expected::Colon } else { Expected::CommaOrEnd };
                return Ok(if is_key { Part::Key } else { Part::Scalar });
            }
            (Escape::Outside, '\\') => Escape::Begun,
            (Escape::Outside, _) | (Escape::Begun, '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't') => Escape::Outside,
            (Escape::Begun, 'u') => Escape::Digits(4),
            (Escape::Digits(1), '0'..='9' | 'a'..='f' | 'A'..='F') => Escape::Outside,
            (Escape::Digits(left), '0'..='9' | 'a'..='f' | 'A'..='F') => Escape::Digits(left - 1),
            _ => return Err(Malformed),
        };
        self.expected = Expected::Text { is_key, escape };
        Ok(if is_key { Part::Key } else { Part::Scalar })
    }
}

fn text(is_key: bool) -> Expected {
    Expected::Text { is_key, escape: Escape::Outside }
}

/// Says whether a character may stand in a number or a word.
fn is_of_scalar(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '-' | '+' | '.')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_object(text: &str) -> bool {
        let mut scanner = Scanner::new();
        text.chars().all(|c| scanner.push(c).is_ok()) && scanner.depth() == 0
    }

    #[test]
    fn what_is_json_is_what_serde_json_takes() {
        for text in [
            "{}",
            r#"{ "a" : [ ] , "b":[1,-2.5e+3,true,null,"x"],"c":{"d":{}}}"#,
            r#"{"\u00e9\n\"": "\\"}"#,
            "{,}",
            "{\"a\"}",
            "{\"a\":}",
            "{\"a\":1,}",
            "{\"a\":[1,]}",
            "{\"a\":01}",
            "{\"a\":tru}",
            "{\"a\":1 2}",
            "{\"a\":]}",
            "{\"a\":[}",
            "{\"a\":1]",
            "{a:1}",
            r#"{"a":"\x"}"#,
            r#"{"a":"\u12g4"}"#,
            "{\"a\":\"",
            "{}}",
            "{} x",
        ] {
            assert_eq!(is_object(text), serde_json::from_str::<Value>(text).is_ok(), "{text}");
        }
        assert!(!is_object(&format!("{}1{}", "{\"a\":".repeat(200), "}".repeat(200))));
        assert!(!is_object(&format!("{{\"a\":{}}}", "1".repeat(1000))));
    }
}
