//! Export of records to Parquet: a row for each choice of a token, and one for each expert's load in a step.

use std::io::{BufRead, Write};
use std::path::Path;
use std::sync::Arc;

use ::parquet::basic::{Compression, ZstdLevel};
use ::parquet::column::writer::ColumnWriter;
use ::parquet::data_type::ByteArray;
use ::parquet::errors::ParquetError;
use ::parquet::file::properties::WriterProperties;
use ::parquet::file::writer::SerializedFileWriter;
use ::parquet::schema::parser::parse_message_type;

use super::{Block, Exported, LoadBlock, NONE, RecordError, RecordHeader, RecordReader, TokenBlock};

/// The columns. Rows of kind "choice" have those of choices, rows of kind "load" those of loads.
const SCHEMA: &str = "message routing {
    required binary kind (utf8);
    required int64 time_ms;
    required int64 id;
    required int32 layer;
    required int32 expert;
    optional int32 position;
    optional int64 token_id;
    optional int32 slot;
    optional float weight;
    optional boolean dropped;
    optional int64 chosen;
    optional int64 kept;
    optional float importance;
}";
/// Rows of a row group at least, but for the last.
const GROUP_ROWS: usize = 1 << 18;

/// A column's values that are there, and for each row whether it has one.
#[derive(Debug)]
struct Optional<T> {
    values: Vec<T>,
    levels: Vec<i16>,
}

impl<T> Default for Optional<T> {
    fn default() -> Self {
        Self { values: Vec::new(), levels: Vec::new() }
    }
}

impl<T> Optional<T> {
    fn push(&mut self, value: Option<T>) {
        self.levels.push(i16::from(value.is_some()));
        self.values.extend(value);
    }
}

/// The rows of a row group.
#[derive(Debug, Default)]
struct Rows {
    kind: Vec<ByteArray>,
    time_ms: Vec<i64>,
    id: Vec<i64>,
    layer: Vec<i32>,
    expert: Vec<i32>,
    position: Optional<i32>,
    token_id: Optional<i64>,
    slot: Optional<i32>,
    weight: Optional<f32>,
    dropped: Optional<bool>,
    chosen: Optional<i64>,
    kept: Optional<i64>,
    importance: Optional<f32>,
}

/// The fields that all rows have.
struct Row {
    kind: &'static str,
    time_ms: u64,
    id: u64,
    layer: usize,
    expert: usize,
}

/// The fields of a token's choice.
struct ChoiceFields {
    position: u64,
    token_id: Option<u32>,
    slot: usize,
    weight: Option<f32>,
    is_dropped: bool,
}

/// The fields of an expert's load.
struct LoadFields {
    chosen: u32,
    kept: u32,
    importance: Option<f32>,
}

/// Writes a record as a Parquet file to `out`, which errors call `path`.
///
/// # Errors
/// If the record cannot be read or the file cannot be written.
pub fn write_parquet<R: BufRead>(
    reader: &mut RecordReader<R>,
    out: impl Write + Send,
    path: &Path,
) -> Result<Exported, RecordError> {
    let wrong = |error: ParquetError| RecordError::Parquet { path: path.to_owned(), problem: error.to_string() };
    let header = reader.header().clone();
    let schema = Arc::new(parse_message_type(SCHEMA).map_err(wrong)?);
    let compression = Compression::ZSTD(ZstdLevel::default());
    let properties = Arc::new(WriterProperties::builder().set_compression(compression).build());
    let mut writer = SerializedFileWriter::new(out, schema, properties).map_err(wrong)?;
    let (mut rows, mut exported) = (Rows::default(), Exported::default());
    while let Some(block) = reader.next_block()? {
        exported.add(&block);
        match &block {
            Block::Tokens(block) => rows.add_choices(block, &header),
            Block::Loads(block) => rows.add_loads(block, &header),
        }
        if rows.kind.len() >= GROUP_ROWS {
            std::mem::take(&mut rows).write(&mut writer).map_err(wrong)?;
        }
    }
    if !rows.kind.is_empty() {
        rows.write(&mut writer).map_err(wrong)?;
    }
    writer.close().map_err(wrong)?;
    exported.damage = reader.damage().clone();
    Ok(exported)
}

