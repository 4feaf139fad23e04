//! Reading a model folder.
//!
//! Every tensor's presence and shape is checked against the configuration before memory is taken for it, so that what is
//! allocated is never more than the files hold.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use moeworks_moe::{MoeWeights, NamedTensor, SharedWeights};
use moeworks_ops::{Context, elementwise};
use moeworks_tensor::{DType, Tensor};
use serde_json::Value;

use super::config_json::{self, Fault};
use super::error::LoadError;
use super::family::{Family, LayerNames, Matrix};
use crate::config::{ModelConfig, QkNorm};
use crate::safetensors::{FileDType, ModelFiles, SafetensorsError};
use crate::weights::{AttentionWeights, DecoderWeights, DenseWeights, FeedForwardWeights, LayerWeights};

/// The largest `config.json` that is read, in bytes.
const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// The configuration and the weights of the model folder `dir`. Matrices keep their type, f32 or bf16 (f16 becomes f32);
/// norm weights and routers become f32. Matrices that need no joining are lent from the mapped file and cannot be written
/// to: for training make a [`DecoderWeights::compute_copy`].
pub fn load_model(ctx: &Context, dir: &Path) -> Result<(ModelConfig, DecoderWeights), LoadError> {
    let (family, config) = read_config(&dir.join("config.json"))?;
    let files = ModelFiles::open(dir)?;
    let loader = Loader { ctx, files: &files, used: RefCell::default() };
    let weights = loader.decoder(family, &config)?;
    let used = loader.used.into_inner();
    for name in files.names() {
        let is_harmless = name.ends_with("rotary_emb.inv_freq") || (config.tie_embeddings && name == "lm_head.weight");
        if !used.contains(name) && !is_harmless {
            let (path, tensor) = (dir.to_owned(), name.to_owned());
            return Err(LoadError::UnexpectedTensor { path, tensor, model_type: family.model_type });
        }
    }
    Ok((config, weights))
}

fn read_config(path: &Path) -> Result<(&'static Family, ModelConfig), LoadError> {
    let io = |source| LoadError::Io { path: path.to_owned(), source };
    let bad = |reason: String| LoadError::Config { path: path.to_owned(), reason };
    let metadata = fs::metadata(path).map_err(io)?;
    if !metadata.is_file() || metadata.len() > MAX_CONFIG_BYTES {
        return Err(bad(format!("not a file of at most {MAX_CONFIG_BYTES} bytes")));
    }
    let text = fs::read_to_string(path).map_err(io)?;
    let json: Value = serde_json::from_str(&text).map_err(|error| bad(error.to_string()))?;
    let (family, config) = config_json::read(&json).map_err(|fault| match fault {
        Fault::UnknownFamily(model_type) => LoadError::UnknownFamily { path: path.to_owned(), model_type },
        Fault::Other(reason) => bad(reason),
    })?;
    config.validate().map_err(|source| LoadError::Setting { path: path.to_owned(), source })?;
    if config.vocab_size == 0 {
        return Err(bad("vocab_size = 0: must be at least 1".to_owned()));
    }
    Ok((family, config))
}

struct Loader<'a> {
    ctx: &'a Context,
    files: &'a ModelFiles,
    /// Tensors that have found their place.
    used: RefCell<BTreeSet<String>>,
}

/// The sizes of stacked feed-forwards: how many, F, D, and whether there is a gate.
#[derive(Clone, Copy)]
struct Stack {
    count: usize,
    hidden: usize,
    width: usize,
    is_gated: bool,
}

