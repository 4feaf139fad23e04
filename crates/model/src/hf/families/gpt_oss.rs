//! GPT-OSS (2508.10925): attention sinks, alternating sliding windows, biases everywhere, a clamped SwiGLU. Experts
//! are transposed on disk, with the columns of gate and up alternating; OpenAI published them in MXFP4.

use moeworks_moe::ScoreOrder;
use serde_json::{Map, Value, json};

use crate::config::{ActivationKind, ModelConfig, RopeScaling};
use crate::hf::config_json::{Keys, shortest};
use crate::hf::family::Family;
use crate::hf::key_table::{DECODER, EXPERTS, KeyTable, QUANTIZED, refused};
use crate::hf::keys::{Defaults, layer_types};
use crate::hf::mxfp4;
use crate::hf::names::{Form, Rule};

pub(crate) const FAMILY: Family = Family {
    model_type: "gpt_oss",
    architecture: "GptOssForCausalLM",
    layers: &["model.layers."],
    encoder_layers: "",
    rules: &[
        Rule { ours: "mlp.gate.weight", form: Form::Whole("mlp.router.weight") },
        Rule { ours: "mlp.gate.bias", form: Form::Whole("mlp.router.bias") },
        Rule { ours: "mlp.experts.gate_up_proj", form: Form::Interleaved("mlp.experts.gate_up_proj") },
        Rule { ours: "mlp.experts.down_proj", form: Form::Transposed("mlp.experts.down_proj") },
        Rule {
            ours: "mlp.experts.gate_up_proj",
            form: Form::Mxfp4 { name: "mlp.experts.gate_up_proj", is_interleaved: true },
        },
        Rule {
            ours: "mlp.experts.down_proj",
            form: Form::Mxfp4 { name: "mlp.experts.down_proj", is_interleaved: false },
        },
        Rule { ours: "mlp.experts.gate_up_proj_bias", form: Form::InterleavedVectors("mlp.experts.gate_up_proj_bias") },
    ],
    ignored: &[],
    has_mtp_layers: false,
    keys: KeyTable {
        used: &[DECODER, EXPERTS, &["attention_bias", "sliding_window", "swiglu_alpha", "swiglu_limit"], &[QUANTIZED]],
        harmless: &["initial_context_length"],
        refused: &[refused("norm_topk_prob", &["true"])],
    },
    read,
    write,
};

fn read(keys: &Keys<'_>) -> Result<ModelConfig, String> {
    let mut config = keys.decoder(&Defaults { norm_eps: 1e-5, rope_theta: 150_000.0, head_dim: Some(64) })?;
    keys.quantized(mxfp4::METHOD)?;
    if !keys.has_rope() {
        // The family's default scaling.
        config.variant.rotary.scaling = RopeScaling::Yarn {
            factor: 32.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_len: 4096,
            truncate: false,
            attention_factor: None,
            mscale: None,
            mscale_all_dim: None,
        };
    }
    config.variant.qkv_bias = keys.optional(&["attention_bias"])?.unwrap_or(true);
    config.variant.output_bias = config.variant.qkv_bias;
    config.variant.sinks = true;
    keys.experts(&mut config, "intermediate_size")?;
    config.score_order = ScoreOrder::TopKThenSoftmax;
    config.normalize_weights = true;
    config.variant.router_bias = true;
    config.variant.feed_forward_bias = true;
    config.activation = ActivationKind::ClampedSwiglu {
        alpha: keys.optional(&["swiglu_alpha"])?.unwrap_or(1.702),
        limit: keys.optional(&["swiglu_limit"])?.unwrap_or(7.0),
    };
    let window = keys.optional(&["sliding_window"])?;
    keys.window(&mut config, window, |i| i % 2 == 0)?;
    Ok(config)
}

fn write(config: &ModelConfig, map: &mut Map<String, Value>) {
    let (alpha, limit) = match config.activation {
        ActivationKind::ClampedSwiglu { alpha, limit } => (alpha, limit),
        _ => (1.702, 7.0),
    };
    let window = config.variant.window;
    let json = json!({
        "intermediate_size": config.expert_width,
        "attention_bias": config.variant.qkv_bias,
        "swiglu_alpha": shortest(alpha),
        "swiglu_limit": shortest(limit),
        "sliding_window": if window > 0 { json!(window) } else { Value::Null },
        "layer_types": layer_types(config),
    });
    super::insert_all(map, json);
}
