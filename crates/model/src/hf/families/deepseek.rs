//! DeepSeek-V2 (2405.04434) and V3 (2412.19437): multi-head latent attention, shared experts, dense first layers. V2
//! scores by softmax, V3 by sigmoid with a bias that corrects the choice. V3 is published in FP8.

use moeworks_moe::{GroupScore, RouterConfig, ScoreFunction};
use serde_json::{Map, Value, json};

use crate::config::{LatentAttention, ModelConfig};
use crate::hf::config_json::{Keys, shortest};
use crate::hf::family::Family;
use crate::hf::fp8;
use crate::hf::key_table::{DECODER, EXPERTS, KeyTable, QUANTIZED, Refused, refused};
use crate::hf::keys::USUAL;

/// The keys that both versions read.
const LATENT: &[&str] = &[
    "attention_bias",
    "first_k_dense_replace",
    "kv_lora_rank",
    "moe_intermediate_size",
    "n_group",
    "n_shared_experts",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "routed_scaling_factor",
    "topk_group",
    "v_head_dim",
];

/// Keys that follow from others, and settings of training.
const HARMLESS: &[&str] = &["qk_head_dim", "num_nextn_predict_layers", "num_mtp_layers"];

/// Every layer after the dense ones has experts.
const ONE_IN_ONE: Refused = refused("moe_layer_freq", &["1"]);

pub(crate) const V2: Family = Family {
    model_type: "deepseek_v2",
    architecture: "DeepseekV2ForCausalLM",
    layers: &["model.layers."],
    encoder_layers: "",
    rules: &[],
    ignored: &[],
    has_mtp_layers: false,
    keys: KeyTable {
        used: &[DECODER, EXPERTS, LATENT, &["topk_method", QUANTIZED]],
        harmless: HARMLESS,
        // `transformers` ignores this key in this family, other programs do not.
        refused: &[refused("norm_topk_prob", &["false"]), refused("rope_interleave", &["true"]), ONE_IN_ONE],
    },
    read: read_v2,
    write: write_v2,
};

pub(crate) const V3: Family = Family {
    model_type: "deepseek_v3",
    architecture: "DeepseekV3ForCausalLM",
    has_mtp_layers: true,
    keys: KeyTable {
        used: &[DECODER, EXPERTS, LATENT, &["norm_topk_prob", "rope_interleave", QUANTIZED]],
        harmless: HARMLESS,
        refused: &[refused("scoring_func", &["\"sigmoid\""]), refused("topk_method", &["\"noaux_tc\""]), ONE_IN_ONE],
    },
    read: read_v3,
    write: write_v3,
    ..V2
};

/// The values of absent keys about experts and routing.
struct RoutingDefaults {
    num_shared: usize,
    /// The number of dense layers before the first with experts.
    num_dense: usize,
    num_groups: usize,
    top_groups: usize,
    routed_scale: f32,
}

const V2_DEFAULTS: RoutingDefaults =
    RoutingDefaults { num_shared: 2, num_dense: 0, num_groups: 1, top_groups: 1, routed_scale: 1.0 };
const V3_DEFAULTS: RoutingDefaults =
    RoutingDefaults { num_shared: 1, num_dense: 3, num_groups: 8, top_groups: 4, routed_scale: 2.5 };

