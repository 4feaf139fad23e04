//! Parquet files: one column of text, with one document for each row.
//!
//! Only the pages of that column are read, one at a time. The reader of the `parquet` crate checks much, but has
//! panicked on damaged files; a panic in any call of it becomes an error.

use std::borrow::Cow;
use std::cell::Cell;
use std::fs::File;
use std::io::{Seek, copy};
use std::ops::ControlFlow;
use std::panic::{self, AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Once;

use ::parquet::basic::{Compression, Type};
use ::parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use ::parquet::data_type::{ByteArray, ByteArrayType};
use ::parquet::errors::ParquetError;
use ::parquet::file::reader::FileReader;
use ::parquet::file::serialized_reader::SerializedFileReader;

use super::input::Input;
use super::rows::{Row, Rows};
use super::sources::Visit;
use super::{DataError, decode};

/// The magic bytes at both ends of Parquet files.
pub(super) const MAGIC: &[u8] = b"PAR1";

/// The number of rows that are decoded together.
const ROWS: usize = 256;

/// The most column names that an error lists.
const MAX_NAMES: usize = 16;

/// Reads the text column of a file. Each row with text is a document.
pub(super) fn read(input: Input<'_>, visit: &mut Visit<'_>) -> Result<ControlFlow<()>, DataError> {
    let file = open(input)?;
    let num_bytes = file.metadata().map_or(0, |metadata| metadata.len());
    let reader = fenced(input.path, || SerializedFileReader::new(file))?;
    let index = column_index(input, &reader)?;
    let total = reader.metadata().file_metadata().num_rows().max(1) as f64;
    let (mut rows, mut row) = (Rows::new(input), 0u64);
    for group in 0..reader.num_row_groups() {
        let metadata = reader.metadata().row_group(group);
        check_codec(input.path, metadata.column(index).compression())?;
        let level = metadata.column(index).column_descr().max_def_level();
        let mut pages = fenced(input.path, || match reader.get_row_group(group)?.get_column_reader(index)? {
            ColumnReader::ByteArrayColumnReader(pages) => Ok(pages),
            _ => Err(ParquetError::General(format!("column {} changes its type", input.field))),
        })?;
        let first_row = row;
        loop {
            input.pass.check()?;
            let batch = Batch::read(input.path, &mut pages, level)?;
            if batch.num_rows == 0 {
                break;
            }
            for text in batch.texts() {
                row += 1;
                let place = || format!(" row {row}");
                let text = text.map_or(Ok(Row::Null), |text| text_of(input, text, &place))?;
                if rows.take(text, &place, visit)?.is_break() {
                    return Ok(ControlFlow::Break(()));
                }
            }
            input.pass.add_bytes((num_bytes as f64 * (batch.num_rows as f64 / total)) as u64);
        }
        let (found, stated) = (row - first_row, metadata.num_rows());
        if i64::try_from(found) != Ok(stated) {
            let problem =
                format!("not a readable Parquet file: row group {group} states {stated} rows and has {found}");
            return Err(wrong(input.path, problem));
        }
    }
    Ok(ControlFlow::Continue(()))
}

/// Returns the text of a row.
fn text_of<'t>(input: Input<'_>, text: &'t ByteArray, place: &dyn Fn() -> String) -> Result<Row<'t>, DataError> {
    let text = std::str::from_utf8(text.data()).map_err(|error| {
        let problem = format!("column \"{}\" is not UTF-8 at byte {} of the text", input.field, error.valid_up_to());
        DataError::Format { path: input.path.into(), place: place(), problem }
    })?;
    Ok(Row::Text(Cow::Borrowed(text)))
}

/// Opens the file itself, or its decompressed content in an unnamed temporary file, since Parquet is read from its
/// end.
fn open(input: Input<'_>) -> Result<File, DataError> {
    let unreadable = |source| decode::unreadable(input.path, source);
    if !decode::is_compressed(&input)? {
        return decode::open_raw(&input);
    }
    let mut content = decode::open(input)?;
    let mut file = tempfile::tempfile().map_err(unreadable)?;
    copy(&mut content, &mut file).and_then(|_| file.rewind()).map_err(unreadable)?;
    Ok(file)
}

/// Consecutive rows of a column.
struct Batch {
    num_rows: usize,
    values: Vec<ByteArray>,
    /// A flag for each row that has a value; empty if all have.
    has_value: Vec<bool>,
}

impl Batch {
    /// Reads the next rows. Values have the definition level `level`.
    fn read(path: &Path, pages: &mut ColumnReaderImpl<ByteArrayType>, level: i16) -> Result<Self, DataError> {
        let (mut levels, mut values) = (Vec::with_capacity(ROWS), Vec::with_capacity(ROWS));
        let read = || pages.read_records(ROWS, Some(&mut levels), None, &mut values);
        let (num_rows, num_values, _) = fenced(path, read)?;
        let has_value: Vec<bool> = levels.iter().map(|&found| found == level).collect();
        let num_stated = if level == 0 { num_rows } else { has_value.iter().filter(|&&has| has).count() };
        if num_stated != num_values || num_values != values.len() || (level > 0 && has_value.len() != num_rows) {
            return Err(wrong(path, "not a readable Parquet file: its rows and values differ".into()));
        }
        Ok(Self { num_rows, values, has_value: if level == 0 { Vec::new() } else { has_value } })
    }

    /// Iterates over the text of each row, if it has one.
    fn texts(&self) -> impl Iterator<Item = Option<&ByteArray>> {
        let mut values = self.values.iter();
        (0..self.num_rows).map(
            move |i| {
                if self.has_value.get(i).copied().unwrap_or(true) { values.next() } else { None }
            },
        )
    }
}

/// Refuses an unsupported compression, which the `parquet` crate would call a missing feature.
fn check_codec(path: &Path, codec: Compression) -> Result<(), DataError> {
    let name = match codec {
        Compression::BROTLI(_) => "Brotli",
        Compression::LZO => "LZO",
        _ => return Ok(()),
    };
    let remedy = "write it with zstd, snappy, gzip or lz4, such as by pyarrow.parquet.write_table(table, path, compression=\"zstd\")";
    Err(wrong(path, format!("its text is compressed by {name}, which is not supported; {remedy}")))
}

/// Returns the index of the text column among the leaves of the schema.
fn column_index(input: Input<'_>, reader: &SerializedFileReader<File>) -> Result<usize, DataError> {
    let (path, name) = (input.path, input.field);
    let schema = reader.metadata().file_metadata().schema_descr();
    let columns: Vec<String> = schema.columns().iter().map(|column| column.path().string()).collect();
    let names = || columns.iter().take(MAX_NAMES).map(String::as_str).collect::<Vec<_>>().join(", ");
    let Some(index) = columns.iter().position(|column| column == name) else {
        let below = format!("{name}.");
        let inner = schema.columns().iter().zip(&columns).find(|(_, column)| column.starts_with(&below));
        let problem = match inner {
            Some((column, _)) if column.max_rep_level() > 0 => {
                format!("column \"{name}\" is a list; must be text (columns: {})", names())
            }
            Some((_, inner)) => {
                format!("column \"{name}\" is a group of columns; data.text_field = \"{inner}\" names one")
            }
            None => format!("no column \"{name}\" (columns: {}); data.text_field names the one to use", names()),
        };
        return Err(wrong(path, problem));
    };
    let column = schema.column(index);
    if column.physical_type() != Type::BYTE_ARRAY || column.max_rep_level() > 0 {
        let kind = if column.max_rep_level() > 0 { "a list".into() } else { column.physical_type().to_string() };
        return Err(wrong(path, format!("column \"{name}\" is {kind}; must be text (columns: {})", names())));
    }
    Ok(index)
}

fn wrong(path: &Path, problem: String) -> DataError {
    DataError::Format { path: path.into(), place: String::new(), problem }
}

/// Calls `call`, and turns its errors and panics into an error about the file.
fn fenced<T>(path: &Path, call: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, DataError> {
    let damaged = |message: String| wrong(path, format!("not a readable Parquet file: {}", message.replace('\n', " ")));
    SILENCE.call_once(|| {
        let report = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !FENCED.get() {
                report(info);
            }
        }));
    });
    FENCED.set(true);
    let result = catch_unwind(AssertUnwindSafe(call));
    FENCED.set(false);
    match result {
        Ok(result) => result.map_err(|error| damaged(error.to_string())),
        Err(_) => Err(damaged("its content contradicts itself".into())),
    }
}

/// The guard that installs, once, a panic hook which is silent within `fenced`: the hook is global, and the error
/// already says what failed.
static SILENCE: Once = Once::new();

thread_local! {
    static FENCED: Cell<bool> = const { Cell::new(false) };
}

#[cfg(test)]
#[path = "parquet_tests.rs"]
mod tests;
