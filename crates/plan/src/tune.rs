//! The number of chunks of a layer, found by trying: a dictionary from the load to the best number, as in Tutel
//! (Hwang et al., 2206.03382, section 3.3).
//!
//! Ranks that observe the same loads and times make the same choices; these may be those of the slowest rank.

use std::collections::BTreeMap;

/// The numbers of chunks that are tried.
const DEGREES: [usize; 4] = [1, 2, 4, 8];
/// The number of times that each is tried; the best time counts.
const REPEATS: usize = 2;

/// A tuner that tries numbers of chunks while the load is unknown, and then takes the fastest.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChunkTuner {
    /// Seconds of the trials so far, by the key of the load: [`REPEATS`] for each of [`DEGREES`].
    trials: BTreeMap<i32, Vec<f64>>,
    key: i32,
    /// True if the current pass began with another number of chunks, so that its time does not count.
    is_mixed: bool,
}

impl ChunkTuner {
    /// Returns the number of chunks for the current pass.
    #[must_use]
    pub fn chunks(&self) -> usize {
        let trials = self.trials.get(&self.key).map_or(&[][..], Vec::as_slice);
        DEGREES.get(trials.len() / REPEATS).copied().unwrap_or_else(|| best(trials))
    }

    /// Returns whether the time of the current pass is wanted.
    #[must_use]
    pub fn is_trying(&self) -> bool {
        !self.is_mixed && self.trials.get(&self.key).is_none_or(|trials| trials.len() < DEGREES.len() * REPEATS)
    }

    /// Ends a pass that took `seconds`; `None` if that is unknown or not wanted. `load` is the number of rows that
    /// the fullest rank is expected to have in the next pass. Loads are distinguished in steps of the square root of
    /// two.
    pub fn observe(&mut self, load: f64, seconds: Option<f64>) {
        let before = self.chunks();
        if let Some(seconds) = seconds.filter(|_| self.is_trying()) {
            self.trials.entry(self.key).or_default().push(seconds);
        }
        self.key = (2.0 * load.max(1.0).log2()).round() as i32;
        self.is_mixed = self.chunks() != before;
    }
}

/// Returns the number of chunks with the lowest best time; the lowest number at ties.
fn best(trials: &[f64]) -> usize {
    let times = trials.chunks(REPEATS).map(|times| times.iter().copied().fold(f64::INFINITY, f64::min));
    let fastest = times.zip(DEGREES).min_by(|a, b| a.0.total_cmp(&b.0));
    fastest.map_or(1, |(_, degree)| degree)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs `num_passes` passes at a load, each taking the seconds of `time`, and returns their numbers of chunks.
    fn passes(tuner: &mut ChunkTuner, num_passes: usize, load: f64, time: impl Fn(usize) -> f64) -> Vec<usize> {
        let pass = |_| {
            let chunks = tuner.chunks();
            let seconds = tuner.is_trying().then(|| time(chunks));
            tuner.observe(load, seconds);
            chunks
        };
        (0..num_passes).map(pass).collect()
    }

    #[test]
    fn the_fastest_number_is_found_and_kept() {
        let mut tuner = ChunkTuner::default();
        let chunks = passes(&mut tuner, 30, 1000.0, |chunks| (chunks as f64 - 4.2).abs());
        assert!(chunks[15..].iter().all(|&chunks| chunks == 4), "{chunks:?}");
        assert!(DEGREES.iter().all(|degree| chunks.contains(degree)), "all were tried: {chunks:?}");
        assert!(!tuner.is_trying());
    }

    #[test]
    fn another_load_is_tried_anew_and_a_known_one_remembered() {
        let mut tuner = ChunkTuner::default();
        passes(&mut tuner, 30, 1000.0, |chunks| chunks as f64);
        assert_eq!(tuner.chunks(), 1);
        let chunks = passes(&mut tuner, 30, 8000.0, |chunks| 1.0 / chunks as f64);
        assert_eq!((chunks[0], chunks[29]), (1, 8));
        passes(&mut tuner, 1, 1010.0, |_| 0.0);
        assert_eq!((tuner.chunks(), tuner.is_trying()), (1, false), "nearly the load that is known");
    }

    #[test]
    fn a_pass_that_changes_its_number_under_way_does_not_count() {
        let mut tuner = ChunkTuner::default();
        tuner.observe(100.0, Some(1.0));
        tuner.observe(100.0, Some(1.0));
        tuner.observe(100.0, Some(1.0));
        assert_eq!(tuner.chunks(), 2, "two times of one chunk at this load, and one before it was known");
        assert!(!tuner.is_trying(), "its backward has the number of before");
        tuner.observe(100.0, None);
        assert!(tuner.is_trying());
    }

    #[test]
    fn a_pass_without_a_time_is_tried_again() {
        let mut tuner = ChunkTuner::default();
        for _ in 0..10 {
            tuner.observe(50.0, None);
        }
        assert_eq!((tuner.chunks(), tuner.is_trying()), (1, true));
    }
}
