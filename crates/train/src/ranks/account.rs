//! What all ranks measured, brought together.

use std::path::Path;

use super::Ranks;
use crate::error::TrainError;
use crate::metrics::RankRecord;
use crate::trace;

/// The tag of traces on their way to the root.
const TAG: u32 = 2;

impl Ranks {
    /// Everybody's record of a step, in the order of ranks.
    pub(crate) fn all_records(&self, own: &RankRecord) -> Result<Vec<RankRecord>, TrainError> {
        let all = self.all_values(&own.to_numbers())?;
        let record = |numbers: &[f64; 6]| RankRecord::from_numbers(*numbers);
        Ok(all.as_chunks::<6>().0.iter().map(record).collect())
    }

    /// Brings the events of all ranks to the root, which writes them.
    pub(crate) fn write_trace(&self, path: &Path) -> Result<(), TrainError> {
        let own = trace::events(self.world.rank(), &self.meter.take_spans());
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
