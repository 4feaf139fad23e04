//! The simulation of a schedule, event by event, where messages and all-to-alls share links with what passes at the
//! same time.
//!
//! The rules are those of [the module](super), and of [`Checked::timeline`](super::Checked::timeline): without
//! transfers on links both give the same times. Here a message or an all-to-all first takes the seconds of
//! [`Times`], then passes its links, as fast as the others leave it ([`crate::network`]).
//!
//! A rank of the schedule stands for all ranks of its stage group of the pipeline, which do the same at the same
//! time. They are simulated once, so that the number of events does not depend on data, expert and tensor
//! parallelism.

mod chunks;
mod engine;
mod under_way;

use super::action::Kind;
use super::check::Checked;
use super::makespan::{Span, Timeline};
use super::times::{Times, TimesError};
use crate::network::{LevelBytes, Traffic, TransferId};

use self::engine::Engine;

/// The transfers that the communication of a schedule makes on links.
#[derive(Clone, Debug, Default)]
pub struct Transfers {
    /// The links, and what each transfer puts on them.
    pub traffic: Traffic,
    /// The messages of each rank: the rank that they go to, and the transfer.
    pub messages: Vec<Vec<(u32, TransferId)>>,
    /// The all-to-alls of each rank: one chunk of each, if they go in chunks.
    pub all_to_alls: Vec<Option<AllToAlls>>,
    /// The chunks of each all-to-all, of which one travels while experts compute another; 0 and 1 for whole ones.
    pub chunks: u16,
    /// The sum of gradients of each rank, once its list is done.
    pub sums: Vec<Option<TransferId>>,
    /// Seconds of each rank after that: the update of its weights.
    pub update_s: Vec<f64>,
}

/// The four all-to-alls of a layer.
#[derive(Clone, Copy, Debug)]
pub struct AllToAlls {
    /// The forward dispatch.
    pub dispatch: TransferId,
    /// The forward combine.
    pub combine: TransferId,
    /// The backward of the combine, which sends gradients to experts.
    pub combine_grad: TransferId,
    /// The backward of the dispatch.
    pub dispatch_grad: TransferId,
}

impl AllToAlls {
    fn of(&self, kind: Kind) -> TransferId {
        match kind {
            Kind::ForwardDispatch => self.dispatch,
            Kind::ForwardCombine => self.combine,
            Kind::BackwardCombine => self.combine_grad,
            _ => self.dispatch_grad,
        }
    }
}

/// The simulated schedule: its timeline, and the use of links.
#[derive(Clone, Debug)]
pub struct Simulation<'a> {
    /// The times of all actions; spans of sends and all-to-alls end when the last byte arrives.
    pub timeline: Timeline<'a>,
    /// The sum of gradients of each rank; empty without one.
    pub sums: Vec<Span>,
    /// Seconds until all weights are updated; the makespan if there is nothing after it.
    pub step: f64,
    /// The bytes at each level, of the stage groups of all ranks.
    pub levels: Vec<LevelBytes>,
    /// The links, where those that carry the same are one.
    pub links: Vec<LinkRecord>,
    /// The number of events.
    pub num_events: u64,
}

/// The use of a link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkRecord {
    /// The level.
    pub level: usize,
    /// The seconds that the link would be full for what it carried.
    pub busy_s: f64,
    /// The largest share of its bandwidth that was used at a time.
    pub most: f64,
}

impl<'a> Checked<'a> {
    /// Simulates the schedule. A transfer that `transfers` has nothing of takes its time of `times` alone.
    pub fn simulate(&self, times: &'a Times, transfers: &Transfers) -> Result<Simulation<'a>, TimesError> {
        times.check(self.schedule.num_stages())?;
        let mut engine = Engine::new(self, times, transfers);
        engine.run();
        Ok(engine.into_simulation())
    }
}
