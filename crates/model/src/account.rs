//! What a model costs: parameters, floating-point operations and memory, from its configuration alone.

use moeworks_plan::ModelShape;

use crate::config::ModelConfig;
use crate::shapes::shapes_by_name;
use crate::split::TensorSplit;
use crate::weights::is_of_experts;

/// Parameters of one kind of part, over all layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// What it is, such as `experts`.
    pub name: &'static str,
    /// Parameters in all.
    pub total: u64,
    /// Parameters that one token passes through.
    pub active: u64,
    /// Those of `active` that are in matrix products.
    pub in_products: u64,
}

/// The parameter count of a model by part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameters {
    /// The parts, in the order in which a token meets them; parts without parameters are left out.
    pub parts: Vec<Part>,
}

/// The name of the routed experts' part.
const EXPERTS: &str = "experts";
/// The name of the routers' part.
const ROUTERS: &str = "routers";

/// The parts, in the order in which a token meets them, and what belongs to each by its name inside a layer.
const PARTS: [(&str, &[&str]); 8] = [
    ("embedding", &["embed_"]),
    ("norms", &["norm"]),
    ("attention", &["_attn.", "relative_bias"]),
    (ROUTERS, &["mlp.gate."]),
    (EXPERTS, &["mlp.experts."]),
    ("shared experts", &["mlp.shared_expert"]),
    ("dense feed-forward", &["mlp."]),
    ("output projection", &["lm_head."]),
];

/// The part that a tensor belongs to: the first that knows its name.
fn part_of(name: &str) -> usize {
    PARTS.iter().position(|(_, names)| names.iter().any(|part| name.contains(part))).unwrap_or(PARTS.len() - 1)
}

/// Floating-point operations of one layer's router for a token: what it takes, and what scoring every expert would take.
#[must_use]
pub fn routing_flops_per_token(config: &ModelConfig) -> (u64, u64) {
    let moe = config.moe();
    let flops = |products: usize| 2 * (products * config.width) as u64;
    (flops(moe.router_products()), flops(moe.num_choosable()))
}

/// Whether a tensor is looked up in, not multiplied with.
fn is_table(name: &str) -> bool {
    name.contains("embed_") || name.contains("relative_bias")
}

/// The parameters of a tensor: in all, those that a token passes, and of these those in products.
fn counts(config: &ModelConfig, name: &str, shape: &[usize]) -> [u64; 3] {
    let total = shape.iter().map(|&dim| dim as u64).product::<u64>();
    let is_expert = name.contains("mlp.experts.");
    let active = if is_expert { total / config.num_experts.max(1) as u64 * config.top_k as u64 } else { total };
    // Biases of stacked experts have two dims, but multiply nothing.
    let is_matrix = shape.len() > 1 && !name.ends_with("bias") && !is_table(name);
    [total, active, if is_matrix { active } else { 0 }]
}

/// Counts what a token passes of routers that are not passed whole.
fn narrow_routers(config: &ModelConfig, parts: &mut [Part]) {
    let moe = config.moe();
    if moe.router.passes_all_weights() {
        return;
    }
    let moe_layers = (0..config.num_layers).filter(|&i| config.is_moe_layer(i)).count();
    let products = (moe_layers * moe.router_products() * config.width) as u64;
    for part in parts.iter_mut().filter(|part| part.name == ROUTERS && part.total > 0) {
        (part.active, part.in_products) = (products, products);
    }
}

impl Parameters {
    /// Counts the parameters of a model of `config`, whose `vocab_size` is set: those of every tensor that the model has.
    #[must_use]
    pub fn of(config: &ModelConfig) -> Self {
        let mut parts: Vec<Part> =
            PARTS.iter().map(|(name, _)| Part { name, total: 0, active: 0, in_products: 0 }).collect();
        for (name, shape) in shapes_by_name(config) {
            let [total, active, in_products] = counts(config, &name, &shape);
            let part = &mut parts[part_of(&name)];
            part.total += total;
            part.active += active;
            part.in_products += in_products;
        }
        narrow_routers(config, &mut parts);
        if config.tie_embeddings {
            // A tied projection computes but has no parameters of its own.
            parts[part_of("lm_head.weight")].in_products += config.vocab_size as u64 * config.width as u64;
        }
        Self { parts: parts.into_iter().filter(|part| part.total + part.in_products > 0).collect() }
    }

