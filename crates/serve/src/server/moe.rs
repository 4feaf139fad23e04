//! `GET /moe/load`: the load of each expert in each layer.

use moeworks_plan::Placements;
use serde_json::{Value, json};

use super::app::App;
use crate::experts::{ExpertLoad, LayerLoad, RankLoad};

/// Says what experts computed since the server began, with the figures that its page shows beside them. A model
/// without experts has no layers here.
pub(crate) fn load(app: &App) -> Value {
    load_json(&LoadOfModel {
        model: app.served.name(),
        top_k: app.served.model.decoder.config().top_k as u64,
        layers: &layers(app.metrics.experts()),
        ranks: app.metrics.experts().and_then(ExpertLoad::ranks),
        serving: app.metrics.serving(),
    })
}

/// The load of a model's experts, with the figures of its server.
pub(crate) struct LoadOfModel<'a> {
    pub(crate) model: &'a str,
    /// Experts of a token.
    pub(crate) top_k: u64,
    pub(crate) layers: &'a [LayerLoad],
    /// The ranks among which the experts lie; none on one.
    pub(crate) ranks: Option<RankLoad>,
    pub(crate) serving: Value,
}

/// The JSON of a load.
pub(crate) fn load_json(load: &LoadOfModel<'_>) -> Value {
    let LoadOfModel { model, top_k, layers, ranks, serving } = load;
    let of_layer = |(place, layer): (usize, &LayerLoad)| layer_json(place, layer, ranks.as_ref());
    json!({
        "object": "moe.load",
        "model": model,
        "num_experts": layers.first().map_or(0, |layer| layer.tokens_per_expert.len()),
        "top_k": top_k,
        "balancedness": (!layers.is_empty()).then(|| balancedness(layers)),
        "ranks": ranks.as_ref().map(|ranks| ranks_json(ranks, layers)),
        "layers": layers.iter().enumerate().map(of_layer).collect::<Vec<_>>(),
        "serving": serving,
    })
}

/// Says how even the load of ranks is, and what has moved. "before" is by the placements with which the server began.
fn ranks_json(ranks: &RankLoad, layers: &[LayerLoad]) -> Value {
    let [before, now] = ranks.balancedness(layers);
    json!({
        "num_ranks": ranks.now.num_ranks(),
        "balancedness_before": before,
        "balancedness": now,
        "experts_moved": ranks.moved.len(),
        "copies_moved": ranks.num_copies,
        "replicas": ranks.num_replicas(),
    })
}

/// Lists the ranks of each expert of a layer.
fn ranks_of(placements: &Placements, layer: usize) -> Option<Vec<&[usize]>> {
    let placement = placements.layer(layer)?;
    Some((0..placement.num_experts()).map(|expert| placement.ranks_of(expert)).collect())
}

/// Returns the figures of a layer that has `place` MoE layers before it.
fn layer_json(place: usize, load: &LayerLoad, ranks: Option<&RankLoad>) -> Value {
    let of_ranks = ranks.and_then(|ranks| ranks.of_layer(place, load));
    let LayerLoad { layer, num_tokens, tokens_per_expert } = load;
    json!({
        "ranks_before": ranks.and_then(|ranks| ranks_of(&ranks.first, *layer)),
        "ranks": ranks.and_then(|ranks| ranks_of(&ranks.now, *layer)),
        "tokens_per_rank": of_ranks.as_ref().map(|load| &load.ranks),
        "tokens_per_node": of_ranks.as_ref().map(|load| &load.nodes),
        "layer": layer,
        "tokens": num_tokens,
        "cv": load.cv(),
        "balancedness": load.balancedness(),
        "tokens_per_expert": tokens_per_expert,
    })
}

/// The mean of the layers' balancedness.
pub(crate) fn balancedness(layers: &[LayerLoad]) -> f64 {
    layers.iter().map(LayerLoad::balancedness).sum::<f64>() / layers.len().max(1) as f64
}

/// Reads the load of a model that has experts.
pub(crate) fn layers(load: Option<&ExpertLoad>) -> Vec<LayerLoad> {
    load.map(ExpertLoad::layers).unwrap_or_default()
}