/// Reads the keys that both versions share.
fn read(keys: &Keys<'_>, defaults: &RoutingDefaults) -> Result<ModelConfig, String> {
    let mut config = keys.decoder(&USUAL)?;
    keys.quantized(fp8::METHOD)?;
    let latent = LatentAttention {
        query_rank: keys.optional_or_null("q_lora_rank", 1536)?.unwrap_or(0),
        kv_rank: keys.optional(&["kv_lora_rank"])?.unwrap_or(512),
        plain_dim: keys.optional(&["qk_nope_head_dim"])?.unwrap_or(128),
        rotary_dim: keys.optional(&["qk_rope_head_dim"])?.unwrap_or(64),
    };
    // Latent attention makes keys and values for every head, whatever number of them the file gives.
    config.num_kv_heads = config.num_heads;
    config.head_dim = latent.plain_dim.saturating_add(latent.rotary_dim);
    config.variant.latent = Some(latent);
    config.variant.value_dim = keys.optional(&["v_head_dim"])?.unwrap_or(128);
    config.variant.rotary.is_interleaved = true;
    config.variant.qkv_bias = keys.flag("attention_bias")?;
    config.variant.output_bias = config.variant.qkv_bias;
    keys.experts(&mut config, "moe_intermediate_size")?;
    let num_shared: usize = keys.optional_or_null("n_shared_experts", defaults.num_shared)?.unwrap_or(0);
    config.shared_width = num_shared.saturating_mul(config.expert_width);
    let num_dense: usize = keys.optional(&["first_k_dense_replace"])?.unwrap_or(defaults.num_dense);
    config.variant.dense_layers = (0..num_dense.min(config.num_layers)).collect();
    config.router = RouterConfig {
        num_groups: keys.optional(&["n_group"])?.unwrap_or(defaults.num_groups),
        top_groups: keys.optional(&["topk_group"])?.unwrap_or(defaults.top_groups),
        routed_scale: keys.optional(&["routed_scaling_factor"])?.unwrap_or(defaults.routed_scale),
        ..RouterConfig::default()
    };
    Ok(config)
}

fn read_v2(keys: &Keys<'_>) -> Result<ModelConfig, String> {
    let mut config = read(keys, &V2_DEFAULTS)?;
    config.normalize_weights = false;
    let method: String = keys.optional(&["topk_method"])?.unwrap_or_else(|| "greedy".to_owned());
    match method.as_str() {
        "group_limited_greedy" => config.router.group_score = GroupScore::Max,
        "greedy" => (config.router.num_groups, config.router.top_groups) = (1, 1),
        _ => return Err(format!("topk_method = {method:?}: not supported, only greedy and group_limited_greedy")),
    }
    Ok(config)
}

fn read_v3(keys: &Keys<'_>) -> Result<ModelConfig, String> {
    let mut config = read(keys, &V3_DEFAULTS)?;
    config.variant.rotary.is_interleaved = keys.optional(&["rope_interleave"])?.unwrap_or(true);
    config.normalize_weights = keys.optional(&["norm_topk_prob"])?.unwrap_or(true);
    config.router.scores = ScoreFunction::Sigmoid;
    config.router.expert_bias = true;
    config.router.group_score = GroupScore::TopTwo;
    Ok(config)
}

fn write(config: &ModelConfig, map: &mut Map<String, Value>) {
    // A configuration without latent attention does not read back the same, so it is never written in these keys.
    let latent =
        config.variant.latent.unwrap_or(LatentAttention { query_rank: 0, kv_rank: 0, plain_dim: 0, rotary_dim: 0 });
    let num_dense = (0..config.num_layers).take_while(|&i| !config.is_moe_layer(i)).count();
    let json = json!({
        "attention_bias": config.variant.qkv_bias,
        "first_k_dense_replace": num_dense,
        "head_dim": latent.rotary_dim,
        "kv_lora_rank": latent.kv_rank,
        "moe_intermediate_size": config.expert_width,
        "n_group": config.router.num_groups,
        "n_routed_experts": config.num_experts,
        "n_shared_experts": config.shared_width.checked_div(config.expert_width).unwrap_or(0),
        "norm_topk_prob": config.normalize_weights,
        "q_lora_rank": if latent.query_rank > 0 { json!(latent.query_rank) } else { Value::Null },
        "qk_head_dim": config.head_dim,
        "qk_nope_head_dim": latent.plain_dim,
        "qk_rope_head_dim": latent.rotary_dim,
        "rope_interleave": config.variant.rotary.is_interleaved,
        "routed_scaling_factor": shortest(config.router.routed_scale),
        "topk_group": config.router.top_groups,
        "v_head_dim": config.value_dim(),
    });
    super::insert_all(map, json);
}

fn write_v2(config: &ModelConfig, map: &mut Map<String, Value>) {
    write(config, map);
    let method = if config.router.num_groups > 1 { "group_limited_greedy" } else { "greedy" };
    super::insert_all(map, json!({"topk_method": method, "mlp_bias": false}));
}

fn write_v3(config: &ModelConfig, map: &mut Map<String, Value>) {
    write(config, map);
    // Our model has no multi-token-prediction layers; those of the original folder are added to these keys.
    super::insert_all(
        map,
        json!({"num_nextn_predict_layers": 0, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}),
    );
}
