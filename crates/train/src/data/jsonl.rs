//! JSON lines: one object a line, one of whose fields is the text of a document.

use std::borrow::Cow;
use std::fmt;
use std::io::{BufRead, BufReader, ErrorKind};
use std::ops::ControlFlow;
use std::path::Path;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};

use super::sources::Visit;
use super::text::{self, BOM};
use super::{DataError, decode};

/// Longest line: a document of this size is a mistake, such as a whole data set on one line.
const MAX_LINE_BYTES: usize = 256 << 20;

/// Reads the field `field` of each line of the file at `path` as a document. Empty lines and empty texts are passed over.
pub(super) fn read(path: &Path, field: &str, visit: &mut Visit<'_>) -> Result<ControlFlow<()>, DataError> {
    let mut reader = BufReader::with_capacity(1 << 18, decode::open(path)?);
    let mut line = Vec::new();
    let mut offset = 0u64;
    for number in 1u64.. {
        let wrong = |problem: String| DataError::Format { path: path.into(), place: format!(":{number}"), problem };
        line.clear();
        if !read_line(path, &mut reader, &mut line)? {
            return Err(wrong(format!("line of more than {} MiB; each document must be a line", MAX_LINE_BYTES >> 20)));
        }
        if line.is_empty() {
            break;
        }
        let bom = if number == 1 && line.starts_with(BOM) { BOM.len() } else { 0 };
        let json = std::str::from_utf8(&line[bom..]).map_err(|error| DataError::NotUtf8 {
            path: path.into(),
            offset: offset + (bom + error.valid_up_to()) as u64,
        })?;
        offset += line.len() as u64;
        if json.trim().is_empty() {
            continue;
        }
        let text = text_of(json, field).map_err(wrong)?;
        if text::give(&text, path, visit)?.is_break() {
            return Ok(ControlFlow::Break(()));
        }
    }
    Ok(ControlFlow::Continue(()))
}

/// Reads a line with its end; an empty one at the end of the file. Whether it is within bounds.
fn read_line(path: &Path, reader: &mut impl BufRead, line: &mut Vec<u8>) -> Result<bool, DataError> {
    loop {
        let available = match reader.fill_buf() {
            Ok(available) => available,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Err(decode::unreadable(path, error)),
        };
        let end = available.iter().position(|&byte| byte == b'\n').map(|i| i + 1);
        let taken = end.unwrap_or(available.len());
        if line.len() + taken > MAX_LINE_BYTES {
            return Ok(false);
        }
        line.extend_from_slice(&available[..taken]);
        reader.consume(taken);
        if end.is_some() || taken == 0 {
            return Ok(true);
        }
    }
}

/// The text in `field` of the object in `json`, or what is wrong.
fn text_of<'j>(json: &'j str, field: &str) -> Result<Cow<'j, str>, String> {
    let mut deserializer = serde_json::Deserializer::from_str(json);
    let text = FieldOf { field }.deserialize(&mut deserializer).and_then(|text| deserializer.end().map(|()| text));
    text.map_err(|error| {
        // The line is told by its number in the file, not by that in the string.
        let message = error.to_string().replace(" at line 1 column ", " at column ");
        if error.is_data() { message } else { format!("not JSON: {message}; each line must be one object") }
    })
}

/// Picks one field out of an object and keeps nothing of the others.
struct FieldOf<'f> {
    field: &'f str,
}

impl<'de> DeserializeSeed<'de> for FieldOf<'_> {
    type Value = Cow<'de, str>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for FieldOf<'_> {
    type Value = Cow<'de, str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an object with the text in field \"{}\"", self.field)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut text = None;
        let mut others = Vec::new();
        while let Some(key) = map.next_key::<Cow<'de, str>>()? {
            if key == self.field {
                text = Some(map.next_value_seed(Text { field: self.field })?);
            } else {
                map.next_value::<IgnoredAny>()?;
                if others.len() < 8 {
                    others.push(key.escape_debug().collect::<String>());
                }
            }
        }
        text.ok_or_else(|| {
            let fields = if others.is_empty() { "none".into() } else { others.join(", ") };
            let field = self.field;
            serde::de::Error::custom(format!(
                "no field \"{field}\" (fields: {fields}); data.text_field names the one to use"
            ))
        })
    }
}

/// A string, borrowed where it has no escapes.
struct Text<'f> {
    field: &'f str,
}

impl<'de> DeserializeSeed<'de> for Text<'_> {
    type Value = Cow<'de, str>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'de> Visitor<'de> for Text<'_> {
    type Value = Cow<'de, str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "text in field \"{}\"", self.field)
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Self::Value, E> {
        Ok(Cow::Borrowed(text))
    }

    fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Cow::Owned(text.into()))
    }
}

#[cfg(test)]
#[path = "jsonl_tests.rs"]
mod tests;
