//! Conversion of records to JSON and CSV lines, and back from JSON.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};

use serde_json::Value;

use moeworks_model::RouterLosses;

use super::{Columns, LayerRecord, NamedFigure, OCCASIONAL, RUN_FIGURES, RanksRecord, Record, router_loss_name};
use crate::routing::Specialization;

/// The error of a file of records that cannot be written or read.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}: {source}", path.display())]
pub struct MetricsError {
    /// The failed action: "write", "read".
    pub action: &'static str,
    /// The file.
    pub path: PathBuf,
    /// The system's error.
    #[source]
    pub source: io::Error,
}

impl MetricsError {
    pub(super) fn new(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self + use<> {
        let path = path.to_owned();
        move |source| Self { action, path, source }
    }
}

/// Formats a number for JSON and CSV: the shortest text that reads back as the same bits.
pub(super) fn number(value: f64) -> String {
    let text = format!("{value:?}");
    text.strip_suffix(".0").map_or(text.clone(), str::to_owned)
}

/// Returns whether the record is of a step without this figure, as opposed to a figure that is NaN.
fn is_absent(record: &Record, name: &str, value: f64) -> bool {
    let in_layer = name.strip_prefix("moe/layer_").and_then(|rest| rest.split('/').nth(1));
    let is_router_loss = name.starts_with("moe/") && name.ends_with("_loss") && in_layer.is_none();
    (name == "val/loss" && record.val_loss.is_none())
        || (value.is_nan() && name.starts_with("val/") && name != "val/loss")
        || (record.ranks.is_none() && name.starts_with("ranks/"))
        || (value.is_nan() && is_router_loss)
        || (value.is_nan() && in_layer.is_some_and(|name| OCCASIONAL.contains(&name)))
}

/// Formats a line of `metrics.jsonl`, with its line end.
pub(super) fn json_line(record: &Record) -> String {
    let mut line = format!("{{\"step\":{},\"tokens\":{}", record.step, record.tokens);
    for (name, value) in record.scalars() {
        if is_absent(record, &name, value) {
            continue;
        }
        let value = if value.is_finite() { number(value) } else { "null".to_owned() };
        // Writing to a String cannot fail.
        let _ = write!(line, ",\"{name}\":{value}");
    }
    for layer in &record.layers {
        let counts: Vec<String> = layer.tokens_per_expert.iter().map(u64::to_string).collect();
        let (index, counts) = (layer.layer, counts.join(","));
        let _ = write!(line, ",\"moe/layer_{index}/num_dropped\":{}", layer.num_dropped);
        let _ = write!(line, ",\"moe/layer_{index}/num_rerouted\":{}", layer.num_rerouted);
        let _ = write!(line, ",\"moe/layer_{index}/tokens_per_expert\":[{counts}]");
    }
    if let Some(ranks) = &record.ranks {
        line.push_str(&ranks.json());
    }
    line.push_str("}\n");
    line
}

/// Formats the header of `metrics.csv` with these columns, with its line end.
pub(super) fn csv_header(columns: &Columns) -> String {
    let layers = columns.moe_layers.iter().map(|&layer| LayerRecord { layer, ..LayerRecord::default() }).collect();
    let metrics = columns.metrics_of(&Record::default());
    let names = Record { layers, metrics, ..Record::default() }.scalars().into_iter().map(|(name, _)| name);
    let names: Vec<String> = ["step".to_owned(), "tokens".to_owned()].into_iter().chain(names).collect();
    names.join(",") + "\n"
}

/// Formats a line of `metrics.csv` with these columns, with its line end.
pub(super) fn csv_line(record: &Record, columns: &Columns) -> String {
    let mut line = format!("{},{}", record.step, record.tokens);
    let record = Record { metrics: columns.metrics_of(record), ..record.clone() };
    for (_, value) in record.scalars() {
        line.push(',');
        if value.is_finite() {
            line.push_str(&number(value));
        }
    }
    line.push('\n');
    line
}

/// Returns the step of a line of `metrics.jsonl` or `samples.jsonl`; `None` if the line is damaged.
pub(super) fn json_step(line: &[u8]) -> Option<u64> {
    serde_json::from_slice::<Value>(line).ok()?.get("step")?.as_u64()
}

/// Returns the step of a line of `metrics.csv`; `None` for a line without one.
pub(super) fn csv_step(line: &[u8]) -> Option<u64> {
    std::str::from_utf8(line).ok()?.split(',').next()?.parse().ok()
}

/// Parses a line of `metrics.jsonl`. Unknown names are skipped; numbers that are missing or `null` become NaN.
pub(super) fn parse_record(line: &[u8]) -> Option<Record> {
    let Value::Object(fields) = serde_json::from_slice(line).ok()? else { return None };
    let number = |name: &str| fields.get(name).and_then(Value::as_f64).unwrap_or(f64::NAN);
    let count = |name: &str| fields.get(name).and_then(Value::as_u64);
    let mut layers = Vec::new();
    for (name, value) in &fields {
        let index = name.strip_prefix("moe/layer_").and_then(|rest| rest.strip_suffix("/tokens_per_expert"));
        let Some(layer) = index.and_then(|index| index.parse().ok()) else { continue };
        let counts = value.as_array()?.iter().map(Value::as_u64);
        layers.push(LayerRecord { tokens_per_expert: counts.collect::<Option<_>>()?, ..parse_layer(&fields, layer) });
    }
    layers.sort_by_key(|layer| layer.layer);
    Some(Record {
        step: count("step")?,
        tokens: count("tokens").unwrap_or(0),
        loss: number("train/loss"),
        balance_loss: number("train/balance_loss"),
        z_loss: number("train/z_loss"),
        router_losses: RouterLosses::from_names(|name| fields.get(&router_loss_name(name)).and_then(Value::as_f64)),
        routing_flops_saved: number("moe/routing_flops_saved"),
        lr: number("train/lr"),
        grad_norm: number("train/grad_norm"),
        tokens_per_s: number("perf/tokens_per_s"),
        mfu: number("perf/mfu"),
        step_ms: number("perf/step_ms"),
        processor_ms: number("perf/processor_ms"),
        memory_peak_bytes: count("perf/memory_peak_bytes").unwrap_or(0),
        val_loss: fields.get("val/loss").map(|value| value.as_f64().unwrap_or(f64::NAN)),
        is_skipped: number("train/is_skipped") == 1.0,
        metrics: parse_metrics(&fields),
        ranks: RanksRecord::parse(&fields),
        layers,
    })
}

/// Returns the task's metrics: all figures of training and validation that not every run has.
fn parse_metrics(fields: &serde_json::Map<String, Value>) -> Vec<NamedFigure> {
    let is_metric =
        |name: &str| (name.starts_with("train/") || name.starts_with("val/")) && !RUN_FIGURES.contains(&name);
    let metrics = fields.iter().filter(|(name, _)| is_metric(name));
    metrics.map(|(name, value)| NamedFigure { name: name.clone(), value: value.as_f64().unwrap_or(f64::NAN) }).collect()
}

/// Parses the figures of a layer, except for the counts of its experts.
fn parse_layer(fields: &serde_json::Map<String, Value>, layer: usize) -> LayerRecord {
    let field = |name: &str| fields.get(&format!("moe/layer_{layer}/{name}"));
    let number = |name: &str| field(name).and_then(Value::as_f64).unwrap_or(f64::NAN);
    let count = |name: &str| field(name).and_then(Value::as_u64).unwrap_or(0);
    let specialization = Specialization { nats: number("specialization_nats"), share: number("specialization") };
    LayerRecord {
        layer,
        tokens_per_expert: Vec::new(),
        num_dropped: count("num_dropped"),
        num_rerouted: count("num_rerouted"),
        router_entropy: number("router_entropy"),
        mean_prob_entropy: number("mean_prob_entropy"),
        router_z: number("router_z"),
        router_logit_rms: number("router_logit_rms"),
        specialization: (!specialization.share.is_nan()).then_some(specialization),
        checkpoint_agreement: field("checkpoint_agreement").and_then(Value::as_f64),
    }
}

/// An iterator over the records of a `metrics.jsonl`. Damaged lines (a cut last one after a kill) are skipped.
pub struct ReadRecords {
    lines: BufReader<File>,
    path: PathBuf,
    line: Vec<u8>,
    /// The number of skipped lines so far.
    pub num_damaged: usize,
}

/// Opens a `metrics.jsonl`. Records are read one at a time, so that a long run need not fit in memory.
pub fn read_records(path: &Path) -> Result<ReadRecords, MetricsError> {
    let file = File::open(path).map_err(MetricsError::new("read", path))?;
    Ok(ReadRecords { lines: BufReader::new(file), path: path.to_owned(), line: Vec::new(), num_damaged: 0 })
}

impl Iterator for ReadRecords {
    type Item = Result<Record, MetricsError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            self.line.clear();
            match self.lines.read_until(b'\n', &mut self.line) {
                Ok(0) => return None,
                Ok(_) => {}
                Err(source) => return Some(Err(MetricsError::new("read", &self.path)(source))),
            }
            match parse_record(&self.line) {
                Some(record) => return Some(Ok(record)),
                None => self.num_damaged += 1,
            }
        }
    }
}
