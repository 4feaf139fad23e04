//! A placement that is improved by few moves, because each moves the weights of an expert.

use super::loads::{BalanceError, RankLoads, check_loads};
use crate::Placement;

/// Two ranks that change experts: `expert` goes from rank `from` to rank `to`, and `back`, where it is there, the
/// other way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertMove {
    /// The expert that leaves the rank with more load.
    pub expert: usize,
    /// The rank with more load.
    pub from: usize,
    /// The rank with less.
    pub to: usize,
    /// The expert that comes in its place; none where `to` has a slot more to use than `from` keeps.
    pub back: Option<usize>,
}

/// A placement under way, with the loads of ranks and of copies.
#[derive(Clone)]
pub(super) struct Search<'a> {
    expert_loads: &'a [f64],
    /// The ranks of each expert, ascending.
    pub(super) ranks: Vec<Vec<usize>>,
    /// The experts of each rank.
    experts: Vec<Vec<usize>>,
    pub(super) loads: Vec<f64>,
    slots_per_rank: usize,
}

/// Improves a placement greedily by at most `max_moves` moves: each takes the move or the swap between the rank with
/// the largest load and any other that leaves the smaller of the larger load of both. A rank holds at most
/// `slots_per_rank` experts, or as many as it holds already. Stops where no move lowers the largest load. The largest
/// load never rises, and no expert is on a rank twice.
///
/// # Errors
/// If there is not one load for each expert, or one is negative or not finite.
pub fn improve(
    placement: &Placement,
    expert_loads: &[f64],
    slots_per_rank: usize,
    max_moves: usize,
) -> Result<(Placement, Vec<ExpertMove>), BalanceError> {
    let mut search = Search::new(placement, expert_loads, slots_per_rank)?;
    let mut moves = Vec::new();
    while moves.len() < max_moves {
        let Some(found) = search.best_move() else { break };
        search.carry_out(found);
        moves.push(found);
    }
    Ok((search.into_placement(placement.num_ranks()), moves))
}

impl<'a> Search<'a> {
    pub(super) fn new(
        placement: &Placement,
        expert_loads: &'a [f64],
        slots_per_rank: usize,
    ) -> Result<Self, BalanceError> {
        check_loads(expert_loads, placement.num_experts())?;
        let loads = RankLoads::new(placement, expert_loads)?.loads().to_vec();
        let ranks = (0..placement.num_experts()).map(|e| placement.ranks_of(e).to_vec()).collect();
        let experts = (0..placement.num_ranks()).map(|rank| placement.experts_of(rank)).collect();
        Ok(Search { expert_loads, ranks, experts, loads, slots_per_rank })
    }

    pub(super) fn into_placement(self, num_ranks: usize) -> Placement {
        Placement::from_ranks(num_ranks, self.ranks)
    }

    /// The `count` moves from the rank with the largest load that leave the smallest larger load of their two ranks,
    /// best first; only those that lower it.
    pub(super) fn moves(&self, count: usize) -> Vec<ExpertMove> {
        let Some(from) = self.hottest() else { return Vec::new() };
        let mut moves: Vec<(f64, ExpertMove)> = Vec::new();
        self.each_move(from, &mut |larger, found| moves.push((larger, found)));
        moves.retain(|(larger, _)| *larger < self.loads[from] * (1.0 - 1e-9));
        moves.sort_by(|a, b| a.0.total_cmp(&b.0));
        moves.into_iter().take(count).map(|(_, found)| found).collect()
    }

    /// The first rank of those with the largest load.
    fn hottest(&self) -> Option<usize> {
        (0..self.loads.len()).rev().max_by(|&a, &b| self.loads[a].total_cmp(&self.loads[b]))
    }

    /// The load of one copy of `expert`.
    fn copy_load(&self, expert: usize) -> f64 {
        self.expert_loads[expert] / self.ranks[expert].len() as f64
    }

    fn holds(&self, rank: usize, expert: usize) -> bool {
        self.ranks[expert].binary_search(&rank).is_ok()
    }

    /// The move from the rank with the largest load that leaves the smallest larger load of its two ranks; none where
    /// that does not fall.
    fn best_move(&self) -> Option<ExpertMove> {
        let from = self.hottest()?;
        let mut best: Option<(f64, ExpertMove)> = None;
        self.each_move(from, &mut |larger, found| {
            if best.as_ref().is_none_or(|(least, _)| larger < *least) {
                best = Some((larger, found));
            }
        });
        // A gain that rounding alone could give is none.
        best.filter(|(larger, _)| *larger < self.loads[from] * (1.0 - 1e-9)).map(|(_, found)| found)
    }

    /// Tells each move from rank `from`, with the larger load of both ranks after it.
    fn each_move(&self, from: usize, tell: &mut dyn FnMut(f64, ExpertMove)) {
        for to in (0..self.loads.len()).filter(|&to| to != from) {
            for &expert in self.experts[from].iter().filter(|&&expert| !self.holds(to, expert)) {
                let has_slot = self.experts[to].len() < self.slots_per_rank;
                let swaps = self.experts[to].iter().filter(|&&back| !self.holds(from, back)).map(|&back| Some(back));
                for back in swaps.chain(has_slot.then_some(None)) {
                    let moved = self.copy_load(expert) - back.map_or(0.0, |back| self.copy_load(back));
                    let larger = (self.loads[from] - moved).max(self.loads[to] + moved);
                    tell(larger, ExpertMove { expert, from, to, back });
                }
            }
        }
    }

    pub(super) fn carry_out(&mut self, ExpertMove { expert, from, to, back }: ExpertMove) {
        let moved = self.copy_load(expert) - back.map_or(0.0, |back| self.copy_load(back));
        self.loads[from] -= moved;
        self.loads[to] += moved;
        self.replace(expert, from, to);
        if let Some(back) = back {
            self.replace(back, to, from);
        }
    }

    /// Takes `expert` from one rank to another.
    fn replace(&mut self, expert: usize, from: usize, to: usize) {
        let ranks = &mut self.ranks[expert];
        ranks.retain(|&rank| rank != from);
        ranks.push(to);
        ranks.sort_unstable();
        self.experts[from].retain(|&held| held != expert);
        self.experts[to].push(expert);
    }
}
