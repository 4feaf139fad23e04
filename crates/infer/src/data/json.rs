//! JSON rows: one object per line, an array of objects, or consecutive objects. One field is the text of a document.

use std::borrow::Cow;
use std::cell::Cell;
use std::fmt;
use std::io::{self, BufRead, BufReader, ErrorKind, Read};
use std::ops::ControlFlow;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::error::Category;

use super::input::Input;
use super::notes::Note;
use super::repair::{self, Repaired};
use super::rows::{Row, Rows};
use super::sources::Visit;
use super::text::BOM;
use super::{DataError, decode};

/// The longest row: a larger document is a mistake, such as a whole data set on one line.
const MAX_ROW_BYTES: u64 = 256 << 20;

/// The fields of a single object that may hold its rows.
const LISTS: [&str; 5] = ["data", "rows", "examples", "records", "documents"];

/// The most field names that an error lists.
const MAX_NAMES: usize = 8;

/// A visitor of rows with their places. It may stop the reading.
type OnRow<'r> = dyn FnMut(Row<'_>, &dyn Fn() -> String) -> Result<ControlFlow<()>, DataError> + 'r;

/// Reads the field of each row as a document. Empty lines are skipped.
pub(super) fn read(input: Input<'_>, visit: &mut Visit<'_>) -> Result<ControlFlow<()>, DataError> {
    let mut rows = Rows::new(input);
    let flow = for_each_row(input, &mut |row, place| rows.take(row, place, visit))?;
    if flow.is_continue() {
        rows.end()?;
    }
    Ok(flow)
}

/// The result of looking at the first rows of a JSON file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Survey {
    /// Rows with the field.
    Rows,
    /// Several rows, none of which has the field.
    RowsWithoutField,
    /// A single value, such as a file of settings, or no JSON.
    Other,
}

/// Returns whether a file begins with an object or an array.
pub(super) fn begins_as_rows(input: Input<'_>) -> Result<bool, DataError> {
    let mut start = Vec::new();
    let read = decode::open_text(input)?.take(1 << 10).read_to_end(&mut start);
    read.map_err(|source| decode::unreadable(input.path, source))?;
    let start = start.strip_prefix(BOM).unwrap_or(&start).trim_ascii_start();
    Ok(start.starts_with(b"{") || start.starts_with(b"["))
}

