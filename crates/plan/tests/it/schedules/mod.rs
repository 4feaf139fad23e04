//! Pipeline schedules.

mod carried_out;
mod checked;
mod chunks;
mod mutated;
mod pictures;
mod published;
mod shared_links;
mod texts;

use moeworks_plan::schedule::{Kind, Timeline};
use moeworks_plan::{Schedule, ScheduleKind, ScheduleRequest, Times};

/// Generates a schedule of `ranks` ranks and `microbatches` microbatches.
fn generate(kind: ScheduleKind, ranks: usize, microbatches: usize, times: &Times) -> Schedule {
    let request = ScheduleRequest::new(ranks, microbatches, times);
    kind.generate(&request).unwrap_or_else(|error| panic!("{error}"))
}

/// Gives `of` the timeline of a schedule that must be right.
fn with_timeline<T>(schedule: &Schedule, times: &Times, of: impl FnOnce(&Timeline<'_>) -> T) -> T {
    let checked = schedule.check().unwrap_or_else(|error| panic!("{}: {error}\n{schedule}", schedule.name));
    of(&checked.timeline(times).expect("times of each stage"))
}

/// The peaks of each rank: of activations, of waiting weight gradients, of both.
fn peaks(schedule: &Schedule) -> Vec<[usize; 3]> {
    let checked = schedule.check().unwrap_or_else(|error| panic!("{}: {error}", schedule.name));
    checked.peaks().iter().map(|peaks| [peaks.activations, peaks.weight_grads, peaks.held]).collect()
}

/// The kinds of all actions of a rank, in order.
fn letters(schedule: &Schedule, rank: usize) -> impl Iterator<Item = Kind> {
    schedule.ranks[rank].iter().flat_map(|entry| entry.actions().map(|action| action.kind))
}
