//! A placement that is improved by few moves, found by beam search.

use super::improve::{ExpertMove, Search, improve};
use super::loads::{BalanceError, RankLoads};
use crate::Placement;

/// The bounds of a beam search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BeamOptions {
    /// Experts that a rank holds at most, or as many as it holds already.
    pub slots_per_rank: usize,
    /// Moves and swaps at most.
    pub max_moves: usize,
    /// Placements that are followed at a time; also the moves that are tried from each.
    pub width: usize,
}

/// A placement of the beam, with the moves that led to it.
#[derive(Clone)]
struct State<'a> {
    search: Search<'a>,
    moves: Vec<ExpertMove>,
}

impl State<'_> {
    /// The loads, descending: placements are compared by the largest, then by the next.
    fn key(&self) -> Vec<f64> {
        let mut loads = self.search.loads.clone();
        loads.sort_by(|a, b| b.total_cmp(a));
        loads
    }
}

/// Improves a placement by at most `max_moves` moves and swaps of experts, as [`improve`](fn@improve) does, but
/// follows the `width` best placements after each move instead of one. The outcome is never worse than that of
/// [`improve`](fn@improve); of equally good ones it is that with the fewest moves.
///
/// # Errors
/// See [`improve`](fn@improve).
pub fn improve_by_beam(
    placement: &Placement,
    expert_loads: &[f64],
    options: BeamOptions,
) -> Result<(Placement, Vec<ExpertMove>), BalanceError> {
    let BeamOptions { slots_per_rank, max_moves, width } = options;
    let greedy = improve(placement, expert_loads, slots_per_rank, max_moves)?;
    let width = width.max(1);
    let start = State { search: Search::new(placement, expert_loads, slots_per_rank)?, moves: Vec::new() };
    let mut best = (start.key(), start.clone());
    let mut beam = vec![start];
    for _ in 0..max_moves {
        let mut next: Vec<(Vec<f64>, State<'_>)> = Vec::new();
        for state in &beam {
            for found in state.search.moves(width) {
                let mut state = state.clone();
                state.search.carry_out(found);
                state.moves.push(found);
                next.push((state.key(), state));
            }
        }
        next.sort_by(|a, b| compare(&a.0, &b.0));
        next.dedup_by(|a, b| a.1.search.ranks == b.1.search.ranks);
        next.truncate(width);
        match next.first() {
            None => break,
            Some(first) if first.0[0] < best.0[0] * (1.0 - 1e-9) => best = first.clone(),
            Some(_) => {}
        }
        beam = next.into_iter().map(|(_, state)| state).collect();
    }
    let found = best.1.search.into_placement(placement.num_ranks());
    let max = |placement: &Placement| RankLoads::new(placement, expert_loads).map(|loads| loads.max());
    let is_better = max(&found)? < max(&greedy.0)? * (1.0 - 1e-9);
    Ok(if is_better { (found, best.1.moves) } else { greedy })
}

fn compare(a: &[f64], b: &[f64]) -> std::cmp::Ordering {
    a.iter().zip(b).map(|(a, b)| a.total_cmp(b)).find(|order| order.is_ne()).unwrap_or(std::cmp::Ordering::Equal)
}
