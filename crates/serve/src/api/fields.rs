//! The fields of a request, taken one by one; what is left in the end is not known.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use super::error::quoted;
use super::{ApiError, ErrorKind};

/// The fields of a request, or of an object in it. A field that is null counts as absent.
pub(crate) struct Fields {
    fields: Map<String, Value>,
    /// Stands before names in messages, such as `messages[3].`.
    place: String,
}

/// The numbers that a field takes.
#[derive(Clone, Debug)]
pub(crate) struct Range {
    /// The least and the most.
    pub(crate) bounds: RangeInclusive<f64>,
    /// Says whether the least itself is refused.
    pub(crate) is_open: bool,
}

impl Range {
    /// The numbers of `bounds`.
    pub(crate) fn closed(bounds: RangeInclusive<f64>) -> Self {
        Self { bounds, is_open: false }
    }

    /// The numbers of `bounds` without the least.
    pub(crate) fn above(bounds: RangeInclusive<f64>) -> Self {
        Self { bounds, is_open: true }
    }

    fn contains(&self, value: f64) -> bool {
        self.bounds.contains(&value) && !(self.is_open && value <= *self.bounds.start())
    }

    fn describe(&self) -> String {
        let (start, end) = (self.bounds.start(), self.bounds.end());
        let start = if self.is_open { format!("above {start}") } else { format!("at least {start}") };
        format!("a number {start} and at most {end}")
    }
}

impl Fields {
    /// The fields of a request.
    pub(crate) fn new(fields: Map<String, Value>) -> Self {
        Self { fields, place: String::new() }
    }

    /// The fields of an object in it.
    pub(crate) fn nested(place: String, value: Value) -> Result<Self, ApiError> {
        match value {
            Value::Object(fields) => Ok(Self { fields, place: format!("{place}.") }),
            other => Err(ApiError::field(&place, &other, "an object")),
        }
    }

    /// The whole name of a field.
    pub(crate) fn name(&self, name: &str) -> String {
        format!("{}{name}", self.place)
    }

    /// Takes a value.
    pub(crate) fn take(&mut self, name: &str) -> Option<Value> {
        self.record(name);
        self.remove(name)
    }

    fn remove(&mut self, name: &str) -> Option<Value> {
        self.fields.remove(name).filter(|value| !value.is_null())
    }

    /// Notes that a field of the request itself is known, for a test.
    fn record(&self, name: &str) {
        #[cfg(test)]
        if self.place.is_empty() {
            RECORDED.with_borrow_mut(|names| names.push(name.to_owned()));
        }
        let _ = name;
    }

    /// Returns the error of a field.
    pub(crate) fn wrong(&self, name: &str, found: &Value, expected: &str) -> ApiError {
        ApiError::field(&self.name(name), found, expected)
    }

    /// Takes a value and reads it by `read`; the error says what is expected.
    fn read<T>(
        &mut self,
        name: &str,
        expected: &str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        read(&value).map(Some).ok_or_else(|| self.wrong(name, &value, expected))
    }

    pub(crate) fn bool(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        self.read(name, "true or false", Value::as_bool)
    }

    /// Takes a whole number of a range.
    pub(crate) fn integer(&mut self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, ApiError> {
        let expected = format!("a whole number from {} to {}", range.start(), range.end());
        self.read(name, &expected, |value| integer(value).filter(|value| range.contains(value)))
    }

    /// Takes a whole number of at least `least`, which may be as large as it likes.
    pub(crate) fn count(&mut self, name: &str, least: usize) -> Result<Option<usize>, ApiError> {
        let expected = format!("a whole number of at least {least}");
        let read = |value: &Value| value.as_u64().or_else(|| u64::try_from(integer(value)?).ok());
        let count = |value: &Value| usize::try_from(read(value)?).ok();
        self.read(name, &expected, |value| count(value).filter(|&value| value >= least))
    }

    pub(crate) fn number(&mut self, name: &str, range: Range) -> Result<Option<f32>, ApiError> {
        let read = |value: &Value| value.as_f64().filter(|&value| range.contains(value)).map(|value| value as f32);
        self.read(name, &range.describe(), read)
    }

    /// Takes a text of at most `most` bytes.
    pub(crate) fn text(&mut self, name: &str, most: usize) -> Result<Option<String>, ApiError> {
        let expected = format!("a text of at most {most} bytes");
        self.read(name, &expected, |value| value.as_str().filter(|text| text.len() <= most).map(str::to_owned))
    }

    /// Takes an object; the rest of its fields is left in it.
    pub(crate) fn object(&mut self, name: &str) -> Result<Option<Self>, ApiError> {
        let place = self.name(name);
        self.take(name).map(|value| Self::nested(place, value)).transpose()
    }

    /// Accepts fields that change nothing here, whatever they hold.
    pub(crate) fn ignore(&mut self, names: &[&str]) {
        for name in names {
            self.record(name);
            self.fields.remove(*name);
        }
    }

    /// Refuses fields that the server cannot do, unless they ask for nothing: false, 0, an empty list or text.
    pub(crate) fn refuse(&mut self, names: &[&str]) -> Result<(), ApiError> {
        for name in names {
            if let Some(value) = self.remove(name).filter(|value| !asks_for_nothing(value)) {
                return Err(self.unsupported(name, &value));
            }
        }
        Ok(())
    }

    /// Returns the error of a field that the server cannot do.
    pub(crate) fn unsupported(&self, name: &str, found: &Value) -> ApiError {
        let name = self.name(name);
        let shown = match found {
            Value::String(text) => format!(" = {}", quoted(text)),
            Value::Bool(value) => format!(" = {value}"),
            Value::Number(value) => format!(" = {value}"),
            _ => String::new(),
        };
        ApiError::new(ErrorKind::Unsupported, format!("{name}{shown} is not supported by this server")).of(&name)
    }

    /// Ends the reading: what is left is not known.
    pub(crate) fn finish(self) -> Result<(), ApiError> {
        match self.fields.keys().next() {
            None => Ok(()),
            Some(name) => {
                let message = format!("the field {} is not known", quoted(&self.name(name)));
                let shown = quoted(&self.name(name));
                Err(ApiError::new(ErrorKind::UnknownField, message).of(shown.trim_matches('"')))
            }
        }
    }
}

/// A whole number, which may be written with a fraction of 0.
pub(crate) fn integer(value: &Value) -> Option<i64> {
    const MOST: f64 = (1_u64 << 53) as f64;
    let of_float = || value.as_f64().filter(|x| x.fract() == 0.0 && x.abs() < MOST).map(|x| x as i64);
    value.as_i64().or_else(of_float)
}

#[cfg(test)]
thread_local! {
    /// The fields that were looked for.
    static RECORDED: std::cell::RefCell<Vec<String>> = const { std::cell::RefCell::new(Vec::new()) };
}

/// The fields of requests that `read` looks for.
#[cfg(test)]
pub(super) fn recorded(read: impl Fn()) -> Vec<String> {
    RECORDED.take();
    read();
    RECORDED.take()
}

fn asks_for_nothing(value: &Value) -> bool {
    match value {
        Value::Bool(is_asked) => !is_asked,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(values) => values.is_empty(),
        Value::Object(map) => map.is_empty(),
        Value::Null => true,
    }
}
