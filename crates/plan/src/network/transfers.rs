//! The transfers of a step: messages between stage groups, all-to-alls, sums of gradients.

use super::loads::Loads;
use super::places::Places;
use crate::cost::collectives::parts_hit;
use crate::{Algorithm, Exchange, Layout, Nodes, Placement};

/// The rows of one rank in an all-to-all.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rows {
    /// Bytes of all rows of a rank.
    pub bytes: f64,
    /// K, the number of rows of a token.
    pub top_k: usize,
    /// E, the number of experts that a token chooses from.
    pub num_experts: usize,
}

/// The share of a source's rows that goes to each rank of a group.
#[derive(Clone, Debug)]
pub struct ExpertShares {
    /// The shares of each source; one for all where they do not depend on the source.
    of_source: Vec<Vec<f64>>,
    /// The share of all rows that the rank with the most gets, over the average.
    pub hottest: f64,
}

impl ExpertShares {
    /// Returns the shares of a placement, where `loads` are the rows of each expert (of any sum). `nodes` are those
    /// of the group's ranks.
    #[must_use]
    pub fn new(placement: &Placement, loads: &[f64], nodes: &Nodes) -> Self {
        let all: f64 = loads.iter().sum();
        let of = |source: usize| {
            let mut shares = vec![0.0; placement.num_ranks()];
            for (expert, load) in loads.iter().enumerate() {
                shares[placement.serving_rank(nodes, source, expert)] += load / all;
            }
            shares
        };
        let sources = if placement.has_replicas() { placement.num_ranks() } else { 1 };
        let of_source: Vec<Vec<f64>> = (0..sources).map(of).collect();
        let received = |rank: usize| of_source.iter().map(|shares| shares[rank]).sum::<f64>() / sources as f64;
        let most = (0..placement.num_ranks()).map(received).fold(0.0, f64::max);
        Self { hottest: most * placement.num_ranks() as f64, of_source }
    }

    /// Returns the share of the rows of `source` that goes to rank `to`.
    #[must_use]
    pub fn of(&self, source: usize, to: usize) -> f64 {
        self.of_source[if self.of_source.len() == 1 { 0 } else { source }][to]
    }

    fn depends_on_source(&self) -> bool {
        self.of_source.len() > 1
    }
}

impl Places<'_> {
    /// Returns the messages of all ranks of stage group `from` to those at their places in stage group `to`, each of
    /// `bytes`.
    #[must_use]
    pub fn messages(&self, layout: &Layout, from: usize, to: usize, bytes: f64) -> Loads<'_> {
        let mut loads = Loads::new(self);
        for place in 0..layout.stage_group_size() {
            let [from, to] = [from, to].map(|stage_group| stage_group * layout.stage_group_size() + place);
            loads.send(from, to, bytes);
            if let Some(level) = self.level_between(from, to) {
                let of = &self.cluster.levels[level];
                loads.wait(of.latency_s + of.message_s);
            }
        }
        loads
    }

    /// Returns the parts, one after another, of the all-to-alls of all groups of `stage_group`.
    #[must_use]
    pub fn all_to_all(
        &self,
        layout: &Layout,
        stage_group: usize,
        exchange: &Exchange,
        rows: &Rows,
        shares: &ExpertShares,
    ) -> Vec<Loads<'_>> {
        let groups: Vec<Members<'_>> =
            ep_groups(layout, stage_group).into_iter().map(|ranks| Members::new(self, ranks)).collect();
        let mut direct = Loads::new(self);
        if exchange.algorithm == Algorithm::Linear || groups.iter().all(Members::is_one_node) {
            groups.iter().for_each(|group| group.add_direct(&mut direct, 0, rows.bytes, shares));
            return vec![direct];
        }
        let mut near = Loads::new(self);
        for group in &groups {
            let nodes = group.num_units(0);
            let hit = match exchange.algorithm {
                Algorithm::TwoHop => parts_hit(rows.num_experts, rows.top_k, nodes) / rows.top_k.max(1) as f64,
                Algorithm::Linear | Algorithm::Hierarchical => 1.0,
            };
            group.add_hop_in_node(&mut near, rows.bytes, shares);
            group.add_direct(&mut direct, 1, rows.bytes * hit.min(1.0), shares);
        }
        // Two copies make the rows contiguous.
        near.fixed_s += 2.0 * rows.bytes / self.cluster.device.memory_rate();
        vec![near, direct]
    }

    /// Returns the parts, one level after another, of the all-reduces of `bytes` on each rank of all `groups`: at
    /// each level a ring over its units, of what the levels below leave to each rank.
    #[must_use]
    pub fn all_reduce(&self, groups: &[Vec<usize>], bytes: f64) -> Vec<Loads<'_>> {
        let mut parts: Vec<Loads<'_>> = self.cluster.levels.iter().map(|_| Loads::new(self)).collect();
        for ranks in groups {
            let group = Members::new(self, ranks.clone());
            for (level, loads) in parts.iter_mut().enumerate() {
                group.add_ring(loads, level, bytes);
            }
        }
        parts.retain(|loads| !loads.bytes.is_empty() || loads.fixed_s > 0.0);
        parts
    }

    /// Returns the parts of a layer's exchange in domains of `domain` units of the outermost level (HybridEP,
    /// 2510.19470, section 3): experts of `expert_bytes` a rank that units of a domain fetch from each other, then
    /// tokens, which go to the unit at their place in another domain.
    #[must_use]
    pub fn domain_exchange(
        &self,
        layout: &Layout,
        stage_group: usize,
        domain: usize,
        bytes: [f64; 2],
    ) -> [Loads<'_>; 2] {
        let [row_bytes, expert_bytes] = bytes;
        let (mut gather, mut tokens) = (Loads::new(self), Loads::new(self));
        let outer = self.cluster.levels.len() - 1;
        for ranks in ep_groups(layout, stage_group) {
            let group = Members::new(self, ranks);
            let num = if outer == 0 { group.ranks.len() } else { group.num_units(outer - 1) };
            let fetched = (domain.min(num) - 1) as f64;
            let away = 1.0 - domain.min(num) as f64 / num as f64;
            let of = &self.cluster.levels[outer];
            gather.wait(if fetched > 0.0 { of.latency_s + fetched * of.message_s } else { 0.0 });
            tokens.wait(if away > 0.0 { of.latency_s + (num / domain.max(1)) as f64 * of.message_s } else { 0.0 });
            for (index, &rank) in group.ranks.iter().enumerate() {
                for (loads, bytes) in [(&mut gather, fetched * expert_bytes), (&mut tokens, away * row_bytes)] {
                    loads.add_out(rank, outer, bytes);
                    loads.add_in(rank, outer, bytes);
                }
                group.add_uniform_inside(&mut tokens, index, row_bytes);
            }
        }
        [gather, tokens]
    }
}

