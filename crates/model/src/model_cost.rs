//! The cost of a model from its configuration alone: parameters, floating-point operations and memory.

use moeworks_plan::{Layout, ModelShape, Precision, RankMemory, Workload, rank_memory};

use crate::config::ModelConfig;
use crate::split::TensorSplit;
use crate::weights::{WeightGroup, WeightPlace, WeightRole, WeightSpec, WeightTable};

/// The number of parameters of one group of weights, over all layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The group of weights.
    pub group: WeightGroup,
    /// The group's name, such as `experts`.
    pub name: &'static str,
    /// The number of parameters.
    pub total: u64,
    /// The number of trained parameters.
    pub trainable: u64,
    /// The number of parameters that one token uses.
    pub active: u64,
    /// The part of `active` that is multiplied with.
    pub in_products: u64,
}

/// The number of parameters of a model by group of weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameters {
    /// The groups in the order in which tokens pass them; groups without parameters are left out.
    pub parts: Vec<Part>,
}

/// Returns the floating-point operations of one layer's router per token: those of the scheme, and those of scoring
/// every expert.
#[must_use]
pub fn routing_flops_per_token(config: &ModelConfig) -> (u64, u64) {
    let moe = config.moe();
    let flops = |products: usize| 2 * (products * config.width) as u64;
    (flops(moe.router_products()), flops(moe.num_choosable()))
}

/// Returns the number of parameters of a tensor that a token uses, and the part that is multiplied with.
fn active(config: &ModelConfig, spec: &WeightSpec) -> [u64; 2] {
    let active = spec.active_elements(config.num_experts, config.top_k);
    [active, if spec.is_multiplied() { active } else { 0 }]
}

/// Corrects the counts of routers that use only some of their weights per token.
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
    /// Counts the parameters of a model of `config`, whose `vocab_size` must be set.
    #[must_use]
    pub fn new(config: &ModelConfig) -> Self {
        Self::from_table(config, &WeightTable::new(config))
    }

    /// Counts the parameters of a table of weights, some of which may be frozen.
    #[must_use]
    pub fn from_table(config: &ModelConfig, table: &WeightTable) -> Self {
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
            // A tied projection computes, but has no parameters of its own.
            parts[WeightGroup::Head as usize].in_products += config.vocab_size as u64 * config.width as u64;
        }
        Self { parts: parts.into_iter().filter(|part| part.total + part.in_products > 0).collect() }
    }

    /// Returns the number of parameters.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.parts.iter().map(|part| part.total).sum()
    }

    /// Returns the number of trained parameters.
    #[must_use]
    pub fn trainable(&self) -> u64 {
        self.parts.iter().map(|part| part.trainable).sum()
    }

    /// Returns the number of trained parameters of a group.
    #[must_use]
    pub fn trainable_of(&self, group: WeightGroup) -> u64 {
        self.parts.iter().filter(|part| part.group == group).map(|part| part.trainable).sum()
    }

    /// Returns the number of parameters of routed experts, and of those that a token uses.
    #[must_use]
    pub fn experts(&self) -> [u64; 2] {
        let part = self.parts.iter().find(|part| part.group == WeightGroup::Experts);
        part.map_or([0, 0], |part| [part.total, part.active])
    }

    /// Returns the number of parameters that one token uses: all but those of experts that it is not routed to.
    #[must_use]
    pub fn active(&self) -> u64 {
        self.parts.iter().map(|part| part.active).sum()
    }

    /// Returns the number of parameters that one token is multiplied with.
    #[must_use]
    pub fn in_products(&self) -> u64 {
        self.parts.iter().map(|part| part.in_products).sum()
    }
}

/// Returns the floating-point operations of a forward pass per token at the mean position of a sequence of `seq_len`:
/// 2 per multiplied parameter, and `s H (d_qk + d_v)` per layer for causal attention (Megatron's count, halved for
/// causality).
#[must_use]
pub fn forward_flops_per_token(config: &ModelConfig, seq_len: usize) -> f64 {
    let elements = config.num_heads * (config.head_dim + config.value_dim());
    let attention = config.num_layers as f64 * seq_len as f64 * elements as f64;
    2.0 * Parameters::new(config).in_products() as f64 + attention
}

/// Floating-point operations of a forward pass for one token, by the parts that a pipeline shares out.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerFlops {
    /// The operations of each layer.
    pub layers: Vec<f64>,
    /// The operations of the output projection.
    pub head: f64,
}

