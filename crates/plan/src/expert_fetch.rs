//! The choice of experts to fetch in a layer. Tokens move to their experts, or experts are fetched by all ranks for
//! one pass, or some of each.
//!
//! The tokens of a fetched expert stay where they are, and its gradients are summed back. Fetching none is expert
//! parallelism, fetching all is data parallelism. The number is chosen for each layer and step from the rows that the
//! router gave each expert and from the costs of the links (adaptive parallelism, Tutel 2206.03382, section 3.1;
//! shadowing of popular experts, FasterMoE, He et al., PPoPP 2022, section 4.2). Unlike FasterMoE's estimate, this
//! one also counts the tokens that still move once some experts are fetched. Weights cross to each node once and are
//! handed on there.

use crate::{Algorithm, LinkClass, Links, Nodes, Placement};

/// The work that the routers gave a group of ranks in one layer.
#[derive(Clone, Copy, Debug)]
pub struct LayerLoad<'a> {
    /// The node of each rank.
    pub nodes: &'a Nodes,
    /// The ranks that hold each expert.
    pub placement: &'a Placement,
    /// The number of tokens of each rank.
    pub tokens: &'a [u32],
    /// Rows of each rank for each expert, `rows[rank][expert]`: a token has one row for each of its experts.
    pub rows: &'a [Vec<u32>],
}

/// The costs that the choice weighs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MoveCosts {
    /// The path of the tokens.
    pub algorithm: Algorithm,
    /// The links of a rank.
    pub links: Links,
    /// Bytes of a token's row, the mean of its four transfers (there and back, forward and backward).
    pub row_bytes: f64,
    /// Bytes of an expert's weights and of its gradients.
    pub expert_bytes: [f64; 2],
    /// Seconds of an expert's computation of one row, forward and backward.
    pub row_compute_s: f64,
}

/// The bytes from each rank to each other rank in one hop.
struct HopBytes<'a> {
    nodes: &'a Nodes,
    /// Bytes by sender, then by receiver.
    bytes: Vec<f64>,
}

impl<'a> HopBytes<'a> {
    fn new(nodes: &'a Nodes) -> Self {
        Self { nodes, bytes: vec![0.0; nodes.num_ranks() * nodes.num_ranks()] }
    }

    fn send(&mut self, from: usize, to: usize, bytes: f64) {
        if from != to {
            self.bytes[from * self.nodes.num_ranks() + to] += bytes;
        }
    }

    /// Returns the seconds of the busiest line. Messages that a rank sends follow each other, and so do those that it
    /// receives.
    fn seconds(&self, links: &Links) -> f64 {
        let n = self.nodes.num_ranks();
        let mut lines = vec![0.0; 2 * n];
        for (index, &bytes) in self.bytes.iter().enumerate().filter(|(_, bytes)| **bytes > 0.0) {
            let (from, to) = (index / n, index % n);
            let is_near = self.nodes.of(from) == self.nodes.of(to);
            let seconds = links.of(if is_near { LinkClass::Node } else { LinkClass::Cluster }).seconds(1, bytes);
            lines[from] += seconds;
            lines[n + to] += seconds;
        }
        lines.into_iter().fold(0.0, f64::max)
    }
}

/// A layer while experts are fetched one after another.
struct Pass<'a> {
    load: LayerLoad<'a>,
    /// The rows that each rank computes.
    computed: Vec<u64>,
    /// The rows from each source to each serving rank, by source first.
    rows: Vec<u64>,
    /// The number of fetched experts that each rank gives.
    given: Vec<usize>,
}

impl<'a> Pass<'a> {
    fn new(load: LayerLoad<'a>) -> Self {
        let n = load.placement.num_ranks();
        let mut pass = Self { load, computed: vec![0; n], rows: vec![0; n * n], given: vec![0; n] };
        for source in 0..n {
            for expert in 0..load.placement.num_experts() {
                let (server, rows) = pass.rows_of(source, expert);
                pass.rows[source * n + server] += rows;
                pass.computed[server] += rows;
            }
        }
        pass
    }

    /// Returns the rank that serves `source` with `expert`, and the number of its rows.
    fn rows_of(&self, source: usize, expert: usize) -> (usize, u64) {
        let LayerLoad { nodes, placement, rows, .. } = self.load;
        (placement.serving_rank(nodes, source, expert), u64::from(rows[source][expert]))
    }

    fn fetch(&mut self, expert: usize) {
        let n = self.load.placement.num_ranks();
        for source in 0..n {
            let (server, rows) = self.rows_of(source, expert);
            self.rows[source * n + server] -= rows;
            self.computed[server] -= rows;
            self.computed[source] += rows;
        }
        self.given[self.load.placement.ranks_of(expert)[0]] += 1;
    }

