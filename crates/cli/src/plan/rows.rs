//! The rows of the tables of `moeworks plan`.

use moeworks_plan::{Algorithm, Estimate, RankOrder, ScalingRow};

use crate::progress::{bytes, thousands};

pub(super) const HEADER: [&str; 10] = [
    "layout",
    "memory of a rank",
    "sent in the node",
    "to other nodes",
    "compute",
    "all-to-all",
    "all-reduce",
    "tp sums",
    "update",
    "step",
];

pub(super) fn table_row(estimate: &Estimate) -> Vec<String> {
    let time = &estimate.time;
    let memory = bytes(estimate.memory.total() as u64) + if estimate.fits { "" } else { " (too much)" };
    vec![
        layout_name(estimate),
        memory,
        bytes(estimate.traffic.node_bytes as u64),
        bytes(estimate.traffic.cluster_bytes as u64),
        milliseconds(time.compute),
        milliseconds(time.all_to_all),
        milliseconds(time.all_reduce),
        milliseconds(time.tensor_parallel),
        milliseconds(time.optimizer),
        milliseconds(time.total()),
    ]
}

pub(super) fn layout_name(estimate: &Estimate) -> String {
    let layout = &estimate.layout;
    let order = if layout.order == RankOrder::DpInner { ", dp_inner" } else { "" };
    format!(
        "dp {}, ep {}, tp {}{order}{}",
        layout.dp,
        layout.ep,
        layout.tp,
        match estimate.exchange.algorithm {
            Algorithm::Linear => "",
            Algorithm::Hierarchical => ", hierarchical",
            Algorithm::TwoHop => ", two-hop",
        }
    )
}

pub(super) fn milliseconds(seconds: f64) -> String {
    format!("{:.1} ms", 1e3 * seconds)
}

pub(super) const SCALING_HEADER: [&str; 8] =
    ["ranks", "layout", "step", "share", "hierarchical", "+ overlap", "+ compression", "matrices cut"];

fn share(estimate: &Estimate) -> f64 {
    100.0 * estimate.time.all_to_all / estimate.time.total()
}

pub(super) fn scaling_row(row: &ScalingRow) -> Vec<String> {
    let after = |estimate: &Estimate| format!("{} {:.0}%", milliseconds(estimate.time.total()), share(estimate));
    let cut = |estimate: &Estimate| {
        let time = &estimate.time;
        let share = 100.0 * time.tensor_parallel / time.total();
        format!("tp {}: {} {share:.0}%", estimate.layout.tp, milliseconds(time.total()))
    };
    let layout = &row.linear.layout;
    vec![
        thousands(row.num_ranks as u64),
        format!("dp {} ep {}", layout.dp, layout.ep),
        milliseconds(row.linear.time.total()),
        format!("{:.0}%", share(&row.linear)),
        after(&row.hierarchical),
        after(&row.overlapped),
        after(&row.compressed),
        row.cut.as_ref().map_or_else(String::new, cut),
    ]
}
