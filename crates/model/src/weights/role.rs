//! The role of a tensor in a model, and the name that follows from it.

/// The role of a tensor in a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightRole {
    /// The embedding of tokens, which is also the output projection if they are tied.
    Embedding,
    /// Learned positions.
    Positions,
    /// The relative position bias, added to attention scores.
    RelativeBias,
    /// The norm before attention.
    AttentionNorm,
    /// Its bias.
    AttentionNormBias,
    /// The projection to queries; in latent attention, if there is no down-projection of queries.
    Q,
    /// Its bias.
    QBias,
    /// The projection to keys.
    K,
    /// Its bias.
    KBias,
    /// The projection to values.
    V,
    /// Its bias.
    VBias,
    /// The norm of queries.
    QNorm,
    /// The norm of keys.
    KNorm,
    /// The down-projection of queries in latent attention.
    QDown,
    /// Its bias.
    QDownBias,
    /// The norm of the down-projected queries.
    QDownNorm,
    /// The up-projection of queries in latent attention.
    QUp,
    /// The down-projection of keys and values in latent attention, with the projection to the rotated part of keys.
    KvDown,
    /// Its bias.
    KvDownBias,
    /// The norm of the down-projected keys and values.
    KvDownNorm,
    /// The up-projection of keys and values in latent attention.
    KvUp,
    /// Attention's output projection.
    O,
    /// Its bias.
    OBias,
    /// The attention sinks: one logit per head.
    Sinks,
    /// The norm before cross-attention.
    CrossNorm,
    /// Its bias.
    CrossNormBias,
    /// The queries of cross-attention.
    CrossQ,
    /// The keys of cross-attention.
    CrossK,
    /// The values of cross-attention.
    CrossV,
    /// The output projection of cross-attention.
    CrossO,
    /// The norm before the feed-forward.
    FeedForwardNorm,
    /// Its bias.
    FeedForwardNormBias,
    /// A dense feed-forward's gate and up projections, stacked.
    DenseGateUp,
    /// A dense feed-forward's down projection.
    DenseDown,
    /// The bias of gate and up.
    DenseGateUpBias,
    /// The bias of down.
    DenseDownBias,
    /// The router's matrix.
    Router,
    /// The bias of the router's logits.
    RouterBias,
    /// A weight of certain routing schemes, under the scheme's name for it.
    RouterExtra(&'static str),
    /// The routed experts' gate and up projections, stacked.
    ExpertGateUp,
    /// The routed experts' down projections.
    ExpertDown,
    /// The biases of gate and up.
    ExpertGateUpBias,
    /// The biases of down.
    ExpertDownBias,
    /// The shared experts' gate and up projections, stacked.
    SharedGateUp,
    /// The shared experts' down projection.
    SharedDown,
    /// The gate of the shared experts' output.
    SharedGate,
    /// The norm after the last layer.
    FinalNorm,
    /// Its bias.
    FinalNormBias,
    /// The output projection.
    Head,
    /// The bias of the logits.
    HeadBias,
    /// A linear map without a role of its own, in models that are no decoders.
    Linear,
    /// The bias of such a map.
    LinearBias,
}

/// The stack and the layer that a tensor belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightPlace {
    /// Outside the layers.
    Model,
    /// Outside the layers, the decoder's own where an encoder has one as well.
    Decoder,
    /// Outside the encoder's layers.
    Encoder,
    /// A layer of the decoder.
    Layer(usize),
    /// A layer of the encoder.
    EncoderLayer(usize),
}

impl WeightPlace {
    /// Returns the number of the decoder's layer; none elsewhere.
    #[must_use]
    pub fn layer(self) -> Option<usize> {
        match self {
            Self::Layer(layer) => Some(layer),
            _ => None,
        }
    }
}

/// A group of tensors whose parameters are counted together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WeightGroup {
    /// Embeddings of tokens and positions.
    Embedding,
    /// Norms.
    Norms,
    /// Attention, without its norms.
    Attention,
    /// Routers.
    Routers,
    /// Routed experts.
    Experts,
    /// Shared experts and their gate.
    SharedExperts,
    /// Dense feed-forwards.
    Dense,
    /// The output projection.
    Head,
}

impl WeightGroup {
    /// All groups, in the order in which tokens pass them.
    pub const ALL: [Self; 8] = [
        Self::Embedding,
        Self::Norms,
        Self::Attention,
        Self::Routers,
        Self::Experts,
        Self::SharedExperts,
        Self::Dense,
        Self::Head,
    ];

