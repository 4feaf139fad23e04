//! The figures of a timeline with given times, as a table and as JSON.

use moeworks_plan::Schedule;
use moeworks_plan::schedule::{Peaks, Timeline};
use serde_json::json;

use crate::tables;

/// The largest number of ranks shown in a table.
pub(super) const SHOWN: usize = 32;

pub(super) fn percent(share: f64) -> String {
    format!("{:.1}%", 100.0 * share)
}

/// Formats a number with at most six significant digits, or with all digits before the decimal point.
pub(super) fn number(value: f64) -> String {
    let decimals = if value == 0.0 { 0 } else { (5.0 - value.abs().log10().floor()).clamp(0.0, 12.0) as usize };
    let text = format!("{value:.decimals$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

pub(super) fn print_table(schedule: &Schedule, timeline: &Timeline<'_>, peaks: &[Peaks], memory: &[f64]) {
    let (ranks, stages) = (schedule.num_ranks(), schedule.num_stages());
    println!("{}: {ranks} ranks, {stages} stages, {} microbatches", schedule.name, schedule.num_microbatches());
    println!("  makespan {}, bubble {}", number(timeline.makespan), percent(timeline.bubble()));
    let span = number(timeline.longest_span);
    println!("  longest rank {span}, bubble {} (from its own first action on)", percent(timeline.span_bubble()));
    match timeline.hidden() {
        Some(hidden) => println!("  communication {}, hidden {}", number(timeline.communication), percent(hidden)),
        None => println!("  no communication"),
    }
    println!("Peaks of each rank, in microbatches of a stage; memory in the unit of --memory:");
    let row = |rank: usize| {
        let Peaks { activations, weight_grads, held } = peaks[rank];
        let counts = [activations, weight_grads, held].map(|count| count.to_string());
        let mut row = vec![rank.to_string(), number(timeline.busy[rank])];
        row.extend(counts);
        row.push(number(memory[rank]));
        row
    };
    let header = ["rank", "busy", "activations", "W waiting", "both", "memory"];
    tables::print(&header, &(0..ranks.min(SHOWN)).map(row).collect::<Vec<_>>());
    if ranks > SHOWN {
        println!("  and {} more", ranks - SHOWN);
    }
}

pub(super) fn print_json(schedule: &Schedule, timeline: &Timeline<'_>, peaks: &[Peaks], memory: &[f64]) {
    let rank = |rank: usize| {
        let Peaks { activations, weight_grads, held } = peaks[rank];
        json!({
            "busy": timeline.busy[rank],
            "peak_activations": activations,
            "peak_weight_grads": weight_grads,
            "peak_held": held,
            "peak_memory": memory[rank],
        })
    };
    let value = json!({
        "schedule": schedule.name,
        "num_stages": schedule.num_stages(),
        "num_microbatches": schedule.num_microbatches(),
        "makespan": timeline.makespan,
        "bubble": timeline.bubble(),
        "longest_span": timeline.longest_span,
        "span_bubble": timeline.span_bubble(),
        "communication": timeline.communication,
        "communication_hidden": timeline.hidden(),
        "ranks": (0..schedule.num_ranks()).map(rank).collect::<Vec<_>>(),
    });
    println!("{value:#}");
}
