//! `GET /moe/load`: the load of each expert in each layer.

use serde_json::{Value, json};

use super::app::App;
use crate::experts::{ExpertLoad, LayerLoad};

/// Says what experts computed since the server began, with the figures that its page shows beside them. A model
/// without experts has no layers here.
pub(crate) fn load(app: &App) -> Value {
    let layers = layers(app.metrics.experts());
    json!({
        "object": "moe.load",
        "model": app.served.name(),
        "num_experts": layers.first().map_or(0, |layer| layer.tokens_per_expert.len()),
        "top_k": app.served.model.decoder.config().top_k,
        "balancedness": (!layers.is_empty()).then(|| balancedness(&layers)),
        "layers": layers.iter().map(layer_json).collect::<Vec<_>>(),
        "serving": app.metrics.serving(),
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
