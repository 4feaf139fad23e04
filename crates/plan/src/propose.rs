//! Which layout to take: every one that the ranks allow, with its costs, the best first.

use crate::cost::estimate::estimate;
use crate::{Algorithm, Estimate, Exchange, Group, Layout, ModelShape, Order, Precision, Topology, Wire, Workload};

/// All layouts of the ranks of `topology` for `shape`, those that fit in memory first and each part by the seconds of a step,
/// with the path of the all-to-all that is fastest for it. Of equal layouts the one with fewer groups that talk.
///
/// Matrices are not cut (`tp` is 1), and an expert-parallel group has no more ranks than there are experts.
#[must_use]
pub fn propose(shape: &ModelShape, workload: &Workload, topology: &Topology) -> Vec<Estimate> {
    let n = topology.num_ranks();
    let mut found: Vec<Estimate> = (1..=n.min(shape.num_experts.max(1)))
        .filter(|ep| n.is_multiple_of(*ep))
        .flat_map(|ep| orders(topology, n / ep, ep).map(move |order| Layout { order, ..Layout::new(n / ep, ep, 1) }))
        .map(|layout| best_path(shape, workload, topology, &layout))
        .collect();
    found.sort_by(|a, b| b.fits.cmp(&a.fits).then(a.time.total().total_cmp(&b.time.total())));
    found
}

/// The orders that differ.
fn orders(topology: &Topology, dp: usize, ep: usize) -> impl Iterator<Item = Order> {
    let differ = dp > 1 && ep > 1 && topology.node_sizes.len() > 1;
    [Order::Together, Order::Apart].into_iter().take(if differ { 2 } else { 1 })
}

fn best_path(shape: &ModelShape, workload: &Workload, topology: &Topology, layout: &Layout) -> Estimate {
    let wire = if workload.precision == Precision::Bf16 { Wire::Bf16 } else { Wire::F32 };
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
