//! Methods of Python's strings that the template engine lacks, and Python's text form of values.

use std::io::{self, Write};

use minijinja::value::{Kwargs, Value};
use minijinja::{Error, ErrorKind};
use serde::Serialize as _;
use serde_json::ser::{CompactFormatter, Formatter};
use serde_json::{Serializer, Value as Json};

/// The largest width that a method pads to.
const MAX_WIDTH: usize = 10_000;
/// The largest indent of JSON.
const MAX_INDENT: usize = 16;

/// Calls a method of a string; `None` if the method is unknown here.
pub(super) fn string_method(text: &str, method: &str, arguments: &[Value]) -> Option<Result<Value, Error>> {
    let argument = |index: usize| arguments.get(index).and_then(Value::as_str);
    let missing = || Error::new(ErrorKind::MissingArgument, format!("{method} needs a text"));
    let by_text = |result: &dyn Fn(&str) -> Value| argument(0).map(result).ok_or_else(missing);
    let result = match method {
        "title" => Ok(titled(text).into()),
        "swapcase" => Ok(swapped(text).into()),
        "casefold" => Ok(text.to_lowercase().into()),
        "rsplit" => rsplit(text, arguments),
        "partition" => by_text(&|mark| parts(text, mark, text.find(mark), false)),
        "rpartition" => by_text(&|mark| parts(text, mark, text.rfind(mark), true)),
        "removeprefix" => by_text(&|prefix| text.strip_prefix(prefix).unwrap_or(text).into()),
        "removesuffix" => by_text(&|suffix| text.strip_suffix(suffix).unwrap_or(text).into()),
        "index" => by_text(&|part| text.find(part).map_or(Value::UNDEFINED, |at| text[..at].chars().count().into()))
            .and_then(|found| {
                if found.is_undefined() {
                    Err(Error::new(ErrorKind::InvalidOperation, "substring not found"))
                } else {
                    Ok(found)
                }
            }),
        "zfill" | "ljust" | "rjust" | "center" => filled(text, method, arguments),
        _ => return None,
    };
    Some(result)
}

/// Does `str.title`: a letter after a non-letter becomes uppercase, other letters lowercase.
fn titled(text: &str) -> String {
    let mut is_inside = false;
    let letter = |c: char| {
        let was_inside = std::mem::replace(&mut is_inside, c.is_alphabetic());
        if was_inside { c.to_lowercase().collect::<String>() } else { c.to_uppercase().collect() }
    };
    text.chars().map(letter).collect()
}

fn swapped(text: &str) -> String {
    let letter =
        |c: char| if c.is_uppercase() { c.to_lowercase().collect::<String>() } else { c.to_uppercase().collect() };
    text.chars().map(letter).collect()
}

/// Does `str.rsplit(sep, maxsplit)`.
fn rsplit(text: &str, arguments: &[Value]) -> Result<Value, Error> {
    let mark = arguments.first().and_then(Value::as_str);
    if mark == Some("") {
        return Err(Error::new(ErrorKind::InvalidOperation, "empty separator"));
    }
    let most = arguments.get(1).and_then(Value::as_i64).and_then(|most| usize::try_from(most).ok());
    let count = most.map_or(usize::MAX, |most| most.saturating_add(1));
    let mut parts: Vec<String> = match mark {
        Some(mark) => text.rsplitn(count, mark).map(str::to_owned).collect(),
        None => white_space_parts(text, count),
    };
    parts.reverse();
    Ok(parts.into())
}

/// Splits a text at white space from its end, `count` times at most. The last part is the rest.
fn white_space_parts(text: &str, count: usize) -> Vec<String> {
    let (mut parts, mut rest) = (Vec::new(), text.trim_end());
    while !rest.is_empty() {
        let start = rest.rfind(char::is_whitespace).filter(|_| parts.len() + 1 < count);
        let start = start.map_or(0, |at| at + rest[at..].chars().next().map_or(1, char::len_utf8));
        parts.push(rest[start..].to_owned());
        rest = rest[..start].trim_end();
    }
    parts
}

/// Returns the text before `mark`, the mark and the text after it; without a mark, the whole text and two empty ones.
fn parts(text: &str, mark: &str, at: Option<usize>, is_last: bool) -> Value {
    let parts = match at {
        Some(at) => [&text[..at], mark, &text[at + mark.len()..]],
        None if is_last => ["", "", text],
        None => [text, "", ""],
    };
    parts.iter().map(|&part| Value::from(part)).collect()
}

/// Does `str.zfill`, `ljust`, `rjust` and `center`.
fn filled(text: &str, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    let width = arguments.first().and_then(Value::as_usize).filter(|&width| width <= MAX_WIDTH);
    let Some(width) = width else {
        return Err(Error::new(ErrorKind::InvalidOperation, format!("{method} needs a width of at most {MAX_WIDTH}")));
    };
    let fill = arguments.get(1).and_then(Value::as_str).unwrap_or(" ");
    let missing = width.saturating_sub(text.chars().count());
    Ok(match method {
        "zfill" => {
            let digits = text.trim_start_matches(['+', '-']);
            let (sign, digits) = if text.len() - digits.len() == 1 { text.split_at(1) } else { ("", text) };
            format!("{sign}{}{digits}", "0".repeat(missing))
        }
        "ljust" => format!("{text}{}", fill.repeat(missing)),
        "rjust" => format!("{}{text}", fill.repeat(missing)),
        _ => {
            let left = missing / 2 + (missing & width & 1);
            format!("{}{text}{}", fill.repeat(left), fill.repeat(missing - left))
        }
    }
    .into())
}

