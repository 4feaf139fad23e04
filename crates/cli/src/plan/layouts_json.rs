//! Layouts in all dimensions as JSON: the figures and the sentences of the text.

use moeworks_plan::{Alternative, Bill, Fabric, Gain, MeshCost, ModelParts, Verdict};
use serde_json::{Map, Value, json};

use super::layouts::{Plan, precision_name, sentences};

pub(super) fn as_json(plan: &Plan) -> Value {
    let Plan { place, job, found, verdict, trainable, bill, top } = plan;
    let cost = |cost: &MeshCost| cost_json(cost, &place.fabric, &job.parts);
    json!({
        "cluster": place.name,
        "ranks": place.fabric.num_ranks,
        "memory_bytes_of_rank": place.fabric.rates.memory_bytes,
        "model": job.parts.name,
        "params": job.parts.params(),
        "training_flops_per_token": job.parts.training_flops(job.seq_len),
        "sequences": job.global_batch,
        "seq_len": job.seq_len,
        "precision": precision_name(job.precision),
        "num_costed": found.num_costed,
        "num_layouts": found.found.len(),
        "num_fitting": found.found.iter().filter(|cost| cost.fits).count(),
        "proposals": found.found.iter().take(*top).map(cost).collect::<Vec<_>>(),
        "best_trainable": trainable.as_ref().map(cost),
        "verdict": verdict.as_ref().map(verdict_json),
        "bill": bill.as_ref().map(bill_json),
        "sentences": sentences(plan),
    })
}

fn cost_json(cost: &MeshCost, fabric: &Fabric, parts: &ModelParts) -> Value {
    let (mesh, memory) = (&cost.mesh, &cost.memory);
    let mut seconds: Map<String, Value> =
        cost.time.parts().into_iter().map(|(name, part)| (name.replace([' ', '-'], "_"), json!(part))).collect();
    seconds.insert("total".to_owned(), json!(cost.time.total()));
    let sent: Map<String, Value> =
        fabric.levels.iter().zip(cost.sent_bytes).map(|(level, sent)| (level.name.clone(), json!(sent))).collect();
    json!({
        "tp": mesh.tp,
        "cp": mesh.cp,
        "dp": mesh.dp,
        "pp": mesh.pp,
        "ep": mesh.ep,
        "etp": mesh.etp,
        "expert_copies": mesh.edp(),
        "schedule": (mesh.pp > 1).then(|| mesh.schedule.name()),
        "virtual_stages": mesh.virtual_stages,
        "microbatch": mesh.microbatch,
        "microbatches": cost.microbatches,
        "zero": mesh.zero,
        "recompute": mesh.recompute.name(),
        "algorithm": format!("{:?}", cost.path).to_lowercase(),
        "chunks": cost.chunks,
        "hottest_rank": { "time": cost.hot.time, "memory": cost.hot.memory },
        "fits": cost.fits,
        "memory_bytes": {
            "weights": memory.weights,
            "gradients": memory.gradients,
            "optimizer": memory.optimizer,
            "activations": memory.activations,
            "received": memory.received,
            "total": memory.total(),
        },
        "sent_bytes": sent,
        "seconds": seconds,
        "tokens_per_s": cost.tokens_per_s,
        "flops_per_rank": cost.flops_per_rank,
        "mfu": cost.mfu,
        "train_options": mesh.options(parts.num_experts, parts.num_layers, cost.microbatches),
        "planned_only": mesh.planned_only(parts.num_experts),
    })
}

fn verdict_json(verdict: &Verdict) -> Value {
    let gain = |gain: &Gain| json!({ "resource": gain.resource, "seconds": gain.seconds, "saved": gain.saved });
    let alternative = |other: &Alternative| {
        json!({
            "dimension": other.dimension,
            "chosen": other.chosen,
            "value": other.value,
            "layout": other.cost.mesh.to_string(),
            "fits": other.cost.fits,
            "seconds": other.cost.time.total(),
            "grows": other.grows.map(|(name, seconds)| json!({ "part": name, "seconds": seconds })),
        })
    };
    json!({
        "binds": verdict.binds,
        "gains": verdict.gains.iter().map(gain).collect::<Vec<_>>(),
        "alternatives": verdict.alternatives.iter().map(alternative).collect::<Vec<_>>(),
    })
}

fn bill_json(bill: &Bill) -> Value {
    json!({
        "tokens": bill.tokens,
        "days": bill.days,
        "rank_hours": bill.rank_hours,
        "price": bill.price,
        "kilowatt_hours": bill.kilowatt_hours,
    })
}
