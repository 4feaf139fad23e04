//! Reading of a trace that `train --trace` wrote.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::Value;

use super::figures::{SpanTotal, TraceFigures};
use super::read::AdviceError;

/// Reads the spans of rank 0. A trace is written at the end of a run, so that a damaged one is refused.
pub(super) fn read_trace(path: &Path) -> Result<TraceFigures, AdviceError> {
    let failed = |problem: String| AdviceError::Trace { path: path.to_owned(), problem };
    let text = fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
    let value: Value = serde_json::from_str(&text).map_err(|error| failed(format!("is not JSON: {error}")))?;
    let events = value.get("traceEvents").and_then(Value::as_array);
    let events =
        events.ok_or_else(|| failed("has no traceEvents: it is no trace of `moeworks train --trace`".into()))?;
    let (mut first, mut last, mut totals) = (f64::INFINITY, 0.0_f64, BTreeMap::<&str, f64>::new());
    for event in events {
        let is_span =
            event.get("ph").and_then(Value::as_str) == Some("X") && event.get("pid").and_then(Value::as_u64) == Some(0);
        let number = |name: &str| event.get(name).and_then(Value::as_f64).filter(|value| value.is_finite());
        let name = event.get("name").and_then(Value::as_str);
        let (true, Some(name), Some(start), Some(length)) = (is_span, name, number("ts"), number("dur")) else {
            continue;
        };
        (first, last) = (first.min(start), last.max(start + length));
        *totals.entry(name).or_default() += length / 1e3;
    }
    if totals.is_empty() {
        return Err(failed("has no spans of rank 0".into()));
    }
    let mut spans: Vec<SpanTotal> =
        totals.into_iter().map(|(name, ms)| SpanTotal { name: name.to_owned(), ms }).collect();
    spans.sort_by(|a, b| b.ms.total_cmp(&a.ms));
    Ok(TraceFigures { total_ms: (last - first) / 1e3, spans })
}