/// The operations of each layer of a model of `config` with the weights of `table`, counted as
/// [`forward_flops_per_token`] does.
#[must_use]
pub fn layer_flops(config: &ModelConfig, table: &WeightTable, seq_len: usize) -> LayerFlops {
    let attention = seq_len as f64 * (config.num_heads * (config.head_dim + config.value_dim())) as f64;
    let mut layers = vec![attention; config.num_layers];
    for spec in table.specs() {
        if let Some(layer) = spec.place.layer().and_then(|layer| layers.get_mut(layer)) {
            *layer += 2.0 * active(config, spec)[1] as f64;
        }
    }
    LayerFlops { layers, head: 2.0 * (config.vocab_size * config.width) as f64 }
}

/// Returns the floating-point operations of a training step per token: three forward passes. Recomputation is not
/// counted, so that this over time is the model FLOPs utilisation.
#[must_use]
pub fn training_flops_per_token(config: &ModelConfig, seq_len: usize) -> f64 {
    3.0 * forward_flops_per_token(config, seq_len)
}

/// Returns the floating-point operations of a training step per token of an answer of `answer_len` to a source of
/// `source_len`, in a model with an encoder. Those of the source are spread over the answer's tokens.
#[must_use]
pub fn training_flops_per_answer_token(config: &ModelConfig, source_len: usize, answer_len: usize) -> f64 {
    let (source, answer) = (source_len as f64, answer_len as f64);
    // Cross-attention computes its keys and values from the source.
    let is_of_source = |spec: &&WeightSpec| {
        matches!(spec.place, WeightPlace::Encoder | WeightPlace::EncoderLayer(_))
            || matches!(spec.role, WeightRole::CrossK | WeightRole::CrossV)
    };
    let table = WeightTable::new(config);
    let of_source: u64 = table.specs().iter().filter(is_of_source).map(|spec| active(config, spec)[1]).sum();
    let of_answer = Parameters::new(config).in_products() - of_source;
    let pairs = config.num_encoder_layers() as f64 * source * source
        + config.num_layers as f64 * answer * (answer / 2.0 + source);
    let elements = (config.num_heads * (config.head_dim + config.value_dim())) as f64;
    3.0 * 2.0 * (of_source as f64 * source + of_answer as f64 * answer + pairs * elements) / answer
}

/// Returns the memory of a training step on one rank: weights, gradients, optimizer state, and activations kept for
/// backward. The last is an estimate that leaves out temporary buffers of single operations. With an encoder, sources
/// and answers are taken to be of equal length.
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

/// The settings of training that decide which activations are kept for backward.
#[derive(Clone, Copy, Debug)]
pub struct Kept {
    /// The number format of products.
    pub precision: Precision,
    /// Keeps only the inputs of layers and recomputes the rest.
    pub checkpoint_layers: bool,
}

/// Returns the bytes that a stack of layers keeps per token for backward.
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

/// Returns the sizes that planning over ranks needs: of a model of `config`, whose `vocab_size` must be set, with the
/// weights of `table`, on sequences of `seq_len`.
#[must_use]
pub fn shape(config: &ModelConfig, table: &WeightTable, seq_len: usize, kept: Kept) -> ModelShape {
    let parameters = Parameters::from_table(config, table);
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

/// Returns the bytes that decoding keeps of a sequence of `len` tokens, in f32: keys and values (only those in sight
/// of a sliding window), or the latent vectors of latent attention. Spare capacity is not counted. With an encoder,
/// the keys and values of a source of the same length are included.
#[must_use]
pub fn kv_cache_bytes(config: &ModelConfig, len: usize) -> u64 {
    let heads = kv_elements(config);
    let row = config.variant.latent.map_or(heads, |latent| latent.kv_rank + latent.rotary_dim);
    let tokens: usize = (0..config.num_layers).map(|i| config.window(i).map_or(len, |window| len.min(window))).sum();
    let of_source = if config.variant.encoder.is_some() { config.num_layers * len * heads } else { 0 };
    4 * (tokens * row + of_source) as u64
}

/// Returns the number of elements of a token's keys and values in one layer.
fn kv_elements(config: &ModelConfig) -> usize {
    config.num_kv_heads * (config.head_dim + config.value_dim())
}

#[cfg(test)]
#[path = "model_cost_tests.rs"]
mod tests;
