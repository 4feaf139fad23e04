//! The table of a model's weights, made once from its configuration. Everything that needs names, shapes, sharding,
//! initial values or counts reads it.
//!
//! Shape letters as in [`structs`](super::structs).

use std::ops::Range;

use moeworks_moe::{Init as ExtraInit, MoeConfig, WeightShape};

use super::role::{WeightGroup, WeightPlace, WeightRole};
use super::spec::{Init, Shard, WeightSpec};
use crate::config::{ModelConfig, NormKind, PositionKind, QkNorm};

/// The first stream of random numbers for the weights of routing schemes; each layer has 16.
const FIRST_EXTRA_STREAM: u64 = 1 << 32;

/// The weights of a model in the order of computation, which is always the same for a configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightTable {
    specs: Vec<WeightSpec>,
    /// The range of tensors of each layer of the decoder.
    layers: Vec<Range<usize>>,
    is_tied: bool,
}

impl WeightTable {
    /// Lists the weights of a model of `config`, all trainable, with the default sharding of tensor and expert
    /// parallelism.
    #[must_use]
    pub fn new(config: &ModelConfig) -> Self {
        let mut lister = Lister { config, specs: Vec::new(), place: WeightPlace::Model, num_layers: config.num_layers };
        lister.decoder();
        Self { is_tied: config.tie_embeddings, ..Self::from_specs(lister.specs) }
    }

    /// Makes a table of entries in order; layers are consecutive, from 0.
    pub(super) fn from_specs(specs: Vec<WeightSpec>) -> Self {
        let in_layers = specs.chunk_by(|a, b| a.place == b.place).filter(|specs| is_in_layer(&specs[0]));
        let layers = in_layers.map(|specs| specs[0].index..specs[0].index + specs.len()).collect();
        Self { specs, layers, is_tied: false }
    }

    /// Returns the weights in order.
    #[must_use]
    pub fn specs(&self) -> &[WeightSpec] {
        &self.specs
    }

    pub(super) fn specs_mut(&mut self) -> &mut [WeightSpec] {
        &mut self.specs
    }

    /// Returns the number of layers of the decoder, or of another model.
    #[must_use]
    pub fn num_layers(&self) -> usize {
        self.layers.len()
    }

    /// Returns the indices of the tensors of layer `layer` of the decoder.
    #[must_use]
    pub fn layer(&self, layer: usize) -> Range<usize> {
        self.layers[layer].clone()
    }

    /// Iterates over the weights that belong to no layer of the decoder.
    pub fn outside(&self) -> impl Iterator<Item = &WeightSpec> {
        self.specs.iter().filter(|spec| !is_in_layer(spec))
    }

    /// Returns true if the output projection is the embedding.
    #[must_use]
    pub fn is_tied(&self) -> bool {
        self.is_tied
    }

    /// Returns true if tensor parallelism shards a tensor of `group` in layer `layer` of the decoder.
    pub(crate) fn is_cut_in_layer(&self, layer: usize, group: WeightGroup) -> bool {
        self.specs[self.layer(layer)].iter().any(|spec| spec.role.group() == group && spec.shard.is_over_tensor_ranks())
    }

    /// Returns true if tensor parallelism shards the tensor of `role` outside the layers.
    pub(crate) fn is_cut_outside(&self, role: WeightRole) -> bool {
        self.specs.iter().any(|spec| spec.role == role && spec.shard.is_over_tensor_ranks())
    }

    /// Returns the number of parameters of trainable tensors.
    #[must_use]
    pub fn num_trainable(&self) -> u64 {
        self.specs.iter().filter(|spec| spec.is_trainable).map(|spec| spec.num_elements() as u64).sum()
    }
}

/// Returns true if the tensor belongs to a layer of the decoder.
fn is_in_layer(spec: &WeightSpec) -> bool {
    matches!(spec.place, WeightPlace::Layer(_))
}

/// Lists the entries of the table in order.
struct Lister<'a> {
    config: &'a ModelConfig,
    specs: Vec<WeightSpec>,
    place: WeightPlace,
    /// The number of the decoder's layers, by which the initial values of projections to the residual stream are
    /// scaled.
    num_layers: usize,
}

