//! Statistics of a record as JSON.

use serde_json::{Value, json};

use super::{ExpertPair, RecordStats, RecordedLayer};

/// Returns the statistics as an object. Figures that are not known are null.
#[must_use]
pub fn stats_json(stats: &RecordStats) -> Value {
    let RecordStats { header, num_tokens, num_steps, num_windows, num_ahead, layers, damage, notes } = stats;
    let layers: Vec<Value> = layers.iter().map(layer_json).collect();
    json!({
        "model": header.model,
        "source": header.source,
        "experts": header.num_experts,
        "top_k": header.top_k,
        "tokens": num_tokens,
        "steps": num_steps,
        "windows": num_windows,
        "windows_ahead": num_ahead,
        "layers": layers,
        "damage": (!damage.is_none()).then(|| json!({
            "damaged_blocks": damage.num_bad_blocks,
            "damaged_bytes": damage.bad_bytes,
            "cut_bytes": damage.cut_bytes,
            "first_at": damage.first_at,
            "problem": damage.problem,
        })),
        "notes": notes,
    })
}

fn layer_json(layer: &RecordedLayer) -> Value {
    let concentration = &layer.concentration;
    let stability = layer.stability.map(|stability| {
        json!({
            "change": stability.change,
            "sampling": stability.sampling,
            "drift": stability.drift,
            "top_kept": stability.top_kept,
        })
    });
    let next_layer = layer.next_layer.map(|next| {
        json!({
            "tokens": next.num_tokens,
            "top_1": next.top_1,
            "top_1_base": next.top_1_base,
            "recall": next.recall,
            "recall_base": next.recall_base,
        })
    });
    let forecasts = layer.forecasts.iter();
    let forecasts: Vec<Value> = forecasts
        .map(|error| {
            json!({ "method": error.method.name(), "windows": error.num_windows, "error": error.mean, "recent": error.recent })
        })
        .collect();
    json!({
        "layer": layer.layer,
        "chosen": layer.chosen,
        "kept": layer.kept,
        "importance": layer.importance,
        "ranks": layer.on_ranks.as_ref().map(|load| json!({
            "load": load.ranks,
            "imbalance": load.rank_imbalance(),
            "load_of_nodes": load.nodes,
            "imbalance_of_nodes": load.node_imbalance(),
        })),
        "max_over_mean": concentration.max_over_mean,
        "top_1": concentration.top_1,
        "top_tenth": concentration.top_tenth,
        "entropy": concentration.entropy,
        "gini": concentration.gini,
        "zipf": concentration.zipf,
        "unused": concentration.num_unused,
        "stability": stability,
        "next_window": forecasts,
        "next_window_by_sampling": layer.forecast_sampling,
        "next_layer": next_layer,
        "repeats": layer.repeats.map(|repeats| json!({ "share": repeats.share, "base": repeats.base })),
        "together": layer.pairs.iter().map(pair_json).collect::<Vec<Value>>(),
    })
}

fn pair_json(pair: &ExpertPair) -> Value {
    json!({ "experts": [pair.first, pair.second], "share": pair.share, "lift": pair.lift })
}
