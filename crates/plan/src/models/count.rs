//! Parameters, operations and activations of the layers of a described model.
//!
//! Operations follow the Megatron-Core report (2603.07685) and the programs of this project: 2 for each parameter in
//! a product and token, and `2 H (d_qk + d_v)` for each token that one attends to, of which a causal model has half.

use super::{Attention, LayerGroup, Model};
use crate::cost::passes::{LAYER_PASSES, ROTARY_PASSES, ROW_PASSES};
use crate::{ModelShape, Precision};

/// The parameters and costs of one layer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LayerCost {
    /// Parameters outside routed experts.
    pub dense_params: u64,
    /// The part of them that tensor parallelism replicates: norms, router, shared expert.
    pub whole_params: u64,
    /// Parameters of one routed expert; 0 in a layer without experts.
    pub expert_params: u64,
    /// The number of routed experts.
    pub num_experts: usize,
    /// The number of experts a token.
    pub top_k: usize,
    /// Operations of a forward pass for a token of the sequence in products with weights, without routed experts.
    pub dense_flops: f64,
    /// Operations of a forward pass between queries, keys and values.
    pub attention_flops: f64,
    /// Operations of a forward pass in routed experts.
    pub expert_flops: f64,
    /// Bytes that a token of the sequence keeps for backward.
    pub activation_bytes: f64,
    /// Numbers of a token of the sequence that a forward passes over between products, but for rows sorted by expert.
    pub passed: f64,
    /// Numbers of a token of the sequence in inputs and outputs of products.
    pub operands: f64,
    /// Numbers of a token's keys and values, as attention reads them.
    pub key_values: f64,
    /// The width of the residual stream.
    pub width: usize,
    /// The tokens of the layer for each token of the sequence.
    pub token_share: f64,
}

impl LayerCost {
    /// Returns the number of parameters with all experts.
    #[must_use]
    pub fn params(&self) -> u64 {
        self.dense_params + self.expert_params * self.num_experts as u64
    }

    /// Returns the operations of a forward pass for a token of the sequence.
    #[must_use]
    pub fn forward_flops(&self) -> f64 {
        self.dense_flops + self.attention_flops + self.expert_flops
    }
}

/// The weights of an attention: those in products, biases and norms.
struct AttentionSizes {
    products: usize,
    biases: usize,
    norms: usize,
    /// The width of a query and of a value, of all heads together.
    score_width: usize,
    /// Numbers that a token keeps for backward.
    kept: usize,
    /// Numbers of a token's queries, keys and values.
    query_key_value: usize,
    /// Numbers of a token's keys and values.
    key_value: usize,
    kv_heads: usize,
}

impl Attention {
    fn sizes(&self, width: usize) -> AttentionSizes {
        match *self {
            Self::Heads { heads, kv_heads, head_dim } => {
                let (query, kv) = (heads * head_dim, kv_heads * head_dim);
                AttentionSizes {
                    products: 2 * width * query + 2 * width * kv,
                    biases: query + 2 * kv + width,
                    norms: 0,
                    score_width: 2 * query,
                    kept: 2 * query + 2 * kv,
                    query_key_value: query + 2 * kv,
                    key_value: 2 * kv,
                    kv_heads,
                }
            }
            Self::Latent { heads, query_rank, kv_rank, nope_dim, rotary_dim, value_dim } => {
                let head = nope_dim + rotary_dim;
                let queries = width * query_rank + query_rank * heads * head;
                let keys = width * (kv_rank + rotary_dim) + kv_rank * heads * (nope_dim + value_dim);
                AttentionSizes {
                    products: queries + keys + heads * value_dim * width,
                    biases: 0,
                    norms: query_rank + kv_rank,
                    score_width: heads * (head + value_dim),
                    kept: 2 * heads * (head + value_dim) + 2 * (query_rank + kv_rank),
                    query_key_value: heads * (2 * head + value_dim),
                    key_value: heads * (head + value_dim),
                    kv_heads: heads,
                }
            }
        }
    }
}

impl LayerGroup {
    /// Returns whether the layer at `index` of the group has experts.
    #[must_use]
    pub fn has_experts(&self, index: usize) -> bool {
        self.experts.is_some() && (index + 1).is_multiple_of(self.expert_every)
    }

