//! Traces of the ranks for Chrome and Perfetto. Each rank is a process; one track has its work and the communications
//! that it waited in, another the communications that were in flight meanwhile.
//!
//! The format is the Trace Event Format, with complete events, and nestable asynchronous events for communications in
//! flight. Times are in microseconds.

use std::fmt::Write as _;
use std::io;
use std::path::Path;

use moeworks_comm::Span;
use moeworks_model::files::write_whole;

/// Returns the events of rank `rank`, one JSON object per line with commas between. If spans were left out, a last
/// event says how many.
#[must_use]
pub fn events(rank: usize, spans: &[Span], num_left_out: u64) -> String {
    let mut text = format!(
        "{{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":{rank},\"tid\":0,\"args\":{{\"name\":\"rank {rank}\"}}}}"
    );
    for (index, span) in spans.iter().enumerate() {
        let (start, end) = (micros(span.start), micros(span.start + span.length));
        let name = span.name;
        let args = if span.bytes > 0 { format!(",\"args\":{{\"bytes\":{}}}", span.bytes) } else { String::new() };
        // Writing to a String cannot fail.
        let _ = if span.is_in_flight {
            let head = format!("\"cat\":\"under way\",\"name\":\"{name}\",\"pid\":{rank},\"tid\":0");
            let id = format!("\"id\":\"{rank}.{index}\"");
            write!(
                text,
                ",\n{{\"ph\":\"b\",{head},{id},\"ts\":{start}{args}}},\n{{\"ph\":\"e\",{head},{id},\"ts\":{end}}}"
            )
        } else {
            let length = micros(span.length);
            write!(
                text,
                ",\n{{\"ph\":\"X\",\"cat\":\"rank\",\"name\":\"{name}\",\"pid\":{rank},\"tid\":0,\"ts\":{start},\"dur\":{length}{args}}}"
            )
        };
    }
    if num_left_out > 0 {
        let end = spans.iter().map(|span| span.start + span.length).max().unwrap_or_default();
        let _ = write!(
            text,
            ",\n{{\"ph\":\"I\",\"s\":\"p\",\"name\":\"the trace ends here, {num_left_out} later spans are left out\",\"pid\":{rank},\"tid\":0,\"ts\":{}}}",
            micros(end)
        );
    }
    text
}

fn micros(time: std::time::Duration) -> f64 {
    time.as_nanos() as f64 / 1e3
}

/// Writes the events of all ranks to `path` atomically.
///
/// # Errors
/// The system's error.
pub fn write(path: &Path, events: &[String]) -> io::Result<()> {
    let text = format!("{{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n{}\n]}}\n", events.join(",\n"));
    write_whole(path, text.as_bytes())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Duration;

    use serde_json::Value;

    use super::*;

    #[test]
    fn a_trace_has_a_process_for_each_rank_and_its_spans_in_microseconds() {
        let span = |name, is_in_flight| Span {
            name,
            start: Duration::from_micros(1500),
            length: Duration::from_nanos(2500),
            bytes: if is_in_flight { 64 } else { 0 },
            is_in_flight,
        };
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace.json");
        let ranks = [events(0, &[span("experts", false), span("all-to-all", true)], 0), events(1, &[], 7)];
        write(&path, &ranks).unwrap();
        let trace: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let phases: Vec<_> = events.iter().map(|event| event["ph"].as_str().unwrap()).collect();
        assert_eq!(phases, ["M", "X", "b", "e", "M", "I"]);
        assert_eq!((events[1]["ts"].as_f64(), events[1]["dur"].as_f64()), (Some(1500.0), Some(2.5)));
        assert_eq!((&events[2]["args"]["bytes"], &events[2]["id"]), (&Value::from(64), &events[3]["id"]));
        assert_eq!(events[4]["args"]["name"], "rank 1");
        assert!(events[5]["name"].as_str().unwrap().contains("7 later spans"), "{}", events[5]);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing half-written is left");
    }
}
