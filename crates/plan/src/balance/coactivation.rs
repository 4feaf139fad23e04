//! Placements that keep experts chosen together on one node, so that tokens cross fewer nodes (GRACE-MoE,
//! 2509.25041).

use super::loads::{BalanceError, check_loads};
use super::{EplbSizes, eplb};
use crate::Placement;

/// The number of tokens that chose each pair of experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Coactivation {
    num_experts: usize,
    /// `[E, E]`, symmetric, without the diagonal.
    counts: Vec<u64>,
}

impl Coactivation {
    /// Makes counts of no token.
    #[must_use]
    pub fn new(num_experts: usize) -> Self {
        Self { num_experts, counts: vec![0; num_experts * num_experts] }
    }

    /// Adds a token that chose these experts. Experts beyond the number are passed over.
    pub fn add(&mut self, experts: &[u32]) {
        let known = |&&expert: &&u32| (expert as usize) < self.num_experts;
        let experts: Vec<usize> = experts.iter().filter(known).map(|&expert| expert as usize).collect();
        for (place, &a) in experts.iter().enumerate() {
            for &b in experts[place + 1..].iter().filter(|&&b| b != a) {
                self.counts[a * self.num_experts + b] += 1;
                self.counts[b * self.num_experts + a] += 1;
            }
        }
    }

    /// Returns E.
    #[must_use]
    pub fn num_experts(&self) -> usize {
        self.num_experts
    }

    /// Returns the number of tokens that chose both.
    #[must_use]
    pub fn pair(&self, a: usize, b: usize) -> u64 {
        self.counts[a * self.num_experts + b]
    }

    /// Returns the number of all pairs of all tokens.
    #[must_use]
    pub fn num_pairs(&self) -> u64 {
        self.counts.iter().sum::<u64>() / 2
    }

    /// Returns the share of the pairs of which some node holds both experts; 1 without pairs.
    #[must_use]
    pub fn in_node_share(&self, placement: &Placement, ranks_per_node: usize) -> f64 {
        let nodes = |expert: usize| -> Vec<usize> {
            placement.ranks_of(expert).iter().map(|rank| rank / ranks_per_node.max(1)).collect()
        };
        let nodes: Vec<Vec<usize>> = (0..self.num_experts).map(nodes).collect();
        let mut in_node = 0;
        for a in 0..self.num_experts {
            for b in a + 1..self.num_experts {
                let is_near = nodes[a].iter().any(|node| nodes[b].contains(node));
                in_node += if is_near { self.pair(a, b) } else { 0 };
            }
        }
        let all = self.num_pairs();
        if all == 0 { 1.0 } else { in_node as f64 / all as f64 }
    }
}

/// The sizes of a placement by co-activation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NodeSizes {
    /// Ranks, as many on each node.
    pub num_ranks: usize,
    /// Nodes.
    pub num_nodes: usize,
    /// Slots for experts of each rank; at least as many as the experts need.
    pub slots_per_rank: usize,
    /// The load of a node over the mean at most, less 1, as far as the plain placement is not beyond it.
    pub max_excess: f64,
}

impl NodeSizes {
    fn check(&self, num_experts: usize) -> Result<(), BalanceError> {
        let Self { num_ranks, num_nodes, slots_per_rank, .. } = *self;
        let wrong = |what, value, expected: String| Err(BalanceError::Size { what, value, expected });
        for (what, value) in [("ranks", num_ranks), ("nodes", num_nodes)] {
            if value == 0 {
                return wrong(what, value, "must be at least 1".to_owned());
            }
        }
        if !num_ranks.is_multiple_of(num_nodes) {
            return wrong("nodes", num_nodes, format!("must divide the {num_ranks} ranks"));
        }
        let least = num_experts.div_ceil(num_ranks);
        if slots_per_rank < least {
            return wrong("slots of a rank", slots_per_rank, format!("must be at least {least}"));
        }
        Ok(())
    }
}

