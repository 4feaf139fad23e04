//! Weak scaling on paper: the same tokens on each rank, and more ranks.

use crate::cost::estimate::estimate;
use crate::{Algorithm, Estimate, Exchange, Layout, ModelShape, Topology, Wire, Workload};

/// The estimates for one size of the cluster. Each adds one optimization to the one before it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScalingRow {
    /// The number of ranks.
    pub num_ranks: usize,
    /// Tokens in f32 or bf16 go straight to their experts, in one piece.
    pub linear: Estimate,
    /// The fastest path: tokens may go once to each node and on from there.
    pub hierarchical: Estimate,
    /// The number of chunks that hides most.
    pub overlapped: Estimate,
    /// Dispatch and combine in bytes, with a scale for each 128 numbers.
    pub compressed: Estimate,
    /// Tensor parallelism within a node as well, in the size that takes the least time; `None` where no size is
    /// possible.
    pub cut: Option<Estimate>,
}

/// The largest number of chunks that is tried.
const MAX_CHUNKS: usize = 8;

/// Returns the table for clusters of 8, 16, ... up to `most` ranks like those of `cluster`. Expert-parallel groups
/// have as many ranks as there are experts, or all.
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
    let wire = if workload.precision.has_bf16_copies() { Wire::Bf16 } else { Wire::F32 };
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
    let cut = cut(shape, workload, topology, &compressed);
    ScalingRow { num_ranks, linear: of(&plain), hierarchical, overlapped, compressed, cut }
}

/// Returns the fastest estimate of `whole` with tensor parallelism over 2, 4, ... ranks of a node.
fn cut(shape: &ModelShape, workload: &Workload, topology: &Topology, whole: &Estimate) -> Option<Estimate> {
    let num_ranks = topology.num_ranks();
    let most = shape.max_tp.min(topology.node_sizes[0]);
    let sizes = (1..usize::BITS).map(|power| 1 << power).take_while(|&tp: &usize| tp <= most);
    let layouts = sizes.filter(|tp| num_ranks.is_multiple_of(*tp)).map(|tp| {
        let ep = (whole.layout.ep / tp).max(1);
        Layout::new(num_ranks / tp / ep, ep, tp)
    });
    let estimates = layouts.filter(|layout| layout.check(num_ranks).is_ok());
    let estimates = estimates.map(|layout| estimate(shape, workload, topology, &layout, &whole.exchange));
    estimates.min_by(|a, b| a.time.total().total_cmp(&b.time.total()))
}
