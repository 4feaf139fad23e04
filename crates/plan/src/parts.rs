//! The parts of a model that costs of training and serving depend on.

use crate::Model;
use crate::models::{Attention, LayerGroup};

/// The sizes of a model, part by part. Numbers of parameters are those of one layer or of one expert.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelParts {
    /// The name, for tables.
    pub name: String,
    /// D, the width.
    pub width: usize,
    /// L, the number of layers.
    pub num_layers: usize,
    /// The number of layers with experts.
    pub num_moe_layers: usize,
    /// E, the number of routed experts of each.
    pub num_experts: usize,
    /// K, the number of experts a token.
    pub top_k: usize,
    /// The most units (nodes) that the experts of a token lie in, where routing is limited.
    pub max_units: Option<usize>,
    /// The width of an expert.
    pub expert_width: usize,
    /// Parameters of one expert.
    pub expert_params: f64,
    /// Parameters of the shared experts of a layer.
    pub shared_params: f64,
    /// Parameters of the router of a layer.
    pub router_params: f64,
    /// Parameters of the feed-forward of a layer without experts.
    pub dense_params: f64,
    /// Parameters of the attention of a layer.
    pub attention_params: f64,
    /// Parameters of the projections of a layer that latent attention widens its narrow vectors with; 0 in others.
    pub up_projection_params: f64,
    /// Elements of a token's narrow vectors in latent attention; 0 in others.
    pub latent_elements: f64,
    /// Parameters of the norms of a layer.
    pub norm_params: f64,
    /// Elements of a token's queries in a layer: heads times their width.
    pub query_elements: f64,
    /// Elements of the attention's output in a layer, before its projection.
    pub value_elements: f64,
    /// Elements of a token's keys and values in a layer, as attention reads them.
    pub key_value_elements: f64,
    /// Elements of a token that decoding keeps in a layer: keys and values, or the latent vector.
    pub cache_elements: f64,
    /// The number of inputs of the activation: 2 with a gate, otherwise 1.
    pub activation_inputs: usize,
    /// V, the vocabulary.
    pub vocabulary: usize,
    /// True if embedding and output projection are one matrix.
    pub is_tied: bool,
    /// The largest tensor-parallel size.
    pub max_tp: usize,
    /// The number of further layers with experts that predict tokens after the next one, each with an output
    /// projection and a product of 2 D by D before it. They are no part of the model that is served.
    pub num_mtp_layers: usize,
    /// Parameters outside the layers besides embedding and output projection.
    pub other_params: f64,
    /// The tokens that a layer computes for each token of the sequence, on average: 1 in a language model.
    pub token_share: f64,
    /// The most tokens that a token attends to, where there is a limit.
    pub window: Option<usize>,
    /// True if a token attends to those before it alone, half of them on average.
    pub is_causal: bool,
}

impl ModelParts {
    /// Returns the parameters of the embedding and of the output projection.
    #[must_use]
    pub fn outside_params(&self) -> f64 {
        self.head_params() * if self.is_tied { 1.0 } else { 2.0 } + self.other_params
    }

    /// Returns the parameters of the output projection.
    #[must_use]
    pub fn head_params(&self) -> f64 {
        (self.vocabulary * self.width) as f64
    }

    /// Returns the parameters outside routed experts of all layers.
    #[must_use]
    pub fn layer_params(&self) -> f64 {
        let (layers, moe) = (self.num_layers as f64, self.num_moe_layers as f64);
        layers * (self.attention_params + self.norm_params)
            + (layers - moe) * self.dense_params
            + moe * (self.shared_params + self.router_params)
    }

    /// Returns the parameters of all routed experts.
    #[must_use]
    pub fn routed_params(&self) -> f64 {
        self.num_moe_layers as f64 * self.num_experts as f64 * self.expert_params
    }

    /// Returns the number of parameters, without layers that predict further tokens.
    #[must_use]
    pub fn params(&self) -> f64 {
        self.layer_params() + self.routed_params() + self.outside_params() + self.width as f64
    }

    /// Returns the parameters that one token is multiplied with, and those of further predictions if `with_mtp`.
    #[must_use]
    pub fn active_params(&self, with_mtp: bool) -> f64 {
        let moe = self.shared_params + self.router_params + self.top_k as f64 * self.expert_params;
        let layers = self.layer_params() - self.num_layers as f64 * self.norm_params;
        let experts = self.num_moe_layers as f64 * self.top_k as f64 * self.expert_params;
        let mtp = if with_mtp { self.num_mtp_layers as f64 } else { 0.0 };
        let each = self.attention_params + moe + self.head_params() + 2.0 * (self.width * self.width) as f64;
        layers + experts + self.head_params() + mtp * each
    }

    /// Returns the operations of causal attention of one layer for a token at the mean position of a sequence,
    /// forward.
    #[must_use]
    pub fn score_flops(&self, seq_len: f64) -> f64 {
        let context = self.window.map_or(seq_len, |window| seq_len.min(window as f64));
        context * if self.is_causal { 1.0 } else { 2.0 } * (self.query_elements + self.value_elements)
    }

    /// Returns the operations of a training step for a token: those of three forward passes, the attention's halved
    /// for causality, recomputation not counted.
    #[must_use]
    pub fn training_flops(&self, seq_len: usize) -> f64 {
        let layers = (self.num_layers + self.num_mtp_layers) as f64;
        self.token_share * (6.0 * self.active_params(true) + 3.0 * layers * self.score_flops(seq_len as f64))
    }
}

