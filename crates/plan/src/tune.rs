//! How many chunks to cut a layer into, found by trying: a dictionary from the load to the best number, as Tutel
//! keeps one (Hwang et al., 2206.03382, section 3.3).
//!
//! Ranks that observe the same loads and the same times, such as those of the slowest of them, make the same choices.

use std::collections::BTreeMap;

/// Numbers of chunks that are tried.
const DEGREES: [usize; 4] = [1, 2, 4, 8];
/// Times that each is tried; its best time counts.
const REPEATS: usize = 2;

/// Tries numbers of chunks while the load is one that it does not know yet, and then takes the fastest of them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChunkTuner {
    /// Seconds of the trials so far, by the key of the load: [`REPEATS`] for each of [`DEGREES`].
    trials: BTreeMap<i32, Vec<f64>>,
    key: i32,
    /// Whether the pass under way began with another number of chunks: its time says nothing.
    is_mixed: bool,
}

impl ChunkTuner {
    /// The number of chunks for the pass under way.
    #[must_use]
    pub fn chunks(&self) -> usize {
        let trials = self.trials.get(&self.key).map_or(&[][..], Vec::as_slice);
        DEGREES.get(trials.len() / REPEATS).copied().unwrap_or_else(|| best(trials))
    }

    /// Whether the time of the pass under way is wanted.
    #[must_use]
    pub fn is_trying(&self) -> bool {
        !self.is_mixed && self.trials.get(&self.key).is_none_or(|trials| trials.len() < DEGREES.len() * REPEATS)
    }

    /// Ends a pass that took `seconds` (`None` where that is not known, or not wanted). `load` are the rows that the
    /// fullest rank of the next one is expected to have; loads are told apart in steps of the square root of two.
    pub fn observe(&mut self, load: f64, seconds: Option<f64>) {
        let before = self.chunks();
        if let Some(seconds) = seconds.filter(|_| self.is_trying()) {
            self.trials.entry(self.key).or_default().push(seconds);
        }
        self.key = (2.0 * load.max(1.0).log2()).round() as i32;
        self.is_mixed = self.chunks() != before;
    }
}

/// The number of chunks whose best time is lowest; the lowest of equal ones.
fn best(trials: &[f64]) -> usize {
    let times = trials.chunks(REPEATS).map(|times| times.iter().copied().fold(f64::INFINITY, f64::min));
    let fastest = times.zip(DEGREES).min_by(|a, b| a.0.total_cmp(&b.0));
    fastest.map_or(1, |(_, degree)| degree)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers of chunks of `num_passes` passes at a load, each of which takes the seconds of `time`.
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
