//! Routing decisions that depend on many tokens, taken over the tokens of all ranks. They equal the decisions of one
//! rank that has all tokens, in the order of ranks.
//!
//! Filling an expert's capacity in the order of tokens needs only counts, K E per rank, which the ranks gather.
//! Decisions that order all tokens (priorities, rerouting, expert choice) gather their inputs; every rank then takes
//! the same decision and keeps its own part.

use std::ops::Range;

use bytemuck::Pod;
use moeworks_comm::Reduce;

use super::ExpertRanks;
use crate::overflow::{self, RemainingCapacity, WithinCapacity};
use crate::{DispatchRule, NO_EXPERT};

/// The tokens of all ranks as seen from one rank. All ranks must make the same calls.
pub(crate) struct CrossRank<'a> {
    ranks: &'a ExpertRanks,
    /// The number of tokens of each rank.
    lens: Vec<usize>,
    own: Range<usize>,
}

/// The choices of one rank's tokens.
#[derive(Clone, Copy)]
pub(crate) struct ChoiceIds<'a> {
    /// `[T, K]`: the experts.
    pub(crate) ids: &'a [u32],
    pub(crate) top_k: usize,
    pub(crate) num_experts: usize,
}

impl<'a> CrossRank<'a> {
    /// Gathers the numbers of tokens; this rank has `num_tokens`. All ranks call it.
    pub(crate) fn new(ranks: &'a ExpertRanks, num_tokens: usize) -> Self {
        let world = ranks.world();
        let mut lens = vec![0_u64; world.size()];
        ranks.attempt((), || world.all_gather(&[num_tokens as u64], &mut lens));
        let mut lens: Vec<usize> = lens.into_iter().map(|len| len as usize).collect();
        // Set here as well, in case the communication failed.
        lens[world.rank()] = num_tokens;
        let start = lens[..world.rank()].iter().sum();
        Self { ranks, lens, own: start..start + num_tokens }
    }

    /// Returns the number of tokens of all ranks.
    pub(crate) fn num_tokens(&self) -> usize {
        self.lens.iter().sum()
    }

    /// Returns the range of this rank's tokens among those of all ranks.
    pub(crate) fn own(&self) -> Range<usize> {
        self.own.clone()
    }

