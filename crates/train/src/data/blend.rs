//! Sources in turn by their weights: at any position each has had its share, to within a few.
//!
//! Item `m` of a source with the share `w` is due at the time `(m + 1/2) / w`, and items come in the order of these times (stride
//! scheduling, Waldspurger & Weihl 1995). So after `n` items a source has had `n w` of them, but for 1/2 and `w` times half the
//! number of sources at most. Which item stands at a position follows from arithmetic alone, so that a resumed run goes on at once
//! and exactly.

use std::cmp::Ordering;

/// Weights are rounded to this part of their sum, so that times are compared as whole numbers.
const UNITS: f64 = (1u64 << 32) as f64;

/// Sources by their weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blend {
    weights: Vec<u64>,
    total: u64,
}

impl Blend {
    /// A blend by `weights`, finite numbers above 0, of which there is at least one.
    #[must_use]
    pub fn new(weights: &[f64]) -> Self {
        // Divided by the greatest first, whose sum cannot be too large for a number.
        let greatest = weights.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
        let sum: f64 = weights.iter().map(|weight| weight / greatest).sum();
        let units = |weight: &f64| ((weight / greatest / sum * UNITS).round() as u64).max(1);
        let weights: Vec<u64> = weights.iter().map(units).collect();
        Self { total: weights.iter().sum(), weights }
    }

    /// The share of a source, 0 to 1.
    #[must_use]
    pub fn share(&self, source: usize) -> f64 {
        self.weights[source] as f64 / self.total as f64
    }

    /// The items from `position` on.
    #[must_use]
    pub fn at(&self, position: u64) -> BlendCursor<'_> {
        // Before the time that is as many items early as there are sources, fewer items than `position` are due.
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

/// A place in a blend.
#[derive(Clone, Debug)]
pub struct BlendCursor<'b> {
    blend: &'b Blend,
    counts: Vec<u64>,
}

impl BlendCursor<'_> {
    /// How many items each source has had.
    #[must_use]
    pub fn counts(&self) -> &[u64] {
        &self.counts
    }

    /// The source of the next item, and the item's number in it.
    pub fn advance(&mut self) -> (usize, u64) {
        let next = (0..self.counts.len()).min_by(|&a, &b| self.compare(a, b)).unwrap_or_default();
        self.take(next)
    }

    /// As [`Self::advance`], of sources that have only so many items; none when all are through.
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

    /// Compares when the next items of two sources are due; the first source comes first where both are due at once.
    fn compare(&self, a: usize, b: usize) -> Ordering {
        let [twice_a, twice_b] = [a, b].map(|source| 2 * u128::from(self.counts[source]) + 1);
        let weight = |source: usize| u128::from(self.blend.weights[source]);
        (twice_a * weight(b)).cmp(&(twice_b * weight(a)))
    }
}

#[cfg(test)]
#[path = "blend_tests.rs"]
mod tests;