impl Lister<'_> {
    fn add(&mut self, role: WeightRole, shape: &[usize]) {
        let init = self.init(role);
        self.add_with(role, shape, init);
    }

    fn add_if(&mut self, is_there: bool, role: WeightRole, shape: &[usize]) {
        if is_there {
            self.add(role, shape);
        }
    }

    fn add_with(&mut self, role: WeightRole, shape: &[usize], init: Init) {
        self.specs.push(WeightSpec {
            index: self.specs.len(),
            name: role.name(self.place),
            place: self.place,
            role,
            shape: shape.to_vec(),
            init,
            shard: shard(role, self.config),
            is_trainable: true,
            is_decayed: shape.len() > 1,
        });
    }

    /// Returns the initial values of the tensor that is added next. The stream of random ones is the tensor's index.
    fn init(&self, role: WeightRole) -> Init {
        let (std, stream) = (self.config.init_std, self.specs.len() as u64);
        if role.is_norm() {
            Init::Ones
        } else if role.is_bias() {
            Init::Zeros
        } else if role.writes_to_residual() {
            Init::Normal { std: std / (2.0 * self.num_layers as f32).sqrt(), stream }
        } else {
            Init::Normal { std, stream }
        }
    }

    fn decoder(&mut self) {
        let c = self.config;
        let (v, d) = (c.vocab_size, c.width);
        let encoder = c.of_encoder();
        if let Some(encoder) = &encoder {
            self.encoder(encoder);
        }
        let has_two = encoder.is_some() && !c.tie_embeddings;
        self.place = if has_two { WeightPlace::Decoder } else { WeightPlace::Model };
        self.add(WeightRole::Embedding, &[v, d]);
        self.place = WeightPlace::Model;
        self.add_if(c.variant.positions == PositionKind::Learned, WeightRole::Positions, &[c.max_seq_len, d]);
        self.relative();
        for i in 0..c.num_layers {
            self.place = WeightPlace::Layer(i);
            self.layer(i);
        }
        self.place = WeightPlace::Model;
        self.norm(WeightRole::FinalNorm, WeightRole::FinalNormBias);
        self.add_if(!c.tie_embeddings, WeightRole::Head, &[v, d]);
        self.add_if(c.variant.head_bias, WeightRole::HeadBias, &[v]);
    }

    /// Adds the encoder, whose layers are of `config`.
    fn encoder(&mut self, config: &ModelConfig) {
        let specs = std::mem::take(&mut self.specs);
        let mut lister = Lister { config, specs, place: WeightPlace::Encoder, num_layers: self.num_layers };
        lister.add_if(!config.tie_embeddings, WeightRole::Embedding, &[config.vocab_size, config.width]);
        lister.relative();
        for i in 0..config.num_layers {
            lister.place = WeightPlace::EncoderLayer(i);
            lister.layer(i);
        }
        lister.place = WeightPlace::Encoder;
        lister.add(WeightRole::FinalNorm, &[config.width]);
        self.specs = lister.specs;
    }

    fn relative(&mut self) {
        if let PositionKind::Relative { num_buckets, .. } = self.config.variant.positions {
            self.add(WeightRole::RelativeBias, &[num_buckets, self.config.num_heads]);
        }
    }

    fn norm(&mut self, weight: WeightRole, bias: WeightRole) {
        let shape = [self.config.width];
        self.add(weight, &shape);
        self.add_if(self.config.variant.norm == NormKind::Layer, bias, &shape);
    }

    fn linear(&mut self, [weight, bias]: [WeightRole; 2], [out, inner]: [usize; 2], has_bias: bool) {
        self.add(weight, &[out, inner]);
        self.add_if(has_bias, bias, &[out]);
    }

    fn layer(&mut self, i: usize) {
        let c = self.config;
        self.norm(WeightRole::AttentionNorm, WeightRole::AttentionNormBias);
        if c.variant.latent.is_some() {
            self.latent();
        } else {
            self.heads();
        }
        let from_heads = [c.width, c.num_heads * c.value_dim()];
        self.linear([WeightRole::O, WeightRole::OBias], from_heads, c.variant.output_bias);
        self.add_if(c.variant.sinks, WeightRole::Sinks, &[c.num_heads]);
        if c.variant.encoder.is_some() {
            self.cross();
        }
        self.norm(WeightRole::FeedForwardNorm, WeightRole::FeedForwardNormBias);
        if c.is_moe_layer(i) { self.moe(i) } else { self.dense() }
    }

    fn heads(&mut self) {
        let c = self.config;
        let (d, h, bias) = (c.width, c.head_dim, c.variant.qkv_bias);
        let (q, k) = (c.num_heads * h, c.num_kv_heads * h);
        self.linear([WeightRole::Q, WeightRole::QBias], [q, d], bias);
        self.linear([WeightRole::K, WeightRole::KBias], [k, d], bias);
        self.linear([WeightRole::V, WeightRole::VBias], [c.num_kv_heads * c.value_dim(), d], bias);
        let [q_norm, k_norm] = if c.qk_norm == QkNorm::Whole { [q, k] } else { [h, h] };
        self.add_if(c.qk_norm != QkNorm::None, WeightRole::QNorm, &[q_norm]);
        self.add_if(c.qk_norm != QkNorm::None, WeightRole::KNorm, &[k_norm]);
    }

    fn latent(&mut self) {
        let c = self.config;
        let latent = c.variant.latent.expect("latent attention");
        let (d, h, bias) = (c.width, c.num_heads, c.variant.qkv_bias);
        let (rank, kv_rank) = (latent.query_rank, latent.kv_rank);
        if rank > 0 {
            self.linear([WeightRole::QDown, WeightRole::QDownBias], [rank, d], bias);
            self.add(WeightRole::QDownNorm, &[rank]);
            self.add(WeightRole::QUp, &[h * c.head_dim, rank]);
        } else {
            self.add(WeightRole::Q, &[h * c.head_dim, d]);
        }
        self.linear([WeightRole::KvDown, WeightRole::KvDownBias], [kv_rank + latent.rotary_dim, d], bias);
        self.add(WeightRole::KvDownNorm, &[kv_rank]);
        self.add(WeightRole::KvUp, &[h * (latent.plain_dim + c.value_dim()), kv_rank]);
    }

    fn cross(&mut self) {
        let c = self.config;
        let (d, h, w) = (c.width, c.head_dim, c.value_dim());
        self.norm(WeightRole::CrossNorm, WeightRole::CrossNormBias);
        self.add(WeightRole::CrossQ, &[c.num_heads * h, d]);
        self.add(WeightRole::CrossK, &[c.num_kv_heads * h, d]);
        self.add(WeightRole::CrossV, &[c.num_kv_heads * w, d]);
        self.add(WeightRole::CrossO, &[d, c.num_heads * w]);
    }

    fn moe(&mut self, i: usize) {
        let (c, moe) = (self.config, self.config.moe());
        let parts = MoeParts {
            router_bias: c.variant.router_bias,
            expert_biases: c.variant.feed_forward_bias,
            shared_gate: c.variant.shared_gate,
        };
        for (role, shape) in moe_shapes(&moe, parts) {
            self.add(role, &shape);
        }
        let shapes = moe.extra_shapes();
        for (extra, init) in shapes.iter().zip(extra_inits(&shapes, i, c.init_std)) {
            self.add_with(WeightRole::RouterExtra(extra.name), &extra.shape, init);
        }
    }

    fn dense(&mut self) {
        let c = self.config;
        let (d, af) = (c.width, c.moe().activation.num_inputs() * c.dense_width);
        self.add(WeightRole::DenseGateUp, &[1, af, d]);
        self.add(WeightRole::DenseDown, &[1, d, c.dense_width]);
        self.add_if(c.variant.feed_forward_bias, WeightRole::DenseGateUpBias, &[1, af]);
        self.add_if(c.variant.feed_forward_bias, WeightRole::DenseDownBias, &[1, d]);
    }
}

