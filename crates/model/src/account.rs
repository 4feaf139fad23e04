//! What a model costs: parameters, floating-point operations and memory, from its configuration alone.

use moeworks_plan::{Layout, ModelShape, Precision, RankMemory, Workload, rank_memory};

use crate::config::ModelConfig;
use crate::split::TensorSplit;
use crate::weights::{WeightGroup, WeightPlace, WeightRole, WeightSpec, WeightTable};

/// Parameters of one kind of part, over all layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The group of weights.
    pub group: WeightGroup,
    /// Its name, such as `experts`.
    pub name: &'static str,
    /// Parameters in all.
    pub total: u64,
    /// Trained parameters.
    pub trainable: u64,
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

/// Floating-point operations of one layer's router for a token: what it takes, and what scoring every expert would take.
#[must_use]
pub fn routing_flops_per_token(config: &ModelConfig) -> (u64, u64) {
    let moe = config.moe();
    let flops = |products: usize| 2 * (products * config.width) as u64;
    (flops(moe.router_products()), flops(moe.num_choosable()))
}

/// Parameters of a tensor that a token passes, and of these those in products.
fn active(config: &ModelConfig, spec: &WeightSpec) -> [u64; 2] {
    let active = spec.active_elements(config.num_experts, config.top_k);
    [active, if spec.is_multiplied() { active } else { 0 }]
}

/// Counts what a token passes of routers that are not passed whole.
fn narrow_routers(config: &ModelConfig, parts: &mut [Part]) {
    let moe = config.moe();
    if moe.router.passes_all_weights() {
        return;
    }
    let moe_layers = (0..config.num_layers).filter(|&i| config.is_moe_layer(i)).count();
    let products = (moe_layers * moe.router_products() * config.width) as u64;
    for part in parts.iter_mut().filter(|part| part.group == WeightGroup::Routers && part.total > 0) {
        (part.active, part.in_products) = (products, products);
    }
}

impl Parameters {
    /// Counts the parameters of a model of `config`, whose `vocab_size` is set: those of every tensor that the model has.
    #[must_use]
    pub fn of(config: &ModelConfig) -> Self {
        Self::of_table(config, &WeightTable::new(config))
    }

    /// Counts as [`of`](Self::of) does, from the table of the model's weights, of which some may be frozen.
    #[must_use]
    pub fn of_table(config: &ModelConfig, table: &WeightTable) -> Self {
        let mut parts = WeightGroup::ALL.map(|group| Part {
            group,
            name: group.name(),
            total: 0,
            trainable: 0,
            active: 0,
            in_products: 0,
        });
        for spec in table.specs() {
            let total = spec.num_elements() as u64;
            let [active, in_products] = active(config, spec);
            let part = &mut parts[spec.role.group() as usize];
            part.total += total;
            part.trainable += if spec.is_trainable { total } else { 0 };
            part.active += active;
            part.in_products += in_products;
        }
        narrow_routers(config, &mut parts);
        if config.tie_embeddings {
            // A tied projection computes but has no parameters of its own.
            parts[WeightGroup::Head as usize].in_products += config.vocab_size as u64 * config.width as u64;
        }
        Self { parts: parts.into_iter().filter(|part| part.total + part.in_products > 0).collect() }
    }

