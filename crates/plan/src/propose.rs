//! The choice of a layout: all that the ranks allow, with their costs, the best first.

use crate::cost::estimate::estimate;
use crate::{Algorithm, Estimate, Exchange, Group, Layout, ModelShape, RankOrder, Topology, Wire, Workload};

/// Returns all layouts of the ranks of `topology` for `shape`, each with its fastest all-to-all path. Those that fit
/// in memory come first, and within each part the shortest step. Of equal layouts the one with fewer communicating
/// groups comes first.
///
/// Tensor parallelism is limited by the model, and an expert-parallel group has no more ranks than there are experts.
#[must_use]
pub fn propose(shape: &ModelShape, workload: &Workload, topology: &Topology) -> Vec<Estimate> {
    let n = topology.num_ranks();
    let sizes = divisors(n, shape.max_tp.max(1)).flat_map(|tp| {
        let most_ep = (shape.num_experts / tp).max(1);
        divisors(n / tp, most_ep).map(move |ep| (n / tp / ep, ep, tp))
    });
    let mut found: Vec<Estimate> = sizes
        .flat_map(|(dp, ep, tp)| orders(topology, dp, ep).map(move |order| Layout { order, ..Layout::new(dp, ep, tp) }))
        .map(|layout| best_path(shape, workload, topology, &layout))
        .collect();
    found.sort_by(|a, b| b.fits.cmp(&a.fits).then(a.time.total().total_cmp(&b.time.total())));
    found
}

/// Iterates over the divisors of `n` up to `most`.
fn divisors(n: usize, most: usize) -> impl Iterator<Item = usize> {
    (1..=n.min(most)).filter(move |divisor| n.is_multiple_of(*divisor))
}

/// Iterates over the rank orders that differ for these sizes.
fn orders(topology: &Topology, dp: usize, ep: usize) -> impl Iterator<Item = RankOrder> {
    let differ = dp > 1 && ep > 1 && topology.node_sizes.len() > 1;
    [RankOrder::EpInner, RankOrder::DpInner].into_iter().take(if differ { 2 } else { 1 })
}

fn best_path(shape: &ModelShape, workload: &Workload, topology: &Topology, layout: &Layout) -> Estimate {
    let wire = if workload.precision.has_bf16_copies() { Wire::Bf16 } else { Wire::F32 };
    let is_one_node = Group::of(topology, &layout.ep_group(0)).nodes() == 1;
    let algorithms = [Algorithm::Linear, Algorithm::Hierarchical, Algorithm::TwoHop];
    let paths = algorithms.into_iter().take(if is_one_node { 1 } else { 3 });
    let of = |algorithm| {
        let exchange = Exchange { algorithm, ..Exchange::plain(wire) };
        estimate(shape, workload, topology, layout, &exchange)
    };
    let first = of(Algorithm::Linear);
    paths.skip(1).map(of).fold(first, |best, next| if next.time.total() < best.time.total() { next } else { best })
}