/// The optional tensors of an MoE layer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MoeParts {
    /// A bias of the router's logits.
    pub(super) router_bias: bool,
    /// Biases of the routed experts.
    pub(super) expert_biases: bool,
    /// A gate of the shared experts' output.
    pub(super) shared_gate: bool,
}

/// Lists the tensors of an MoE layer with their shapes, in the order of
/// [`MoeWeights::tensors`](moeworks_moe::MoeWeights::tensors), without those that only some routing schemes have.
pub(super) fn moe_shapes(moe: &MoeConfig, parts: MoeParts) -> Vec<(WeightRole, Vec<usize>)> {
    let a = moe.activation.num_inputs();
    let (d, e, f, s) = (moe.width, moe.num_experts, moe.expert_width, moe.shared_width);
    let all = [
        (true, WeightRole::Router, moe.router_shape().to_vec()),
        (parts.router_bias, WeightRole::RouterBias, vec![e]),
        (true, WeightRole::ExpertGateUp, vec![e, a * f, d]),
        (true, WeightRole::ExpertDown, vec![e, d, f]),
        (parts.expert_biases, WeightRole::ExpertGateUpBias, vec![e, a * f]),
        (parts.expert_biases, WeightRole::ExpertDownBias, vec![e, d]),
        (s > 0, WeightRole::SharedGateUp, vec![a * s, d]),
        (s > 0, WeightRole::SharedDown, vec![d, s]),
        (s > 0 && parts.shared_gate, WeightRole::SharedGate, vec![1, d]),
    ];
    all.into_iter().filter(|(is_there, ..)| *is_there).map(|(_, role, shape)| (role, shape)).collect()
}

