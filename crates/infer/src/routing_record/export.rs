//! Export of records to JSON lines.

use std::io::{BufRead, Write};
use std::path::Path;

use serde_json::{Map, Value, json};

use super::{Block, Damage, LayerChoices, LoadBlock, NONE, RecordError, RecordHeader, RecordReader, TokenBlock};

/// The counts of an export.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Exported {
    /// Tokens with their choices.
    pub num_tokens: u64,
    /// Steps with loads.
    pub num_loads: u64,
    /// The parts of the record that could not be read.
    pub damage: Damage,
}

impl Exported {
    pub(super) fn add(&mut self, block: &Block) {
        match block {
            Block::Tokens(block) => self.num_tokens += block.num_tokens() as u64,
            Block::Loads(_) => self.num_loads += 1,
        }
    }
}

/// Writes a record as JSON lines to `out`, which errors call `path`: an object with the header, and then one for each
/// token and for each step's loads.
///
/// # Errors
/// If the record cannot be read or `out` cannot be written.
pub fn write_json_lines<R: BufRead>(
    reader: &mut RecordReader<R>,
    out: &mut impl Write,
    path: &Path,
) -> Result<Exported, RecordError> {
    let header = reader.header().clone();
    let mut exported = Exported::default();
    let mut line = |value: &Value| writeln!(out, "{value}").map_err(RecordError::io(path));
    line(&header_line(&header))?;
    while let Some(block) = reader.next_block()? {
        exported.add(&block);
        match &block {
            Block::Tokens(block) => token_lines(block, &header).try_for_each(|value| line(&value))?,
            Block::Loads(block) => line(&load_line(block, &header))?,
        }
    }
    exported.damage = reader.damage().clone();
    Ok(exported)
}

fn header_line(header: &RecordHeader) -> Value {
    let mut value = serde_json::to_value(header).unwrap_or_default();
    if let Value::Object(fields) = &mut value {
        fields.insert("kind".to_owned(), "header".into());
    }
    value
}

/// Returns an object for each token of a block.
fn token_lines<'a>(block: &'a TokenBlock, header: &'a RecordHeader) -> impl Iterator<Item = Value> + 'a {
    let tokens =
        block.runs.iter().flat_map(|run| (0..run.len).map(move |i| (run.id, u64::from(run.position) + u64::from(i))));
    tokens.enumerate().map(move |(t, (id, position))| {
        let layers = block.layers.iter().zip(&header.layers[block.first_layer..]);
        let layers: Vec<Value> = layers.map(|(choices, &layer)| choices_of(choices, layer, t, block.top_k)).collect();
        let mut line = json!({ "kind": "token", "time_ms": block.time_ms, "id": id, "position": position });
        if let Some(ids) = &block.token_ids {
            line["token_id"] = ids[t].into();
        }
        line["layers"] = layers.into();
        line
    })
}

/// Returns the choices of token `t` in a layer, without the empty places.
fn choices_of(choices: &LayerChoices, layer: usize, t: usize, top_k: usize) -> Value {
    let range = t * top_k..(t + 1) * top_k;
    let chosen: Vec<usize> = range.filter(|&i| choices.expert_ids[i] != NONE).collect();
    let of = |value: &dyn Fn(usize) -> Value| -> Value { chosen.iter().map(|&i| value(i)).collect() };
    let mut fields = Map::new();
    fields.insert("layer".to_owned(), layer.into());
    fields.insert("experts".to_owned(), of(&|i| choices.expert_ids[i].into()));
    if let Some(weights) = &choices.weights {
        fields.insert("weights".to_owned(), of(&|i| weights[i].into()));
    }
    if let Some(dropped) = &choices.dropped {
        fields.insert("dropped".to_owned(), of(&|i| dropped[i].into()));
    }
    Value::Object(fields)
}

fn load_line(block: &LoadBlock, header: &RecordHeader) -> Value {
    let layers = block.layers.iter().zip(&header.layers[block.first_layer..]);
    let layer = |(loads, layer): (&super::LayerLoads, &usize)| {
        let mut value = json!({ "layer": layer, "chosen": loads.chosen, "kept": loads.kept });
        if let Some(importance) = &loads.importance {
            value["importance"] = json!(importance);
        }
        value
    };
    let layers: Vec<Value> = layers.map(layer).collect();
    json!({ "kind": "loads", "time_ms": block.time_ms, "id": block.step, "tokens": block.num_tokens, "layers": layers })
}
