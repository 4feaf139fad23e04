//! A pass of ranks that compute and communicate: how long it takes, how much of it goes into communication that nothing hides, and how
//! much into waiting for ranks that compute longer.
//!
//! The rank that comes last to a communication waits for nobody: what it stands there is the communication itself. Of each one the
//! least that a rank stands counts therefore as communication, and what is beyond it as waiting.

use std::time::Instant;

use moeworks_comm::{CommError, Communicator, Meter, Reduce, Span};
use serde_json::{Value, json};

/// Seconds of a pass.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pass {
    /// From its begin to its end on the slowest rank.
    pub(super) seconds: f64,
    /// Of standing in communications though no other rank is late.
    pub(super) communication_s: f64,
    /// Of waiting for ranks that come later, on the rank that waits most.
    pub(super) waiting_s: f64,
}

impl Pass {
    /// Does `work`, in which all ranks make the same communications, metered by `meter` with spans.
    pub(super) fn of(
        comm: &dyn Communicator,
        meter: &Meter,
        work: impl FnOnce() -> Result<(), CommError>,
    ) -> Result<Self, CommError> {
        comm.barrier()?;
        meter.take_spans();
        let start = Instant::now();
        work()?;
        let seconds = start.elapsed().as_secs_f64();
        let stood = |span: &Span| (!span.is_under_way).then_some(span.length.as_secs_f64());
        let mut least: Vec<f64> = meter.take_spans().iter().filter_map(stood).collect();
        let whole: f64 = least.iter().sum();
        comm.all_reduce(&mut least, Reduce::Min)?;
        let communication_s: f64 = least.iter().sum();
        let mut slowest = [seconds, whole - communication_s];
        comm.all_reduce(&mut slowest, Reduce::Max)?;
        Ok(Self { seconds: slowest[0], communication_s, waiting_s: slowest[1] })
    }

    /// The medians of several passes.
    pub(super) fn median(passes: &[Self]) -> Self {
        let median = |of: fn(&Self) -> f64| super::median(passes.iter().map(of).collect());
        Self {
            seconds: median(|pass| pass.seconds),
            communication_s: median(|pass| pass.communication_s),
            waiting_s: median(|pass| pass.waiting_s),
        }
    }

    /// The share of the communication of `whole`, a pass that hides nothing, that this one hides: none where it takes as long or longer.
    pub(super) fn hidden(&self, whole: &Self) -> f64 {
        if self.communication_s < whole.communication_s {
            1.0 - self.communication_s / whole.communication_s
        } else {
            0.0
        }
    }

    pub(super) fn json(&self) -> Value {
        json!({ "seconds": self.seconds, "communication_s": self.communication_s, "waiting_s": self.waiting_s })
    }
}
