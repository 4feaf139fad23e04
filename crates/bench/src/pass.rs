//! A pass of ranks that compute and communicate: its time, the part of it that is communication which nothing hides,
//! and the part that is waiting for slower ranks.
//!
//! The rank that comes last to a communication waits for nobody: its time there is that of the communication itself.
//! The shortest time that any rank spends in a communication counts therefore as communication, and the rest as
//! waiting.

use std::time::Instant;

use moeworks_comm::{CommError, Communicator, Meter, Reduce, Span};
use serde_json::{Value, json};

use crate::timing::median;

/// Seconds of a pass.
#[derive(Clone, Copy, Debug)]
pub struct Pass {
    /// From begin to end on the slowest rank.
    pub seconds: f64,
    /// In communication while no other rank is late.
    pub communication_s: f64,
    /// In communication while another rank is late, on the rank that waits most.
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

    /// Returns the share of the communication of `whole`, a pass that hides nothing, that this pass hides; 0 where it
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