/// Returns the groups of a stage group whose ranks hold the experts between them.
fn ep_groups(layout: &Layout, stage_group: usize) -> Vec<Vec<usize>> {
    distinct_groups(layout, stage_group, |rank| layout.ep_group(rank))
}

/// Returns the groups of the ranks of a stage group, each once.
pub(crate) fn distinct_groups(
    layout: &Layout,
    stage_group: usize,
    of: impl Fn(usize) -> Vec<usize>,
) -> Vec<Vec<usize>> {
    let first = stage_group * layout.stage_group_size();
    let mut is_seen = vec![false; layout.stage_group_size()];
    let mut groups = Vec::new();
    for rank in first..first + layout.stage_group_size() {
        if !is_seen[rank - first] {
            let group = of(rank);
            group.iter().for_each(|&member| is_seen[member - first] = true);
            groups.push(group);
        }
    }
    groups
}

/// The ranks of a group, sorted by unit: the number and the first and last member of each unit follow from it.
struct Members<'a> {
    places: &'a Places<'a>,
    ranks: Vec<usize>,
    /// The number of members in the unit of each member, for each level.
    counts: Vec<Vec<usize>>,
    /// The number of each member among those of its innermost unit.
    numbers: Vec<usize>,
}

impl<'a> Members<'a> {
    fn new(places: &'a Places<'a>, ranks: Vec<usize>) -> Self {
        let mut numbers = vec![0; ranks.len()];
        let counts = (0..places.cluster.levels.len()).map(|level| {
            let mut in_unit = std::collections::HashMap::new();
            for (index, &rank) in ranks.iter().enumerate() {
                let count = in_unit.entry(places.unit(level, rank)).or_insert(0_usize);
                if level == 0 {
                    numbers[index] = *count;
                }
                *count += 1;
            }
            ranks.iter().map(|&rank| in_unit[&places.unit(level, rank)]).collect()
        });
        let counts = counts.collect();
        Self { places, ranks, counts, numbers }
    }

    /// Returns the number of members in the unit of a member below `level`: 1 below the innermost.
    fn below(&self, level: usize, index: usize) -> usize {
        level.checked_sub(1).map_or(1, |level| self.counts[level][index])
    }

    fn num_units(&self, level: usize) -> usize {
        let units: std::collections::HashSet<usize> =
            self.ranks.iter().map(|&rank| self.places.unit(level, rank)).collect();
        units.len()
    }

    fn is_one_node(&self) -> bool {
        self.counts[0].first().is_none_or(|&count| count == self.ranks.len())
    }

