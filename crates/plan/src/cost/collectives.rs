//! Bytes and seconds of collectives, by latency and bandwidth (alpha-beta models).
//!
//! Bytes are those that one rank sends. The two classes of links are used one after the other, as by the plain
//! algorithms.

use crate::{Algorithm, Group, Topology};

/// The rows that a rank sends in an all-to-all.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rows {
    /// T: the number of tokens of the rank.
    pub tokens: usize,
    /// K: the number of rows of each token.
    pub top_k: usize,
    /// E: the number of experts that a token chooses from, spread evenly over the ranks.
    pub num_experts: usize,
    /// Bytes of a row on the wire.
    pub row_bytes: usize,
}

impl Rows {
    /// Returns the bytes of all rows.
    #[must_use]
    pub fn bytes(&self) -> f64 {
        self.tokens as f64 * self.top_k as f64 * self.row_bytes as f64
    }
}

/// The cost of a collective for each rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Seconds.
    pub seconds: f64,
    /// Bytes sent within the node.
    pub node_bytes: f64,
    /// Bytes sent to other nodes.
    pub cluster_bytes: f64,
}

impl Cost {
    /// Returns the cost of `times` such collectives.
    #[must_use]
    pub fn times(self, times: f64) -> Self {
        Self {
            seconds: self.seconds * times,
            node_bytes: self.node_bytes * times,
            cluster_bytes: self.cluster_bytes * times,
        }
    }
}

impl std::ops::Add for Cost {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            seconds: self.seconds + other.seconds,
            node_bytes: self.node_bytes + other.node_bytes,
            cluster_bytes: self.cluster_bytes + other.cluster_bytes,
        }
    }
}

/// Returns the expected number of `parts` equal parts of `num_experts` experts that `top_k` different random experts
/// lie in: `parts (1 - C(E - E/parts, K) / C(E, K))`.
#[must_use]
pub fn parts_hit(num_experts: usize, top_k: usize, parts: usize) -> f64 {
    let (e, parts) = (num_experts as f64, parts.max(1) as f64);
    let outside = e - e / parts;
    // C(outside, K) / C(E, K), with a factor for each draw.
    let miss: f64 = (0..top_k).map(|i| ((outside - i as f64) / (e - i as f64)).max(0.0)).product();
    parts * (1.0 - miss)
}

/// Returns the cost of the all-to-all of `rows` in `group`.
#[must_use]
pub fn all_to_all(topology: &Topology, group: Group, algorithm: Algorithm, rows: &Rows) -> Cost {
    let (n, m) = (group.ranks as f64, group.per_node.min(group.ranks) as f64);
    let (nodes, bytes) = (group.nodes(), rows.bytes());
    if group.ranks <= 1 {
        return Cost::default();
    }
    let in_node = group.per_node - 1;
    let (node_bytes, cluster_bytes, node_messages, cluster_messages, copied) = match algorithm {
        _ if nodes == 1 => (bytes * (n - 1.0) / n, 0.0, in_node, 0, 0.0),
        // (n - 1) messages, each straight to its rank.
        Algorithm::Linear => (bytes * (m - 1.0) / n, bytes * (n - m) / n, in_node, group.ranks - group.per_node, 0.0),
        // Everything takes a hop within the node, and two copies make it contiguous.
        Algorithm::Hierarchical => (bytes * (m - 1.0) / m, bytes * (1.0 - m / n), in_node, nodes - 1, 2.0 * bytes),
        // One row for each node that a token goes to; from there a row for each of its experts.
        Algorithm::TwoHop => {
            let hit = parts_hit(rows.num_experts, rows.top_k, nodes) / rows.top_k.max(1) as f64;
            let elsewhere = bytes * hit.min(1.0) * (1.0 - m / n);
            (bytes * (m - 1.0) / m, elsewhere, in_node, nodes - 1, 2.0 * bytes)
        }
    };
    let seconds = topology.node_link.seconds(node_messages, node_bytes)
        + topology.cluster_link.seconds(cluster_messages, cluster_bytes)
        + copied / topology.rank.memory_bytes_per_s;
    Cost { seconds, node_bytes, cluster_bytes }
}

/// Returns the path on which the all-to-all of `rows` in `group` takes the least time; the simplest at ties.
#[must_use]
pub fn fastest_path(topology: &Topology, group: Group, rows: &Rows) -> Algorithm {
    let paths = [Algorithm::Linear, Algorithm::Hierarchical, Algorithm::TwoHop];
    let seconds = |algorithm: &Algorithm| all_to_all(topology, group, *algorithm, rows).seconds;
    paths.into_iter().min_by(|a, b| seconds(a).total_cmp(&seconds(b))).unwrap_or_default()
}

/// Returns the cost of the all-reduce of `bytes` on each rank. On one node it sends `2 (n-1)/n` of them around a
/// ring. Between nodes it is a reduce-scatter on the node, an all-reduce of the m-th parts between nodes, and an
/// all-gather on the node.
#[must_use]
pub fn all_reduce(topology: &Topology, group: Group, bytes: f64) -> Cost {
    let (m, nodes) = (group.per_node.min(group.ranks), group.nodes());
    if group.ranks <= 1 {
        return Cost::default();
    }
    let ring = |n: usize| 2.0 * (n as f64 - 1.0) / n as f64;
    let (node_bytes, cluster_bytes) = (ring(m) * bytes, ring(nodes) * bytes / m as f64);
    let seconds = topology.node_link.seconds(2 * (m - 1), node_bytes)
        + topology.cluster_link.seconds(2 * (nodes - 1), cluster_bytes);
    Cost { seconds, node_bytes, cluster_bytes }
}