    /// Parameters in all.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.parts.iter().map(|part| part.total).sum()
    }

    /// Parameters that are trained.
    #[must_use]
    pub fn trainable(&self) -> u64 {
        self.parts.iter().map(|part| part.trainable).sum()
    }

    /// Parameters of a group that are trained.
    #[must_use]
    pub fn trainable_of(&self, group: WeightGroup) -> u64 {
        self.parts.iter().filter(|part| part.group == group).map(|part| part.trainable).sum()
    }

    /// Parameters of routed experts: in all, and those that a token passes through.
    #[must_use]
    pub fn experts(&self) -> [u64; 2] {
        let part = self.parts.iter().find(|part| part.group == WeightGroup::Experts);
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
    let is_of_source = |spec: &&WeightSpec| {
        matches!(spec.place, WeightPlace::Encoder | WeightPlace::EncoderLayer(_))
            || matches!(spec.role, WeightRole::CrossK | WeightRole::CrossV)
    };
    let table = WeightTable::new(config);
    let of_source: u64 = table.specs().iter().filter(is_of_source).map(|spec| active(config, spec)[1]).sum();
    let of_answer = Parameters::of(config).in_products() - of_source;
    let pairs = config.num_encoder_layers() as f64 * source * source
        + config.num_layers as f64 * answer * (answer / 2.0 + source);
    let elements = (config.num_heads * (config.head_dim + config.value_dim())) as f64;
    3.0 * 2.0 * (of_source as f64 * source + of_answer as f64 * answer + pairs * elements) / answer
}

/// The memory of a training step on one rank: weights, gradients, optimizer state, and what forward keeps for backward. The last is an
/// estimate: buffers of single operations are not counted. With an encoder as many tokens are read as are written.
#[must_use]
pub fn memory_on_one_rank(
    config: &ModelConfig,
    table: &WeightTable,
    workload: &Workload,
    checkpoint_layers: bool,
) -> RankMemory {
    let kept = Kept { precision: workload.precision, checkpoint_layers };
    rank_memory(&shape(config, table, 1, kept), workload, &Layout::new(1, 1, 1))
}

/// Settings of training that decide what is kept of a token for backward.
#[derive(Clone, Copy, Debug)]
pub struct Kept {
    /// Number format of the products.
    pub precision: Precision,
    /// Whether layers keep only their input and compute the rest again.
    pub checkpoint_layers: bool,
}

/// Bytes that a stack of layers keeps of a token for backward.
fn kept_bytes_per_token(config: &ModelConfig, kept: Kept) -> usize {
    let product_bytes = kept.precision.bytes();
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
    match kept.checkpoint_layers {
        true => config.num_layers * residual + layers.iter().max().copied().unwrap_or(0),
        false => layers.iter().sum(),
    }
}

/// The sizes that planning over ranks needs of a model of `config`, whose vocabulary is set, with the weights of `table`, on sequences of
/// `seq_len`.
#[must_use]
pub fn shape(config: &ModelConfig, table: &WeightTable, seq_len: usize, kept: Kept) -> ModelShape {
    let parameters = Parameters::of_table(config, table);
    let [experts, active_experts] = parameters.experts();
    let [trained_experts, dense] = [parameters.trainable_of(WeightGroup::Experts), parameters.total() - experts];
    let share = |trained: u64, all: u64| if all == 0 { 1.0 } else { trained as f64 / all as f64 };
    let num_moe_layers = config.moe_layers().len();
    let kept_bytes = |config: &ModelConfig| kept_bytes_per_token(config, kept);
    let params = |specs: &mut dyn Iterator<Item = &WeightSpec>| specs.map(|spec| spec.num_elements() as u64).sum();
    let is_whole = |spec: &&WeightSpec| spec.shard.dim().is_none();
    let is_outside = |spec: &&WeightSpec| !matches!(spec.place, WeightPlace::Layer(_) | WeightPlace::EncoderLayer(_));
    ModelShape {
        whole_params: params(&mut table.specs().iter().filter(is_whole)),
        outside_params: params(&mut table.specs().iter().filter(is_outside)),
        max_tp: TensorSplit::most(config, table),
        width: config.width,
        num_layers: config.num_layers,
        num_moe_layers,
        num_experts: config.num_experts,
        top_k: config.top_k,
        expert_params: experts / (config.num_experts * num_moe_layers).max(1) as u64,
        dense_params: dense,
        trained_dense: share(parameters.trainable() - trained_experts, dense),
        trained_experts: share(trained_experts, experts),
        dense_flops: forward_flops_per_token(config, seq_len) - 2.0 * active_experts as f64,
        activation_bytes: (kept_bytes(config) + config.of_encoder().as_ref().map_or(0, kept_bytes)) as f64,
    }
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