/// Looks at the first rows of a file.
pub(super) fn survey(input: Input<'_>) -> Result<Survey, DataError> {
    const ENOUGH: u64 = 1000;
    let (mut has_field, mut num_rows) = (false, 0);
    let result = for_each_row(input, &mut |row, _| {
        match row {
            Row::Text(_) | Row::Null | Row::Wrong(_) => has_field = true,
            Row::Missing(_) => {}
            Row::Other(_) => return Ok(ControlFlow::Break(())),
        }
        num_rows += 1;
        Ok(if has_field || num_rows == ENOUGH { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    });
    match result {
        Err(DataError::Format { .. } | DataError::NotUtf8 { .. }) if !has_field => Ok(Survey::Other),
        Err(error) => Err(error),
        Ok(_) if has_field => Ok(Survey::Rows),
        Ok(_) => Ok(if num_rows > 1 { Survey::RowsWithoutField } else { Survey::Other }),
    }
}

fn for_each_row(input: Input<'_>, on_row: &mut OnRow<'_>) -> Result<ControlFlow<()>, DataError> {
    let path = input.path;
    let mut reader = BufReader::with_capacity(1 << 18, decode::open_text(input)?);
    let (mut line, mut offset, mut is_first) = (Vec::new(), 0, true);
    for number in 1u64.. {
        let wrong = |problem: String| DataError::Format { path: path.into(), place: format!(":{number}"), problem };
        line.clear();
        if !read_line(input, &mut reader, &mut line)? {
            let size = MAX_ROW_BYTES >> 20;
            return Err(wrong(format!("line of more than {size} MiB; each document must be a line")));
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
        if std::mem::take(&mut is_first) && is_part(json, input.field) {
            return values(input, on_row);
        }
        let (row, num_surrogates) = row_of(json, input.field).map_err(|error| wrong(not_json(&error)))?;
        note_surrogates(input, &row, num_surrogates, &|| format!(":{number}"));
        if on_row(row, &|| format!(":{number}"))?.is_break() {
            return Ok(ControlFlow::Break(()));
        }
    }
    Ok(ControlFlow::Continue(()))
}

/// Returns whether the first line of a file is not one row: an array, an object with a list of rows, or the beginning
/// of a value that continues below.
fn is_part(json: &str, field: &str) -> bool {
    json.trim_start().starts_with('[')
        || match row_of(json, field) {
            Ok((Row::Missing(fields), _)) => fields.iter().any(|field| LISTS.contains(&&**field)),
            Ok(_) => false,
            Err(error) => error.classify() == Category::Eof,
        }
}

fn not_json(error: &serde_json::Error) -> String {
    // The error names the line in the file, not that in the string.
    let message = error.to_string().replace(&format!(" at line {} column ", error.line()), " at column ");
    format!("not JSON: {message}; each line must be one object")
}

fn note_surrogates(input: Input<'_>, row: &Row<'_>, num_surrogates: u64, place: &dyn Fn() -> String) {
    if num_surrogates > 0 && matches!(row, Row::Text(text) if text.contains(char::REPLACEMENT_CHARACTER)) {
        input.note(Note::Surrogate, place);
    }
}

/// Reads a line with its end; an empty one at the end of the file. Returns whether its length is within bounds.
fn read_line(input: Input<'_>, reader: &mut impl BufRead, line: &mut Vec<u8>) -> Result<bool, DataError> {
    loop {
        let available = match reader.fill_buf() {
            Ok(available) => available,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Err(decode::unreadable(input.path, error)),
        };
        let end = available.iter().position(|&byte| byte == b'\n').map(|i| i + 1);
        let taken = end.unwrap_or(available.len());
        if (line.len() + taken) as u64 > MAX_ROW_BYTES {
            return Ok(false);
        }
        line.extend_from_slice(&available[..taken]);
        reader.consume(taken);
        if end.is_some() || taken == 0 {
            return Ok(true);
        }
    }
}

/// Reads the row in `json` and counts its lone surrogates, or returns the problem.
fn row_of<'j>(json: &'j str, field: &str) -> Result<(Row<'j>, u64), serde_json::Error> {
    let error = match parse_row(json, field) {
        Ok(row) => return Ok((row, 0)),
        Err(error) => error,
    };
    // Most rows need no repair, and reading them directly is faster.
    let (repaired, num_surrogates) = repair::line(json);
    if repaired == json {
        return Err(error);
    }
    Ok((parse_row(&repaired, field)?.into_owned(), num_surrogates))
}

fn parse_row<'j>(json: &'j str, field: &str) -> Result<Row<'j>, serde_json::Error> {
    let mut deserializer = serde_json::Deserializer::from_str(json);
    let row = Pick { path: field, is_row: true }.deserialize(&mut deserializer)?;
    deserializer.end().map(|()| row)
}

/// Reads the rows of arrays, of objects that hold a list of them, and of consecutive objects.
fn values(input: Input<'_>, on_row: &mut OnRow<'_>) -> Result<ControlFlow<()>, DataError> {
    let (num_surrogates, row_bytes) = (Cell::new(0), Cell::new(0));
    let reader = Limited { reader: decode::open_text(input)?, row_bytes: &row_bytes };
    let mut reader = BufReader::with_capacity(1 << 16, Repaired::new(reader, &num_surrogates));
    let unreadable = |error: io::Error| decode::unreadable(input.path, error);
    if reader.fill_buf().map_err(unreadable)?.starts_with(BOM) {
        reader.consume(BOM.len());
    }
    let (mut number, mut end) = (0u64, None);
    let mut sink = |row: Row<'_>| {
        number += 1;
        row_bytes.set(0);
        let place = || format!(" row {number}");
        note_surrogates(input, &row, num_surrogates.get(), &place);
        let flow = on_row(row, &place);
        let goes_on = matches!(flow, Ok(ControlFlow::Continue(())));
        if !goes_on {
            end = Some(flow);
        }
        goes_on
    };
    let mut deserializer = serde_json::Deserializer::from_reader(reader);
    let mut result = Ok(());
    while result.is_ok() && deserializer.end().is_err() {
        result = Top { field: input.field, sink: &mut sink }.deserialize(&mut deserializer);
    }
    match (end, result) {
        (Some(flow), _) => flow,
        (None, Ok(())) => Ok(ControlFlow::Continue(())),
        (None, Err(error)) if error.is_io() => Err(unreadable(error.into())),
        (None, Err(error)) => Err(DataError::Format {
            path: input.path.into(),
            place: format!(":{}", error.line()),
            problem: not_json(&error),
        }),
    }
}

