//! CSV and TSV tables: a first row of names, then one document for each row, in the text column.

use std::borrow::Cow;
use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::ops::ControlFlow;

use csv_core::{ReadFieldResult, Reader, ReaderBuilder};

use super::input::Input;
use super::rows::{Row, Rows};
use super::sources::Visit;
use super::text::BOM;
use super::{DataError, decode};

/// The longest field: in a longer one a quotation mark was probably never closed.
const MAX_FIELD_BYTES: usize = 256 << 20;

/// The possible delimiters, by preference. The one for which the first row has the text column is used.
const DELIMITERS: [u8; 3] = [b',', b';', b'\t'];

/// The most column names that an error lists.
const MAX_NAMES: usize = 16;

/// Reads the text column of each row as a document.
pub(super) fn read(input: Input<'_>, visit: &mut Visit<'_>) -> Result<ControlFlow<()>, DataError> {
    let Some((mut table, column)) = Table::open(input)? else {
        return Err(without_column(input)?);
    };
    let mut rows = Rows::new(input);
    for row in 1u64.. {
        let place = || format!(" row {row}");
        let Some(TableRow { num_fields, text }) = table.next_row(column)? else { break };
        if num_fields > table.num_columns {
            let problem = format!(
                "{num_fields} fields, but the first row names {}; quote texts that hold the delimiter",
                table.num_columns
            );
            return Err(DataError::Format { path: input.path.into(), place: place(), problem });
        }
        let row = match text {
            None => Row::Missing(Vec::new()),
            Some(text) => Row::Text(Cow::Owned(String::from_utf8(text).map_err(|_| {
                let problem = format!("column \"{}\" is not UTF-8; must be converted to UTF-8", input.field);
                DataError::Format { path: input.path.into(), place: place(), problem }
            })?)),
        };
        if rows.take(row, &place, visit)?.is_break() {
            return Ok(ControlFlow::Break(()));
        }
    }
    rows.end()?;
    Ok(ControlFlow::Continue(()))
}

/// Returns whether the first row names the text column.
pub(super) fn has_column(input: Input<'_>) -> Result<bool, DataError> {
    Table::open(input).map(|table| table.is_some())
}

/// Returns the error of a file whose first row does not name the text column.
pub(super) fn without_column(input: Input<'_>) -> Result<DataError, DataError> {
    let names = Table::names(input, b',')?.1;
    let shown: Vec<String> = names.iter().take(MAX_NAMES).map(|name| name.escape_debug().collect()).collect();
    let problem = format!(
        "no column \"{}\" (columns: {}); data.text_field names the one to use, data.format = \"text\" reads the file as it is",
        input.field,
        shown.join(", ")
    );
    Ok(DataError::Format { path: input.path.into(), place: String::new(), problem })
}

/// A row of a table.
struct TableRow {
    num_fields: usize,
    /// The field in the text column; `None` if the row is shorter.
    text: Option<Vec<u8>>,
}

/// A table that is read field by field.
struct Table<'a> {
    core: Reader,
    reader: BufReader<Box<dyn Read + 'a>>,
    input: Input<'a>,
    /// The field that was read last, at its beginning.
    buffer: Vec<u8>,
    field_len: usize,
    num_columns: usize,
}

impl<'a> Table<'a> {
    /// Opens the table at its second row, and returns the number of the text column; `None` if there is no such
    /// column.
    fn open(input: Input<'a>) -> Result<Option<(Self, usize)>, DataError> {
        for delimiter in DELIMITERS {
            let (table, names) = Self::names(input, delimiter)?;
            if let Some(column) = names.iter().position(|name| name == input.field) {
                return Ok(Some((table, column)));
            }
        }
        Ok(None)
    }

    /// Reads the names in the first row.
    fn names(input: Input<'a>, delimiter: u8) -> Result<(Self, Vec<String>), DataError> {
        let mut reader = BufReader::with_capacity(1 << 16, decode::open_text(input)?);
        let start = reader.fill_buf().map_err(|source| decode::unreadable(input.path, source))?;
        let mark = if start.starts_with(BOM) { BOM.len() } else { 0 };
        reader.consume(mark);
        let core = ReaderBuilder::new().delimiter(delimiter).build();
        let mut table = Self { core, reader, input, buffer: vec![0; 1 << 10], field_len: 0, num_columns: 0 };
        let mut names = Vec::new();
        while let Some(is_end) = table.next_field()? {
            names.push(String::from_utf8_lossy(table.field()).trim().to_owned());
            if is_end {
                break;
            }
        }
        table.num_columns = names.len();
        Ok((table, names))
    }

    fn field(&self) -> &[u8] {
        &self.buffer[..self.field_len]
    }

    /// Reads a row and keeps the field in `column`; `None` at the end of the file.
    fn next_row(&mut self, column: usize) -> Result<Option<TableRow>, DataError> {
        let mut row = TableRow { num_fields: 0, text: None };
        while let Some(is_end) = self.next_field()? {
            if row.num_fields == column {
                row.text = Some(self.field().to_vec());
            }
            row.num_fields += 1;
            if is_end {
                return Ok(Some(row));
            }
        }
        Ok(None)
    }

    /// Reads a field and returns whether it ends its row; `None` at the end of the file.
    fn next_field(&mut self) -> Result<Option<bool>, DataError> {
        self.field_len = 0;
        loop {
            let available = match self.reader.fill_buf() {
                Ok(available) => available,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(decode::unreadable(self.input.path, error)),
            };
            let (result, taken, given) = self.core.read_field(available, &mut self.buffer[self.field_len..]);
            self.reader.consume(taken);
            self.field_len += given;
            match result {
                ReadFieldResult::InputEmpty => {}
                ReadFieldResult::OutputFull if self.buffer.len() >= MAX_FIELD_BYTES => {
                    let size = MAX_FIELD_BYTES >> 20;
                    let problem = format!("a field of more than {size} MiB: a quotation mark may never be closed");
                    let place = format!(":{}", self.core.line());
                    return Err(DataError::Format { path: self.input.path.into(), place, problem });
                }
                ReadFieldResult::OutputFull => self.buffer.resize(2 * self.buffer.len(), 0),
                ReadFieldResult::Field { record_end } => return Ok(Some(record_end)),
                ReadFieldResult::End => return Ok(None),
            }
        }
    }
}

#[cfg(test)]
#[path = "csv_tests.rs"]
mod tests;
