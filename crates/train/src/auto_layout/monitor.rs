//! The comparison of a run's steps with what was measured when its layout was chosen.

use std::collections::VecDeque;

/// Steps whose median is compared.
const WINDOW: usize = 10;

/// A watch over the times of steps.
#[derive(Clone, Debug)]
pub struct Monitor {
    expected_ms: f64,
    /// The share by which the median may leave what is expected.
    tolerance: f64,
    last: VecDeque<f64>,
}

impl Monitor {
    /// Creates a watch that expects steps of `expected_ms`.
    #[must_use]
    pub fn new(expected_ms: f64, tolerance: f64) -> Self {
        Self { expected_ms, tolerance, last: VecDeque::new() }
    }

    /// Takes the time of a step. Returns the median of the last steps if it has left what is expected.
    pub fn add(&mut self, step_ms: f64) -> Option<f64> {
        self.last.push_back(step_ms);
        if self.last.len() > WINDOW {
            self.last.pop_front();
        }
        if self.last.len() < WINDOW {
            return None;
        }
        let mut sorted: Vec<f64> = self.last.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        let median = sorted[WINDOW / 2];
        ((median / self.expected_ms - 1.0).abs() > self.tolerance).then_some(median)
    }

    /// Returns the milliseconds that are expected of a step.
    #[must_use]
    pub fn expected_ms(&self) -> f64 {
        self.expected_ms
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_median_of_a_full_window_counts() {
        let mut monitor = Monitor::new(100.0, 0.3);
        assert!((0..9).all(|_| monitor.add(500.0).is_none()), "the window is not full");
        assert_eq!(monitor.add(500.0), Some(500.0));
        let mut monitor = Monitor::new(100.0, 0.3);
        assert!(
            (0..40).all(|step| monitor.add(if step % 4 == 0 { 900.0 } else { 110.0 }).is_none()),
            "single slow steps"
        );
        assert_eq!((0..20).find_map(|_| monitor.add(60.0)), Some(60.0), "faster steps count, too");
    }
}
