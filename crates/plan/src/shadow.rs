//! Which popular experts every rank is to hold for the length of a step (FasterMoE, He et al., PPoPP 2022, section 4.2).
//!
//! A shadowed expert's weights go to all ranks, its tokens stay where they are, and its gradients are summed back. That pays
//! where one rank would otherwise compute, and receive, far more than the others. Other than the paper's estimate ours also
//! counts the tokens that still travel once some experts are shadowed.

use crate::Placement;

/// What [`shadow`] weighs, all for forward and backward together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ShadowCosts {
    /// Seconds of computing a row.
    pub row_compute_s: f64,
    /// Seconds of moving a row to its expert and back.
    pub row_move_s: f64,
    /// Seconds of moving an expert's weights to all ranks and its gradients back.
    pub expert_move_s: f64,
}

/// The load of each rank while experts become shadowed one after the other.
struct Loads<'a> {
    counts: &'a [Vec<u32>],
    placement: &'a Placement,
    computed: Vec<u64>,
    received: Vec<u64>,
}

impl<'a> Loads<'a> {
    fn new(counts: &'a [Vec<u32>], placement: &'a Placement) -> Self {
        let n = placement.num_ranks();
        let mut loads = Self { counts, placement, computed: vec![0; n], received: vec![0; n] };
        for (source, row) in counts.iter().enumerate() {
            for (expert, &rows) in row.iter().enumerate() {
                let server = placement.serving_rank(source, expert);
                loads.computed[server] += u64::from(rows);
                loads.received[server] += if server == source { 0 } else { u64::from(rows) };
            }
        }
        loads
    }

    fn shadow(&mut self, expert: usize) {
        for (source, row) in self.counts.iter().enumerate() {
            let (server, rows) = (self.placement.serving_rank(source, expert), u64::from(row[expert]));
            if server != source {
                self.computed[server] -= rows;
                self.received[server] -= rows;
                self.computed[source] += rows;
            }
        }
    }

    fn seconds(&self, num_shadowed: usize, costs: &ShadowCosts) -> f64 {
        let most = |loads: &[u64]| loads.iter().copied().max().unwrap_or(0) as f64;
        most(&self.computed) * costs.row_compute_s
            + most(&self.received) * costs.row_move_s
            + num_shadowed as f64 * costs.expert_move_s
    }
}

/// Seconds of a layer whose experts `shadowed` are everywhere. `counts[rank][expert]` are the rows of each rank.
#[must_use]
pub fn shadow_seconds(counts: &[Vec<u32>], placement: &Placement, shadowed: &[usize], costs: &ShadowCosts) -> f64 {
    let mut loads = Loads::new(counts, placement);
    shadowed.iter().for_each(|&expert| loads.shadow(expert));
    loads.seconds(shadowed.len(), costs)
}

/// The experts to be shadowed, most loaded first: the best number of them, taken in the order of their load (ties to the lower
/// number). With one expert a rank and rows from everywhere alike this is the best of all sets.
#[must_use]
pub fn shadow(counts: &[Vec<u32>], placement: &Placement, costs: &ShadowCosts) -> Vec<usize> {
    let load = |expert: usize| counts.iter().map(|row| u64::from(row[expert])).sum::<u64>();
    let is_everywhere = |expert: usize| placement.ranks_of(expert).len() == placement.num_ranks();
    let mut order: Vec<usize> = (0..placement.num_experts()).filter(|&expert| !is_everywhere(expert)).collect();
    order.sort_by_key(|&expert| std::cmp::Reverse(load(expert)));
    let mut loads = Loads::new(counts, placement);
    let (mut best, mut best_seconds) = (0, loads.seconds(0, costs));
    for (i, &expert) in order.iter().enumerate() {
        loads.shadow(expert);
        let seconds = loads.seconds(i + 1, costs);
        if seconds < best_seconds {
            (best, best_seconds) = (i + 1, seconds);
        }
    }
    order.truncate(best);
    order
}
