//! Traces of simulated ranks for Chrome and Perfetto, in the form of those of real runs: each rank of the schedule is a
//! process, with its work on one track, and what is in flight on another.

use std::fmt::Write as _;

use moeworks_plan::Schedule;
use moeworks_plan::schedule::{Entry, Kind, Span, Timeline};

/// A text near the start of each of these files.
pub(super) const MARK: &str = "\"made by\":\"moeworks simulate\"";

/// The parts of a trace that a timeline does not have.
#[derive(Clone, Copy)]
pub(super) struct Step<'a> {
    /// The sum of gradients of each rank.
    pub(super) sums: &'a [Span],
    /// Bytes of each rank that do not depend on the time.
    pub(super) state_bytes: &'a [f64],
}

/// Returns the trace of a timeline, whose unit of time has `micros` microseconds, with the memory of each rank over
/// time.
pub(super) fn of(timeline: &Timeline<'_>, schedule: &Schedule, micros: f64, step: Step<'_>) -> String {
    let mut text = format!("{{\"displayTimeUnit\":\"ms\",\"otherData\":{{{MARK}}},\"traceEvents\":[");
    for rank in 0..schedule.num_ranks() {
        let comma = if rank == 0 { "" } else { "," };
        // Writing to a String cannot fail.
        let _ = write!(
            text,
            "{comma}\n{{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":{rank},\"tid\":0,\"args\":{{\"name\":\"rank {rank}\"}}}}"
        );
        for (index, (entry, span)) in schedule.ranks[rank].iter().zip(&timeline.spans[rank]).enumerate() {
            let span = Span { start: span.start * micros, end: span.end * micros };
            write_entry(&mut text, entry, Place { rank, index }, span);
        }
        if let Some(sum) = step.sums.get(rank).filter(|sum| !sum.is_empty()) {
            let (start, length) = (sum.start * micros, sum.len() * micros);
            let _ = write!(
                text,
                ",\n{{\"ph\":\"X\",\"cat\":\"rank\",\"name\":\"sum of gradients\",\"pid\":{rank},\"tid\":0,\"ts\":{start},\"dur\":{length}}}"
            );
        }
        let state = step.state_bytes.get(rank).copied().unwrap_or(0.0);
        for (time, held) in timeline.memory(rank) {
            let (time, held) = (time * micros, state + held);
            let _ = write!(
                text,
                ",\n{{\"ph\":\"C\",\"name\":\"memory\",\"pid\":{rank},\"ts\":{time},\"args\":{{\"held\":{held}}}}}"
            );
        }
    }
    text + "\n]}\n"
}

/// A place in a rank's list.
#[derive(Clone, Copy)]
struct Place {
    rank: usize,
    index: usize,
}

fn write_entry(text: &mut String, entry: &Entry, place: Place, span: Span) {
    let Place { rank, index } = place;
    let Span { start, end } = span;
    let kind = entry.first().kind;
    if kind.is_compute() {
        write_event(text, &Event { rank, entry, name: &entry.to_string(), start, end });
    } else if matches!(kind, Kind::ReceiveInput | Kind::ReceiveGrad) {
        if end > start {
            write_event(text, &Event { rank, entry, name: "wait for a message", start, end });
        }
    } else {
        let name = name_in_flight(kind);
        let head =
            format!("\"cat\":\"under way\",\"name\":\"{name}\",\"pid\":{rank},\"tid\":0,\"id\":\"{rank}.{index}\"");
        let args = args(entry);
        let _ = write!(text, ",\n{{\"ph\":\"b\",{head},\"ts\":{start},{args}}},\n{{\"ph\":\"e\",{head},\"ts\":{end}}}");
    }
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
