//! A cluster that grows on paper: the same tokens on each rank, more ranks.

use crate::cost::estimate::estimate;
use crate::{Algorithm, Estimate, Exchange, Layout, ModelShape, Topology, Wire, Workload};

/// One size of the cluster. Each estimate has what the one before it has, and one thing more.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScalingRow {
    /// Ranks.
    pub num_ranks: usize,
    /// Tokens as f32 or bf16 straight to their experts, in one piece.
    pub linear: Estimate,
    /// Once to each node, and on from there.
    pub hierarchical: Estimate,
    /// In the number of chunks that hides most.
    pub overlapped: Estimate,
    /// Dispatched and combined as bytes with a scale for each 128 numbers.
    pub compressed: Estimate,
}

/// Chunks that a layer is cut into at most.
const MAX_CHUNKS: usize = 8;

/// The table for clusters of 8, 16, ... up to `most` ranks like those of `cluster`. Expert-parallel groups have as many ranks
/// as there are experts, or all.
#[must_use]
pub fn weak_scaling(shape: &ModelShape, workload: &Workload, cluster: &Topology, most: usize) -> Vec<ScalingRow> {
    let sizes = (3..usize::BITS).map(|power| 1 << power).take_while(|&ranks: &usize| ranks <= most);
    sizes.map(|num_ranks| row(shape, workload, &cluster.resized(num_ranks))).collect()
}

fn row(shape: &ModelShape, workload: &Workload, topology: &Topology) -> ScalingRow {
    let num_ranks = topology.num_ranks();
    let ep = (1..=num_ranks.min(shape.num_experts.max(1))).rev().find(|ep| num_ranks.is_multiple_of(*ep)).unwrap_or(1);
    let layout = Layout::new(num_ranks / ep, ep, 1);
    let of = |exchange: &Exchange| estimate(shape, workload, topology, &layout, exchange);
    let wire = match workload.precision {
        crate::Precision::F32 => Wire::F32,
        crate::Precision::Bf16 => Wire::Bf16,
    };
    let best = |candidates: &[Exchange]| {
        let estimates = candidates.iter().map(of);
        estimates.min_by(|a, b| a.time.total().total_cmp(&b.time.total())).unwrap_or_else(|| of(&Exchange::plain(wire)))
    };
    let plain = Exchange::plain(wire);
    let paths = [Algorithm::Linear, Algorithm::Hierarchical, Algorithm::TwoHop];
    let hierarchical = best(&paths.map(|algorithm| Exchange { algorithm, ..plain }));
    let chunked =
        |from: Exchange| -> Vec<Exchange> { (1..=MAX_CHUNKS).map(|chunks| Exchange { chunks, ..from }).collect() };
    let overlapped = best(&chunked(hierarchical.exchange));
    let bytes = Exchange { wire: Wire::Byte { block: 128 }, ..hierarchical.exchange };
    let compressed = best(&chunked(bytes));
    ScalingRow { num_ranks, linear: of(&plain), hierarchical, overlapped, compressed }
}
