//! Keys that single architectures of llama.cpp have of their own, translated to the keys of the family that they came
//! from.
//!
//! The keys are those of llama.cpp's converters (`conversion/gpt_oss.py`, `granite.py`, `phi.py`, `deepseek.py`).

use serde_json::{Map, Value as Json, json};

use super::GgufFile;
use super::config::FREQUENCIES_BY_LENGTH;
use super::error::GgufError;
use super::value::Value;

type Keys = Map<String, Json>;

/// Adapts the keys of a family to those of a file.
pub(super) type Adjust = fn(&GgufFile, &mut Keys) -> Result<(), GgufError>;

/// Changes nothing: for architectures with the usual keys alone.
pub(super) fn none(_: &GgufFile, _: &mut Keys) -> Result<(), GgufError> {
    Ok(())
}

/// GPT-OSS: the bounds of YaRN's ramp are not rounded, and a file without scaling has none. Every second layer has a
/// window, unless the file lists the layers.
pub(super) fn gpt_oss(file: &GgufFile, keys: &mut Keys) -> Result<(), GgufError> {
    let name = "gpt-oss.attention.sliding_window_pattern";
    let layers = keys.get("num_hidden_layers").and_then(Json::as_u64).unwrap_or(0).min(1 << 14) as usize;
    if let Some(value) = file.keys().get(name) {
        let kinds = kinds_of_layers(value, layers);
        let reason = || file.wrong_key(name, "must be a number of layers, or a truth value for each layer".to_owned());
        keys.insert("layer_types".to_owned(), json!(kinds.ok_or_else(reason)?));
    }
    let scaling = keys.entry("rope_scaling").or_insert_with(|| json!({ "rope_type": "default" }));
    if scaling["rope_type"] == "yarn" {
        scaling["truncate"] = json!(false);
    }
    Ok(())
}

/// Returns the attention of each layer: `value` is a period whose last layer has full attention, or a list of
/// booleans.
fn kinds_of_layers(value: &Value, layers: usize) -> Option<Vec<&'static str>> {
    let is_sliding: Vec<bool> = match value {
        Value::Numbers(numbers) if numbers.len() == layers => (0..layers)
            .map(|i| numbers.get(i).and_then(|x| x.as_bool().or(x.as_usize().map(|x| x != 0))))
            .collect::<Option<_>>()?,
        value => {
            let period = value.as_usize()?;
            (0..layers).map(|i| period == 0 || i % period < period - 1).collect()
        }
    };
    let kind = |is_sliding| if is_sliding { "sliding_attention" } else { "full_attention" };
    Some(is_sliding.into_iter().map(kind).collect())
}

/// Granite-MoE: multipliers of attention, embeddings, residuals and logits.
pub(super) fn granite_moe(file: &GgufFile, keys: &mut Keys) -> Result<(), GgufError> {
    let multipliers = [
        ("attention.scale", "attention_multiplier"),
        ("embedding_scale", "embedding_multiplier"),
        ("residual_scale", "residual_multiplier"),
        ("logit_scale", "logits_scaling"),
    ];
    for (ours, theirs) in multipliers {
        let x = file.optional(&format!("granitemoe.{ours}"), Value::as_f64, "a number")?;
        // As in llama.cpp, 0 stands for an absent key.
        if let Some(x) = x.filter(|&x| x != 0.0) {
            keys.insert(theirs.to_owned(), json!(shortest(x)));
        }
    }
    Ok(())
}

/// PhiMoE: biases, and LongRoPE's divisors as tensors, with one amplitude for short and long contexts.
pub(super) fn phimoe(file: &GgufFile, keys: &mut Keys) -> Result<(), GgufError> {
    let name = |key: &str| format!("phimoe.rope.scaling.{key}");
    keys.insert("lm_head_bias".to_owned(), json!(file.tensors().contains_key("output.bias")));
    let [Some(short), Some(long)] = FREQUENCIES_BY_LENGTH.map(|name| file.tensors().get(name)) else { return Ok(()) };
    let amplitude = shortest(file.optional(&name("attn_factor"), Value::as_f64, "a number")?.unwrap_or(1.0));
    let original = file.key(&name("original_context_length"), Value::as_usize, "a whole number")?;
    let scaling = json!({
        "rope_type": "longrope",
        "short_factor": file.numbers(short),
        "long_factor": file.numbers(long),
        "short_mscale": amplitude,
        "long_mscale": amplitude,
        "original_max_position_embeddings": original,
    });
    keys.insert("rope_scaling".to_owned(), scaling);
    Ok(())
}

/// DeepSeek-V2 and V3: latent attention and groups of experts. Newer files describe latent attention as one narrow
/// head that all queries share; then the keys `..._mla` are the sizes of a head. A sigmoid router makes it V3.
pub(super) fn deepseek(file: &GgufFile, keys: &mut Keys) -> Result<(), GgufError> {
    let name = |key: &str| format!("deepseek2.{key}");
    let size = |key: &str| file.optional(&name(key), Value::as_usize, "a whole number");
    let required = |key: &str| file.key(&name(key), Value::as_usize, "a whole number");
    let rotary = required("rope.dimension_count")?;
    let head = |kind: &str| match size(&format!("attention.{kind}_length_mla"))? {
        Some(len) => Ok(len),
        None => required(&format!("attention.{kind}_length")),
    };
    let plain = head("key")?.checked_sub(rotary).ok_or_else(|| {
        file.wrong_key(&name("rope.dimension_count"), format!("is {rotary}: must be at most the length of a key"))
    })?;
    let groups = size("expert_group_count")?.unwrap_or(1);
    let is_sigmoid = size("expert_gating_func")? == Some(2);
    let scale = file.optional(&name("expert_weights_scale"), Value::as_f64, "a number")?.unwrap_or(1.0);
    keys.remove("head_dim");
    let own = json!({
        "model_type": if is_sigmoid { "deepseek_v3" } else { "deepseek_v2" },
        "num_key_value_heads": keys.get("num_attention_heads"),
        "q_lora_rank": size("attention.q_lora_rank")?,
        "kv_lora_rank": required("attention.kv_lora_rank")?,
        "qk_nope_head_dim": plain,
        "qk_rope_head_dim": rotary,
        "v_head_dim": head("value")?,
        "first_k_dense_replace": size("leading_dense_block_count")?.unwrap_or(0),
        "n_shared_experts": size("expert_shared_count")?.unwrap_or(0),
        "routed_scaling_factor": shortest(scale),
        "n_group": groups,
        "topk_group": size("expert_group_used_count")?.unwrap_or(1),
        "topk_method": match (is_sigmoid, groups) {
            (true, _) => "noaux_tc",
            (false, 1) => "greedy",
            (false, _) => "group_limited_greedy",
        },
    });
    keys.extend(own.as_object().cloned().unwrap_or_default());
    let multiplier = file.optional(&name("rope.scaling.yarn_log_multiplier"), Value::as_f64, "a number")?;
    if let (Some(x), Some(scaling)) = (multiplier, keys.get_mut("rope_scaling")) {
        // The file has 0.1 times the value that all published configurations give for both keys.
        let mscale = json!(shortest(10.0 * x));
        scaling["mscale"] = mscale.clone();
        scaling["mscale_all_dim"] = mscale;
    }
    Ok(())
}

/// Returns the f64 of the shortest decimal that is the same f32: the number that the configuration had.
pub(super) fn shortest(x: f64) -> f64 {
    (x as f32).to_string().parse().unwrap_or(x)
}
