//! Rates of work between the measured sizes and numbers of threads.

use super::Machine;
use crate::Precision;

/// The rates of a kind of work, in operations a second. A backward pass counts as two forward passes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PassRates {
    /// The rate of a forward pass.
    pub forward: f64,
    /// The rate of forward and backward together.
    pub training: f64,
}

impl PassRates {
    /// Returns the seconds of a forward pass of `flops` operations.
    #[must_use]
    pub fn forward_seconds(self, flops: f64) -> f64 {
        flops / self.forward
    }

    /// Returns the seconds of forward and backward, whose forward pass has `flops` operations.
    #[must_use]
    pub fn training_seconds(self, flops: f64) -> f64 {
        3.0 * flops / self.training
    }

    /// Returns the seconds of a backward pass, whose forward pass has `flops` operations.
    #[must_use]
    pub fn backward_seconds(self, flops: f64) -> f64 {
        (self.training_seconds(flops) - self.forward_seconds(flops)).max(0.0)
    }

    /// Returns the rates `factor` times as high.
    #[must_use]
    pub(crate) fn times(self, factor: f64) -> Self {
        Self { forward: self.forward * factor, training: self.training * factor }
    }
}

/// The sizes of a measurement; the last one is the number of threads.
type Place = [f64; 4];

/// A measured rate.
#[derive(Clone, Copy, Debug)]
struct Point {
    precision: Precision,
    place: Place,
    value: f64,
}

impl Machine {
    /// Returns the operations a second of a forward product with `rows` rows and matrices of `width`, by `threads`
    /// threads: interpolated between the measured sizes and numbers of threads. A precision that was not measured has
    /// the rate of another.
    #[must_use]
    pub fn product_rate(&self, precision: Precision, threads: usize, size: [f64; 2]) -> f64 {
        self.products_at(precision, threads, size).forward
    }

    /// Returns the rates of products with `rows` rows and matrices of `width`.
    pub(super) fn products_at(&self, precision: Precision, threads: usize, [rows, width]: [f64; 2]) -> PassRates {
        let rates = self.products.iter().map(|rate| Rate {
            precision: rate.precision,
            place: [rate.rows, rate.width, 1, rate.threads],
            forward: rate.flops,
            training: rate.training_flops.unwrap_or(rate.flops),
        });
        // A machine has at least one product.
        at(rates, precision, [rows, width, 1.0, threads as f64]).unwrap_or(PassRates { forward: 1.0, training: 1.0 })
    }

    /// Returns the rates of the two products of experts with `rows` rows each, in a model of `width`. Without
    /// measurements they are those of as large products.
    pub(super) fn experts_at(&self, precision: Precision, threads: usize, size: [f64; 3]) -> PassRates {
        let [rows, width, expert_width] = size;
        let rates = self.experts.iter().map(|rate| Rate {
            precision: rate.precision,
            place: [rate.rows, rate.width, rate.expert_width, rate.threads],
            forward: rate.flops,
            training: rate.training_flops,
        });
        at(rates, precision, [rows, width, expert_width, threads as f64])
            .unwrap_or_else(|| self.products_at(precision, threads, [rows, (width * expert_width).sqrt()]))
    }

    /// Returns the rates of causal attention; none without measurements.
    pub(super) fn attention_at(
        &self,
        precision: Precision,
        threads: usize,
        [seq_len, head_dim]: [f64; 2],
    ) -> Option<PassRates> {
        let rates = self.attention.iter().map(|rate| Rate {
            precision: rate.precision,
            place: [rate.seq_len, rate.head_dim, 1, rate.threads],
            forward: rate.flops,
            training: rate.training_flops,
        });
        at(rates, precision, [seq_len, head_dim, 1.0, threads as f64])
    }

    /// Returns the rate of forward and backward of an output layer with its loss; none without measurements.
    pub(super) fn output_layer_at(
        &self,
        precision: Precision,
        threads: usize,
        [width, vocabulary]: [f64; 2],
    ) -> Option<f64> {
        let rates = self.output_layers.iter().map(|rate| Rate {
            precision: rate.precision,
            place: [rate.width, rate.vocabulary, 1, rate.threads],
            forward: rate.training_flops,
            training: rate.training_flops,
        });
        at(rates, precision, [width, vocabulary, 1.0, threads as f64]).map(|rates| rates.training)
    }

    /// Returns the parameters a second of the norm of gradients and the optimizer; none without measurements.
    pub(super) fn update_rate(&self, precision: Precision, threads: usize) -> Option<f64> {
        let rates = self.updates.iter().map(|rate| Rate {
            precision: rate.precision,
            place: [1, 1, 1, rate.threads],
            forward: rate.params_per_s,
            training: rate.params_per_s,
        });
        at(rates, precision, [1.0, 1.0, 1.0, threads as f64]).map(|rates| rates.forward)
    }
}

/// A line of a table of rates.
struct Rate {
    precision: Precision,
    place: [usize; 4],
    forward: f64,
    training: f64,
}

/// Interpolates a table of rates.
fn at(rates: impl Iterator<Item = Rate>, precision: Precision, place: Place) -> Option<PassRates> {
    let rates: Vec<Rate> = rates.collect();
    let points = |value: fn(&Rate) -> f64| {
        let of = |rate: &Rate| Point {
            precision: rate.precision,
            place: rate.place.map(|size| size as f64),
            value: value(rate),
        };
        interpolate_points(&rates.iter().map(of).collect::<Vec<_>>(), precision, place)
    };
    Some(PassRates { forward: points(|rate| rate.forward)?, training: points(|rate| rate.training)? })
}

/// Interpolates `points` of a precision, or of another if there are none of it.
fn interpolate_points(points: &[Point], precision: Precision, place: Place) -> Option<f64> {
    let is_like = |point: &&Point| point.precision.has_bf16_copies() == precision.has_bf16_copies();
    let mut alike: Vec<Point> = points.iter().filter(is_like).copied().collect();
    if alike.is_empty() {
        alike = points.to_vec();
    }
    interpolate_axes(&alike, &place)
}

/// Interpolates along the last of the axes between the values that the others give at each of its places.
fn interpolate_axes(points: &[Point], place: &[f64]) -> Option<f64> {
    let Some((&last, others)) = place.split_last() else { return points.first().map(|point| point.value) };
    let axis = others.len();
    let mut places: Vec<f64> = points.iter().map(|point| point.place[axis]).collect();
    places.sort_by(f64::total_cmp);
    places.dedup();
    let values = places.into_iter().filter_map(|at| {
        let there: Vec<Point> = points.iter().filter(|point| point.place[axis] == at).copied().collect();
        Some([at, interpolate_axes(&there, others)?])
    });
    interpolate(&values.collect::<Vec<_>>(), last)
}

/// Interpolates between `points` of (place, value), by ascending places, on logarithmic scales; beyond the ends the
/// value stays.
fn interpolate(points: &[[f64; 2]], place: f64) -> Option<f64> {
    let after = points.iter().position(|point| point[0] >= place);
    match after {
        Some(0) => Some(points[0][1]),
        None => points.last().map(|point| point[1]),
        Some(index) => {
            let ([x0, y0], [x1, y1]) = (points[index - 1], points[index]);
            let t = (place.ln() - x0.ln()) / (x1.ln() - x0.ln());
            Some((y0.ln() + t * (y1.ln() - y0.ln())).exp())
        }
    }
}