    /// Sums `of` the members in the unit of each member, for a level; below the innermost those of the member itself.
    fn sums(&self, level: Option<usize>, of: &[f64]) -> Vec<f64> {
        let Some(level) = level else { return of.to_vec() };
        let mut in_unit = std::collections::HashMap::new();
        for (&rank, value) in self.ranks.iter().zip(of) {
            *in_unit.entry(self.places.unit(level, rank)).or_insert(0.0) += value;
        }
        self.ranks.iter().map(|&rank| in_unit[&self.places.unit(level, rank)]).collect()
    }

    /// Adds rows that go straight to the ranks of their experts, at `first_level` and outer ones. There is a message
    /// for each rank, or for each node if the first level is not the innermost.
    fn add_direct(&self, loads: &mut Loads<'_>, first_level: usize, bytes: f64, shares: &ExpertShares) {
        for level in first_level..self.counts.len() {
            self.add_level(loads, level, bytes, shares);
        }
        let per_message = if first_level == 0 { 1 } else { self.counts[0].iter().copied().max().unwrap_or(1) };
        for index in 0..self.ranks.len() {
            let (mut seconds, mut latency) = (0.0, 0.0_f64);
            for (level, of) in self.places.cluster.levels.iter().enumerate().skip(first_level) {
                let messages = (self.counts[level][index] - self.below(level, index)) as f64 / per_message as f64;
                seconds += messages.ceil() * of.message_s;
                latency = latency.max(if messages > 0.0 { of.latency_s } else { 0.0 });
            }
            loads.wait(seconds + latency);
        }
    }

    /// Adds the rows that are for ranks of the same unit at `level`, but not below.
    fn add_level(&self, loads: &mut Loads<'_>, level: usize, bytes: f64, shares: &ExpertShares) {
        if shares.depends_on_source() {
            for (source, &from) in self.ranks.iter().enumerate() {
                for (index, &to) in self.ranks.iter().enumerate() {
                    if self.places.level_between(from, to) == Some(level) {
                        let bytes = bytes * shares.of(source, index);
                        loads.add_out(from, level, bytes);
                        loads.add_in(to, level, bytes);
                    }
                }
            }
            return;
        }
        let of: Vec<f64> = (0..self.ranks.len()).map(|index| shares.of(0, index)).collect();
        let (here, below) = (self.sums(Some(level), &of), self.sums(level.checked_sub(1), &of));
        for (index, &rank) in self.ranks.iter().enumerate() {
            let sources = (self.counts[level][index] - self.below(level, index)) as f64;
            if sources > 0.0 {
                loads.add_out(rank, level, bytes * (here[index] - below[index]).max(0.0));
                loads.add_in(rank, level, bytes * sources * of[index]);
            }
        }
    }

    /// Adds the hop within a node: rows go to the rank whose number in its node is that of their expert's rank.
    fn add_hop_in_node(&self, loads: &mut Loads<'_>, bytes: f64, shares: &ExpertShares) {
        for (index, &rank) in self.ranks.iter().enumerate() {
            let members = self.counts[0][index];
            let of_number = |number: usize| -> f64 {
                let same = (0..self.ranks.len()).filter(|&to| self.numbers[to] % members == number);
                same.map(|to| shares.of(index, to)).sum()
            };
            let stays = of_number(self.numbers[index]);
            let received: f64 = (members - 1) as f64 * stays;
            if members > 1 {
                loads.add_out(rank, 0, bytes * (1.0 - stays).max(0.0));
                loads.add_in(rank, 0, bytes * received);
                let of = &self.places.cluster.levels[0];
                loads.wait(of.latency_s + (members - 1) as f64 * of.message_s);
            }
        }
    }

    /// Adds what a member sends to those of its units below the outermost level, if experts are used alike.
    fn add_uniform_inside(&self, loads: &mut Loads<'_>, index: usize, bytes: f64) {
        let levels = self.counts.len();
        let inside = if levels > 1 { self.counts[levels - 2][index] } else { 1 };
        for level in 0..levels - 1 {
            let share = (self.counts[level][index] - self.below(level, index)) as f64 / inside as f64;
            loads.add_out(self.ranks[index], level, bytes * share);
            loads.add_in(self.ranks[index], level, bytes * share);
        }
    }

    /// Adds the ring of an all-reduce over the units of `level` in each unit.
    fn add_ring(&self, loads: &mut Loads<'_>, level: usize, bytes: f64) {
        let of = &self.places.cluster.levels[level];
        for (index, &rank) in self.ranks.iter().enumerate() {
            let below = self.below(level, index);
            let units = self.counts[level][index].div_ceil(below);
            if units > 1 {
                let steps = 2.0 * (units - 1) as f64;
                let bytes = steps / units as f64 * bytes / below as f64;
                loads.add_out(rank, level, bytes);
                loads.add_in(rank, level, bytes);
                loads.wait(steps * (of.latency_s + of.message_s));
            }
        }
    }
}
