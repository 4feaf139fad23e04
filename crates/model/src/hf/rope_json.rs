//! The rotary embedding in `config.json`: `rope_parameters` of `transformers` 5, `rope_theta` and `rope_scaling` of
//! version 4.

use serde_json::{Map, Value, json};

use super::keys::{Keys, abridged};
use crate::config::{ModelConfig, RopeScaling};

/// Reads base and scaling. `partial_rotary_factor` must be 1 in these families: `transformers` ignores it there,
/// other programs do not.
pub(super) fn read(keys: &Keys<'_>, default_theta: f64, config: &mut ModelConfig) -> Result<(), String> {
    let new: Map<String, Value> = keys.optional(&[NEW])?.unwrap_or_default();
    let old: Map<String, Value> = keys.optional(&[OLD])?.unwrap_or_default();
    let theta = keys.optional(&["rope_theta"])?;
    let (new, old) = (flat(keys, NEW, new, theta)?, flat(keys, OLD, old, theta)?);
    let inner_theta = Keys::new(&new).optional(&["rope_theta"])?.or(Keys::new(&old).optional(&["rope_theta"])?);
    if let (Some(inner), Some(outer)) = (inner_theta, theta)
        && inner != outer
    {
        return Err(format!("rope_theta = {outer}: {NEW} says {inner}; leave one of them out"));
    }
    config.rope_theta = inner_theta.or(theta).unwrap_or(default_theta);
    let of = |name: &str, map: &Map<String, Value>| {
        let inner = Keys::new(map);
        let found =
            scaling(keys, &inner, config).and_then(|scaling| check_rest(name, map, &inner, keys).map(|()| scaling));
        found.map_err(|reason| format!("{name}: {reason}"))
    };
    let (of_new, of_old) = (of(NEW, &new)?, of(OLD, &old)?);
    if !new.is_empty() && !old.is_empty() && of_new != of_old {
        return Err(format!("{NEW} and {OLD} differ; leave one of them out"));
    }
    if let Some(part) = keys.optional::<f64>(&[PART])?.filter(|&part| part != 1.0) {
        return Err(format!("{PART} = {part}: must be 1 in this family"));
    }
    config.variant.rotary.scaling = if new.is_empty() { of_old } else { of_new };
    Ok(())
}

/// The key of `transformers` 5.
const NEW: &str = "rope_parameters";
/// The key of `transformers` 4.
const OLD: &str = "rope_scaling";
/// The part of a head that is rotated.
const PART: &str = "partial_rotary_factor";

/// Returns the parameters that all layers share, where they are given for each kind of layer.
fn flat(
    keys: &Keys<'_>,
    name: &str,
    map: Map<String, Value>,
    theta: Option<f64>,
) -> Result<Map<String, Value>, String> {
    let is_kind =
        |(key, value): &(&String, &Value)| key.ends_with("_attention") && (value.is_object() || value.is_null());
    if !map.iter().any(|entry| is_kind(&entry)) {
        return Ok(map);
    }
    let used: Vec<String> = keys.optional(&["layer_types"])?.unwrap_or_default();
    let is_used = |kind: &str| used.is_empty() || used.iter().any(|used| used == kind);
    let mut all: Option<(&str, Map<String, Value>)> = None;
    for (kind, parameters) in map.iter().filter(is_kind).filter(|(kind, _)| is_used(kind)) {
        let Some(mut parameters) = parameters.as_object().cloned() else {
            return Err(format!(
                "{name}: {kind} has no parameters; layers without a rotary embedding are not supported"
            ));
        };
        if let Some(theta) = theta {
            parameters.entry("rope_theta").or_insert_with(|| theta.into());
        }
        match &all {
            Some((first, of_first)) if *of_first != parameters => {
                let reason = "layers with different rotary embeddings are not supported in this family";
                return Err(format!("{name}: {first} and {kind} differ; {reason}"));
            }
            Some(_) => {}
            None => all = Some((kind, parameters)),
        }
    }
    all.map(|(_, parameters)| parameters)
        .ok_or_else(|| format!("{name}: has no parameters for the layer_types of this model"))
}

/// Checks the keys that the kind of scaling does not use.
fn check_rest(name: &str, map: &Map<String, Value>, inner: &Keys<'_>, keys: &Keys<'_>) -> Result<(), String> {
    let asked = inner.asked();
    // Keys of early YaRN programs and of others that go beyond what is computed here.
    for (key, off) in [(PART, 1.0), ("attn_factor", 1.0), ("extrapolation_factor", 1.0), ("mscale_all_dim", 0.0)] {
        let value = map.get(key).filter(|value| !value.is_null() && !asked.contains(key));
        if let Some(value) = value.filter(|value| value.as_f64() != Some(off)) {
            return Err(format!("{key} = {}: must be {off} or absent", abridged(value)));
        }
    }
    if let Some(value) = map.get("mrope_section").filter(|value| !value.is_null()) {
        return Err(format!("mrope_section = {}: positions of images are not supported", abridged(value)));
    }
    let harmless =
        ["rope_theta", "rope_type", "type", "finetuned", PART, "attn_factor", "extrapolation_factor", "mscale_all_dim"];
    let is_used = |key: &String| asked.contains(key) || harmless.contains(&&**key) || key == ORIGINAL;
    let unused = map.iter().filter(|(key, value)| !value.is_null() && !is_used(key));
    unused.for_each(|(key, _)| keys.note_unused(format!("{name}.{key}")));
    Ok(())
}