/// Formats a number as Python's `repr`: with an exponent below 1e-4 and from 1e16 on.
pub(super) fn float(value: f64) -> String {
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if value.is_finite() && value != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    format!("{value:?}")
}

/// Writes JSON as Python's `json.dumps` does. `ensure_ascii` is false by default, as in `transformers`.
pub(super) fn to_json(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let is_ascii: Option<bool> = options.get("ensure_ascii")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let is_sorted: Option<bool> = options.get("sort_keys")?;
    options.assert_all_used()?;
    let [comma, colon] = match separators.as_deref() {
        None if indent.is_some() => [",".to_owned(), ": ".to_owned()],
        None => [", ".to_owned(), ": ".to_owned()],
        Some([comma, colon]) => [comma.clone(), colon.clone()],
        Some(_) => return Err(Error::new(ErrorKind::InvalidOperation, "tojson: separators must be two texts")),
    };
    let indent = indent.map(|indent| " ".repeat(indent.min(MAX_INDENT)));
    let formatter =
        PythonFormatter { indent, comma, colon, is_ascii: is_ascii == Some(true), level: 0, is_empty: true };
    let failed = |error: serde_json::Error| Error::new(ErrorKind::BadSerialization, error.to_string());
    let mut bytes = Vec::new();
    let mut serializer = Serializer::with_formatter(&mut bytes, formatter);
    if is_sorted == Some(true) {
        let mut json = serde_json::to_value(value).map_err(failed)?;
        sort(&mut json);
        json.serialize(&mut serializer).map_err(failed)?;
    } else {
        value.serialize(&mut serializer).map_err(failed)?;
    }
    Ok(String::from_utf8(bytes).unwrap_or_default().into())
}

/// Sorts the keys of all objects.
fn sort(json: &mut Json) {
    match json {
        Json::Array(values) => values.iter_mut().for_each(sort),
        Json::Object(map) => {
            let mut entries: Vec<_> = std::mem::take(map).into_iter().collect();
            entries.sort_by(|(a, _), (b, _)| a.cmp(b));
            entries.iter_mut().for_each(|(_, value)| sort(value));
            map.extend(entries);
        }
        _ => {}
    }
}

/// A formatter that writes JSON as `json.dumps` does.
struct PythonFormatter {
    indent: Option<String>,
    comma: String,
    colon: String,
    is_ascii: bool,
    level: usize,
    /// True if the current array or object has no value yet.
    is_empty: bool,
}

impl PythonFormatter {
    fn line<W: ?Sized + Write>(&self, writer: &mut W) -> io::Result<()> {
        let Some(indent) = &self.indent else { return Ok(()) };
        write!(writer, "\n{}", indent.repeat(self.level))
    }

    fn begin<W: ?Sized + Write>(&mut self, writer: &mut W, bracket: &str) -> io::Result<()> {
        self.level += 1;
        self.is_empty = true;
        writer.write_all(bracket.as_bytes())
    }

    fn end<W: ?Sized + Write>(&mut self, writer: &mut W, bracket: &str) -> io::Result<()> {
        self.level -= 1;
        if !std::mem::replace(&mut self.is_empty, false) {
            self.line(writer)?;
        }
        writer.write_all(bracket.as_bytes())
    }

    fn next<W: ?Sized + Write>(&mut self, writer: &mut W, is_first: bool) -> io::Result<()> {
        self.is_empty = false;
        if !is_first {
            writer.write_all(self.comma.as_bytes())?;
        }
        self.line(writer)
    }
}

impl Formatter for PythonFormatter {
    fn begin_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.begin(writer, "[")
    }

    fn end_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.end(writer, "]")
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.next(writer, first)
    }

    fn begin_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.begin(writer, "{")
    }

    fn end_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.end(writer, "}")
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.next(writer, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(self.colon.as_bytes())
    }

    fn end_array_value<W: ?Sized + Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.is_empty = false;
        Ok(())
    }

    fn end_object_value<W: ?Sized + Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.is_empty = false;
        Ok(())
    }

    fn write_f64<W: ?Sized + Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        writer.write_all(float(value).as_bytes())
    }

    fn write_string_fragment<W: ?Sized + Write>(&mut self, writer: &mut W, fragment: &str) -> io::Result<()> {
        if !self.is_ascii {
            return CompactFormatter.write_string_fragment(writer, fragment);
        }
        for c in fragment.chars() {
            if c.is_ascii() {
                write!(writer, "{c}")?;
            } else {
                let mut units = [0; 2];
                c.encode_utf16(&mut units).iter().try_for_each(|unit| write!(writer, "\\u{unit:04x}"))?;
            }
        }
        Ok(())
    }
}