/// A reader that fails when a row is too long.
struct Limited<'c, R> {
    reader: R,
    row_bytes: &'c Cell<u64>,
}

impl<R: Read> Read for Limited<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.row_bytes.get() > MAX_ROW_BYTES {
            return Err(io::Error::other(format!("a row of more than {} MiB", MAX_ROW_BYTES >> 20)));
        }
        let count = self.reader.read(buffer)?;
        self.row_bytes.set(self.row_bytes.get() + count as u64);
        Ok(count)
    }
}

/// A deserializer that takes a row, or the value at a path in it, and keeps nothing else.
#[derive(Clone, Copy)]
struct Pick<'p> {
    /// The path of the field, with dots between nested objects; empty for the value itself.
    path: &'p str,
    /// True if the value is a whole row.
    is_row: bool,
}

impl Pick<'_> {
    /// Returns the row of a value that is neither text nor object.
    fn of_kind(self, kind: &'static str) -> Row<'static> {
        match (self.path.is_empty(), self.is_row) {
            (true, _) => Row::Wrong(kind),
            (false, true) => Row::Other(kind),
            (false, false) => Row::Missing(Vec::new()),
        }
    }

    /// Returns the deserializer of a field named `key`, if it is on the path.
    fn below(self, key: &str) -> Option<Self> {
        let path = self.path.strip_prefix(key)?;
        let path = if path.is_empty() { path } else { path.strip_prefix('.')? };
        Some(Self { path, is_row: false })
    }
}

impl<'de> DeserializeSeed<'de> for Pick<'_> {
    type Value = Row<'de>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Pick<'_> {
    type Value = Row<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a row")
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Self::Value, E> {
        let is_text = self.is_row || self.path.is_empty();
        Ok(if is_text { Row::Text(Cow::Borrowed(text)) } else { Row::Missing(Vec::new()) })
    }

    fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
        let is_text = self.is_row || self.path.is_empty();
        Ok(if is_text { Row::Text(Cow::Owned(text.into())) } else { Row::Missing(Vec::new()) })
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(Row::Null)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Self::Value, E> {
        Ok(self.of_kind("true or false"))
    }

    fn visit_u64<E>(self, _: u64) -> Result<Self::Value, E> {
        Ok(self.of_kind("a number"))
    }

    fn visit_i64<E>(self, _: i64) -> Result<Self::Value, E> {
        Ok(self.of_kind("a number"))
    }

    fn visit_f64<E>(self, _: f64) -> Result<Self::Value, E> {
        Ok(self.of_kind("a number"))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(self.of_kind("a list"))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
        if self.path.is_empty() {
            IgnoredAny.visit_map(map)?;
            return Ok(Row::Wrong("an object"));
        }
        fields(self, map, |_, _| Ok(None)).map(|(row, _)| row)
    }
}