    /// Returns the group's name in tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Embedding => "embedding",
            Self::Norms => "norms",
            Self::Attention => "attention",
            Self::Routers => "routers",
            Self::Experts => "experts",
            Self::SharedExperts => "shared experts",
            Self::Dense => "dense feed-forward",
            Self::Head => "output projection",
        }
    }
}

impl WeightRole {
    /// Returns the name within a layer or, outside of layers, without the prefix of the stack.
    fn local_name(self) -> &'static str {
        match self {
            Self::Embedding => "embed_tokens.weight",
            Self::Positions => "embed_positions.weight",
            Self::RelativeBias => "relative_bias.weight",
            Self::AttentionNorm => "input_layernorm.weight",
            Self::AttentionNormBias => "input_layernorm.bias",
            Self::Q => "self_attn.q_proj.weight",
            Self::QBias => "self_attn.q_proj.bias",
            Self::K => "self_attn.k_proj.weight",
            Self::KBias => "self_attn.k_proj.bias",
            Self::V => "self_attn.v_proj.weight",
            Self::VBias => "self_attn.v_proj.bias",
            Self::QNorm => "self_attn.q_norm.weight",
            Self::KNorm => "self_attn.k_norm.weight",
            Self::QDown => "self_attn.q_a_proj.weight",
            Self::QDownBias => "self_attn.q_a_proj.bias",
            Self::QDownNorm => "self_attn.q_a_layernorm.weight",
            Self::QUp => "self_attn.q_b_proj.weight",
            Self::KvDown => "self_attn.kv_a_proj_with_mqa.weight",
            Self::KvDownBias => "self_attn.kv_a_proj_with_mqa.bias",
            Self::KvDownNorm => "self_attn.kv_a_layernorm.weight",
            Self::KvUp => "self_attn.kv_b_proj.weight",
            Self::O => "self_attn.o_proj.weight",
            Self::OBias => "self_attn.o_proj.bias",
            Self::Sinks => "self_attn.sinks",
            Self::CrossNorm => "cross_attn_norm.weight",
            Self::CrossNormBias => "cross_attn_norm.bias",
            Self::CrossQ => "cross_attn.q_proj.weight",
            Self::CrossK => "cross_attn.k_proj.weight",
            Self::CrossV => "cross_attn.v_proj.weight",
            Self::CrossO => "cross_attn.o_proj.weight",
            Self::FeedForwardNorm => "post_attention_layernorm.weight",
            Self::FeedForwardNormBias => "post_attention_layernorm.bias",
            Self::DenseGateUp => "mlp.gate_up_proj",
            Self::DenseDown => "mlp.down_proj",
            Self::DenseGateUpBias => "mlp.gate_up_proj_bias",
            Self::DenseDownBias => "mlp.down_proj_bias",
            Self::Router => "mlp.gate.weight",
            Self::RouterBias => "mlp.gate.bias",
            Self::RouterExtra(name) => name,
            Self::ExpertGateUp => "mlp.experts.gate_up_proj",
            Self::ExpertDown => "mlp.experts.down_proj",
            Self::ExpertGateUpBias => "mlp.experts.gate_up_proj_bias",
            Self::ExpertDownBias => "mlp.experts.down_proj_bias",
            Self::SharedGateUp => "mlp.shared_experts.gate_up_proj",
            Self::SharedDown => "mlp.shared_experts.down_proj",
            Self::SharedGate => "mlp.shared_expert_gate.weight",
            Self::FinalNorm => "norm.weight",
            Self::FinalNormBias => "norm.bias",
            Self::Head => "lm_head.weight",
            Self::HeadBias => "lm_head.bias",
            Self::Linear => "linear.weight",
            Self::LinearBias => "linear.bias",
        }
    }

    /// Returns the full name of the tensor at `place`: the name of `transformers` in memory, if there is one.
    #[must_use]
    pub fn name(self, place: WeightPlace) -> String {
        if matches!(self, Self::Head | Self::HeadBias) {
            return self.local_name().to_owned();
        }
        let local = self.local_name();
        let router = if matches!(self, Self::RouterExtra(_)) { "mlp.gate." } else { "" };
        match place {
            WeightPlace::Model => format!("model.{local}"),
            WeightPlace::Decoder => format!("model.decoder.{local}"),
            WeightPlace::Encoder => format!("model.encoder.{local}"),
            WeightPlace::Layer(i) => format!("model.layers.{i}.{router}{local}"),
            WeightPlace::EncoderLayer(i) => format!("model.encoder.layers.{i}.{router}{local}"),
        }
    }

    /// Returns true for operands of matrix products and the embedding, which are bf16 in mixed precision. Norms,
    /// biases, sinks and routers are always f32.
    #[must_use]
    pub fn is_product(self) -> bool {
        use WeightRole::{
            CrossK, CrossO, CrossQ, CrossV, DenseDown, DenseGateUp, Embedding, ExpertDown, ExpertGateUp, Head, K,
            KvDown, KvUp, Linear, O, Q, QDown, QUp, SharedDown, SharedGateUp, V,
        };
        matches!(
            self,
            Embedding
                | Head
                | Q
                | K
                | V
                | O
                | QDown
                | QUp
                | KvDown
                | KvUp
                | CrossQ
                | CrossK
                | CrossV
                | CrossO
                | DenseGateUp
                | DenseDown
                | ExpertGateUp
                | ExpertDown
                | SharedGateUp
                | SharedDown
                | Linear
        )
    }

    /// Returns true for tensors of routed experts, whose first dim is E.
    #[must_use]
    pub fn is_of_experts(self) -> bool {
        self.group() == WeightGroup::Experts
    }

    /// Returns true for tables that are only looked up, never multiplied with.
    #[must_use]
    pub fn is_lookup(self) -> bool {
        matches!(self, Self::Embedding | Self::Positions | Self::RelativeBias)
    }

    /// Returns true for biases.
    #[must_use]
    pub fn is_bias(self) -> bool {
        use WeightRole::{
            AttentionNormBias, CrossNormBias, DenseDownBias, DenseGateUpBias, ExpertDownBias, ExpertGateUpBias,
            FeedForwardNormBias, FinalNormBias, HeadBias, KBias, KvDownBias, LinearBias, OBias, QBias, QDownBias,
            RouterBias, VBias,
        };
        matches!(
            self,
            AttentionNormBias
                | CrossNormBias
                | DenseDownBias
                | DenseGateUpBias
                | ExpertDownBias
                | ExpertGateUpBias
                | FeedForwardNormBias
                | FinalNormBias
                | HeadBias
                | KBias
                | KvDownBias
                | LinearBias
                | OBias
                | QBias
                | QDownBias
                | RouterBias
                | VBias
        )
    }

    /// Returns true for the weight of a norm.
    #[must_use]
    pub fn is_norm(self) -> bool {
        self.group() == WeightGroup::Norms && !self.is_bias()
    }

    /// Returns true for projections whose output is added to the residual stream.
    #[must_use]
    pub fn writes_to_residual(self) -> bool {
        matches!(self, Self::O | Self::CrossO | Self::DenseDown | Self::ExpertDown | Self::SharedDown)
    }

    /// Returns the group that counts its parameters.
    #[must_use]
    pub fn group(self) -> WeightGroup {
        match self {
            Self::Embedding | Self::Positions => WeightGroup::Embedding,
            Self::AttentionNorm
            | Self::AttentionNormBias
            | Self::QNorm
            | Self::KNorm
            | Self::QDownNorm
            | Self::KvDownNorm
            | Self::CrossNorm
            | Self::CrossNormBias
            | Self::FeedForwardNorm
            | Self::FeedForwardNormBias
            | Self::FinalNorm
            | Self::FinalNormBias => WeightGroup::Norms,
            Self::RelativeBias
            | Self::Q
            | Self::QBias
            | Self::K
            | Self::KBias
            | Self::V
            | Self::VBias
            | Self::QDown
            | Self::QDownBias
            | Self::QUp
            | Self::KvDown
            | Self::KvDownBias
            | Self::KvUp
            | Self::O
            | Self::OBias
            | Self::Sinks
            | Self::CrossQ
            | Self::CrossK
            | Self::CrossV
            | Self::CrossO => WeightGroup::Attention,
            Self::Router | Self::RouterBias | Self::RouterExtra(_) => WeightGroup::Routers,
            Self::ExpertGateUp | Self::ExpertDown | Self::ExpertGateUpBias | Self::ExpertDownBias => {
                WeightGroup::Experts
            }
            Self::SharedGateUp | Self::SharedDown | Self::SharedGate => WeightGroup::SharedExperts,
            Self::DenseGateUp | Self::DenseDown | Self::DenseGateUpBias | Self::DenseDownBias => WeightGroup::Dense,
            Self::Linear | Self::LinearBias => WeightGroup::Dense,
            Self::Head | Self::HeadBias => WeightGroup::Head,
        }
    }
}
