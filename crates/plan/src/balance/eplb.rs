//! DeepSeek's expert-parallel load balancer (EPLB, github.com/deepseek-ai/EPLB).
//!
//! Spare slots go to copies of the experts with the largest load per copy; slots are then packed on ranks, each rank
//! with as many. Where groups of experts divide over nodes, groups are packed on nodes first and copies stay in their
//! node (hierarchical), so that group-limited routing crosses few nodes; else all ranks are one node (global).
//!
//! EPLB may put two copies of an expert on one rank, where they are worth one. [`eplb`] gives no expert more copies
//! than a node has ranks, and swaps a copy that would be the second of its rank for a slot of another rank of the
//! node.

use super::loads::{BalanceError, check_loads};
use crate::Placement;

/// The sizes of a placement by EPLB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EplbSizes {
    /// Slots for experts on all ranks together: the experts and the spare slots. A multiple of the ranks.
    pub num_slots: usize,
    /// Groups of consecutive experts; 1 without groups.
    pub num_groups: usize,
    /// Nodes, each with as many ranks.
    pub num_nodes: usize,
    /// Ranks.
    pub num_ranks: usize,
}

impl EplbSizes {
    /// Fails where the sizes do not divide each other, or have no room for the experts.
    fn check(&self, num_experts: usize) -> Result<(), BalanceError> {
        let Self { num_slots, num_groups, num_nodes, num_ranks } = *self;
        let wrong = |what, value, expected: String| Err(BalanceError::Size { what, value, expected });
        for (what, value) in [("ranks", num_ranks), ("nodes", num_nodes), ("groups", num_groups)] {
            if value == 0 {
                return wrong(what, value, "must be at least 1".to_owned());
            }
        }
        if num_slots < num_experts || !num_slots.is_multiple_of(num_ranks) {
            let expected =
                format!("must be a multiple of the {num_ranks} ranks and at least {num_experts}, the experts");
            return wrong("slots", num_slots, expected);
        }
        if num_slots > num_experts * num_ranks {
            let most = num_experts * num_ranks;
            return wrong("slots", num_slots, format!("must be at most {most}: each expert once on each rank"));
        }
        if !num_ranks.is_multiple_of(num_nodes) {
            return wrong("nodes", num_nodes, format!("must divide the {num_ranks} ranks"));
        }
        if !num_experts.is_multiple_of(num_groups) {
            return wrong("groups", num_groups, format!("must divide the {num_experts} experts"));
        }
        Ok(())
    }

    /// The sizes by which the published algorithm goes: global where groups do not divide over nodes.
    fn resolved(self) -> Self {
        if self.num_groups.is_multiple_of(self.num_nodes) { self } else { Self { num_groups: 1, num_nodes: 1, ..self } }
    }
}

/// Packs items on packs, `items / num_packs` on each, by descending weight to the lightest pack with room. Returns
/// each item's pack and place there.
fn pack(weights: &[f64], num_packs: usize) -> Vec<Packed> {
    let per_pack = weights.len() / num_packs;
    let mut packed = vec![Packed { pack: 0, place: 0 }; weights.len()];
    if per_pack == 1 {
        (0..).zip(&mut packed).for_each(|(pack, packed)| *packed = Packed { pack, place: 0 });
        return packed;
    }
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by(|&a, &b| weights[b].total_cmp(&weights[a]));
    let (mut sums, mut counts) = (vec![0.0_f64; num_packs], vec![0; num_packs]);
    for item in order {
        let with_room = (0..num_packs).filter(|&pack| counts[pack] < per_pack);
        let pack = with_room.min_by(|&a, &b| sums[a].total_cmp(&sums[b])).expect("packs with room for all items");
        packed[item] = Packed { pack, place: counts[pack] };
        sums[pack] += weights[item];
        counts[pack] += 1;
    }
    packed
}

/// An item's pack and its place there.
#[derive(Clone, Copy)]
struct Packed {
    pack: usize,
    place: usize,
}

/// The expert of each slot, and the copies of each expert: each expert once, then one more of that with the largest
/// weight per copy, again and again. No expert gets more than `max_copies`.
fn replicate(weights: &[f64], num_slots: usize, max_copies: usize) -> (Vec<usize>, Vec<usize>) {
    let mut counts = vec![1_usize; weights.len()];
    let mut experts: Vec<usize> = (0..weights.len()).collect();
    while experts.len() < num_slots {
        let per_copy = |expert: usize| weights[expert] / counts[expert] as f64;
        // The first of those with the largest.
        let with_room = (0..weights.len()).rev().filter(|&expert| counts[expert] < max_copies);
        let hottest = with_room.max_by(|&a, &b| per_copy(a).total_cmp(&per_copy(b)));
        let hottest = hottest.expect("slots for at most as many copies");
        experts.push(hottest);
        counts[hottest] += 1;
    }
    (experts, counts)
}