/// Places experts so that a node holds those that tokens choose together. Experts are swapped between nodes,
/// beginning with the plain placement and with groups grown around the strongest pairs; each swap raises the pairs
/// inside of nodes and keeps their loads within `max_excess`, and the better outcome is taken. Inside of each node
/// experts are packed on ranks by load, with copies in spare slots ([`eplb`](fn@eplb)). The share of pairs in a node
/// is never below the plain placement's.
///
/// # Errors
/// If loads and sizes do not fit each other, or a load is negative or not finite.
pub fn place_by_coactivation(
    expert_loads: &[f64],
    pairs: &Coactivation,
    sizes: NodeSizes,
) -> Result<Placement, BalanceError> {
    let num_experts = pairs.num_experts();
    check_loads(expert_loads, num_experts)?;
    sizes.check(num_experts)?;
    let ranks_per_node = sizes.num_ranks / sizes.num_nodes;
    let plain = Placement::sharded(num_experts, sizes.num_ranks);
    let plain: Vec<usize> = (0..num_experts).map(|expert| plain.ranks_of(expert)[0] / ranks_per_node).collect();
    let grown = grow_groups(pairs, &plain, sizes.num_nodes);
    let mean = expert_loads.iter().sum::<f64>() / sizes.num_nodes as f64;
    let most = mean * (1.0 + sizes.max_excess.max(0.0));
    let search = |nodes: Vec<usize>| NodeSearch::new(pairs, expert_loads, nodes, sizes.num_nodes, most).run();
    let (from_plain, from_grown) = (search(plain.clone()), search(grown));
    let is_better = from_grown.max_load() <= most.max(from_plain.max_load()) && from_grown.in_node > from_plain.in_node;
    let nodes = if is_better { from_grown.nodes } else { from_plain.nodes };
    pack_nodes(expert_loads, &nodes, sizes)
}

/// Grows groups of as many experts as the plain placement has on each node: each begins with the free expert with the
/// most pairs among the free ones, and takes the free expert with the most pairs in the group.
fn grow_groups(pairs: &Coactivation, plain: &[usize], num_nodes: usize) -> Vec<usize> {
    let mut free: Vec<usize> = (0..plain.len()).collect();
    let mut nodes = vec![0; plain.len()];
    for node in 0..num_nodes {
        let mut group: Vec<usize> = Vec::new();
        for _ in plain.iter().filter(|&&of| of == node) {
            let with =
                |expert: usize, others: &[usize]| others.iter().map(|&other| pairs.pair(expert, other)).sum::<u64>();
            let others = if group.is_empty() { &free } else { &group };
            // The first of those with the most.
            let best = (0..free.len()).rev().max_by_key(|&at| with(free[at], others)).expect("experts for all places");
            let expert = free.remove(best);
            nodes[expert] = node;
            group.push(expert);
        }
    }
    nodes
}

/// Experts on nodes, improved by swaps.
struct NodeSearch<'a> {
    pairs: &'a Coactivation,
    expert_loads: &'a [f64],
    /// The node of each expert.
    nodes: Vec<usize>,
    num_nodes: usize,
    /// `[E, nodes]`: the pairs of each expert with those on each node.
    links: Vec<u64>,
    loads: Vec<f64>,
    most: f64,
    in_node: u64,
}

impl<'a> NodeSearch<'a> {
    fn new(pairs: &'a Coactivation, expert_loads: &'a [f64], nodes: Vec<usize>, num_nodes: usize, most: f64) -> Self {
        let (mut links, mut loads) = (vec![0; nodes.len() * num_nodes], vec![0.0; num_nodes]);
        for (expert, &node) in nodes.iter().enumerate() {
            loads[node] += expert_loads[expert];
            for other in 0..nodes.len() {
                links[other * num_nodes + node] += pairs.pair(other, expert);
            }
        }
        let in_node = nodes.iter().enumerate().map(|(expert, node)| links[expert * num_nodes + node]).sum::<u64>() / 2;
        Self { pairs, expert_loads, nodes, num_nodes, links, loads, most, in_node }
    }