    /// Parameters in all.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.parts.iter().map(|part| part.total).sum()
    }

    /// Parameters of routed experts: in all, and those that a token passes through.
    #[must_use]
    pub fn experts(&self) -> [u64; 2] {
        let part = self.parts.iter().find(|part| part.name == EXPERTS);
        part.map_or([0, 0], |part| [part.total, part.active])
    }

    /// Parameters that one token passes through: all but the experts it is not sent to.
    #[must_use]
    pub fn active(&self) -> u64 {
        self.parts.iter().map(|part| part.active).sum()
    }

    /// Parameters in the matrix products of one token.
    #[must_use]
    pub fn in_products(&self) -> u64 {
        self.parts.iter().map(|part| part.in_products).sum()
    }
}

/// Floating-point operations of a forward pass for one token at the mean position of a sequence of `seq_len`: 2 for each
/// parameter in a product, and `s H (d_qk + d_v)` a layer for causal attention (Megatron's count, halved for causality).
#[must_use]
pub fn forward_flops_per_token(config: &ModelConfig, seq_len: usize) -> f64 {
    let elements = config.num_heads * (config.head_dim + config.value_dim());
    let attention = config.num_layers as f64 * seq_len as f64 * elements as f64;
    2.0 * Parameters::of(config).in_products() as f64 + attention
}

/// Floating-point operations of a training step for one token: three forward passes. Recomputation is not counted, so
/// that this over time is the model FLOPs utilisation.
#[must_use]
pub fn training_flops_per_token(config: &ModelConfig, seq_len: usize) -> f64 {
    3.0 * forward_flops_per_token(config, seq_len)
}

/// As [`training_flops_per_token`] of a model with an encoder, for one token of an answer of `answer_len` to a source of
/// `source_len`: those of the source are shared out among the answer's tokens.
#[must_use]
pub fn training_flops_per_answer_token(config: &ModelConfig, (source_len, answer_len): (usize, usize)) -> f64 {
    let (source, answer) = (source_len as f64, answer_len as f64);
    // Keys and values of the decoder's attention to the source are made of the source.
    let is_of_source = |name: &str| {
        name.starts_with("model.encoder.") || name.contains("cross_attn.k_proj") || name.contains("cross_attn.v_proj")
    };
    let tensors = shapes_by_name(config);
    let of_source = tensors.iter().filter(|(name, _)| is_of_source(name));
    let of_source: u64 = of_source.map(|(name, shape)| counts(config, name, shape)[2]).sum();
    let of_answer = Parameters::of(config).in_products() - of_source;
    let pairs = config.num_encoder_layers() as f64 * source * source
        + config.num_layers as f64 * answer * (answer / 2.0 + source);
    let elements = (config.num_heads * (config.head_dim + config.value_dim())) as f64;
    3.0 * 2.0 * (of_source as f64 * source + of_answer as f64 * answer + pairs * elements) / answer
}

/// Bytes of a training process by kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrainingMemory {
    /// f32 weights, and in bf16 precision their bf16 copy.
    pub weights_bytes: u64,
    /// Gradients: f32, [those of experts](Self::with_expert_gradients_in_bf16) possibly bf16.
    pub gradients_bytes: u64,
    /// The two f32 moments of AdamW.
    pub optimizer_bytes: u64,
    /// What forward keeps for backward, for one micro-batch. An estimate: buffers of single operations are not counted.
    pub activations_bytes: u64,
}

impl TrainingMemory {
    /// The memory of training with `tokens` tokens a micro-batch, with products in bf16 or f32, with or without
    /// activation checkpointing. With an encoder as many are read and written each.
    #[must_use]
    pub fn of(config: &ModelConfig, tokens: usize, is_bf16: bool, checkpoint_layers: bool) -> Self {
        let parameters = Parameters::of(config).total();
        let kept = |config: &ModelConfig| kept_bytes_per_token(config, is_bf16, checkpoint_layers);
        let kept = kept(config) + config.of_encoder().as_ref().map_or(0, kept);
        Self {
            weights_bytes: parameters * if is_bf16 { 6 } else { 4 },
            gradients_bytes: parameters * 4,
            optimizer_bytes: parameters * 8,
            activations_bytes: (kept * tokens) as u64,
        }
    }

