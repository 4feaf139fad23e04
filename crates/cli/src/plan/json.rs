//! The results of `moeworks plan` as JSON.

use moeworks_plan::{Estimate, RankOrder, ScalingRow};
use serde_json::{Value, json};

pub(super) fn as_json(estimate: &Estimate) -> Value {
    let Estimate { layout, exchange, memory, traffic, time, fits } = estimate;
    json!({
        "dp": layout.dp,
        "ep": layout.ep,
        "tp": layout.tp,
        "rank_order": layout.order,
        // The earlier name of `rank_order`.
        "apart": layout.order == RankOrder::DpInner,
        "algorithm": format!("{:?}", exchange.algorithm).to_lowercase(),
        "chunks": exchange.chunks,
        "fits": fits,
        "memory_bytes": {
            "weights": memory.weights,
            "gradients": memory.gradients,
            "optimizer": memory.optimizer,
            "activations": memory.activations,
            "received": memory.received,
            "total": memory.total(),
        },
        "sent_bytes": { "node": traffic.node_bytes, "cluster": traffic.cluster_bytes },
        "seconds": {
            "compute": time.compute,
            "all_to_all": time.all_to_all,
            "all_reduce": time.all_reduce,
            "tensor_parallel": time.tensor_parallel,
            "optimizer": time.optimizer,
            "total": time.total(),
        },
    })
}

pub(super) fn scaling_json(row: &ScalingRow) -> Value {
    json!({
        "ranks": row.num_ranks,
        "linear": as_json(&row.linear),
        "hierarchical": as_json(&row.hierarchical),
        "overlapped": as_json(&row.overlapped),
        "compressed": as_json(&row.compressed),
        "cut": row.cut.as_ref().map(as_json),
    })
}