/// The context length of the original training.
const ORIGINAL: &str = "original_max_position_embeddings";

fn scaling(keys: &Keys<'_>, inner: &Keys<'_>, config: &ModelConfig) -> Result<RopeScaling, String> {
    let kind: Value = inner.optional(&["rope_type", "type"])?.unwrap_or_else(|| "default".into());
    let factor = || inner.required::<f64>(&["factor"]);
    let original_len = || -> Result<usize, String> {
        let key = [ORIGINAL];
        Ok(keys.optional(&key)?.or(inner.optional(&key)?).unwrap_or(config.max_seq_len))
    };
    Ok(match kind.as_str() {
        Some("default") => RopeScaling::None,
        Some("linear") => RopeScaling::Linear { factor: factor()? },
        Some("llama3") => RopeScaling::Llama3 {
            factor: factor()?,
            low_freq_factor: inner.required(&["low_freq_factor"])?,
            high_freq_factor: inner.required(&["high_freq_factor"])?,
            original_len: original_len()?,
        },
        Some("yarn") => {
            let original_len = original_len()?;
            let ratio = config.max_seq_len as f64 / original_len.max(1) as f64;
            let or = |x: Option<f64>, default: f64| x.filter(|&x| x != 0.0).unwrap_or(default);
            RopeScaling::Yarn {
                factor: inner.optional(&["factor"])?.unwrap_or(ratio),
                beta_fast: or(inner.optional(&["beta_fast"])?, 32.0),
                beta_slow: or(inner.optional(&["beta_slow"])?, 1.0),
                original_len,
                truncate: inner.optional(&["truncate"])?.unwrap_or(true),
                attention_factor: inner.optional(&["attention_factor"])?,
                mscale: inner.optional(&["mscale"])?,
                mscale_all_dim: inner.optional(&["mscale_all_dim"])?,
            }
        }
        Some("longrope" | "su") => {
            let original_len = original_len()?;
            let ratio = config.max_seq_len as f64 / original_len.max(1) as f64;
            let stretch: f64 = inner.optional(&["factor"])?.unwrap_or(ratio);
            let root = (1.0 + stretch.ln() / (original_len as f64).ln()).sqrt();
            // Twelve digits survive writing and reading a file.
            let root = (root * 1e12).round() / 1e12;
            let amplitude = inner.optional(&["attention_factor"])?.unwrap_or(if stretch <= 1.0 { 1.0 } else { root });
            RopeScaling::LongRope {
                short_factor: inner.required(&["short_factor"])?,
                long_factor: inner.required(&["long_factor"])?,
                short_amplitude: inner.optional(&["short_mscale"])?.unwrap_or(amplitude),
                long_amplitude: inner.optional(&["long_mscale"])?.unwrap_or(amplitude),
                original_len,
            }
        }
        _ => {
            let known = "only default, linear, llama3, yarn and longrope";
            return Err(format!("rope_type {} is not supported, {known}", abridged(&kind)));
        }
    })
}

/// Writes base, scaling and the rotated part of a head, in the keys of both versions.
pub(super) fn write(config: &ModelConfig, map: &mut Map<String, Value>) {
    let theta = config.rope_theta;
    let mut parameters = match &config.variant.rotary.scaling {
        RopeScaling::None => json!({"rope_type": "default"}),
        RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_len } => json!({
            "rope_type": "llama3", "factor": factor, "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor, "original_max_position_embeddings": original_len,
        }),
        RopeScaling::Yarn {
            factor,
            beta_fast,
            beta_slow,
            original_len,
            truncate,
            attention_factor,
            mscale,
            mscale_all_dim,
        } => {
            let mut json = json!({
                "rope_type": "yarn", "factor": factor, "beta_fast": beta_fast, "beta_slow": beta_slow,
                "original_max_position_embeddings": original_len, "truncate": truncate,
            });
            let extra =
                [("attention_factor", attention_factor), ("mscale", mscale), ("mscale_all_dim", mscale_all_dim)];
            for (key, value) in extra {
                if let Some(value) = value {
                    json[key] = (*value).into();
                }
            }
            json
        }
        RopeScaling::LongRope { short_factor, long_factor, short_amplitude, long_amplitude, original_len } => {
            let mut json = json!({
                "rope_type": "longrope", "short_factor": short_factor, "long_factor": long_factor,
                "short_mscale": short_amplitude, "long_mscale": long_amplitude,
                "original_max_position_embeddings": original_len,
            });
            // The key of families with a single amplitude.
            if short_amplitude == long_amplitude {
                json["attention_factor"] = (*short_amplitude).into();
            }
            json
        }
    };
    if config.variant.rotary.dim > 0 {
        parameters["partial_rotary_factor"] = (config.variant.rotary.dim as f64 / config.head_dim as f64).into();
    }
    map.insert(
        "rope_scaling".into(),
        if config.variant.rotary.scaling == RopeScaling::None {
            Value::Null
        } else {
            let mut old = parameters.clone();
            old["type"] = old["rope_type"].clone();
            old
        },
    );
    parameters["rope_theta"] = theta.into();
    map.insert("rope_theta".into(), theta.into());
    map.insert("rope_parameters".into(), parameters);
}
