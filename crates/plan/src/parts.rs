//! The parts of a model that costs of training and serving depend on.

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
}

impl ModelParts {
    /// Returns the parameters of the embedding and of the output projection.
    #[must_use]
    pub fn outside_params(&self) -> f64 {
        self.head_params() * if self.is_tied { 1.0 } else { 2.0 }
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

    /// Returns the operations of causal attention of one layer for a token at the mean position of a sequence, forward.
    #[must_use]
    pub fn score_flops(&self, seq_len: f64) -> f64 {
        seq_len * (self.query_elements + self.value_elements)
    }

    /// Returns the operations of a training step for a token: those of three forward passes, the attention's halved
    /// for causality, recomputation not counted.
    #[must_use]
    pub fn training_flops(&self, seq_len: usize) -> f64 {
        let layers = (self.num_layers + self.num_mtp_layers) as f64;
        6.0 * self.active_params(true) + 3.0 * layers * self.score_flops(seq_len as f64)
    }
}
