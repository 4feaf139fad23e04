//! The figures of passes: losses, metrics, and statistics of MoE layers.

use moeworks_model::{PassStats, RouterLosses};
use moeworks_moe::LayerStats;

/// A named figure besides the loss, such as the accuracy, as a sum and a count.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Metric {
    /// The name, such as `accuracy`; records prefix it with `train/` or `val/`.
    pub name: &'static str,
    /// The sum over items.
    pub sum: f64,
    /// The number of items.
    pub count: f64,
}

impl Metric {
    /// Returns the mean; NaN without items.
    #[must_use]
    pub fn mean(&self) -> f64 {
        if self.count == 0.0 { f64::NAN } else { self.sum / self.count }
    }
}

/// The figures of one pass over the batches of all ranks, or summed over several passes.
#[derive(Clone, Debug, Default)]
pub struct PassFigures {
    /// The sum of the losses of all targets.
    pub loss_sum: f64,
    /// The number of targets: items with a loss of their own, such as tokens or images.
    pub num_targets: usize,
    /// The balance loss, without its coefficient; 0 without MoE layers.
    pub balance_loss: f64,
    /// The router z-loss, without its coefficient; 0 without MoE layers.
    pub z_loss: f64,
    /// The other auxiliary losses.
    pub router_losses: RouterLosses,
    /// The statistics of the MoE layers, first to last.
    pub layers: Vec<LayerStats>,
    /// The metrics.
    pub metrics: Vec<Metric>,
}

/// The result of an evaluation.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluation {
    /// The mean loss.
    pub loss: f64,
    /// The metrics.
    pub metrics: Vec<Metric>,
}

impl From<PassStats> for PassFigures {
    fn from(stats: PassStats) -> Self {
        let PassStats { loss_sum, num_targets, balance_loss, z_loss, router_losses, layers, .. } = stats;
        Self { loss_sum, num_targets, balance_loss, z_loss, router_losses, layers, metrics: Vec::new() }
    }
}

impl PassFigures {
    /// Returns the mean loss of a target.
    #[must_use]
    pub fn mean_loss(&self) -> f64 {
        self.loss_sum / self.num_targets as f64
    }

    /// Converts the mean loss and the metrics to the result of an evaluation; none without targets.
    #[must_use]
    pub fn evaluation(self) -> Option<Evaluation> {
        (self.num_targets > 0).then(|| Evaluation { loss: self.mean_loss(), metrics: self.metrics })
    }

    /// Adds the figures of another pass of the step.
    pub(crate) fn add(&mut self, other: &Self) {
        self.loss_sum += other.loss_sum;
        self.num_targets += other.num_targets;
        self.balance_loss += other.balance_loss;
        self.z_loss += other.z_loss;
        self.router_losses.add(&other.router_losses, 1.0);
        for (layer, other) in self.layers.iter_mut().zip(&other.layers) {
            layer.merge(other);
        }
        for (metric, other) in self.metrics.iter_mut().zip(&other.metrics) {
            metric.sum += other.sum;
            metric.count += other.count;
        }
    }

    /// Converts the sums of `num` passes to the figures of a step, in which auxiliary losses are means.
    pub(crate) fn of_step(mut self, num: usize) -> Self {
        self.balance_loss /= num as f64;
        self.z_loss /= num as f64;
        let sum = std::mem::replace(&mut self.router_losses, RouterLosses::from_names(|_| Some(0.0)));
        self.router_losses.add(&sum, 1.0 / num as f64);
        self
    }

    /// Returns the numbers that are summed over ranks.
    pub(super) fn sums(&self) -> Vec<f64> {
        let metrics = self.metrics.iter().flat_map(|metric| [metric.sum, metric.count]);
        [self.loss_sum, self.num_targets as f64].into_iter().chain(metrics).collect()
    }

    /// Sets the numbers that [`sums`](Self::sums) returns.
    pub(super) fn set_sums(&mut self, sums: &[f64]) {
        (self.loss_sum, self.num_targets) = (sums[0], sums[1] as usize);
        for (metric, sums) in self.metrics.iter_mut().zip(sums[2..].chunks_exact(2)) {
            (metric.sum, metric.count) = (sums[0], sums[1]);
        }
    }
}