impl Loader<'_> {
    fn decoder(&self, family: &'static Family, config: &ModelConfig) -> Result<DecoderWeights, LoadError> {
        let (v, d) = (config.vocab_size, config.width);
        let embedding = self.matrix("model.embed_tokens.weight", &[v, d])?;
        let head = if config.tie_embeddings { None } else { Some(self.matrix("lm_head.weight", &[v, d])?) };
        let final_norm = self.exact("model.norm.weight", &[d])?;
        let layers = (0..config.num_layers).map(|i| self.layer(family, config, i)).collect::<Result<_, _>>()?;
        Ok(DecoderWeights { embedding, layers, final_norm, head })
    }

    fn layer(&self, family: &'static Family, config: &ModelConfig, i: usize) -> Result<LayerWeights, LoadError> {
        let names = LayerNames::new(family, i);
        let (d, h) = (config.width, config.head_dim);
        let (q_width, kv_width) = (config.num_heads * h, config.num_kv_heads * h);
        let norm_widths = match config.qk_norm {
            QkNorm::None => None,
            QkNorm::Head => Some((h, h)),
            QkNorm::Whole => Some((q_width, kv_width)),
        };
        let norm = |name, width: Option<usize>| width.map(|w| self.exact(&names.common(name), &[w])).transpose();
        Ok(LayerWeights {
            attention_norm: self.exact(&names.common("input_layernorm.weight"), &[d])?,
            attention: AttentionWeights {
                q: self.matrix(&names.common("self_attn.q_proj.weight"), &[q_width, d])?,
                k: self.matrix(&names.common("self_attn.k_proj.weight"), &[kv_width, d])?,
                v: self.matrix(&names.common("self_attn.v_proj.weight"), &[kv_width, d])?,
                o: self.matrix(&names.common("self_attn.o_proj.weight"), &[d, q_width])?,
                q_norm: norm("self_attn.q_norm.weight", norm_widths.map(|w| w.0))?,
                k_norm: norm("self_attn.k_norm.weight", norm_widths.map(|w| w.1))?,
            },
            feed_forward_norm: self.exact(&names.common("post_attention_layernorm.weight"), &[d])?,
            feed_forward: self.feed_forward(&names, config, config.is_moe_layer(i))?,
        })
    }

    fn feed_forward(
        &self,
        names: &LayerNames,
        config: &ModelConfig,
        is_moe: bool,
    ) -> Result<FeedForwardWeights, LoadError> {
        let is_gated = config.moe().activation.num_inputs() == 2;
        let stack = |count, hidden| Stack { count, hidden, width: config.width, is_gated };
        if !is_moe {
            let (gate_up, down) = self.stacked(stack(1, config.dense_width), |_, matrix| names.dense(matrix))?;
            return Ok(FeedForwardWeights::Dense(DenseWeights { gate_up, down }));
        }
        let (e, d) = (config.num_experts, config.width);
        // In the layout with stacked experts every family calls its router as most do.
        let router = match names.router() {
            name if self.files.find(&name).is_some() => name,
            _ => names.common("mlp.gate.weight"),
        };
        let router = self.exact(&router, &[e, d])?;
        let experts = stack(e, config.expert_width);
        let stacked_names = (names.common("mlp.experts.gate_up_proj"), names.common("mlp.experts.down_proj"));
        let (gate_up, down) = if self.files.find(&stacked_names.0).is_some() {
            let gate_up = self.matrix(&stacked_names.0, &[e, experts.gate_up_rows(), d])?;
            (gate_up, self.matrix(&stacked_names.1, &[e, d, experts.hidden])?)
        } else {
            self.stacked(experts, |expert, matrix| names.expert(expert, matrix))?
        };
        let named = |(name, shape): (&'static str, Vec<usize>)| {
            Ok(NamedTensor { name, tensor: self.exact(&names.common(&format!("mlp.gate.{name}")), &shape)? })
        };
        let state = config.router.state_shapes(e).into_iter().map(named).collect::<Result<_, LoadError>>()?;
        let shared = if config.shared_width > 0 {
            let sizes = stack(1, config.shared_width);
            let (gate_up, down) = self.stacked(sizes, |_, matrix| names.shared(matrix))?;
            let (rows, hidden) = (sizes.gate_up_rows(), sizes.hidden);
            Some(SharedWeights { gate_up: gate_up.reshaped(&[rows, d]), down: down.reshaped(&[d, hidden]) })
        } else {
            None
        };
        Ok(FeedForwardWeights::Moe(MoeWeights { router, gate_up, down, shared, state }))
    }

    /// Separate matrices, joined to `[count, A F, D]` and `[count, D, F]`.
    fn stacked(&self, stack: Stack, name: impl Fn(usize, Matrix) -> String) -> Result<(Tensor, Tensor), LoadError> {
        let Stack { count, hidden, width, is_gated } = stack;
        let inputs: &[Matrix] = if is_gated { &[Matrix::Gate, Matrix::Up] } else { &[Matrix::Up] };
        let inputs_len = inputs.len();
        let gate_up_name = |part: usize| name(part / inputs_len, inputs[part % inputs_len]);
        let gate_up = self.joined(count * inputs_len, gate_up_name, [hidden, width])?;
        let down = self.joined(count, |e| name(e, Matrix::Down), [width, hidden])?;
        Ok((gate_up.reshaped(&[count, inputs_len * hidden, width]), down))
    }

    /// `count` tensors, each of shape `part`, one behind the other: `[count, part]`.
    fn joined(&self, count: usize, name: impl Fn(usize) -> String, part: [usize; 2]) -> Result<Tensor, LoadError> {
        let mut dtype = DType::BF16;
        for i in 0..count {
            if self.check(&name(i), &part)? != FileDType::BF16 {
                dtype = DType::F32;
            }
        }
        let mut tensor = self.ctx.empty(&[count, part[0], part[1]], dtype);
        let len = part[0] * part[1];
        for i in 0..count {
            let (name, range) = (name(i), i * len..(i + 1) * len);
            let (file, _) = self.files.get(&name)?;
            match dtype {
                DType::BF16 => file.read_bf16(&name, &mut tensor.bf16s_mut()[range])?,
                _ => file.read_f32(&name, &mut tensor.f32s_mut()[range])?,
            }
        }
        Ok(tensor)
    }

    /// A tensor of products, in the type it has.
    fn matrix(&self, name: &str, shape: &[usize]) -> Result<Tensor, LoadError> {
        self.check(name, shape)?;
        Ok(self.files.get(name)?.0.tensor(self.ctx, name)?)
    }

    /// A norm weight or router, as f32 with memory of its own.
    fn exact(&self, name: &str, shape: &[usize]) -> Result<Tensor, LoadError> {
        let tensor = self.matrix(name, shape)?;
        Ok(elementwise::cast(self.ctx, &tensor, DType::F32))
    }

    /// The type of a tensor that must be there, of this shape and of a type that weights can have.
    fn check(&self, name: &str, shape: &[usize]) -> Result<FileDType, LoadError> {
        let (file, info) = self.files.get(name)?;
        let path = || file.path().to_owned();
        if info.shape != shape {
            let (found, expected) = (info.shape.clone(), shape.to_vec());
            return Err(LoadError::WrongShape { path: path(), tensor: name.to_owned(), found, expected });
        }
        if !matches!(info.dtype, FileDType::F32 | FileDType::BF16 | FileDType::F16) {
            let (tensor, dtype) = (name.to_owned(), info.dtype);
            return Err(SafetensorsError::UnsupportedDType { path: path(), tensor, dtype }.into());
        }
        self.used.borrow_mut().insert(name.to_owned());
        Ok(info.dtype)
    }
}

impl Stack {
    fn gate_up_rows(self) -> usize {
        if self.is_gated { 2 * self.hidden } else { self.hidden }
    }
}
