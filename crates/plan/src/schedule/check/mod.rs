//! The proof that a schedule can be carried out.

mod error;
mod order;
mod rows;

pub use error::{CheckError, Place};
pub(super) use order::{awaited, releases};
pub(super) use rows::{is_from_other_rank, message_peer, source_stage};

use super::Schedule;
use super::action::{Action, Chain};
use super::chains::{chain_index, chain_len};
use super::times::Times;

/// A schedule that can be carried out. Every action occurs once, on the rank that holds its stage and after the
/// actions that it needs. Messages are received in the order in which they are sent, and no rank waits forever.
#[derive(Clone, Debug)]
pub struct Checked<'a> {
    pub(super) schedule: &'a Schedule,
    pub(super) has_messages: bool,
    /// An order in which ranks can go through their lists, each run after what it waits for.
    pub(super) runs: Vec<Run>,
    peaks: Vec<Peaks>,
}

/// A part of a rank's list that is carried out without waiting for a later run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    pub(super) rank: u32,
    pub(super) start: u32,
    pub(super) end: u32,
}

/// The most that a rank holds at once, counted in microbatches of a stage.
///
/// These depend on the order of the actions alone, not on their times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Peaks {
    /// Activations that F left and B has not yet taken.
    pub activations: usize,
    /// Weight gradients that B left and W has not yet computed.
    pub weight_grads: usize,
    /// Both together.
    pub held: usize,
}

impl Schedule {
    /// Proves that the schedule can be carried out, or returns the first problem. Time and memory are in proportion
    /// to the number of actions.
    pub fn check(&self) -> Result<Checked<'_>, CheckError> {
        rows::check_shape(self)?;
        let has_messages = self.has_messages();
        let peaks = rows::check_rows(self, has_messages)?;
        let runs = order::find_order(self, has_messages)?;
        Ok(Checked { schedule: self, has_messages, runs, peaks })
    }
}

impl<'a> Checked<'a> {
    /// Returns the schedule.
    #[must_use]
    pub fn schedule(&self) -> &'a Schedule {
        self.schedule
    }

    /// Returns the peaks of each rank.
    #[must_use]
    pub fn peaks(&self) -> &[Peaks] {
        &self.peaks
    }

    /// Returns the most memory that each rank holds at once, by the sizes of activations in `times`.
    #[must_use]
    pub fn peak_memory(&self, times: &Times) -> Vec<f64> {
        let of_rank = |entries: &Vec<super::Entry>| {
            let (mut now, mut most) = (0.0, 0.0_f64);
            for entry in entries {
                for action in entry.actions() {
                    let change = Change::of(action, self.schedule.moe_layers_of(action.stage));
                    now += change.begin(times, action.stage);
                    most = most.max(now);
                }
                for action in entry.actions() {
                    now += Change::of(action, self.schedule.moe_layers_of(action.stage)).end(times, action.stage);
                }
            }
            most
        };
        self.schedule.ranks.iter().map(of_rank).collect()
    }
}

/// The change of a rank's memory by an action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// The action begins a forward: activations come when it starts.
    Forward,
    /// The action ends a B: when it ends, activations are taken, and a weight gradient waits.
    InputGrad,
    /// The action ends a W: when it ends, the weight gradient waits no more.
    WeightGrad,
    /// The action is a whole backward: when it ends, activations are taken.
    Backward,
    /// None.
    None,
}

impl Change {
    pub(super) fn of(action: Action, layers: u16) -> Self {
        use super::Kind;
        let index = || chain_index(action, layers);
        let is_last = |chain| index().is_some_and(|index| index + 1 == chain_len(chain, layers));
        match action.kind {
            Kind::Forward | Kind::ForwardAttention if index() == Some(0) => Self::Forward,
            Kind::InputGrad | Kind::BackwardAttention if is_last(Chain::Backward) => Self::InputGrad,
            Kind::WeightGrad | Kind::WeightAttention if is_last(Chain::Weight) => Self::WeightGrad,
            Kind::Backward => Self::Backward,
            _ => Self::None,
        }
    }

    /// Returns the memory that comes when the action starts.
    pub(super) fn begin(self, times: &Times, stage: u32) -> f64 {
        if self == Self::Forward { times.stage(stage).activation } else { 0.0 }
    }

    /// Returns the change of memory when the action ends.
    pub(super) fn end(self, times: &Times, stage: u32) -> f64 {
        let of = times.stage(stage);
        match self {
            Self::InputGrad => of.weight_grad_input - of.activation,
            Self::WeightGrad => -of.weight_grad_input,
            Self::Backward => -of.activation,
            Self::Forward | Self::None => 0.0,
        }
    }
}
