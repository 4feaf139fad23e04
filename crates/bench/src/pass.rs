//! A pass of ranks that compute and communicate: its time, the communication that is not hidden, and the time spent
//! waiting for slower ranks.
//!
//! The last rank to start a communication waits for no other: its time is that of the communication itself. Therefore
//! the shortest time that any rank spends in a communication counts as communication, and the rest as waiting.

use std::time::Instant;

use moeworks_comm::{CommError, Communicator, Meter, Reduce, Span};
use serde_json::{Value, json};

use crate::timing::median;

/// The times of a pass.
#[derive(Clone, Copy, Debug)]
pub struct Pass {
    /// The duration on the slowest rank, in seconds.
    pub seconds: f64,
    /// The time in communication while no other rank is late, in seconds.
    pub communication_s: f64,
    /// The time in communication while another rank is late, on the rank that waits longest, in seconds.
    pub waiting_s: f64,
}

impl Pass {
    /// Times `work`, in which all ranks make the same communications, metered by `meter` with spans.
    ///
    /// # Errors
    /// [`CommError`] of `work` or of the collectives that agree on the times.
    pub fn measure(
        comm: &dyn Communicator,
        meter: &Meter,
        work: impl FnOnce() -> Result<(), CommError>,
    ) -> Result<Self, CommError> {
        comm.barrier()?;
        meter.take_spans();
        let start = Instant::now();
        work()?;
        let seconds = start.elapsed().as_secs_f64();
        let spent = |span: &Span| (!span.is_in_flight).then_some(span.length.as_secs_f64());
        let mut least: Vec<f64> = meter.take_spans().iter().filter_map(spent).collect();
        let whole: f64 = least.iter().sum();
        comm.all_reduce(&mut least, Reduce::Min)?;
        let communication_s: f64 = least.iter().sum();
        let mut slowest = [seconds, whole - communication_s];
        comm.all_reduce(&mut slowest, Reduce::Max)?;
        Ok(Self { seconds: slowest[0], communication_s, waiting_s: slowest[1] })
    }

    /// Returns the medians of several passes.
    #[must_use]
    pub fn median(passes: &[Self]) -> Self {
        let middle = |of: fn(&Self) -> f64| median(passes.iter().map(of).collect());
        Self {
            seconds: middle(|pass| pass.seconds),
            communication_s: middle(|pass| pass.communication_s),
            waiting_s: middle(|pass| pass.waiting_s),
        }
    }

    /// Returns the share of the communication of `whole`, a pass that hides nothing, that this pass hides; 0 if it
    /// takes as long.
    #[must_use]
    pub fn hidden(&self, whole: &Self) -> f64 {
        if self.communication_s < whole.communication_s {
            1.0 - self.communication_s / whole.communication_s
        } else {
            0.0
        }
    }

    /// Returns the seconds as JSON.
    #[must_use]
    pub fn json(&self) -> Value {
        json!({ "seconds": self.seconds, "communication_s": self.communication_s, "waiting_s": self.waiting_s })
    }
}
