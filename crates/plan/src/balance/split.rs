//! Rows of hot experts shared out over idle ranks within a step (least-loaded expert parallelism, LLEP).
//!
//! Placements follow the load of many steps; a single step may still be skewed. Then ranks with rows to spare compute
//! some of a hot expert's rows with weights that they fetch for this step alone.

use super::loads::{BalanceError, check_loads};
use crate::Placement;

/// The bounds of sharing rows out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SplitOptions {
    /// The imbalance (largest rank over mean, less 1) up to which nothing is shared out.
    pub least_imbalance: f64,
    /// The load of a rank over the mean that is allowed, less 1.
    pub max_excess: f64,
    /// The rows that a rank takes over at least, so that fetching the weights pays and the product is not too small.
    pub min_rows: u64,
}

impl Default for SplitOptions {
    fn default() -> Self {
        Self { least_imbalance: 0.3, max_excess: 0.0, min_rows: 64 }
    }
}

/// Rows of an expert that a rank computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowShare {
    /// The expert.
    pub expert: usize,
    /// The rank.
    pub rank: usize,
    /// The rows.
    pub rows: u64,
    /// True if the rank does not hold the expert and fetches its weights.
    pub is_fetched: bool,
}

/// The rows of a step on ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowSplit {
    /// The shares, expert by expert.
    pub shares: Vec<RowShare>,
    /// `[ranks]`: the rows of each rank.
    pub rows_per_rank: Vec<u64>,
}

impl RowSplit {
    /// Returns `(max - mean) / mean` of the ranks' rows; 0 without rows.
    #[must_use]
    pub fn imbalance(&self) -> f64 {
        let total: u64 = self.rows_per_rank.iter().sum();
        let mean = total as f64 / self.rows_per_rank.len() as f64;
        let most = self.rows_per_rank.iter().max().copied().unwrap_or(0);
        if total == 0 { 0.0 } else { most as f64 / mean - 1.0 }
    }

    /// Returns the number of experts' weights that ranks fetch.
    #[must_use]
    pub fn num_fetched(&self) -> usize {
        self.shares.iter().filter(|share| share.is_fetched).count()
    }
}

/// Shares the rows of a step out. Each holder of an expert gets as many of its rows. If the imbalance is above
/// `least_imbalance`, rows beyond the allowed load of a rank go from its largest expert to the least-loaded ranks, at
/// least `min_rows` to each. No row is lost, and the largest load never rises.
///
/// # Errors
/// If there is not one number for each expert.
pub fn split_rows(
    placement: &Placement,
    rows_per_expert: &[u64],
    options: SplitOptions,
) -> Result<RowSplit, BalanceError> {
    let as_loads: Vec<f64> = rows_per_expert.iter().map(|&rows| rows as f64).collect();
    check_loads(&as_loads, placement.num_experts())?;
    let mut split = held_rows(placement, rows_per_expert);
    if split.imbalance() <= options.least_imbalance {
        return Ok(split);
    }
    let total: u64 = split.rows_per_rank.iter().sum();
    let mean = total as f64 / split.rows_per_rank.len() as f64;
    let allowed = (mean * (1.0 + options.max_excess.max(0.0))).ceil() as u64;
    let mut order: Vec<usize> = (0..split.shares.len()).collect();
    order.sort_by_key(|&at| (std::cmp::Reverse(split.shares[at].rows), at));
    for at in order {
        spill(&mut split, at, allowed, options.min_rows.max(1));
    }
    split.shares.retain(|share| share.rows > 0);
    split.shares.sort_by_key(|share| (share.expert, share.is_fetched, share.rank));
    Ok(split)
}

/// Gives every holder of an expert as many of its rows; the first ones get one more where they do not divide.
fn held_rows(placement: &Placement, rows_per_expert: &[u64]) -> RowSplit {
    let mut split = RowSplit { shares: Vec::new(), rows_per_rank: vec![0; placement.num_ranks()] };
    for (expert, &rows) in rows_per_expert.iter().enumerate() {
        let ranks = placement.ranks_of(expert);
        for (place, &rank) in ranks.iter().enumerate() {
            let count = ranks.len() as u64;
            let rows = rows / count + u64::from((place as u64) < rows % count);
            split.rows_per_rank[rank] += rows;
            split.shares.push(RowShare { expert, rank, rows, is_fetched: false });
        }
    }
    split
}

/// Moves rows of share `at` that are beyond the allowed load of its rank to the ranks with the least load.
fn spill(split: &mut RowSplit, at: usize, allowed: u64, min_rows: u64) {
    let RowShare { expert, rank, .. } = split.shares[at];
    loop {
        let beyond = split.rows_per_rank[rank].saturating_sub(allowed).min(split.shares[at].rows);
        // The first of the least loaded ones that does not compute this expert.
        let has_it = |rank: usize| split.shares.iter().any(|share| share.expert == expert && share.rank == rank);
        let others = (0..split.rows_per_rank.len()).filter(|&other| !has_it(other));
        let Some(to) = others.min_by_key(|&other| split.rows_per_rank[other]) else { return };
        let moved = beyond.min(allowed.saturating_sub(split.rows_per_rank[to]));
        if moved < min_rows {
            return;
        }
        split.shares[at].rows -= moved;
        split.rows_per_rank[rank] -= moved;
        split.rows_per_rank[to] += moved;
        split.shares.push(RowShare { expert, rank: to, rows: moved, is_fetched: true });
    }
}
