//! The load of experts over the last steps of a run, from its records.

use std::collections::VecDeque;
use std::path::Path;

use super::lines::{MetricsError, read_records};

/// The choices of the experts of one MoE layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertLoads {
    /// Index of the layer in the model, from 0, dense layers counted.
    pub layer: usize,
    /// Choices per expert, `[E]`, before any is dropped.
    pub tokens_per_expert: Vec<u64>,
}

/// The loads of a window of steps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadWindow {
    /// The last step; 0 without any.
    pub last_step: u64,
    /// Steps with records in the window.
    pub num_steps: usize,
    /// The sums over the window, first layer to last; empty without an MoE layer.
    pub layers: Vec<ExpertLoads>,
}

/// Reads `metrics.jsonl` at `path` and sums the loads of its last `num_steps` steps with records. Records of another
/// model than the last one's (with other layers or experts) are left out.
///
/// # Errors
/// If the file cannot be read.
pub fn read_loads(path: &Path, num_steps: usize) -> Result<LoadWindow, MetricsError> {
    let mut window: VecDeque<(u64, Vec<ExpertLoads>)> = VecDeque::new();
    for record in read_records(path)? {
        let record = record?;
        if record.step == 0 || record.layers.is_empty() {
            continue;
        }
        let loads =
            |layer: super::LayerRecord| ExpertLoads { layer: layer.layer, tokens_per_expert: layer.tokens_per_expert };
        window.push_back((record.step, record.layers.into_iter().map(loads).collect()));
        if window.len() > num_steps {
            window.pop_front();
        }
    }
    let Some((last_step, mut layers)) = window.pop_back() else { return Ok(LoadWindow::default()) };
    let mut num_steps = 1;
    for (_, others) in window {
        let is_same = |(a, b): (&ExpertLoads, &ExpertLoads)| {
            a.layer == b.layer && a.tokens_per_expert.len() == b.tokens_per_expert.len()
        };
        if others.len() != layers.len() || !layers.iter().zip(&others).all(is_same) {
            continue;
        }
        num_steps += 1;
        for (sum, other) in layers.iter_mut().zip(others) {
            let counts = sum.tokens_per_expert.iter_mut().zip(other.tokens_per_expert);
            counts.for_each(|(sum, count)| *sum = sum.saturating_add(count));
        }
    }
    Ok(LoadWindow { last_step, num_steps, layers })
}