    /// Returns this rank's rows of a matrix with `width` columns and a row for each token of all ranks.
    pub(crate) fn own_rows<'r, T>(&self, all: &'r [T], width: usize) -> &'r [T] {
        &all[self.own.start * width..self.own.end * width]
    }

    /// Gathers the rows `own [T, width]` of every rank: `[tokens of all ranks, width]`.
    pub(crate) fn gather<T: Pod>(&self, own: &[T], width: usize) -> Vec<T> {
        let counts: Vec<usize> = self.lens.iter().map(|len| len * width).collect();
        let mut all = vec![T::zeroed(); self.num_tokens() * width];
        self.ranks.attempt((), || self.ranks.world().all_gather_v(own, &mut all, &counts));
        all
    }

    /// Gathers the choices of all ranks, `[tokens of all ranks, K]`. Returns them with the largest K of any rank;
    /// shorter rows are padded with [`NO_EXPERT`].
    pub(crate) fn choices(&self, ids: &[u32], top_k: usize) -> (Vec<u32>, usize) {
        let width = self.largest(top_k);
        if width == top_k {
            return (self.gather(ids, width), width);
        }
        let mut filled = vec![NO_EXPERT; self.own.len() * width];
        for (to, ids) in filled.chunks_mut(width).zip(ids.chunks(top_k)) {
            to[..top_k].copy_from_slice(ids);
        }
        (self.gather(&filled, width), width)
    }

    fn largest(&self, own: usize) -> usize {
        let mut largest = [own as u32];
        self.ranks.attempt((), || self.ranks.world().all_reduce(&mut largest, Reduce::Max));
        largest[0] as usize
    }

    /// Decides which of `choices` are within the capacity that `rule` gives.
    pub(crate) fn within_capacity(&self, rule: &DispatchRule<'_>, choices: ChoiceIds<'_>) -> WithinCapacity {
        let ChoiceIds { ids, top_k, num_experts } = choices;
        let num_tokens = self.num_tokens();
        let (capacity, group_tokens) = (rule.capacities(num_tokens, num_experts), rule.group_size(num_tokens));
        let remaining = RemainingCapacity { capacity: &capacity, group_tokens, before: None };
        if rule.priority.is_none() && group_tokens == num_tokens {
            let before = self.counts_before(ids, top_k, num_experts);
            let remaining = RemainingCapacity { group_tokens: self.own.len(), before: Some(&before), ..remaining };
            return WithinCapacity { is_within: overflow::within_capacity(ids, top_k, remaining, None), num_tokens };
        }
        let (ids, width) = self.choices(ids, top_k);
        let priority = rule.priority.map(|priority| self.gather(priority, 1));
        let all = overflow::within_capacity(&ids, width, remaining, priority.as_deref());
        let own = self.own_rows(&all, width).chunks(width);
        WithinCapacity { is_within: own.flat_map(|row| &row[..top_k]).copied().collect(), num_tokens }
    }

    /// Returns `[K, E]`: for each rank of a choice (first, second ..) and each expert the choices that are served
    /// before those of this rank's first token.
    fn counts_before(&self, ids: &[u32], top_k: usize, num_experts: usize) -> Vec<u32> {
        let (world, e) = (self.ranks.world(), num_experts);
        let mut own = vec![0_u32; self.largest(top_k) * e];
        for (choice, &expert) in ids.iter().enumerate().filter(|(_, expert)| **expert != NO_EXPERT) {
            own[choice % top_k * e + expert as usize] += 1;
        }
        let mut all = vec![0_u32; own.len() * world.size()];
        self.ranks.attempt((), || world.all_gather(&own, &mut all));
        let mut before = vec![0; own.len()];
        for (rank, counts) in all.chunks(own.len()).enumerate() {
            for at in 0..own.len() {
                // Choices of the same rank count on the ranks before this one, choices of lower rank on all ranks.
                let same = if rank < world.rank() { counts[at] } else { 0 };
                before[at] += same + counts[at % e..at].iter().step_by(e).sum::<u32>();
            }
        }
        before
    }

    /// Adds the counts of other ranks to `counts [token groups, E]`. A group has `len` consecutive tokens of all
    /// ranks and this rank's first group has the index `first`. Ranks can share only their first and last group.
    pub(crate) fn sum_counts(&self, counts: &mut [u32], first: usize, num_experts: usize) {
        const NONE: u32 = u32::MAX;
        let (world, width) = (self.ranks.world(), num_experts + 1);
        let mut own = vec![NONE; 2 * width];
        let last = (counts.len() / num_experts).saturating_sub(1);
        let ends = [(0, !counts.is_empty()), (last, last > 0)];
        for (row, (part, _)) in own.chunks_mut(width).zip(ends).filter(|(_, end)| end.1) {
            row[0] = (first + part) as u32;
            row[1..].copy_from_slice(&counts[part * num_experts..(part + 1) * num_experts]);
        }
        let mut all = vec![NONE; own.len() * world.size()];
        self.ranks.attempt((), || world.all_gather(&own, &mut all));
        let others = all.chunks(own.len()).enumerate().filter(|(rank, _)| *rank != world.rank());
        for row in others.flat_map(|(_, rows)| rows.chunks(width)).filter(|row| row[0] != NONE) {
            let Some(part) = (row[0] as usize).checked_sub(first).filter(|part| *part <= last) else { continue };
            if let Some(counts) = counts.get_mut(part * num_experts..(part + 1) * num_experts) {
                counts.iter_mut().zip(&row[1..]).for_each(|(count, other)| *count += other);
            }
        }
    }
}