    /// Returns the parameters of a feed-forward of `hidden` units.
    fn feed_forward(&self, width: usize, hidden: usize) -> u64 {
        let matrices = if self.is_gated { 3 } else { 2 };
        let biases = if self.has_biases && hidden > 0 { (matrices - 1) * hidden + width } else { 0 };
        (matrices * width * hidden + biases) as u64
    }

    fn cost(&self, index: usize, model: &Model, precision: Precision) -> LayerCost {
        let width = self.width.unwrap_or(model.width);
        let attention = self.attention.map(|attention| attention.sizes(width));
        let num_attentions = if self.has_cross_attention { 2 } else { 1 };
        let (mut in_products, mut others, mut whole) = (0, 2 * width, 2 * width);
        let (mut score_width, mut kept, mut rotated, mut key_value) = (0, 0, 0, 0);
        if let Some(sizes) = &attention {
            in_products += num_attentions * sizes.products;
            others += num_attentions * (if self.has_biases { sizes.biases } else { 0 } + sizes.norms);
            whole += num_attentions * sizes.norms;
            score_width = num_attentions * sizes.score_width;
            kept = num_attentions * sizes.kept;
            rotated = num_attentions * sizes.query_key_value;
            key_value = num_attentions * sizes.key_value;
        }
        let experts = if self.has_experts(index) { self.experts } else { None };
        let hidden = experts.map_or(self.dense_width, |of| of.shared_width);
        let beside = self.feed_forward(width, hidden);
        let router = experts.map_or(0, |of| width * of.num);
        let context = self.window.unwrap_or(model.sequence) as f64 * if model.is_causal { 0.5 } else { 1.0 };
        let expert_params = experts.map_or(0, |of| self.feed_forward(width, of.width));
        let top_k = experts.map_or(0, |of| of.top_k);
        let rows = experts.map_or(self.dense_width, |of| of.top_k * of.width + of.shared_width);
        let routed = experts.map_or(0, |of| of.top_k * (ROW_PASSES as usize) * width);
        let hidden_passes = if self.is_gated { 3 } else { 2 } * rows;
        let passed = LAYER_PASSES as usize * width + ROTARY_PASSES as usize * rotated + hidden_passes + routed;
        let operands = (4 + 2 * top_k) * width + rotated + score_width / 2 + hidden_passes;
        let inputs = 2 * width + rows * if self.is_gated { 2 } else { 1 } + kept;
        LayerCost {
            dense_params: (in_products + others + router) as u64 + beside,
            whole_params: (whole + router) as u64 + if experts.is_some() { beside } else { 0 },
            expert_params,
            num_experts: experts.map_or(0, |of| of.num),
            top_k,
            dense_flops: self.token_share * 2.0 * ((in_products + router) as f64 + beside as f64),
            attention_flops: self.token_share * 2.0 * score_width as f64 * context,
            expert_flops: self.token_share * 2.0 * expert_params as f64 * top_k as f64,
            activation_bytes: self.token_share * (2 * 4 * width + precision.bytes() * inputs) as f64,
            passed: self.token_share * passed as f64,
            operands: self.token_share * operands as f64,
            key_values: self.token_share * key_value as f64,
            width,
            token_share: self.token_share,
        }
    }
}

impl Model {
    /// Returns the costs of each layer, first to last, without those that predict further tokens.
    #[must_use]
    pub fn layers(&self, precision: Precision) -> Vec<LayerCost> {
        let of_group = |group: &LayerGroup| -> Vec<LayerCost> {
            (0..group.num).map(|index| group.cost(index, self, precision)).collect()
        };
        self.groups.iter().flat_map(of_group).collect()
    }

    /// Returns the cost of a layer that predicts further tokens, if there are any: one of the last kind, with a
    /// projection of two widths to one and two norms. The head is not counted.
    #[must_use]
    pub fn mtp_layer(&self, precision: Precision) -> Option<LayerCost> {
        let last = self.groups.last().filter(|_| self.mtp_layers > 0)?;
        let mut cost = last.cost(last.num - 1, self, precision);
        let projection = 2 * self.width * self.width;
        cost.dense_params += (projection + 3 * self.width) as u64;
        cost.whole_params += (projection + 3 * self.width) as u64;
        cost.dense_flops += 2.0 * projection as f64;
        Some(cost)
    }

