//! The transfers of a step on the links of its cluster.

use std::collections::HashMap;

use super::StepCosts;
use crate::network::{Loads, Places, Rows, Traffic, TransferId, distinct_groups};
use crate::schedule::{AllToAlls, Transfers};
use crate::{Schedule, Wire};

/// Bytes of a gradient.
const GRADIENT: f64 = 4.0;

impl StepCosts<'_> {
    /// Returns the transfers of a schedule: its messages, its all-to-alls, and the sums of gradients after it.
    pub fn transfers(&self, schedule: &Schedule) -> Transfers {
        let request = self.request;
        let places = Places::new(request.cluster, request.layout.num_ranks());
        let mut traffic = Traffic::new(&places);
        let messages = self.messages(schedule, &places, &mut traffic);
        let num_ranks = schedule.num_ranks();
        let all_to_alls = (0..num_ranks).map(|rank| self.all_to_alls(schedule, rank, &places, &mut traffic)).collect();
        let sums = (0..num_ranks).map(|rank| self.sum(schedule, rank, &places, &mut traffic)).collect();
        let update_s = (0..num_ranks).map(|rank| self.update_s(schedule, rank)).collect();
        let chunks = u16::try_from(request.exchange.chunks).unwrap_or(u16::MAX);
        Transfers { traffic: traffic.joined(), messages, all_to_alls, chunks, sums, update_s }
    }

    /// Returns the messages between neighbouring stages, both ways.
    fn messages(&self, schedule: &Schedule, places: &Places<'_>, traffic: &mut Traffic) -> Vec<Vec<(u32, TransferId)>> {
        let request = self.request;
        let bytes = (request.tokens * request.model.width * request.precision.bytes()) as f64;
        let mut messages = vec![Vec::new(); schedule.num_ranks()];
        let mut known = HashMap::new();
        for copy in &schedule.copies {
            for pair in copy.stage_ranks.windows(2).filter(|pair| pair[0] != pair[1]) {
                for (from, to) in [(pair[0], pair[1]), (pair[1], pair[0])] {
                    known.entry((from, to)).or_insert_with(|| {
                        let loads = places.messages(&request.layout, from as usize, to as usize, bytes);
                        let id = traffic.add(&[loads]);
                        messages[from as usize].push((to, id));
                    });
                }
            }
        }
        messages
    }

    fn all_to_alls(
        &self,
        schedule: &Schedule,
        rank: usize,
        places: &Places<'_>,
        traffic: &mut Traffic,
    ) -> Option<AllToAlls> {
        let request = self.request;
        let held: Vec<usize> = schedule.stages_of(rank).into_iter().map(|(_, stage)| stage as usize).collect();
        let widths: Vec<(usize, f64)> = held.iter().flat_map(|&stage| self.stages[stage].row_widths.clone()).collect();
        if request.layout.num_expert_ranks() == 1 || widths.is_empty() {
            return None;
        }
        let shape = request.model.shape(request.precision);
        let rows = |wire: Wire| {
            let rows = widths.iter().map(|&(width, rows)| rows * wire.row_bytes(width) as f64);
            let bytes = request.tokens as f64 * rows.sum::<f64>() / widths.len() as f64;
            Rows { bytes, top_k: shape.top_k, num_experts: shape.num_experts }
        };
        let mut one = |wire: Wire, is_back: bool, hides: f64| {
            let rows = rows(wire);
            let mut parts = match request.domain {
                1 => places.all_to_all(&request.layout, rank, &request.exchange, &rows, &self.shares),
                domain => self.domain_parts(places, rank, domain, rows.bytes, hides),
            };
            if is_back {
                parts.reverse();
            }
            let parts: Vec<Loads<'_>> = parts.into_iter().map(|part| part.chunk_of(request.exchange.chunks)).collect();
            traffic.add(&parts)
        };
        let wire = request.exchange.wire;
        let [forward, backward] = self.seconds_before_experts(&held);
        Some(AllToAlls {
            dispatch: one(wire, false, forward),
            combine: one(wire.of_sums(), true, f64::INFINITY),
            combine_grad: one(wire, false, f64::INFINITY),
            dispatch_grad: one(wire.of_sums(), true, backward),
        })
    }

    /// Returns the seconds that a rank computes outside experts in a layer, forward and for the input's gradient.
    fn seconds_before_experts(&self, held: &[usize]) -> [f64; 2] {
        let layers: f64 = held.iter().map(|&stage| f64::from(self.stages[stage].moe_layers)).sum();
        let mut seconds = [0.0; 2];
        for &stage in held {
            let times = &self.stages[stage].times;
            seconds[0] += times.forward * (1.0 - times.expert_share) / layers.max(1.0);
            seconds[1] += times.input_grad * (1.0 - times.expert_share) / layers.max(1.0);
        }
        seconds
    }

    /// Returns the parts of a layer's exchange in domains. Experts are fetched while the rank computes what comes
    /// before them, so that the part that this hides is not in the way; none are fetched where all is hidden.
    fn domain_parts<'p>(
        &self,
        places: &'p Places<'p>,
        rank: usize,
        domain: usize,
        row_bytes: f64,
        hides: f64,
    ) -> Vec<Loads<'p>> {
        let request = self.request;
        let shape = request.model.shape(request.precision);
        let held = shape.num_experts.div_ceil(request.layout.num_expert_ranks()) as f64;
        let params = held * shape.expert_params as f64 / request.expert_compression;
        let expert_bytes = params * request.precision.bytes() as f64;
        let [gather, tokens] = places.domain_exchange(&request.layout, rank, domain, [row_bytes, expert_bytes]);
        let seconds = gather.seconds();
        let left = if seconds > 0.0 { (1.0 - hides / seconds).max(0.0) } else { 0.0 };
        vec![gather.scaled(left), tokens]
    }

    /// Returns the sums of gradients of a rank over all that hold the same weights; those of several stage groups, if
    /// copies of the weights are in several, share the work.
    fn sum(&self, schedule: &Schedule, rank: usize, places: &Places<'_>, traffic: &mut Traffic) -> Option<TransferId> {
        let (request, layout) = (self.request, &self.request.layout);
        let mut stage_groups: Vec<usize> = Vec::new();
        for (_, stage) in schedule.stages_of(rank) {
            stage_groups.extend(schedule.copies.iter().map(|copy| copy.stage_ranks[stage as usize] as usize));
        }
        stage_groups.sort_unstable();
        stage_groups.dedup();
        let params = self.params(schedule, rank);
        // Under ZeRO 3 weights are gathered twice, in the format of products.
        let gathers = if request.zero >= 3 { 2.0 * request.precision.bytes() as f64 / GRADIENT } else { 1.0 };
        let share = 0.5 * (1.0 + gathers) * GRADIENT / stage_groups.len().max(1) as f64;
        let mut parts = Vec::new();
        let mut reduce = |params: f64, of: &dyn Fn(usize) -> Vec<usize>| {
            let groups = self.across_stage_groups(&stage_groups, of);
            if params > 0.0 && groups.iter().any(|group| group.len() > 1) {
                parts.extend(places.all_reduce(&groups, params * share));
            }
        };
        reduce(params.cut, &|rank| layout.dense_group(rank));
        let all_of_stage_group = |rank: usize| {
            let first = layout.stage_group(rank) * layout.stage_group_size();
            (first..first + layout.stage_group_size()).collect::<Vec<usize>>()
        };
        reduce(params.whole, &all_of_stage_group);
        reduce(params.experts, &|rank| layout.dp_group(rank));
        if parts.is_empty() { None } else { Some(traffic.add(&parts)) }
    }

    /// Returns the groups of the first stage group, each with its like in the other stage groups.
    fn across_stage_groups(&self, stage_groups: &[usize], of: &dyn Fn(usize) -> Vec<usize>) -> Vec<Vec<usize>> {
        let size = self.request.layout.stage_group_size();
        let Some(&first) = stage_groups.first() else { return Vec::new() };
        let mut groups = distinct_groups(&self.request.layout, first, of);
        for group in &mut groups {
            let members = group.clone();
            for &stage_group in &stage_groups[1..] {
                group.extend(members.iter().map(|rank| rank - first * size + stage_group * size));
            }
        }
        groups
    }
}