/// Elements of a token in one attention.
#[derive(Clone, Copy, Debug, Default)]
struct AttentionParts {
    params: f64,
    norms: f64,
    query: f64,
    value: f64,
    key_value: f64,
    cache: f64,
    up_projections: f64,
    latent: f64,
    max_tp: usize,
}

impl AttentionParts {
    fn new(attention: Option<Attention>, width: usize) -> Self {
        match attention {
            None => Self::default(),
            Some(Attention::Heads { heads, kv_heads, head_dim }) => {
                let (query, kv) = ((heads * head_dim) as f64, (kv_heads * head_dim) as f64);
                Self {
                    params: 2.0 * width as f64 * (query + kv),
                    norms: 0.0,
                    query,
                    value: query,
                    key_value: 2.0 * kv,
                    cache: 2.0 * kv,
                    up_projections: 0.0,
                    latent: 0.0,
                    max_tp: kv_heads,
                }
            }
            Some(Attention::Latent { heads, query_rank, kv_rank, nope_dim, rotary_dim, value_dim }) => {
                let (width, num) = (width as f64, heads as f64);
                let (query, value) = (num * (nope_dim + rotary_dim) as f64, num * value_dim as f64);
                let queries = query_rank as f64 * (width + query);
                let narrow = (kv_rank + rotary_dim) as f64;
                let keys = kv_rank as f64 * (num * nope_dim as f64 + value);
                Self {
                    params: queries + width * narrow + keys + value * width,
                    norms: (query_rank + kv_rank) as f64,
                    query,
                    value,
                    key_value: query + value,
                    cache: narrow,
                    up_projections: query_rank as f64 * query + keys,
                    latent: query_rank as f64 + narrow,
                    max_tp: heads,
                }
            }
        }
    }
}

/// Returns the greatest common divisor.
fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Sums over the layers of a model.
#[derive(Default)]
struct Sums {
    layers: f64,
    moe: f64,
    max_tp: usize,
    values: [f64; 12],
}

impl Sums {
    fn add(&mut self, model: &Model, group: &LayerGroup) {
        let width = group.width.unwrap_or(model.width);
        let attention = AttentionParts::new(group.attention, width);
        let twice = if group.has_cross_attention { 2.0 } else { 1.0 };
        let matrices = if group.is_gated { 3.0 } else { 2.0 } * width as f64;
        let num = group.num as f64;
        let moe = (0..group.num).filter(|&index| group.has_experts(index)).count() as f64;
        let experts = group.experts.filter(|_| moe > 0.0);
        self.layers += num;
        self.moe += moe;
        if group.attention.is_some() {
            self.max_tp = gcd(self.max_tp, attention.max_tp);
        }
        let added = [
            num * twice * attention.params,
            num * (twice * attention.norms + 2.0 * width as f64),
            num * twice * attention.query,
            num * twice * attention.value,
            num * twice * attention.key_value,
            num * twice * attention.cache,
            num * twice * attention.up_projections,
            num * twice * attention.latent,
            (num - moe) * matrices * group.dense_width as f64,
            moe * matrices * experts.map_or(0.0, |of| of.shared_width as f64),
            moe * width as f64 * experts.map_or(0.0, |of| of.num as f64),
            moe * matrices * experts.map_or(0.0, |of| of.width as f64),
        ];
        self.values.iter_mut().zip(added).for_each(|(sum, value)| *sum += value);
    }
}

impl From<&Model> for ModelParts {
    /// Takes unlike layers as so many of their average.
    fn from(model: &Model) -> Self {
        let mut sums = Sums::default();
        model.groups.iter().for_each(|group| sums.add(model, group));
        let [attention, norms, query, value, key_value, cache, widening, latent, dense, shared, router, expert] =
            sums.values;
        let (layers, moe) = (sums.layers.max(1.0), sums.moe.max(1.0));
        let experts = model.groups.iter().filter_map(|group| group.experts);
        let is_gated = model.groups.iter().all(|group| group.is_gated);
        let matrices = if is_gated { 3.0 } else { 2.0 };
        let mut parts = Self {
            name: model.name.clone(),
            width: model.width,
            num_layers: sums.layers as usize,
            num_moe_layers: sums.moe as usize,
            num_experts: experts.clone().map(|of| of.num).max().unwrap_or(0),
            top_k: experts.map(|of| of.top_k).max().unwrap_or(0),
            max_units: None,
            expert_width: (expert / moe / matrices / model.width as f64).round() as usize,
            expert_params: expert / moe,
            shared_params: shared / moe,
            router_params: router / moe,
            dense_params: dense / (layers - sums.moe).max(1.0),
            attention_params: attention / layers,
            up_projection_params: widening / layers,
            latent_elements: latent / layers,
            norm_params: norms / layers,
            query_elements: query / layers,
            value_elements: value / layers,
            key_value_elements: key_value / layers,
            cache_elements: cache / layers,
            activation_inputs: if is_gated { 2 } else { 1 },
            vocabulary: model.vocabulary,
            is_tied: model.is_tied || !model.has_embedding,
            max_tp: sums.max_tp.max(1),
            num_mtp_layers: model.mtp_layers,
            other_params: model.other_params as f64,
            token_share: 1.0,
            window: model.groups.iter().map(|group| group.window).max().flatten(),
            is_causal: model.is_causal,
        };
        let share = model.training_flops() / parts.training_flops(model.sequence);
        // Biases make a difference of less than this; unlike layers more.
        parts.token_share = if (share - 1.0).abs() < 2e-3 { 1.0 } else { share };
        parts
    }
}
