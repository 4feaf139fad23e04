//! `GET /moe/load`: the load of each expert in each layer.

use serde_json::{Value, json};

use super::app::App;
use crate::experts::{ExpertLoad, LayerLoad};

/// Says what experts computed since the server began, with the figures that its page shows beside them. A model
/// without experts has no layers here.
pub(crate) fn load(app: &App) -> Value {
    load_json(&LoadOfModel {
        model: app.served.name(),
        top_k: app.served.model.decoder.config().top_k as u64,
        layers: &layers(app.metrics.experts()),
        serving: app.metrics.serving(),
    })
}

/// The load of a model's experts, with the figures of its server.
pub(crate) struct LoadOfModel<'a> {
    pub(crate) model: &'a str,
    /// Experts of a token.
    pub(crate) top_k: u64,
    pub(crate) layers: &'a [LayerLoad],
    pub(crate) serving: Value,
}

/// The JSON of a load.
pub(crate) fn load_json(load: &LoadOfModel<'_>) -> Value {
    let LoadOfModel { model, top_k, layers, serving } = load;
    json!({
        "object": "moe.load",
        "model": model,
        "num_experts": layers.first().map_or(0, |layer| layer.tokens_per_expert.len()),
        "top_k": top_k,
        "balancedness": (!layers.is_empty()).then(|| balancedness(layers)),
        "layers": layers.iter().map(layer_json).collect::<Vec<_>>(),
        "serving": serving,
    })
}

fn layer_json(load: &LayerLoad) -> Value {
    let LayerLoad { layer, num_tokens, tokens_per_expert } = load;
    json!({
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