    /// With gradients of routed experts in bf16 instead of f32.
    #[must_use]
    pub fn with_expert_gradients_in_bf16(self, config: &ModelConfig) -> Self {
        Self { gradients_bytes: self.gradients_bytes - 2 * Parameters::of(config).experts()[0], ..self }
    }

    /// The sum.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.weights_bytes + self.gradients_bytes + self.optimizer_bytes + self.activations_bytes
    }
}

/// What a stack of layers keeps of a token for backward.
fn kept_bytes_per_token(config: &ModelConfig, is_bf16: bool, checkpoint_layers: bool) -> usize {
    let product_bytes = if is_bf16 { 2 } else { 4 };
    let residual = 4 * config.width;
    let narrow = config.variant.latent.map_or(0, |latent| 2 * (latent.query_rank + latent.kv_rank));
    let heads = config.num_heads * config.head_dim + kv_elements(config) + narrow;
    let layer = |i: usize| {
        let hidden = if config.is_moe_layer(i) {
            config.moe().largest_top_k() * config.expert_width + config.shared_width
        } else {
            config.dense_width
        } * config.moe().activation.num_inputs();
        let inputs = 2 * config.width + config.num_heads * config.value_dim() + hidden;
        2 * residual + product_bytes * (inputs + heads)
    };
    let layers: Vec<usize> = (0..config.num_layers).map(layer).collect();
    match checkpoint_layers {
        true => config.num_layers * residual + layers.iter().max().copied().unwrap_or(0),
        false => layers.iter().sum(),
    }
}

/// What planning over ranks has to know of a model of `config`, whose vocabulary is set, on sequences of `seq_len`.
#[must_use]
pub fn shape(config: &ModelConfig, seq_len: usize, is_bf16: bool) -> ModelShape {
    let parameters = Parameters::of(config);
    let [experts, active_experts] = parameters.experts();
    let num_moe_layers = (0..config.num_layers).filter(|&i| config.is_moe_layer(i)).count();
    let whole = |split: TensorSplit| {
        let is_whole = |name: &str| !is_of_experts(name) && split.of(name).cut.is_none();
        let shapes = shapes_by_name(config).into_iter().filter(|(name, _)| is_whole(name));
        shapes.map(|(_, shape)| shape.iter().product::<usize>() as u64).sum()
    };
    ModelShape {
        whole_params: TensorSplit::new(config, (0, 1)).map_or(0, whole),
        outside_params: outside_params(config),
        max_tp: TensorSplit::most(config),
        width: config.width,
        num_layers: config.num_layers,
        num_moe_layers,
        num_experts: config.num_experts,
        top_k: config.top_k,
        expert_params: experts / (config.num_experts * num_moe_layers).max(1) as u64,
        dense_params: parameters.total() - experts,
        dense_flops: forward_flops_per_token(config, seq_len) - 2.0 * active_experts as f64,
        activation_bytes: TrainingMemory::of(config, 1, is_bf16, false).activations_bytes as f64,
    }
}

/// Parameters that belong to no layer.
fn outside_params(config: &ModelConfig) -> u64 {
    let outside = shapes_by_name(config).into_iter().filter(|(name, _)| !name.contains(".layers."));
    outside.map(|(_, shape)| shape.iter().product::<usize>() as u64).sum()
}

/// Bytes of what is kept of a sequence of `len` tokens from one step of decoding to the next, in f32: keys and values, of a
/// sliding window those alone that are seen, of latent attention the narrow vectors. Room for further tokens is not counted.
/// With an encoder it is a source as long that is kept as well.
#[must_use]
pub fn kv_cache_bytes(config: &ModelConfig, len: usize) -> u64 {
    let heads = kv_elements(config);
    let row = config.variant.latent.map_or(heads, |latent| latent.kv_rank + latent.rotary_dim);
    let tokens: usize = (0..config.num_layers).map(|i| config.window(i).map_or(len, |window| len.min(window))).sum();
    let of_source = if config.variant.encoder.is_some() { config.num_layers * len * heads } else { 0 };
    4 * (tokens * row + of_source) as u64
}

/// Elements of the keys and values of one token in one layer.
fn kv_elements(config: &ModelConfig) -> usize {
    config.num_kv_heads * (config.head_dim + config.value_dim())
}

#[cfg(test)]
#[path = "account_tests.rs"]
mod tests;
