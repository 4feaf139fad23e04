//! Gathering of the records of all ranks.

use std::path::Path;

use super::Ranks;
use crate::error::TrainError;
use crate::metrics::{NUM_FIGURES, RankRecord};
use crate::trace;

/// The tag of messages with traces for the root.
const TAG: u32 = 2;

impl Ranks {
    /// Gathers every rank's record of a step, in the order of ranks.
    pub(crate) fn all_records(&self, own: &RankRecord) -> Result<Vec<RankRecord>, TrainError> {
        let all = self.all_values(&own.to_numbers())?;
        let record = |numbers: &[f64; NUM_FIGURES]| RankRecord::from_numbers(*numbers);
        Ok(all.as_chunks::<NUM_FIGURES>().0.iter().map(record).collect())
    }

    /// Gathers the events of all ranks on the root, which writes them.
    pub(crate) fn write_trace(&self, path: &Path) -> Result<(), TrainError> {
        let num_left_out = self.meter.num_left_out();
        let own = trace::events(self.world.rank(), &self.meter.take_spans(), num_left_out);
        let left_out = self.all_values(&[num_left_out])?.into_iter().sum::<u64>();
        if self.is_root() && left_out > 0 {
            tracing::warn!(
                "the trace ends before the run: {left_out} later spans of time are not in it; fewer steps would fit"
            );
        }
        let lens = self.all_values(&[own.len() as u64])?;
        if !self.is_root() {
            return Ok(self.world.send(own.as_bytes(), 0, TAG)?);
        }
        let mut all = vec![own];
        for (rank, &len) in lens.iter().enumerate().skip(1) {
            let mut bytes = vec![0; len as usize];
            self.world.receive(&mut bytes, rank, TAG)?;
            all.push(String::from_utf8_lossy(&bytes).into_owned());
        }
        trace::write(path, &all).map_err(TrainError::io(path))
    }
}
