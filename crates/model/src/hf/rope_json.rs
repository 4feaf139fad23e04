//! The rotary embedding in `config.json`: `rope_parameters` of version 5, `rope_theta` and `rope_scaling` of version 4.

use serde_json::{Map, Value, json};

use super::keys::{Keys, abridged};
use crate::config::{ModelConfig, RopeScaling};

/// Reads base and scaling. No family rotates a part of a head: `transformers` does not look at `partial_rotary_factor` where
/// nothing is scaled, and fails otherwise.
pub(super) fn read(keys: &Keys<'_>, default_theta: f64, config: &mut ModelConfig) -> Result<(), String> {
    let new: Map<String, Value> = keys.optional(&["rope_parameters"])?.unwrap_or_default();
    let old: Map<String, Value> = keys.optional(&["rope_scaling"])?.unwrap_or_default();
    let theta = Keys::new(&new).optional(&["rope_theta"])?;
    config.rope_theta = theta.or(keys.optional(&["rope_theta"])?).unwrap_or(default_theta);
    let (name, map) =
        if is_scaled(&new) || !is_scaled(&old) { ("rope_parameters", new) } else { ("rope_scaling", old) };
    let inner = Keys::new(&map);
    let scaling = scaling(keys, &inner, config).map_err(|reason| format!("{name}: {reason}"))?;
    let part: Option<f64> = inner.optional(&["partial_rotary_factor"])?.or(keys.optional(&["partial_rotary_factor"])?);
    if let Some(part) = part.filter(|&part| part != 1.0 && scaling != RopeScaling::None) {
        return Err(format!("{name}: partial_rotary_factor = {part}: must be 1 where the rotary embedding is scaled"));
    }
    config.variant.rotary.scaling = scaling;
    Ok(())
}

fn is_scaled(map: &Map<String, Value>) -> bool {
    kind_of(map).is_some_and(|kind| kind != "default")
}

fn kind_of(map: &Map<String, Value>) -> Option<&str> {
    ["rope_type", "type"].iter().find_map(|key| map.get(*key)?.as_str())
}

fn scaling(keys: &Keys<'_>, inner: &Keys<'_>, config: &ModelConfig) -> Result<RopeScaling, String> {
    let kind: Value = inner.optional(&["rope_type", "type"])?.unwrap_or_else(|| "default".into());
    let factor = || inner.required::<f64>(&["factor"]);
    let original_len = || -> Result<usize, String> {
        let key = ["original_max_position_embeddings"];
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
            // Of so many digits that it comes back from a file as it was.
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

/// Writes base, scaling and the part of a head that is rotated, in the keys of both versions.
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
            // What families with one amplitude call it.
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
