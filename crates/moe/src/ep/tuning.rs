//! The number of chunks of an exchange: fixed, or tuned by measurement.

use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use moeworks_comm::Reduce;
use moeworks_plan::ChunkTuner;

use super::ExpertRanks;
use crate::LayerStats;

/// The measurements of the passes so far.
#[derive(Debug, Default)]
pub(super) struct Tuning {
    tuner: ChunkTuner,
    /// This rank's seconds in layers since the last merge of statistics: backward of one pass and forward of the
    /// next.
    seconds: f64,
    /// Backward passes of layers in that time.
    num_backward: usize,
    /// True if a pass other than training contributed to the seconds.
    is_disturbed: bool,
    /// This rank's seconds in the experts' GEMMs of training passes since they were last taken.
    expert_seconds: f64,
}

impl ExpertRanks {
    /// Returns the number of chunks for a layer's next pass.
    pub(crate) fn num_chunks(&self) -> usize {
        match self.exchange().chunks {
            0 => self.tuning().tuner.chunks(),
            chunks => chunks,
        }
    }

    pub(crate) fn count_forward(&self, time: Duration, is_training: bool) {
        let mut tuning = self.tuning();
        tuning.seconds += time.as_secs_f64();
        tuning.is_disturbed |= !is_training;
    }

    pub(crate) fn count_backward(&self, time: Duration) {
        let mut tuning = self.tuning();
        tuning.seconds += time.as_secs_f64();
        tuning.num_backward += 1;
    }

    /// Runs `work`, GEMMs of experts in a training pass, and reports its time as `name`.
    pub(crate) fn time_experts<R>(&self, name: &'static str, work: impl FnOnce() -> R) -> R {
        let start = Instant::now();
        let result = self.time(name, work);
        self.tuning().expert_seconds += start.elapsed().as_secs_f64();
        result
    }

    /// Returns this rank's seconds in the experts' GEMMs of training passes since the last call.
    #[must_use]
    pub fn take_expert_seconds(&self) -> f64 {
        std::mem::take(&mut self.tuning().expert_seconds)
    }

    /// Reports to the tuner the time of a pass on the slowest rank and the expected load of the next. `layers` are
    /// merged statistics, so that all ranks decide alike.
    pub(super) fn tune(&self, layers: &[LayerStats]) {
        let mut tuning = self.tuning();
        let tuning = &mut *tuning;
        if self.exchange().chunks != 0 {
            return;
        }
        let is_whole = tuning.num_backward > 0 && !tuning.is_disturbed;
        let seconds = tuning.tuner.is_trying().then(|| {
            let mut slowest = [if is_whole { tuning.seconds } else { f64::INFINITY }];
            self.attempt((), || self.world().all_reduce(&mut slowest, Reduce::Max));
            slowest[0]
        });
        let load = layers.iter().enumerate().map(|(place, layer)| self.largest_load(place, layer));
        let load = load.sum::<f64>() / layers.len().max(1) as f64;
        let tuner = std::mem::take(&mut tuning.tuner);
        *tuning = Tuning { tuner, expert_seconds: tuning.expert_seconds, ..Tuning::default() };
        tuning.tuner.observe(load, seconds.filter(|seconds| seconds.is_finite()));
    }

    /// Returns the rows of the fullest rank of a group in the MoE layer of index `place`, if the ranks that hold the
    /// same expert share its rows evenly.
    fn largest_load(&self, place: usize, layer: &LayerStats) -> f64 {
        let placements = self.placements();
        let Some(placement) = placements.nth(place) else { return 0.0 };
        let mut loads = vec![0.0; placement.num_ranks()];
        for (expert, &rows) in layer.kept_per_expert.iter().take(placement.num_experts()).enumerate() {
            let ranks = placement.ranks_of(expert);
            ranks.iter().for_each(|&rank| loads[rank] += f64::from(rows) / ranks.len() as f64);
        }
        loads.into_iter().fold(0.0, f64::max)
    }

    fn tuning(&self) -> MutexGuard<'_, Tuning> {
        self.inner.tuning.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