/// The expert in each slot, rank after rank, by the published algorithm; a rank may have two copies of an expert.
///
/// # Errors
/// If a load is negative or not finite, or sizes do not divide each other or have no room for the experts.
pub fn eplb_slots(expert_loads: &[f64], sizes: EplbSizes) -> Result<Vec<usize>, BalanceError> {
    slots_with_copies(expert_loads, sizes, usize::MAX)
}

/// The expert in each slot where no expert has more than `max_copies` copies in a node.
fn slots_with_copies(expert_loads: &[f64], sizes: EplbSizes, max_copies: usize) -> Result<Vec<usize>, BalanceError> {
    let num_experts = expert_loads.len();
    check_loads(expert_loads, num_experts)?;
    sizes.check(num_experts)?;
    let EplbSizes { num_slots, num_groups, num_nodes, num_ranks } = sizes.resolved();
    if num_experts == 0 {
        return Ok(Vec::new());
    }
    let (group_size, groups_per_node) = (num_experts / num_groups, num_groups / num_nodes);
    let group_loads: Vec<f64> = expert_loads.chunks(group_size).map(|group| group.iter().sum()).collect();
    // The experts of each node, in the order of its groups.
    let mut of_nodes = vec![0; num_experts];
    for (group, Packed { pack: node, place }) in pack(&group_loads, num_nodes).into_iter().enumerate() {
        let first = (node * groups_per_node + place) * group_size;
        (0..group_size).for_each(|i| of_nodes[first + i] = group * group_size + i);
    }
    let (slots_per_node, slots_per_rank) = (num_slots / num_nodes, num_slots / num_ranks);
    let mut slots = Vec::with_capacity(num_slots);
    for experts in of_nodes.chunks(num_experts / num_nodes) {
        let loads: Vec<f64> = experts.iter().map(|&expert| expert_loads[expert]).collect();
        let (copies, counts) = replicate(&loads, slots_per_node, max_copies);
        let copy_loads: Vec<f64> = copies.iter().map(|&copy| loads[copy] / counts[copy] as f64).collect();
        let mut of_node = vec![0; slots_per_node];
        for (copy, packed) in copies.iter().zip(pack(&copy_loads, num_ranks / num_nodes)) {
            of_node[packed.pack * slots_per_rank + packed.place] = experts[*copy];
        }
        slots.extend(of_node);
    }
    Ok(slots)
}

/// The placement of one layer by EPLB, without an expert twice on a rank.
///
/// # Errors
/// As [`eplb_slots`].
pub fn eplb(expert_loads: &[f64], sizes: EplbSizes) -> Result<Placement, BalanceError> {
    sizes.check(expert_loads.len())?;
    let ranks_per_node = sizes.num_ranks / sizes.resolved().num_nodes;
    let mut slots = slots_with_copies(expert_loads, sizes, ranks_per_node)?;
    let slots_per_rank = sizes.num_slots / sizes.num_ranks;
    for of_node in slots.chunks_mut(slots_per_rank * ranks_per_node) {
        spread_copies(of_node, expert_loads, slots_per_rank);
    }
    let mut ranks = vec![Vec::new(); expert_loads.len()];
    for (slot, &expert) in slots.iter().enumerate() {
        ranks[expert].push(slot / slots_per_rank);
    }
    for ranks in &mut ranks {
        ranks.sort_unstable();
        ranks.dedup();
    }
    Ok(Placement::from_ranks(sizes.num_ranks, ranks))
}

/// Swaps the slots of a node's ranks until no rank has an expert twice, as far as swaps of two slots can. Each swap
/// is the one that changes loads least.
fn spread_copies(slots: &mut [usize], expert_loads: &[f64], slots_per_rank: usize) {
    let copies = |slots: &[usize], expert: usize| slots.iter().filter(|&&other| other == expert).count().max(1);
    let rank_of = |slot: usize| slot / slots_per_rank * slots_per_rank..(slot / slots_per_rank + 1) * slots_per_rank;
    for slot in 0..slots.len() {
        let expert = slots[slot];
        if !slots[rank_of(slot).start..slot].contains(&expert) {
            continue;
        }
        let can_swap = |&other: &usize| {
            let is_elsewhere = !rank_of(slot).contains(&other) && !slots[rank_of(other)].contains(&expert);
            is_elsewhere && !slots[rank_of(slot)].contains(&slots[other])
        };
        let load = |expert: usize| expert_loads[expert] / copies(slots, expert) as f64;
        let change = |other: usize| (load(slots[other]) - load(expert)).abs();
        let best = (0..slots.len()).filter(can_swap).min_by(|&a, &b| change(a).total_cmp(&change(b)));
        if let Some(best) = best {
            slots.swap(slot, best);
        }
    }
}
