//! Traces of simulated ranks for Chrome and Perfetto, in the form of those of real runs: each rank of the schedule is a
//! process, with its work on one track, and what is in flight on another.

use std::fmt::Write as _;

use moeworks_plan::Schedule;
use moeworks_plan::schedule::{Entry, Kind, Timeline};

/// A text near the start of each of these files.
pub(super) const MARK: &str = "\"made by\":\"moeworks simulate\"";

/// Returns the trace of a timeline, whose unit of time has `micros` microseconds.
pub(super) fn of(timeline: &Timeline<'_>, schedule: &Schedule, micros: f64) -> String {
    let mut text = format!("{{\"displayTimeUnit\":\"ms\",\"otherData\":{{{MARK}}},\"traceEvents\":[");
    for (rank, (entries, spans)) in schedule.ranks.iter().zip(&timeline.spans).enumerate() {
        let comma = if rank == 0 { "" } else { "," };
        // Writing to a String cannot fail.
        let _ = write!(
            text,
            "{comma}\n{{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":{rank},\"tid\":0,\"args\":{{\"name\":\"rank {rank}\"}}}}"
        );
        for (index, (entry, span)) in entries.iter().zip(spans).enumerate() {
            let (start, end) = (span.start * micros, span.end * micros);
            let kind = entry.first().kind;
            if kind.is_compute() {
                write_event(&mut text, &Event { rank, entry, name: &entry.to_string(), start, end });
            } else if matches!(kind, Kind::ReceiveInput | Kind::ReceiveGrad) {
                if end > start {
                    write_event(&mut text, &Event { rank, entry, name: "wait for a message", start, end });
                }
            } else {
                let name = name_in_flight(kind);
                let head = format!(
                    "\"cat\":\"under way\",\"name\":\"{name}\",\"pid\":{rank},\"tid\":0,\"id\":\"{rank}.{index}\""
                );
                let args = args(entry);
                let _ = write!(
                    text,
                    ",\n{{\"ph\":\"b\",{head},\"ts\":{start},{args}}},\n{{\"ph\":\"e\",{head},\"ts\":{end}}}"
                );
            }
        }
    }
    text + "\n]}\n"
}

struct Event<'a> {
    rank: usize,
    entry: &'a Entry,
    name: &'a str,
    start: f64,
    end: f64,
}

fn write_event(text: &mut String, event: &Event<'_>) {
    let Event { rank, entry, name, start, end } = event;
    let (length, args) = (end - start, args(entry));
    let _ = write!(
        text,
        ",\n{{\"ph\":\"X\",\"cat\":\"rank\",\"name\":\"{name}\",\"pid\":{rank},\"tid\":0,\"ts\":{start},\"dur\":{length},{args}}}"
    );
}

fn args(entry: &Entry) -> String {
    let first = entry.first();
    format!("\"args\":{{\"stage\":{},\"microbatch\":{}}}", first.stage, first.microbatch)
}

fn name_in_flight(kind: Kind) -> &'static str {
    match kind {
        Kind::ForwardDispatch => "dispatch",
        Kind::ForwardCombine => "combine",
        Kind::BackwardCombine => "combine backward",
        Kind::BackwardDispatch => "dispatch backward",
        Kind::SendGrad => "gradient to the stage before",
        _ => "output to the next stage",
    }
}