/// Reads the row in the fields of an object. `other` may take the value of another field, and returns whether it held
/// rows. Returns the row, and whether any field held rows.
fn fields<'de, A: MapAccess<'de>>(
    pick: Pick<'_>,
    mut map: A,
    mut other: impl FnMut(&str, &mut A) -> Result<Option<bool>, A::Error>,
) -> Result<(Row<'de>, bool), A::Error> {
    let (mut row, mut names, mut has_rows) = (None, Vec::new(), false);
    while let Some(key) = map.next_key::<Cow<'de, str>>()? {
        match pick.below(&key) {
            // Of fields with the same name the last counts, as for most readers.
            Some(below) => {
                let found = map.next_value_seed(below)?;
                if !matches!((&row, &found), (Some(_), Row::Missing(_))) {
                    row = Some(found);
                }
            }
            None => match other(&key, &mut map)? {
                Some(found) => has_rows |= found,
                None => drop(map.next_value::<IgnoredAny>()?),
            },
        }
        if names.len() < MAX_NAMES {
            names.push(key.escape_debug().collect::<String>());
        }
    }
    let row = row.filter(|row| !matches!(row, Row::Missing(_)));
    Ok((row.unwrap_or(Row::Missing(names)), has_rows))
}

/// A deserializer that passes the rows of a top-level value to `sink`, until it stops.
struct Top<'s, 'f> {
    field: &'f str,
    sink: &'s mut dyn FnMut(Row<'_>) -> bool,
}

impl Top<'_, '_> {
    fn give<E: Error>(&mut self, row: Row<'_>) -> Result<(), E> {
        if (self.sink)(row) { Ok(()) } else { Err(E::custom("no more is wanted")) }
    }
}

impl<'de> DeserializeSeed<'de> for Top<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Top<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("rows")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut seq: A) -> Result<(), A::Error> {
        while let Some(row) = seq.next_element_seed(Pick { path: self.field, is_row: true })? {
            self.give(row)?;
        }
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(mut self, map: A) -> Result<(), A::Error> {
        let pick = Pick { path: self.field, is_row: true };
        let (row, is_list) = fields(pick, map, |key, map| match LISTS.contains(&key) {
            true => map.next_value_seed(List(&mut self)).map(Some),
            false => Ok(None),
        })?;
        if is_list && matches!(row, Row::Missing(_)) { Ok(()) } else { self.give(row) }
    }

    fn visit_str<E: Error>(mut self, text: &str) -> Result<(), E> {
        self.give(Row::Text(Cow::Borrowed(text)))
    }

    fn visit_unit<E: Error>(mut self) -> Result<(), E> {
        self.give(Row::Null)
    }

    fn visit_bool<E: Error>(mut self, _: bool) -> Result<(), E> {
        self.give(Row::Other("true or false"))
    }

    fn visit_u64<E: Error>(mut self, _: u64) -> Result<(), E> {
        self.give(Row::Other("a number"))
    }

    fn visit_i64<E: Error>(mut self, _: i64) -> Result<(), E> {
        self.give(Row::Other("a number"))
    }

    fn visit_f64<E: Error>(mut self, _: f64) -> Result<(), E> {
        self.give(Row::Other("a number"))
    }
}

/// A field that may hold a list of rows; its value decides.
struct List<'l, 's, 'f>(&'l mut Top<'s, 'f>);

impl<'de> DeserializeSeed<'de> for List<'_, '_, '_> {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<bool, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for List<'_, '_, '_> {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("rows")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<bool, A::Error> {
        let mut has_rows = false;
        while let Some(row) = seq.next_element_seed(Pick { path: self.0.field, is_row: true })? {
            if !matches!(row, Row::Other(_)) {
                self.0.give(row)?;
                has_rows = true;
            }
        }
        Ok(has_rows)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<bool, A::Error> {
        IgnoredAny.visit_map(map).map(|_| false)
    }

    fn visit_str<E>(self, _: &str) -> Result<bool, E> {
        Ok(false)
    }

    fn visit_unit<E>(self) -> Result<bool, E> {
        Ok(false)
    }

    fn visit_bool<E>(self, _: bool) -> Result<bool, E> {
        Ok(false)
    }

    fn visit_u64<E>(self, _: u64) -> Result<bool, E> {
        Ok(false)
    }

    fn visit_i64<E>(self, _: i64) -> Result<bool, E> {
        Ok(false)
    }

    fn visit_f64<E>(self, _: f64) -> Result<bool, E> {
        Ok(false)
    }
}

#[cfg(test)]
#[path = "json_tests.rs"]
mod tests;
