//! Pipeline schedules as values: for each rank the list of its actions.
//!
//! A [`Schedule`] can be written by hand or made by a generator ([`ScheduleKind::generate`]). [`Schedule::check`]
//! proves that it can be carried out, and gives the peaks of memory; the [`Checked`] schedule gives a [`Timeline`]
//! for given [`Times`], which is drawn by [`Timeline::to_svg`].
//!
//! # Carrying out
//!
//! Checker, timeline and executor agree on this:
//!
//! - Each rank goes through its list in order.
//! - A computation (F, B, W, BW and parts of them) starts when the rank has come to it and its inputs are there, and
//!   the rank computes until it ends. A pair starts when the inputs of both are there.
//! - An all-to-all (dispatch, combine) starts when the rank has come to it and the rank's earlier all-to-alls are
//!   done. The rank goes on at once; whichever action needs the result waits for it.
//! - A send is buffered: it starts when the rank has come to it, and the rank goes on at once. A receive blocks until
//!   its message is there. Messages of a kind between the same two stages arrive in the order in which they were
//!   sent.
//! - A schedule without sends and receives has them implied: a stage's output leaves when it is computed, and the
//!   computation that needs it waits for it. If there is one send or receive there must be all of them.
//!
//! ```
//! use moeworks_plan::{ScheduleKind, ScheduleRequest, Times};
//!
//! let times = Times::uniform(1.0, 1.0, 1.0);
//! let schedule = ScheduleKind::OneFOneB.generate(&ScheduleRequest::new(4, 8, &times))?;
//! let checked = schedule.check()?;
//! assert_eq!(checked.peaks()[0].activations, 4);
//! let timeline = checked.timeline(&times)?;
//! assert_eq!(timeline.makespan, (8.0 + 3.0) * 3.0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod action;
mod chains;
mod check;
mod events;
mod expand;
mod generators;
mod makespan;
mod svg;
mod text;
mod times;

pub use action::{Action, ActionError, Chain, Entry, Kind};
pub use check::{CheckError, Checked, Peaks, Place};
pub use events::{AllToAlls, LinkRecord, Simulation, Transfers};
pub use generators::{GenerateError, ScheduleKind, ScheduleRequest, UnknownSchedule};
pub use makespan::{Span, Timeline};
pub use svg::SvgOptions;
pub use text::ScheduleError;
pub use times::{PairTime, StageTimes, Times, TimesError};

/// A pipeline schedule: for each rank the list of its actions, and which rank holds which stage.
///
/// ```
/// use moeworks_plan::Schedule;
///
/// let text = "schedule by hand\n\
///             microbatches 0..2: stages on ranks 0 1\n\
///             rank 0: 0F0, 0F1, 0BW0, 0BW1\n\
///             rank 1: 1F0, 1BW0, 1F1, 1BW1\n";
/// let schedule: Schedule = text.parse()?;
/// assert_eq!(schedule.to_string(), text);
/// assert!(schedule.check().is_ok());
/// # Ok::<(), moeworks_plan::ScheduleError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// The name: one line without `#`, which begins a comment in the text form, and without spaces around it.
    pub name: String,
    /// The copies of the weights, each with the microbatches that go through it: one, or two in DualPipe.
    pub copies: Vec<WeightCopy>,
    /// The number of MoE layers of each stage whose all-to-alls are actions of their own; empty without such layers.
    pub moe_layers: Vec<u16>,
    /// The list of each rank.
    pub ranks: Vec<Vec<Entry>>,
}

/// A copy of all stages, and the microbatches that go through it.
///
/// Microbatches are numbered consecutively: those of a copy follow those of the copy before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightCopy {
    /// The number of microbatches that go through the copy.
    pub num_microbatches: u32,
    /// The rank that holds each stage.
    pub stage_ranks: Vec<u32>,
}

impl Schedule {
    /// Returns the number of ranks.
    #[must_use]
    pub fn num_ranks(&self) -> usize {
        self.ranks.len()
    }

    /// Returns the number of stages of the model.
    #[must_use]
    pub fn num_stages(&self) -> usize {
        self.copies.first().map_or(0, |copy| copy.stage_ranks.len())
    }

    /// Returns the number of microbatches of all copies.
    #[must_use]
    pub fn num_microbatches(&self) -> usize {
        self.copies.iter().map(|copy| copy.num_microbatches as usize).sum()
    }

    /// Returns the number of the copy of the weights that a microbatch goes through; none beyond the last microbatch.
    #[must_use]
    pub fn copy_of(&self, microbatch: u32) -> Option<usize> {
        let mut first = 0_u64;
        self.copies.iter().position(|copy| {
            first += u64::from(copy.num_microbatches);
            u64::from(microbatch) < first
        })
    }

    /// Returns the rank that computes a stage for a microbatch; none if there is no such stage or microbatch.
    #[must_use]
    pub fn rank_of(&self, stage: u32, microbatch: u32) -> Option<u32> {
        self.copies[self.copy_of(microbatch)?].stage_ranks.get(stage as usize).copied()
    }

    /// Returns the copies and stages that a rank holds: of each copy its stages, ascending.
    #[must_use]
    pub fn stages_of(&self, rank: usize) -> Vec<(usize, u32)> {
        let copies = self.copies.iter().enumerate();
        let held =
            copies.flat_map(|(copy, of)| of.stage_ranks.iter().zip(0..).map(move |(at, stage)| (copy, stage, at)));
        held.filter(|&(.., &at)| at as usize == rank).map(|(copy, stage, _)| (copy, stage)).collect()
    }

    /// Returns the number of MoE layers of a stage whose all-to-alls are actions of their own.
    #[must_use]
    pub fn moe_layers_of(&self, stage: u32) -> u16 {
        self.moe_layers.get(stage as usize).copied().unwrap_or(0)
    }

    /// Returns the number of entries of all ranks.
    #[must_use]
    pub fn num_entries(&self) -> usize {
        self.ranks.iter().map(Vec::len).sum()
    }

    /// Returns whether sends and receives are actions; otherwise they are implied.
    #[must_use]
    pub fn has_messages(&self) -> bool {
        self.ranks.iter().flatten().any(|entry| entry.first().kind.is_message())
    }
}
