//! Parquet: one column of text, a document a row.
//!
//! Only that column's pages are read, one at a time. The reader of the `parquet` crate checks much but has been known to
//! panic on damaged files, so each call of it is fenced: a panic becomes an error like the others.

use std::cell::Cell;
use std::fs::File;
use std::io::{Seek, copy};
use std::ops::ControlFlow;
use std::panic::{self, AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Once;

use ::parquet::basic::Type;
use ::parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use ::parquet::data_type::{ByteArray, ByteArrayType};
use ::parquet::errors::ParquetError;
use ::parquet::file::reader::FileReader;
use ::parquet::file::serialized_reader::SerializedFileReader;

use super::sources::Visit;
use super::{DataError, decode, text};

/// How Parquet files begin and end.
pub(super) const MAGIC: &[u8] = b"PAR1";

/// Rows that are decoded together.
const ROWS: usize = 256;

/// Reads the column `column` of the file at `path`; each row with text is a document.
pub(super) fn read(path: &Path, column: &str, visit: &mut Visit<'_>) -> Result<ControlFlow<()>, DataError> {
    let file = open(path)?;
    let reader = fenced(path, || SerializedFileReader::new(file))?;
    let index = column_index(path, &reader, column)?;
    let mut row = 0u64;
    for group in 0..reader.num_row_groups() {
        let mut pages = fenced(path, || match reader.get_row_group(group)?.get_column_reader(index)? {
            ColumnReader::ByteArrayColumnReader(pages) => Ok(pages),
            _ => Err(ParquetError::General(format!("column {column} changes its type"))),
        })?;
        let stated = reader.metadata().row_group(group).num_rows();
        let first_row = row;
        loop {
            let mut texts = Vec::with_capacity(ROWS);
            let records = read_rows(path, &mut pages, &mut texts)?;
            if records == 0 {
                break;
            }
            for text in &texts {
                let text = std::str::from_utf8(text.data()).map_err(|error| {
                    let at = error.valid_up_to();
                    let problem = format!("column {column}, near row {row}: not UTF-8 at byte {at} of the text");
                    wrong(path, problem)
                })?;
                if text::give(text, path, visit)?.is_break() {
                    return Ok(ControlFlow::Break(()));
                }
            }
            row += records as u64;
        }
        if i64::try_from(row - first_row) != Ok(stated) {
            let found = row - first_row;
            let problem =
                format!("not a readable Parquet file: row group {group} states {stated} rows and has {found}");
            return Err(wrong(path, problem));
        }
    }
    Ok(ControlFlow::Continue(()))
}

/// The file itself, or its decompressed content in a nameless temporary file: Parquet is read from its end.
fn open(path: &Path) -> Result<File, DataError> {
    let unreadable = |source| decode::unreadable(path, source);
    if !decode::is_compressed(path)? {
        return File::open(path).map_err(unreadable);
    }
    let mut content = decode::open(path)?;
    let mut file = tempfile::tempfile().map_err(unreadable)?;
    copy(&mut content, &mut file).and_then(|_| file.rewind()).map_err(unreadable)?;
    Ok(file)
}

fn read_rows(
    path: &Path,
    pages: &mut ColumnReaderImpl<ByteArrayType>,
    texts: &mut Vec<ByteArray>,
) -> Result<usize, DataError> {
    let mut levels = Vec::with_capacity(ROWS);
    fenced(path, || pages.read_records(ROWS, Some(&mut levels), None, texts)).map(|(records, ..)| records)
}

/// Where the column of text stands among the leaves of the schema.
fn column_index(path: &Path, reader: &SerializedFileReader<File>, name: &str) -> Result<usize, DataError> {
    let schema = reader.metadata().file_metadata().schema_descr();
    let names = || {
        let names: Vec<String> = schema.columns().iter().take(16).map(|column| column.path().string()).collect();
        names.join(", ")
    };
    let found = schema.columns().iter().position(|column| column.path().string() == name);
    let Some(index) = found else {
        let problem = format!("no column \"{name}\" (columns: {}); data.text_field names the one to use", names());
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

/// What `call` gives; its errors and panics as an error about the file.
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

/// The report of a panic is the program's, not the thread's: it is taught once to say nothing within the fence, where the
/// error says it.
static SILENCE: Once = Once::new();

thread_local! {
    static FENCED: Cell<bool> = const { Cell::new(false) };
}

#[cfg(test)]
#[path = "parquet_tests.rs"]
mod tests;
