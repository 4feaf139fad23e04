//! Decisions that look at many tokens at once, taken over the tokens of all ranks: they are those of one rank with all of them.
//!
//! Tokens stand in the order of ranks. Where counts are enough, as for the order in which an expert's capacity is filled, ranks
//! tell each other counts, K E of each; where all tokens are put in an order (priorities, rerouting, experts that choose) they
//! gather what decides, take the same decision and each keeps its part.

use std::ops::Range;

use bytemuck::Pod;
use moeworks_comm::Reduce;

use super::ExpertRanks;
use crate::overflow::{self, RemainingCapacity, WithinCapacity};
use crate::{DispatchRule, NO_EXPERT};

/// The tokens of all ranks as one rank sees them. All ranks make the same calls.
pub(crate) struct CrossRank<'a> {
    ranks: &'a ExpertRanks,
    /// Tokens of each rank.
    lens: Vec<usize>,
    own: Range<usize>,
}

/// Choices of a rank's tokens.
#[derive(Clone, Copy)]
pub(crate) struct ChoiceIds<'a> {
    /// `[T, K]`
    pub(crate) ids: &'a [u32],
    pub(crate) top_k: usize,
    pub(crate) num_experts: usize,
}

impl<'a> CrossRank<'a> {
    /// This rank has `num_tokens`.
    pub(crate) fn of(ranks: &'a ExpertRanks, num_tokens: usize) -> Self {
        let world = ranks.world();
        let mut lens = vec![0_u64; world.size()];
        ranks.attempt((), || world.all_gather(&[num_tokens as u64], &mut lens));
        let mut lens: Vec<usize> = lens.into_iter().map(|len| len as usize).collect();
        // Also where nobody answers.
        lens[world.rank()] = num_tokens;
        let start = lens[..world.rank()].iter().sum();
        Self { ranks, lens, own: start..start + num_tokens }
    }

    /// Tokens of all ranks.
    pub(crate) fn num_tokens(&self) -> usize {
        self.lens.iter().sum()
    }

    /// The places of this rank's tokens among all.
    pub(crate) fn own(&self) -> Range<usize> {
        self.own.clone()
    }

    /// This rank's rows of those of all tokens, `width` wide.
    pub(crate) fn own_rows<'r, T>(&self, all: &'r [T], width: usize) -> &'r [T] {
        &all[self.own.start * width..self.own.end * width]
    }

    /// `[tokens of all ranks, width]`: everybody's rows `own [T, width]`.
    pub(crate) fn gather<T: Pod>(&self, own: &[T], width: usize) -> Vec<T> {
        let counts: Vec<usize> = self.lens.iter().map(|len| len * width).collect();
        let mut all = vec![T::zeroed(); self.num_tokens() * width];
        self.ranks.attempt((), || self.ranks.world().all_gather_v(own, &mut all, &counts));
        all
    }

    /// `[tokens of all ranks, K]`: everybody's choices, and the largest K, to which those of ranks with a smaller one are filled.
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

    /// `[K, E]`: choices of each place (first, second ..) and expert that are served before those of this rank's first token.
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
                // Of the ranks before this one those of the same place count, of all ranks those of earlier places.
                let same = if rank < world.rank() { counts[at] } else { 0 };
                before[at] += same + counts[at % e..at].iter().step_by(e).sum::<u32>();
            }
        }
        before
    }

    /// Adds to `counts [parts, E]`, of parts of `len` tokens of which the first is number `first`, what other ranks have in the same
    /// parts: they can only share the first and the last one.
    pub(crate) fn join_counts(&self, counts: &mut [u32], first: usize, num_experts: usize) {
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
