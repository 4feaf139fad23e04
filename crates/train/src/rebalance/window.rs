//! The load of experts since the last decision.

use crate::metrics::{LayerRecord, Record};

/// The sums over the steps since the last decision.
pub(super) struct Window {
    /// `[layers][E]`
    sums: Vec<Vec<u64>>,
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
        Self { sums: vec![vec![0; num_experts]; num_layers], num_steps: 0, seconds: 0.0 }
    }

    /// Adds a step.
    pub(super) fn add(&mut self, record: &Record) {
        self.num_steps += 1;
        self.seconds += record.step_ms / 1e3;
        for (sums, layer) in self.sums.iter_mut().zip(&record.layers) {
            let num_experts = sums.len();
            sums.iter_mut().zip(loads(layer, num_experts)).for_each(|(sum, load)| *sum = sum.saturating_add(load));
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

    /// Returns the mean load of a layer's experts in a step.
    pub(super) fn mean_loads(&self, place: usize) -> Vec<f64> {
        let num_steps = self.num_steps.max(1) as f64;
        self.sums[place].iter().map(|&sum| sum as f64 / num_steps).collect()
    }
}