/// Returns the initial values of the weights of routing schemes in MoE layer `layer`.
pub(super) fn extra_inits(shapes: &[WeightShape], layer: usize, std: f32) -> Vec<Init> {
    let streams = FIRST_EXTRA_STREAM + 16 * layer as u64..;
    let init = |(extra, stream): (&WeightShape, u64)| match extra.init {
        ExtraInit::Normal => Init::Normal { std, stream },
        ExtraInit::Deviation(std) => Init::Normal { std, stream },
        ExtraInit::Constant(value) => Init::Constant(value),
    };
    shapes.iter().zip(streams).map(init).collect()
}

/// Returns the default sharding of a tensor (Megatron-LM, Shoeybi et al., 1909.08053, section 3). Matrices whose
/// outputs are heads, hidden units or logits are sharded by rows; those whose inputs are heads or hidden units, by
/// columns.
fn shard(role: WeightRole, config: &ModelConfig) -> Shard {
    use WeightRole::{
        CrossK, CrossO, CrossQ, CrossV, DenseDown, DenseGateUp, DenseGateUpBias, Embedding, Head, HeadBias, K, KBias,
        KNorm, KvDown, KvDownBias, KvDownNorm, KvUp, O, Q, QBias, QDown, QDownBias, QDownNorm, QNorm, QUp, Router,
        RouterBias, RouterExtra, SharedDown, SharedGate, SharedGateUp, Sinks, V, VBias,
    };
    let (head_dim, value_dim) = (config.head_dim, config.value_dim());
    let is_normed_whole = config.qk_norm == QkNorm::Whole;
    match role {
        Embedding | Head | HeadBias => Shard::Vocabulary,
        Q | QBias | QUp | CrossQ => Shard::Heads { dim: 0, size: head_dim },
        QNorm if is_normed_whole => Shard::Heads { dim: 0, size: head_dim },
        K | KBias | CrossK => Shard::KvHeads { dim: 0, size: head_dim },
        KNorm if is_normed_whole => Shard::KvHeads { dim: 0, size: head_dim },
        V | VBias | CrossV => Shard::KvHeads { dim: 0, size: value_dim },
        KvUp => {
            let plain_dim = config.variant.latent.map_or(0, |latent| latent.plain_dim);
            Shard::Heads { dim: 0, size: plain_dim + value_dim }
        }
        O | CrossO => Shard::Heads { dim: 1, size: value_dim },
        Sinks => Shard::Heads { dim: 0, size: 1 },
        DenseGateUp | DenseGateUpBias => Shard::Hidden { dim: 1 },
        DenseDown => Shard::Hidden { dim: 2 },
        // Norms of heads and down-projections see some of the heads; routers and shared experts see some of the
        // tokens.
        QNorm | KNorm | QDown | QDownBias | QDownNorm | KvDown | KvDownBias | KvDownNorm => {
            Shard::ReplicatedPartialGrad
        }
        Router | RouterBias | RouterExtra(_) | SharedGateUp | SharedDown | SharedGate => Shard::ReplicatedPartialGrad,
        role if role.is_of_experts() => Shard::Experts,
        _ => Shard::Replicated,
    }
}