    /// Returns the parameters of the embedding (without a tied head), the head, the last norm and others.
    #[must_use]
    pub fn outside_params(&self) -> u64 {
        let matrices = usize::from(self.has_embedding) + usize::from(!self.is_tied || !self.has_embedding);
        (matrices * self.vocabulary * self.width + self.width) as u64 + self.other_params
    }

    /// Returns the operations of a forward pass for a token of the sequence in the head.
    #[must_use]
    pub fn head_flops(&self) -> f64 {
        2.0 * (self.vocabulary * self.width) as f64
    }

    /// Returns the number of parameters. Layers that predict further tokens are not counted.
    #[must_use]
    pub fn params(&self) -> u64 {
        self.outside_params() + self.layers(Precision::Bf16).iter().map(LayerCost::params).sum::<u64>()
    }

    /// Returns the number of parameters that a token uses, with its experts and without the embedding.
    #[must_use]
    pub fn active_params(&self) -> u64 {
        let layer = |cost: &LayerCost| cost.dense_params + cost.expert_params * cost.top_k as u64;
        let layers: u64 = self.layers(Precision::Bf16).iter().map(layer).sum();
        layers + (self.vocabulary * self.width) as u64
    }

    /// Returns the floating-point operations of a forward pass for a token of the sequence, with layers that predict
    /// further tokens.
    #[must_use]
    pub fn forward_flops(&self) -> f64 {
        let layers: f64 = self.layers(Precision::Bf16).iter().map(LayerCost::forward_flops).sum();
        let mtp = self.mtp_layer(Precision::Bf16).map_or(0.0, |layer| layer.forward_flops() + self.head_flops());
        let per_sequence = if self.has_embedding { 1.0 } else { 1.0 / self.sequence as f64 };
        layers + self.head_flops() * per_sequence + mtp * self.mtp_layers as f64
    }

    /// Returns the floating-point operations of training for a token of the sequence: those of three forward passes.
    #[must_use]
    pub fn training_flops(&self) -> f64 {
        3.0 * self.forward_flops()
    }

    /// Returns the sizes that costs depend on, with layers that predict further tokens. Experts of unlike layers
    /// count as their average.
    #[must_use]
    pub fn shape(&self, precision: Precision) -> ModelShape {
        let mut layers = self.layers(precision);
        layers.extend(self.mtp_layer(precision).map_or_else(Vec::new, |layer| vec![layer; self.mtp_layers]));
        let with_experts: Vec<&LayerCost> = layers.iter().filter(|layer| layer.num_experts > 0).collect();
        let num_moe_layers = with_experts.len();
        let all_experts: u64 = with_experts.iter().map(|layer| layer.expert_params * layer.num_experts as u64).sum();
        let num_experts = with_experts.iter().map(|layer| layer.num_experts).max().unwrap_or(0);
        let top_k = with_experts.iter().map(|layer| layer.top_k).max().unwrap_or(0);
        let sum = |of: &dyn Fn(&LayerCost) -> u64| layers.iter().map(of).sum::<u64>();
        let heads = self.groups.iter().filter_map(|group| group.attention);
        let mut shape = ModelShape {
            width: with_experts.first().map_or(self.width, |layer| layer.width),
            num_layers: layers.len(),
            num_moe_layers,
            num_experts,
            top_k,
            expert_params: all_experts / (num_experts * num_moe_layers).max(1) as u64,
            dense_params: sum(&|layer| layer.dense_params) + self.outside_params(),
            whole_params: sum(&|layer| layer.whole_params) + self.width as u64,
            outside_params: self.outside_params(),
            max_tp: heads.map(|attention| attention.sizes(self.width).kv_heads).min().unwrap_or(1),
            trained_dense: 1.0,
            trained_experts: 1.0,
            dense_flops: 0.0,
            activation_bytes: layers.iter().map(|layer| layer.activation_bytes).sum(),
        };
        // Experts of unlike layers differ from their average: what is left counts as outside them.
        shape.dense_flops = self.forward_flops() - shape.expert_flops();
        shape
    }
}
