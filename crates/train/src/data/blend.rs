//! A weighted interleaving of sources: at any position each source has had its share, within a few items.
//!
//! Item `m` of a source with the share `w` is due at the time `(m + 1/2) / w`, and items come in the order of these
//! times (stride scheduling, Waldspurger & Weihl 1995). After `n` items a source has had `n w` of them, with an error
//! of at most 1/2 plus `w` times half the number of sources. The item at a position follows from arithmetic alone, so
//! that a resumed run continues exactly, at no cost.

use std::cmp::Ordering;

/// The resolution of weights: they are rounded to this fraction of their sum, so that times are compared as integers.
const UNITS: f64 = (1u64 << 32) as f64;

/// Weighted sources.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blend {
    weights: Vec<u64>,
    total: u64,
}

impl Blend {
    /// Creates a blend by `weights`: at least one, all finite and above 0.
    #[must_use]
    pub fn new(weights: &[f64]) -> Self {
        // Dividing by the greatest weight first keeps the sum finite.
        let greatest = weights.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
        let sum: f64 = weights.iter().map(|weight| weight / greatest).sum();
        let units = |weight: &f64| ((weight / greatest / sum * UNITS).round() as u64).max(1);
        let weights: Vec<u64> = weights.iter().map(units).collect();
        Self { total: weights.iter().sum(), weights }
    }

    /// Returns the share of a source, 0 to 1.
    #[must_use]
    pub fn share(&self, source: usize) -> f64 {
        self.weights[source] as f64 / self.total as f64
    }

    /// Returns a cursor at `position`.
    #[must_use]
    pub fn at(&self, position: u64) -> BlendCursor<'_> {
        // At the time `position - number of sources`, fewer than `position` items are due.
        let time = position.saturating_sub(self.weights.len() as u64);
        let total = u128::from(self.total);
        let due = |weight: &u64| {
            let twice = 2 * u128::from(time) * u128::from(*weight);
            twice.saturating_sub(total).div_ceil(2 * total) as u64
        };
        let mut cursor = BlendCursor { blend: self, counts: self.weights.iter().map(due).collect() };
        let num_items: u64 = cursor.counts.iter().sum();
        for _ in num_items..position {
            cursor.advance();
        }
        cursor
    }
}

/// A position in a blend.
#[derive(Clone, Debug)]
pub struct BlendCursor<'b> {
    blend: &'b Blend,
    counts: Vec<u64>,
}

impl BlendCursor<'_> {
    /// Returns the number of items that each source has had.
    #[must_use]
    pub fn counts(&self) -> &[u64] {
        &self.counts
    }

    /// Returns the source of the next item, and the item's index in it.
    pub fn advance(&mut self) -> (usize, u64) {
        let next = (0..self.counts.len()).min_by(|&a, &b| self.compare(a, b)).unwrap_or_default();
        self.take(next)
    }

    /// Advances among sources with limited numbers of items; none when all are exhausted.
    pub fn advance_within(&mut self, lens: &[u64]) -> Option<(usize, u64)> {
        let goes_on = |source: &usize| self.counts[*source] < lens[*source];
        let next = (0..self.counts.len()).filter(goes_on).min_by(|&a, &b| self.compare(a, b))?;
        Some(self.take(next))
    }

    fn take(&mut self, source: usize) -> (usize, u64) {
        let item = self.counts[source];
        self.counts[source] += 1;
        (source, item)
    }

    /// Compares the times of the next items of two sources; at a tie the first source comes first.
    fn compare(&self, a: usize, b: usize) -> Ordering {
        let [twice_a, twice_b] = [a, b].map(|source| 2 * u128::from(self.counts[source]) + 1);
        let weight = |source: usize| u128::from(self.blend.weights[source]);
        (twice_a * weight(b)).cmp(&(twice_b * weight(a)))
    }
}

#[cfg(test)]
#[path = "blend_tests.rs"]
mod tests;
