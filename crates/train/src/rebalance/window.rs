//! The load of experts since the last decision.

use crate::metrics::{LayerRecord, Record};

/// The single steps of a window that are kept.
const MAX_STEPS: usize = 64;

/// The loads of the steps since the last decision.
pub(super) struct Window {
    /// `[layers][E]`
    sums: Vec<Vec<u64>>,
    /// `[layers][steps][E]`: the loads of every `stride`-th step.
    steps: Vec<Vec<Vec<f64>>>,
    stride: u64,
    num_steps: u64,
    /// This rank's seconds.
    seconds: f64,
}

/// Returns the choices of a layer's experts, without those of zero-computation experts, which are on no rank.
pub(super) fn loads(layer: &LayerRecord, num_experts: usize) -> impl Iterator<Item = u64> + '_ {
    layer.tokens_per_expert.iter().copied().take(num_experts)
}

impl Window {
    pub(super) fn new(num_layers: usize, num_experts: usize) -> Self {
        let (sums, steps) = (vec![vec![0; num_experts]; num_layers], vec![Vec::new(); num_layers]);
        Self { sums, steps, stride: 1, num_steps: 0, seconds: 0.0 }
    }

    /// Adds a step.
    pub(super) fn add(&mut self, record: &Record) {
        if self.num_steps.is_multiple_of(self.stride) {
            self.keep_step(record);
        }
        self.num_steps += 1;
        self.seconds += record.step_ms / 1e3;
        for (sums, layer) in self.sums.iter_mut().zip(&record.layers) {
            let num_experts = sums.len();
            sums.iter_mut().zip(loads(layer, num_experts)).for_each(|(sum, load)| *sum = sum.saturating_add(load));
        }
    }

    /// Keeps the loads of a single step. Leaves out every other step where there are many.
    fn keep_step(&mut self, record: &Record) {
        for ((steps, sums), layer) in self.steps.iter_mut().zip(&self.sums).zip(&record.layers) {
            steps.push(loads(layer, sums.len()).map(|load| load as f64).collect());
        }
        if self.steps.first().is_some_and(|steps| steps.len() > MAX_STEPS) {
            self.stride *= 2;
            for steps in &mut self.steps {
                let mut is_kept = false;
                steps.retain(|_| {
                    is_kept = !is_kept;
                    is_kept
                });
            }
        }
    }

    /// Adds the time of a pause between steps.
    pub(super) fn add_pause(&mut self, seconds: f64) {
        self.seconds += seconds;
    }

    pub(super) fn clear(&mut self) {
        *self = Self::new(self.sums.len(), self.sums.first().map_or(0, Vec::len));
    }

    pub(super) fn num_steps(&self) -> u64 {
        self.num_steps
    }

    pub(super) fn seconds(&self) -> f64 {
        self.seconds
    }

    /// Returns the choices of all experts in the window.
    pub(super) fn num_rows(&self) -> f64 {
        self.sums.iter().flatten().sum::<u64>() as f64
    }

    /// Returns the loads of a layer's experts in single steps, all of the window or some.
    pub(super) fn steps(&self, place: usize) -> &[Vec<f64>] {
        &self.steps[place]
    }

    /// Returns the mean load of a layer's experts in a step.
    pub(super) fn mean_loads(&self, place: usize) -> Vec<f64> {
        let num_steps = self.num_steps.max(1) as f64;
        self.sums[place].iter().map(|&sum| sum as f64 / num_steps).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn single_steps_are_kept_evenly_over_a_long_window() {
        let mut window = Window::new(1, 2);
        for step in 0..300_u64 {
            let layer = LayerRecord { tokens_per_expert: vec![step, 1], ..LayerRecord::default() };
            window.add(&Record { layers: vec![layer], ..Record::default() });
        }
        let kept: Vec<f64> = window.steps(0).iter().map(|loads| loads[0]).collect();
        assert!((MAX_STEPS / 2..=MAX_STEPS).contains(&kept.len()), "{kept:?}");
        assert!(kept.windows(2).all(|pair| pair[1] - pair[0] == 8.0), "{kept:?}");
        assert_eq!(window.mean_loads(0), [149.5, 1.0]);
    }
}
