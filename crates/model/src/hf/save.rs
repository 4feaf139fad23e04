//! Writing a model folder.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

use moeworks_tensor::{DType, Tensor};
use serde_json::{Value, json};

use super::config_json;
use super::error::SaveError;
use super::family::{Family, LayerNames, Matrix};
use crate::config::ModelConfig;
use crate::files::write_whole;
use crate::safetensors::{TensorBytes, write_shards};
use crate::tokenizer::Tokenizer;
use crate::weights::{DecoderWeights, FeedForwardWeights, LayerWeights};

/// What is written besides configuration and weights.
#[derive(Clone, Copy)]
pub struct SaveOptions<'a> {
    /// Written too, and asked for the id that ends a text.
    pub tokenizer: Option<&'a Tokenizer>,
    /// Weights of more bytes than this are written as several files with an index.
    pub max_shard_bytes: usize,
}

impl Default for SaveOptions<'_> {
    fn default() -> Self {
        Self { tokenizer: None, max_shard_bytes: 5_000_000_000 }
    }
}

/// What a folder was saved as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Saved {
    /// `model_type` in `config.json`.
    pub model_type: &'static str,
    /// Whether `transformers` loads it. If not, no family there computes what this model does.
    pub loads_in_transformers: bool,
}

/// Writes a model of `config` to the folder `dir`, which is made if need be. Each file is written beside its place, synced
/// and renamed. Tensors are written in the type they have, f32 or bf16.
pub fn save_model(
    dir: &Path,
    config: &ModelConfig,
    weights: &DecoderWeights,
    options: &SaveOptions<'_>,
) -> Result<Saved, SaveError> {
    let io = |path: &Path| {
        let path = path.to_owned();
        move |source: io::Error| SaveError::Io { path, source }
    };
    fs::create_dir_all(dir).map_err(io(dir))?;
    let family = Family::of(config);
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    write_shards(dir, &tensors(family, weights), &metadata, options.max_shard_bytes).map_err(io(dir))?;
    let dtype = if weights.compute_dtype() == DType::BF16 { "bfloat16" } else { "float32" };
    let eos_id = options.tokenizer.and_then(Tokenizer::eos_id);
    let generation = json!({"bos_token_id": eos_id, "eos_token_id": eos_id, "do_sample": true});
    for (name, json) in
        [("config.json", config_json::write(family, config, dtype, eos_id)), ("generation_config.json", generation)]
    {
        let path = dir.join(name);
        write_whole(&path, pretty(&json).as_bytes()).map_err(io(&path))?;
    }
    if let Some(tokenizer) = options.tokenizer {
        tokenizer.save(dir)?;
    }
    Ok(Saved { model_type: family.model_type, loads_in_transformers: family.is_known_to_transformers() })
}

fn pretty(json: &Value) -> String {
    format!("{json:#}\n")
}

/// Every tensor as it stands on disk; parts of stacked ones are borrowed.
fn tensors<'a>(family: &'static Family, weights: &'a DecoderWeights) -> Vec<TensorBytes<'a>> {
    let mut list = vec![whole("model.embed_tokens.weight".to_owned(), &weights.embedding)];
    for (i, layer) in weights.layers.iter().enumerate() {
        push_layer(&mut list, &LayerNames::new(family, i), layer);
    }
    list.push(whole("model.norm.weight".to_owned(), &weights.final_norm));
    list.extend(weights.head.as_ref().map(|head| whole("lm_head.weight".to_owned(), head)));
    list
}

fn push_layer<'a>(list: &mut Vec<TensorBytes<'a>>, names: &LayerNames, layer: &'a LayerWeights) {
    let a = &layer.attention;
    let common = [
        ("input_layernorm.weight", Some(&layer.attention_norm)),
        ("self_attn.q_proj.weight", Some(&a.q)),
        ("self_attn.k_proj.weight", Some(&a.k)),
        ("self_attn.v_proj.weight", Some(&a.v)),
        ("self_attn.o_proj.weight", Some(&a.o)),
        ("self_attn.q_norm.weight", a.q_norm.as_ref()),
        ("self_attn.k_norm.weight", a.k_norm.as_ref()),
        ("post_attention_layernorm.weight", Some(&layer.feed_forward_norm)),
    ];
    list.extend(common.into_iter().filter_map(|(name, tensor)| Some(whole(names.common(name), tensor?))));
    match &layer.feed_forward {
        FeedForwardWeights::Dense(dense) => {
            push_feed_forward(list, (&dense.gate_up, &dense.down), 1, |_, matrix| names.dense(matrix));
        }
        FeedForwardWeights::Moe(moe) => {
            list.push(whole(names.router(), &moe.router));
            let states = moe.state.iter();
            list.extend(states.map(|state| whole(names.common(&format!("mlp.gate.{}", state.name)), &state.tensor)));
            let num_experts = moe.router.rows();
            push_feed_forward(list, (&moe.gate_up, &moe.down), num_experts, |e, matrix| names.expert(e, matrix));
            if let Some(shared) = &moe.shared {
                push_feed_forward(list, (&shared.gate_up, &shared.down), 1, |_, matrix| names.shared(matrix));
            }
        }
    }
}

/// The matrices of `count` feed-forwards stacked in `gate_up` `[count, A F, D]` and `down` `[count, D, F]`.
fn push_feed_forward<'a>(
    list: &mut Vec<TensorBytes<'a>>,
    (gate_up, down): (&'a Tensor, &'a Tensor),
    count: usize,
    name: impl Fn(usize, Matrix) -> String,
) {
    let (width, hidden) = (gate_up.cols(), down.cols());
    let is_gated = gate_up.rows() == 2 * hidden * count;
    let per_expert = if is_gated { 2 } else { 1 };
    for e in 0..count {
        let mut add = |matrix, tensor: &'a Tensor, part: usize, shape: [usize; 2]| {
            let bytes = shape[0] * shape[1] * tensor.dtype().size();
            let bytes = &tensor.bytes()[part * bytes..(part + 1) * bytes];
            list.push(TensorBytes {
                name: name(e, matrix),
                dtype: tensor.dtype().into(),
                shape: shape.to_vec(),
                bytes,
            });
        };
        if is_gated {
            add(Matrix::Gate, gate_up, 2 * e, [hidden, width]);
        }
        add(Matrix::Up, gate_up, per_expert * e + per_expert - 1, [hidden, width]);
        add(Matrix::Down, down, e, [width, hidden]);
    }
}

fn whole(name: String, tensor: &Tensor) -> TensorBytes<'_> {
    TensorBytes { name, dtype: tensor.dtype().into(), shape: tensor.shape().to_vec(), bytes: tensor.bytes() }
}
