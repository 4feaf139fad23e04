//! The reasons for the layout that `moeworks plan` proposes.

use moeworks_plan::{Estimate, RankOrder, Topology};

use super::rows::{layout_name, milliseconds};
use crate::progress::bytes;

/// Prints why the first layout is proposed.
pub(super) fn explain(found: &[Estimate], zero: u8, topology: &Topology) {
    let Some(best) = found.first() else { return };
    let memory = &best.memory;
    if !best.fits {
        println!(
            "No layout fits: a rank has {}, and the smallest layout needs {}, with weights, gradients and optimizer state divided \
             among copies. More ranks or fewer tokens would help.",
            bytes(topology.rank.memory_bytes as u64),
            bytes(found.iter().map(|e| e.memory.total()).fold(f64::INFINITY, f64::min) as u64),
        );
        return;
    }
    let order = if best.layout.order == RankOrder::DpInner { " --set parallel.rank_order=dp_inner" } else { "" };
    let shared = if zero > 0 { format!(" --set parallel.zero={zero}") } else { String::new() };
    println!("Proposed: --dp {} --ep {} --tp {}{order}{shared}", best.layout.dp, best.layout.ep, best.layout.tp);
    println!(
        "  memory   {} weights, {} gradients, {} optimizer, {} activations, {} received rows; a rank has {}",
        bytes(memory.weights as u64),
        bytes(memory.gradients as u64),
        bytes(memory.optimizer as u64),
        bytes(memory.activations as u64),
        bytes(memory.received as u64),
        bytes(topology.rank.memory_bytes as u64),
    );
    println!(
        "  links    {} sent in the node and {} to other nodes by each rank in a step",
        bytes(best.traffic.node_bytes as u64),
        bytes(best.traffic.cluster_bytes as u64),
    );
    explain_cut(best, found);
    match found.get(1) {
        Some(next) if next.fits => println!(
            "  time     {} a step, against {} for {}",
            milliseconds(best.time.total()),
            milliseconds(next.time.total()),
            layout_name(next)
        ),
        Some(_) => println!("  time     {} a step; no other layout fits in memory", milliseconds(best.time.total())),
        None => println!("  time     {} a step", milliseconds(best.time.total())),
    }
}

/// Prints the benefit of tensor parallelism, or what it would cost.
fn explain_cut(best: &Estimate, found: &[Estimate]) {
    let sums = |estimate: &Estimate| milliseconds(estimate.time.tensor_parallel);
    let is_other = |estimate: &&Estimate| (estimate.layout.tp > 1) != (best.layout.tp > 1);
    match found.iter().find(is_other) {
        Some(whole) if best.layout.tp > 1 => println!(
            "  tp       tensor-parallel sums take {}; without them a rank needs {} and a step takes {}",
            sums(best),
            bytes(whole.memory.total() as u64),
            milliseconds(whole.time.total()),
        ),
        Some(cut) => println!(
            "  tp       not used: with --tp {} the sums take {}, and a rank needs {}",
            cut.layout.tp,
            sums(cut),
            bytes(cut.memory.total() as u64),
        ),
        None => {}
    }
}
