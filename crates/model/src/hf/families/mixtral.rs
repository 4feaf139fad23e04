//! Mixtral (2401.04088): every layer has experts, router weights are normalised, an optional sliding window.

use serde_json::{Map, Value, json};

use crate::config::ModelConfig;
use crate::hf::config_json::{Keys, shortest};
use crate::hf::family::Family;
use crate::hf::key_table::{DECODER, EXPERTS, KeyTable, refused};
use crate::hf::keys::{Defaults, USUAL};
use crate::hf::names::{Form, Rule};

/// The router's name on disk.
pub(super) const ROUTER: Rule = Rule { ours: "mlp.gate.weight", form: Form::Whole("block_sparse_moe.gate.weight") };
/// An expert's gate and up.
pub(super) const GATE_UP: Rule = Rule {
    ours: "mlp.experts.gate_up_proj",
    form: Form::PerExpert(&["block_sparse_moe.experts.{e}.w1.weight", "block_sparse_moe.experts.{e}.w3.weight"]),
};
/// An expert's down.
pub(super) const DOWN: Rule =
    Rule { ours: "mlp.experts.down_proj", form: Form::PerExpert(&["block_sparse_moe.experts.{e}.w2.weight"]) };

pub(crate) const FAMILY: Family = Family {
    model_type: "mixtral",
    architecture: "MixtralForCausalLM",
    layers: &["model.layers."],
    encoder_layers: "",
    rules: &[
        ROUTER,
        // The name of the router beside stacked experts.
        Rule { ours: "mlp.gate.weight", form: Form::Whole("mlp.gate.weight") },
        GATE_UP,
        DOWN,
    ],
    ignored: &[],
    has_mtp_layers: false,
    keys: KeyTable {
        used: &[DECODER, EXPERTS, &["router_jitter_noise", "sliding_window"]],
        harmless: &["max_window_layers"],
        refused: &[refused("norm_topk_prob", &["true"])],
    },
    read,
    write,
};

fn read(keys: &Keys<'_>) -> Result<ModelConfig, String> {
    let mut config = keys.decoder(&Defaults { norm_eps: 1e-5, rope_theta: 1e6, ..USUAL })?;
    keys.experts(&mut config, "intermediate_size")?;
    config.normalize_weights = true;
    config.jitter = keys.optional::<f32>(&["router_jitter_noise"])?.unwrap_or(0.0).into();
    let window = keys.optional(&["sliding_window"])?;
    keys.window(&mut config, window, |_| true)?;
    Ok(config)
}

fn write(config: &ModelConfig, map: &mut Map<String, Value>) {
    let window = config.variant.window;
    let json = json!({
        "intermediate_size": config.expert_width,
        "router_jitter_noise": shortest(config.jitter.end as f32),
        "sliding_window": if window > 0 { json!(window) } else { Value::Null },
    });
    super::insert_all(map, json);
}