    /// Returns the expected number of tokens of `source` that go to any of `ranks`, counting each once however many
    /// of its K experts are there. Experts are taken as independent draws with the frequencies of all tokens.
    fn tokens_to(&self, source: usize, ranks: &[usize]) -> f64 {
        let rows: u64 = ranks.iter().map(|rank| self.rows[source * self.load.placement.num_ranks() + rank]).sum();
        let all: u64 = self.load.rows[source].iter().map(|&rows| u64::from(rows)).sum();
        let (tokens, share) = (f64::from(self.load.tokens[source]), rows as f64 / all.max(1) as f64);
        let num_choices = (all as f64 / tokens.max(1.0)).max(1.0);
        tokens * (1.0 - (1.0 - share).powf(num_choices))
    }

    /// Returns the seconds of one of the four transfers of tokens.
    fn token_seconds(&self, costs: &MoveCosts) -> f64 {
        let nodes = self.load.nodes;
        let n = nodes.num_ranks();
        let (mut first, mut second) = (HopBytes::new(nodes), HopBytes::new(nodes));
        for source in 0..n {
            for target in 0..n {
                let bytes = self.tokens_to(source, &[target]) * costs.row_bytes;
                match costs.algorithm {
                    Algorithm::Linear => first.send(source, target, bytes),
                    Algorithm::Hierarchical => {
                        let relay = nodes.relay(nodes.of(source), target);
                        first.send(source, relay, bytes);
                        second.send(relay, target, bytes);
                    }
                    Algorithm::TwoHop => second.send(nodes.relay(nodes.of(target), source), target, bytes),
                }
            }
            for (node, ranks) in nodes.ranks().iter().enumerate().filter(|_| costs.algorithm == Algorithm::TwoHop) {
                let bytes = self.tokens_to(source, ranks) * costs.row_bytes;
                first.send(source, nodes.relay(node, source), bytes);
            }
        }
        first.seconds(&costs.links) + second.seconds(&costs.links)
    }

    /// Returns the seconds of sending the fetched experts, or of their gradients on the way back, at `bytes` bytes
    /// each.
    fn expert_seconds(&self, bytes: f64, links: &Links) -> f64 {
        let nodes = self.load.nodes;
        let given = |rank: usize| self.given[rank] as f64 * bytes;
        let (mut between, mut inside) = (HopBytes::new(nodes), HopBytes::new(nodes));
        for rank in 0..nodes.num_ranks() {
            (0..nodes.num()).for_each(|node| between.send(rank, nodes.relay(node, rank), given(rank)));
            let collected: f64 = nodes.served_by(rank).map(given).sum();
            nodes.ranks()[nodes.of(rank)].iter().for_each(|&near| inside.send(rank, near, collected));
        }
        between.seconds(links) + inside.seconds(links)
    }

    fn seconds(&self, costs: &MoveCosts) -> f64 {
        let most_computed = self.computed.iter().copied().max().unwrap_or(0) as f64;
        let experts: f64 = costs.expert_bytes.iter().map(|&bytes| self.expert_seconds(bytes, &costs.links)).sum();
        most_computed * costs.row_compute_s + 4.0 * self.token_seconds(costs) + experts
    }
}

/// Returns the seconds of a layer, forward and backward, in which all ranks fetch the experts `fetched`.
#[must_use]
pub fn pass_seconds(load: &LayerLoad<'_>, fetched: &[usize], costs: &MoveCosts) -> f64 {
    let mut pass = Pass::new(*load);
    fetched.iter().for_each(|&expert| pass.fetch(expert));
    pass.seconds(costs)
}

/// Returns the experts to fetch. Experts are sorted by the time of the rows that other ranks have for them, the
/// longest first, and the best number of them is taken; at ties the lower expert and the lower number. With one
/// expert a rank and the same rows from each rank this is the best of all subsets.
#[must_use]
pub fn experts_to_fetch(load: &LayerLoad<'_>, costs: &MoveCosts) -> Vec<usize> {
    let LayerLoad { nodes, placement, rows, .. } = *load;
    let saved = |expert: usize| -> f64 {
        let of_source = |(source, rows): (usize, &Vec<u32>)| {
            let server = placement.serving_rank(nodes, source, expert);
            let is_near = nodes.of(server) == nodes.of(source);
            let link = costs.links.of(if is_near { LinkClass::Node } else { LinkClass::Cluster });
            let row = 4.0 * link.seconds(0, costs.row_bytes) + costs.row_compute_s;
            if server == source { 0.0 } else { f64::from(rows[expert]) * row }
        };
        rows.iter().enumerate().map(of_source).sum()
    };
    let is_everywhere = |expert: usize| placement.ranks_of(expert).len() == placement.num_ranks();
    let experts = (0..placement.num_experts()).filter(|&expert| !is_everywhere(expert));
    let mut order: Vec<(f64, usize)> = experts.map(|expert| (saved(expert), expert)).collect();
    order.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    let mut pass = Pass::new(*load);
    let (mut best, mut best_seconds) = (0, pass.seconds(costs));
    for (i, &(_, expert)) in order.iter().enumerate() {
        pass.fetch(expert);
        let seconds = pass.seconds(costs);
        if seconds < best_seconds {
            (best, best_seconds) = (i + 1, seconds);
        }
    }
    order[..best].iter().map(|&(_, expert)| expert).collect()
}
