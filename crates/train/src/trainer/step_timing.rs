//! The times of the phases of a step: each rank measures its own, and all gather them.

use std::time::Instant;

use moeworks_comm::Totals;

use crate::error::TrainError;
use crate::metrics::{RankRecord, RanksRecord};
use crate::parallel::Ranks;

/// One rank's times in the current step; not measured on a single rank.
pub(super) struct StepTiming<'a> {
    ranks: Option<&'a Ranks>,
    start: Instant,
    record: RankRecord,
}

impl<'a> StepTiming<'a> {
    pub(super) fn begin(ranks: Option<&'a Ranks>) -> Self {
        if let Some(ranks) = ranks {
            // Totals from before belong to no step.
            ranks.meter().take_totals();
            ranks.take_tensor_totals();
            let _of_no_step = ranks.experts().take_exchange_times();
        }
        Self { ranks, start: Instant::now(), record: RankRecord::default() }
    }

    /// Ends the phase of forward and backward.
    pub(super) fn passed(&mut self) {
        let standing_ms = self.account("forward and backward").blocked_s * 1e3;
        self.record.work_ms = (self.lap() - standing_ms).max(0.0);
    }

    /// Ends the phase of summing gradients.
    pub(super) fn summed(&mut self) {
        self.account("sum of gradients");
        self.record.gradients_ms = self.lap();
    }

    /// Ends the phase of the update.
    pub(super) fn updated(&mut self) {
        self.account("optimizer");
        self.record.update_ms = self.lap();
    }

    /// Gathers the records of all ranks, on all of them.
    pub(super) fn join(self) -> Result<Option<RanksRecord>, TrainError> {
        let Some(ranks) = self.ranks else { return Ok(None) };
        Ok(Some(RanksRecord { ranks: ranks.all_records(&self.record)? }))
    }

    /// Ends a phase.
    fn account(&mut self, name: &'static str) -> Totals {
        let Some(ranks) = self.ranks else { return Totals::default() };
        ranks.meter().record(name, self.start);
        let totals = ranks.meter().take_totals();
        self.record.standing_ms += totals.blocked_s * 1e3;
        self.record.node_bytes += totals.node_bytes;
        self.record.cluster_bytes += totals.cluster_bytes;
        let of_matrices = ranks.take_tensor_totals();
        self.record.tensor_ms += of_matrices.blocked_s * 1e3;
        self.record.tensor_bytes += of_matrices.node_bytes + of_matrices.cluster_bytes;
        let exchanges = ranks.experts().take_exchange_times();
        self.record.exchange_ms += exchanges.under_way_s * 1e3;
        self.record.exchange_waited_ms += exchanges.waited_s * 1e3;
        totals
    }

    /// Returns the milliseconds since the last lap.
    fn lap(&mut self) -> f64 {
        let start = std::mem::replace(&mut self.start, Instant::now());
        self.start.duration_since(start).as_secs_f64() * 1e3
    }
}