    fn max_load(&self) -> f64 {
        self.loads.iter().copied().fold(0.0, f64::max)
    }

    /// Swaps until no swap raises the pairs inside of nodes.
    fn run(mut self) -> Self {
        // Each swap raises a whole number, so that this ends; the bound is for the time that it may take.
        for _ in 0..self.nodes.len() * 4 {
            let Some((a, b)) = self.best_swap() else { break };
            self.swap(a, b);
        }
        self
    }

    fn best_swap(&self) -> Option<(usize, usize)> {
        let mut best = (0, None);
        for a in 0..self.nodes.len() {
            for b in (a + 1..self.nodes.len()).filter(|&b| self.nodes[b] != self.nodes[a]) {
                let gain = self.gain(a, b);
                if gain > best.0 && self.keeps_loads(a, b) {
                    best = (gain, Some((a, b)));
                }
            }
        }
        best.1
    }

    /// The pairs that a swap brings into nodes, less those that it takes out.
    fn gain(&self, a: usize, b: usize) -> i64 {
        let link = |expert: usize, of: usize| self.links[expert * self.num_nodes + self.nodes[of]] as i64;
        link(a, b) - link(a, a) + link(b, a) - link(b, b) - 2 * self.pairs.pair(a, b) as i64
    }

    /// Returns whether both nodes stay within the bound, or below the larger load that they have.
    fn keeps_loads(&self, a: usize, b: usize) -> bool {
        let moved = self.expert_loads[a] - self.expert_loads[b];
        let (of_a, of_b) = (self.loads[self.nodes[a]], self.loads[self.nodes[b]]);
        (of_a - moved).max(of_b + moved) <= self.most.max(of_a.max(of_b))
    }

    fn swap(&mut self, a: usize, b: usize) {
        self.in_node = (self.in_node as i64 + self.gain(a, b)) as u64;
        let (node_a, node_b) = (self.nodes[a], self.nodes[b]);
        let moved = self.expert_loads[a] - self.expert_loads[b];
        self.loads[node_a] -= moved;
        self.loads[node_b] += moved;
        for other in 0..self.nodes.len() {
            let (with_a, with_b) = (self.pairs.pair(other, a), self.pairs.pair(other, b));
            let at = other * self.num_nodes;
            self.links[at + node_a] = self.links[at + node_a] + with_b - with_a;
            self.links[at + node_b] = self.links[at + node_b] + with_a - with_b;
        }
        self.nodes.swap(a, b);
    }
}

/// Packs the experts of each node on its ranks by load, with copies of hot ones in spare slots.
fn pack_nodes(expert_loads: &[f64], nodes: &[usize], sizes: NodeSizes) -> Result<Placement, BalanceError> {
    let ranks_per_node = sizes.num_ranks / sizes.num_nodes;
    let mut ranks = vec![Vec::new(); nodes.len()];
    for node in 0..sizes.num_nodes {
        let experts: Vec<usize> = (0..nodes.len()).filter(|&expert| nodes[expert] == node).collect();
        if experts.is_empty() {
            continue;
        }
        let loads: Vec<f64> = experts.iter().map(|&expert| expert_loads[expert]).collect();
        let slots = (sizes.slots_per_rank * ranks_per_node).min(experts.len() * ranks_per_node);
        let within = EplbSizes { num_slots: slots, num_groups: 1, num_nodes: 1, num_ranks: ranks_per_node };
        let placement = eplb(&loads, within)?;
        for (place, &expert) in experts.iter().enumerate() {
            ranks[expert] = placement.ranks_of(place).iter().map(|rank| node * ranks_per_node + rank).collect();
        }
    }
    Ok(Placement::from_ranks(sizes.num_ranks, ranks))
}
