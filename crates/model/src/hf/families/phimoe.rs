//! PhiMoE (2404.14219): layer norms, biases in attention and on the logits, LongRoPE, sparsemixer routing.
//!
//! Beyond the original context the long divisors apply, as in Microsoft's code; transformers 5.23 keeps the short
//! ones and changes the amplitude alone. Its `input_jitter_noise`, training noise on what experts read as well, is
//! not applied.

use serde_json::{Map, Value, json};

use super::mixtral;
use crate::config::{ModelConfig, NormKind};
use crate::hf::config_json::{Keys, shortest};
use crate::hf::family::Family;
use crate::hf::key_table::{DECODER, EXPERTS, KeyTable, refused};
use crate::hf::keys::{Defaults, USUAL};
use crate::hf::names::{Form, Rule};

pub(crate) const FAMILY: Family = Family {
    model_type: "phimoe",
    architecture: "PhimoeForCausalLM",
    layers: &["model.layers."],
    encoder_layers: "",
    rules: &[
        mixtral::ROUTER,
        // The name of the router beside stacked experts.
        Rule { ours: "mlp.gate.weight", form: Form::Whole("mlp.router.weight") },
        mixtral::GATE_UP,
        mixtral::DOWN,
    ],
    ignored: &[],
    has_mtp_layers: false,
    keys: KeyTable {
        used: &[DECODER, EXPERTS, &["attention_bias", "lm_head_bias", "router_jitter_noise", "sliding_window"]],
        harmless: &["input_jitter_noise"],
        refused: &[refused("norm_topk_prob", &["false"])],
    },
    read,
    write,
};

fn read(keys: &Keys<'_>) -> Result<ModelConfig, String> {
    let mut config = keys.decoder(&Defaults { norm_eps: 1e-5, rope_theta: 1e6, ..USUAL })?;
    config.variant.norm = NormKind::Layer;
    config.variant.qkv_bias = keys.flag("attention_bias")?;
    config.variant.output_bias = config.variant.qkv_bias;
    config.variant.head_bias = keys.flag("lm_head_bias")?;
    keys.experts(&mut config, "intermediate_size")?;
    config.normalize_weights = false;
    let jitter: f32 = keys.optional(&["router_jitter_noise"])?.unwrap_or(0.01);
    // 0 would switch the scheme off; here it means that only equal logits are close.
    config.router.sparsemixer_jitter = jitter.max(f32::MIN_POSITIVE);
    let window = keys.optional(&["sliding_window"])?;
    keys.window(&mut config, window, |_| true)?;
    Ok(config)
}

fn write(config: &ModelConfig, map: &mut Map<String, Value>) {
    let window = config.variant.window;
    let json = json!({
        "intermediate_size": config.expert_width,
        "attention_bias": config.variant.qkv_bias,
        "lm_head_bias": config.variant.head_bias,
        "router_jitter_noise": shortest(config.router.sparsemixer_jitter),
        "sliding_window": if window > 0 { json!(window) } else { Value::Null },
    });
    super::insert_all(map, json);
}
