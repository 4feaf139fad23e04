//! The way from one placement to another: the copies that travel, and placements in between.

use crate::{Nodes, Placement};

/// A copy of an expert that travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertTransfer {
    /// The expert.
    pub expert: usize,
    /// The rank that has it.
    pub from: usize,
    /// The rank that gets it.
    pub to: usize,
}

/// Lists the copies that ranks lack of placement `to` where they have those of `from`, by expert and destination.
/// Each comes from a rank of the same node if one has the expert; several holders share the destinations.
#[must_use]
pub fn expert_transfers(from: &Placement, to: &Placement, nodes: &Nodes) -> Vec<ExpertTransfer> {
    let of_expert = |expert: usize| {
        let missing = to.ranks_of(expert).iter().filter(move |&&rank| !from.holds(rank, expert));
        missing.map(move |&rank| ExpertTransfer { expert, from: from.serving_rank(nodes, rank, expert), to: rank })
    };
    (0..to.num_experts()).flat_map(of_expert).collect()
}

/// Returns the largest number of copies that one of `num_ranks` ranks sends or receives.
#[must_use]
pub fn most_copies(transfers: &[ExpertTransfer], num_ranks: usize) -> usize {
    let mut counts = vec![[0; 2]; num_ranks];
    for transfer in transfers {
        counts[transfer.from][0] += 1;
        counts[transfer.to][1] += 1;
    }
    counts.into_iter().flatten().max().unwrap_or(0)
}

/// A step on the way to a placement.
struct Step<'a> {
    target: &'a Placement,
    /// The ranks of each expert after the step.
    ranks: Vec<Vec<usize>>,
    /// The copies of each expert that are still to come.
    num_missing: Vec<usize>,
    /// The experts of each rank after the step, less those that it may hold.
    excess: Vec<isize>,
    /// The copies that each rank sends and receives.
    counts: Vec<[usize; 2]>,
}

/// Returns the placement after the next step from `current` to `target`, in which no rank sends or receives more
/// than `max_copies` copies, or one if that is 0. An expert leaves its old ranks in the step in which the last of
/// its new copies arrives. A rank holds at most one expert more than by the fuller of the two placements, unless
/// nothing could move otherwise. Repeated steps end at `target`.
#[must_use]
pub fn placement_step(current: &Placement, target: &Placement, nodes: &Nodes, max_copies: usize) -> Placement {
    let mut pending = expert_transfers(current, target, nodes);
    let mut step = Step::new(current, target, &pending);
    let max_copies = max_copies.max(1);
    let mut has_moved = false;
    while let Some(index) = step.next(&pending, max_copies) {
        let transfer = pending[index];
        if has_moved && step.excess[transfer.to] > 0 {
            break;
        }
        pending.remove(index);
        step.carry_out(transfer);
        has_moved = true;
    }
    Placement::from_ranks(current.num_ranks(), step.ranks)
}

impl<'a> Step<'a> {
    fn new(current: &Placement, target: &'a Placement, pending: &[ExpertTransfer]) -> Self {
        let num_ranks = current.num_ranks();
        let ranks = (0..current.num_experts()).map(|expert| current.ranks_of(expert).to_vec()).collect();
        let held = |rank| current.experts_of(rank).len() as isize;
        let excess = (0..num_ranks).map(|rank| held(rank) - held(rank).max(target.experts_of(rank).len() as isize));
        let mut num_missing = vec![0; current.num_experts()];
        pending.iter().for_each(|transfer| num_missing[transfer.expert] += 1);
        let mut step = Self { target, ranks, excess: excess.collect(), counts: vec![[0; 2]; num_ranks], num_missing };
        let is_complete = |expert: &usize| step.num_missing[*expert] == 0;
        let complete: Vec<usize> = (0..current.num_experts()).filter(is_complete).collect();
        complete.into_iter().for_each(|expert| step.leave_old_ranks(expert));
        step
    }

    /// Returns the index of the transfer to take next: within the limit, to the rank with the most room.
    fn next(&self, pending: &[ExpertTransfer], max_copies: usize) -> Option<usize> {
        let is_within = |transfer: &ExpertTransfer| {
            self.counts[transfer.from][0] < max_copies && self.counts[transfer.to][1] < max_copies
        };
        let within = pending.iter().enumerate().filter(|(_, transfer)| is_within(transfer));
        within.min_by_key(|(_, transfer)| self.excess[transfer.to]).map(|(index, _)| index)
    }

    fn carry_out(&mut self, ExpertTransfer { expert, from, to }: ExpertTransfer) {
        self.counts[from][0] += 1;
        self.counts[to][1] += 1;
        self.ranks[expert].push(to);
        self.ranks[expert].sort_unstable();
        self.excess[to] += 1;
        self.num_missing[expert] -= 1;
        if self.num_missing[expert] == 0 {
            self.leave_old_ranks(expert);
        }
    }

    /// Leaves an expert on the ranks of the target alone.
    fn leave_old_ranks(&mut self, expert: usize) {
        let (target, excess) = (self.target, &mut self.excess);
        self.ranks[expert].retain(|&rank| {
            let stays = target.holds(rank, expert);
            excess[rank] -= isize::from(!stays);
            stays
        });
    }
}