impl Rows {
    fn push(&mut self, row: &Row, choice: Option<&ChoiceFields>, load: Option<&LoadFields>) {
        self.kind.push(ByteArray::from(row.kind));
        self.time_ms.push(row.time_ms as i64);
        self.id.push(row.id as i64);
        self.layer.push(row.layer as i32);
        self.expert.push(row.expert as i32);
        self.position.push(choice.map(|choice| choice.position.min(i32::MAX as u64) as i32));
        self.token_id.push(choice.and_then(|choice| choice.token_id).map(i64::from));
        self.slot.push(choice.map(|choice| choice.slot as i32));
        self.weight.push(choice.and_then(|choice| choice.weight));
        self.dropped.push(choice.map(|choice| choice.is_dropped));
        self.chosen.push(load.map(|load| i64::from(load.chosen)));
        self.kept.push(load.map(|load| i64::from(load.kept)));
        self.importance.push(load.and_then(|load| load.importance));
    }

    fn add_choices(&mut self, block: &TokenBlock, header: &RecordHeader) {
        let tokens = block.runs.iter().flat_map(|run| (0..run.len).map(move |i| (run.id, run.position, i)));
        for (t, (id, position, i)) in tokens.enumerate() {
            for (choices, &layer) in block.layers.iter().zip(&header.layers[block.first_layer..]) {
                for slot in 0..block.top_k {
                    let at = t * block.top_k + slot;
                    let expert = choices.expert_ids[at];
                    if expert == NONE {
                        continue;
                    }
                    let fields = ChoiceFields {
                        position: u64::from(position) + u64::from(i),
                        token_id: block.token_ids.as_ref().map(|ids| ids[t]),
                        slot,
                        weight: choices.weights.as_ref().map(|weights| weights[at]),
                        is_dropped: choices.dropped.as_ref().is_some_and(|dropped| dropped[at]),
                    };
                    let row = Row { kind: "choice", time_ms: block.time_ms, id, layer, expert: expert as usize };
                    self.push(&row, Some(&fields), None);
                }
            }
        }
    }

    fn add_loads(&mut self, block: &LoadBlock, header: &RecordHeader) {
        for (loads, &layer) in block.layers.iter().zip(&header.layers[block.first_layer..]) {
            for expert in 0..header.num_experts {
                let importance = loads.importance.as_ref().map(|importance| importance[expert]);
                let fields = LoadFields { chosen: loads.chosen[expert], kept: loads.kept[expert], importance };
                let row = Row { kind: "load", time_ms: block.time_ms, id: block.step, layer, expert };
                self.push(&row, None, Some(&fields));
            }
        }
    }

    /// Writes the rows as a row group, column by column in the order of the schema.
    fn write<W: Write + Send>(self, writer: &mut SerializedFileWriter<W>) -> Result<(), ParquetError> {
        let mut group = writer.next_row_group()?;
        let mut index = 0;
        while let Some(mut column) = group.next_column()? {
            self.write_column(index, column.untyped())?;
            column.close()?;
            index += 1;
        }
        group.close()?;
        Ok(())
    }

    fn write_column(&self, index: usize, column: &mut ColumnWriter<'_>) -> Result<(), ParquetError> {
        use ColumnWriter::{
            BoolColumnWriter as Bool, ByteArrayColumnWriter as Text, FloatColumnWriter as Float,
            Int32ColumnWriter as Int32, Int64ColumnWriter as Int64,
        };
        let written = match (index, column) {
            (0, Text(to)) => to.write_batch(&self.kind, None, None),
            (1, Int64(to)) => to.write_batch(&self.time_ms, None, None),
            (2, Int64(to)) => to.write_batch(&self.id, None, None),
            (3, Int32(to)) => to.write_batch(&self.layer, None, None),
            (4, Int32(to)) => to.write_batch(&self.expert, None, None),
            (5, Int32(to)) => to.write_batch(&self.position.values, Some(&self.position.levels), None),
            (6, Int64(to)) => to.write_batch(&self.token_id.values, Some(&self.token_id.levels), None),
            (7, Int32(to)) => to.write_batch(&self.slot.values, Some(&self.slot.levels), None),
            (8, Float(to)) => to.write_batch(&self.weight.values, Some(&self.weight.levels), None),
            (9, Bool(to)) => to.write_batch(&self.dropped.values, Some(&self.dropped.levels), None),
            (10, Int64(to)) => to.write_batch(&self.chosen.values, Some(&self.chosen.levels), None),
            (11, Int64(to)) => to.write_batch(&self.kept.values, Some(&self.kept.levels), None),
            (12, Float(to)) => to.write_batch(&self.importance.values, Some(&self.importance.levels), None),
            _ => return Err(ParquetError::General(format!("column {index} is not that of the schema"))),
        };
        written.map(|_| ())
    }
}
