//! The weights of a decoder: a plain struct of tensors, which also holds gradients and the optimizer's moments.
//!
//! Shape letters: V vocabulary, D width, H query heads, G key and value heads, h head width, E experts, F hidden width of
//! a feed-forward, A = 2 for gated activations (the gate's rows come first) and 1 otherwise.

use std::sync::OnceLock;

use moeworks_moe::{LayerStats, MoeConfig, MoeWeights, next_state};
use moeworks_ops::{Context, elementwise, quantized};
use moeworks_tensor::{DType, Tensor};

/// The weights of a norm.
#[derive(Clone)]
pub struct NormWeights {
    /// `[W]`.
    pub weight: Tensor,
    /// `[W]`; none in an RMS norm.
    pub bias: Option<Tensor>,
}

/// A matrix with an optional bias.
#[derive(Clone)]
pub struct LinearWeights {
    /// `[out, in]`.
    pub weight: Tensor,
    /// `[out]`.
    pub bias: Option<Tensor>,
}

/// Weights of an attention block.
#[derive(Clone)]
pub struct AttentionWeights {
    /// What makes queries, keys and values.
    pub inputs: AttentionInputs,
    /// `[D, H w]`, w elements of a head of values.
    pub o: LinearWeights,
    /// `[H]`: a score for each head that has no value.
    pub sinks: Option<Tensor>,
}

/// What makes queries, keys and values.
#[derive(Clone)]
pub enum AttentionInputs {
    /// A matrix for each.
    Heads(HeadWeights),
    /// Multi-head latent attention.
    Latent(LatentWeights),
}

/// A matrix for queries, keys and values each.
#[derive(Clone)]
pub struct HeadWeights {
    /// `[H h, D]`.
    pub q: LinearWeights,
    /// `[G h, D]`.
    pub k: LinearWeights,
    /// `[G h, D]`.
    pub v: LinearWeights,
    /// Norm of queries, `[h]` or `[H h]`; none without a norm.
    pub q_norm: Option<Tensor>,
    /// Norm of keys, `[h]` or `[G h]`; none without a norm.
    pub k_norm: Option<Tensor>,
}

/// Multi-head latent attention: N elements of a head that are not rotated, R that are, w of its values; L ranks.
#[derive(Clone)]
pub struct LatentWeights {
    /// `[Lq, D]` and the norm of its output `[Lq]`; none where queries are made directly.
    pub q_down: Option<(LinearWeights, Tensor)>,
    /// `[H (N + R), Lq]` or `[H (N + R), D]`.
    pub q: Tensor,
    /// `[Lkv + R, D]`.
    pub kv_down: LinearWeights,
    /// `[Lkv]`: norm of the first Lkv of its outputs.
    pub kv_norm: Tensor,
    /// `[H (N + w), Lkv]`.
    pub kv: Tensor,
    /// What `kv` stands for, if it is in blocks.
    pub(crate) kv_numbers: Numbers,
}

/// What a matrix in blocks stands for, on the processor, worked out when a step first multiplies with it by head. Nothing changes such a
/// matrix in its place; a clone works it out for itself.
#[derive(Default)]
pub(crate) struct Numbers(OnceLock<Tensor>);

impl Clone for Numbers {
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl Numbers {
    /// Those of `blocks` as `dtype`, unless they were asked for as another before.
    pub(crate) fn of(&self, ctx: &Context, blocks: &Tensor, dtype: DType) -> Option<&Tensor> {
        let numbers = self.0.get_or_init(|| quantized::dequantize(ctx, blocks, dtype));
        (numbers.dtype() == dtype).then_some(numbers)
    }
}

/// Weights of a dense feed-forward: an expert without a router.
#[derive(Clone)]
pub struct DenseWeights {
    /// `[1, A F, D]`.
    pub gate_up: Tensor,
    /// `[1, D, F]`.
    pub down: Tensor,
    /// The biases of both, `[1, A F]` and `[1, D]`, f32.
    pub biases: Option<(Tensor, Tensor)>,
}

/// Weights of a feed-forward block.
#[allow(clippy::large_enum_variant)] // one for each layer: nothing is gained by another allocation
#[derive(Clone)]
pub enum FeedForwardWeights {
    /// Every token takes the same way.
    Dense(DenseWeights),
    /// Every token goes to some experts.
    Moe(MoeWeights),
}

/// Weights of a decoder layer's attention to what an encoder made of a source.
#[derive(Clone)]
pub struct CrossWeights {
    /// `[D]`: norm of the decoder's side.
    pub norm: NormWeights,
    /// `[H h, D]`.
    pub q: LinearWeights,
    /// `[G h, D]`, of the encoder's result.
    pub k: LinearWeights,
    /// `[G w, D]`, of the encoder's result.
    pub v: LinearWeights,
    /// `[D, H w]`.
    pub o: LinearWeights,
}

/// Weights of one layer.
#[derive(Clone)]
pub struct LayerWeights {
    /// `[D]`: norm before attention.
    pub attention_norm: NormWeights,
    /// Attention.
    pub attention: AttentionWeights,
    /// Attention to an encoder's result, in a decoder that has one.
    pub cross: Option<CrossWeights>,
    /// `[D]`: norm before the feed-forward.
    pub feed_forward_norm: NormWeights,
    /// Feed-forward.
    pub feed_forward: FeedForwardWeights,
}

/// The weights of an encoder.
#[derive(Clone)]
pub struct EncoderWeights {
    /// `[V, D]`; none if it is the decoder's.
    pub embedding: Option<Tensor>,
    /// `[buckets, H]`: what is added to scores by distance.
    pub relative: Option<Tensor>,
    /// The layers, first to last.
    pub layers: Vec<LayerWeights>,
    /// `[D]`: norm behind the last layer.
    pub final_norm: NormWeights,
}

/// All weights of a decoder. The same struct holds gradients and optimizer moments, all f32 then.
///
/// Norm weights, biases, sinks and routers are f32; the matrices are f32 or bf16, and their type is the precision of the
/// products; for inference they may be f16 or in blocks of small integers. Cloning shares no memory by accident: there is no
/// `Clone`, copies are made with [`DecoderWeights::compute_copy`].
pub struct DecoderWeights {
    /// The encoder, if there is one.
    pub encoder: Option<EncoderWeights>,
    /// `[V, D]`.
    pub embedding: Tensor,
    /// `[max_seq_len, D]`: learned positions.
    pub positions: Option<Tensor>,
    /// `[buckets, H]`: what is added to scores by distance.
    pub relative: Option<Tensor>,
    /// The layers, first to last.
    pub layers: Vec<LayerWeights>,
    /// `[D]`: norm before the output projection.
    pub final_norm: NormWeights,
    /// `[V, D]`: output projection; none if it is the embedding.
    pub head: Option<Tensor>,
    /// `[V]`: bias of the output projection.
    pub head_bias: Option<Tensor>,
}

/// What a tensor is for, which decides its type in mixed precision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// An operand of matrix products (and the embedding): bf16 in mixed precision.
    Product,
    /// Norm weights, biases, sinks and routers: always f32.
    Exact,
}

/// The tensors of a list of layers whose names begin with `$prefix`, for both kinds of access as in [`list_tensors`].
macro_rules! list_layers {
    ($list:ident, $prefix:literal, $layers:expr, $iter:ident, $option:ident $(, $mutable:tt)?) => {
        for (i, layer) in $layers.$iter().enumerate() {
            let mut add = |name: &str, role, tensor| $list.push((format!("{}{i}.{name}", $prefix), role, tensor));
            macro_rules! add_option {
                ($name:expr, $tensor:expr) => {
                    if let Some(tensor) = $tensor.$option() {
                        add($name, Role::Exact, tensor);
                    }
                };
            }
            add("input_layernorm.weight", Role::Exact, & $($mutable)? layer.attention_norm.weight);
            add_option!("input_layernorm.bias", layer.attention_norm.bias);
            let attention = & $($mutable)? layer.attention;
            match & $($mutable)? attention.inputs {
                AttentionInputs::Heads(heads) => {
                    add("self_attn.q_proj.weight", Role::Product, & $($mutable)? heads.q.weight);
                    add_option!("self_attn.q_proj.bias", heads.q.bias);
                    add("self_attn.k_proj.weight", Role::Product, & $($mutable)? heads.k.weight);
                    add_option!("self_attn.k_proj.bias", heads.k.bias);
                    add("self_attn.v_proj.weight", Role::Product, & $($mutable)? heads.v.weight);
                    add_option!("self_attn.v_proj.bias", heads.v.bias);
                    add_option!("self_attn.q_norm.weight", heads.q_norm);
                    add_option!("self_attn.k_norm.weight", heads.k_norm);
                }
                AttentionInputs::Latent(latent) => {
                    let q_name = match & $($mutable)? latent.q_down {
                        Some((down, norm)) => {
                            add("self_attn.q_a_proj.weight", Role::Product, & $($mutable)? down.weight);
                            add_option!("self_attn.q_a_proj.bias", down.bias);
                            add("self_attn.q_a_layernorm.weight", Role::Exact, norm);
                            "self_attn.q_b_proj.weight"
                        }
                        None => "self_attn.q_proj.weight",
                    };
                    add(q_name, Role::Product, & $($mutable)? latent.q);
                    add("self_attn.kv_a_proj_with_mqa.weight", Role::Product, & $($mutable)? latent.kv_down.weight);
                    add_option!("self_attn.kv_a_proj_with_mqa.bias", latent.kv_down.bias);
                    add("self_attn.kv_a_layernorm.weight", Role::Exact, & $($mutable)? latent.kv_norm);
                    add("self_attn.kv_b_proj.weight", Role::Product, & $($mutable)? latent.kv);
                }
            }
            add("self_attn.o_proj.weight", Role::Product, & $($mutable)? attention.o.weight);
            add_option!("self_attn.o_proj.bias", attention.o.bias);
            add_option!("self_attn.sinks", attention.sinks);
            if let Some(cross) = layer.cross.$option() {
                add("cross_attn_norm.weight", Role::Exact, & $($mutable)? cross.norm.weight);
                add_option!("cross_attn_norm.bias", cross.norm.bias);
                add("cross_attn.q_proj.weight", Role::Product, & $($mutable)? cross.q.weight);
                add("cross_attn.k_proj.weight", Role::Product, & $($mutable)? cross.k.weight);
                add("cross_attn.v_proj.weight", Role::Product, & $($mutable)? cross.v.weight);
                add("cross_attn.o_proj.weight", Role::Product, & $($mutable)? cross.o.weight);
            }
            add("post_attention_layernorm.weight", Role::Exact, & $($mutable)? layer.feed_forward_norm.weight);
            add_option!("post_attention_layernorm.bias", layer.feed_forward_norm.bias);
            match & $($mutable)? layer.feed_forward {
                FeedForwardWeights::Dense(dense) => {
                    add("mlp.gate_up_proj", Role::Product, & $($mutable)? dense.gate_up);
                    add("mlp.down_proj", Role::Product, & $($mutable)? dense.down);
                    if let Some((gate_up, down)) = & $($mutable)? dense.biases {
                        add("mlp.gate_up_proj_bias", Role::Exact, gate_up);
                        add("mlp.down_proj_bias", Role::Exact, down);
                    }
                }
                FeedForwardWeights::Moe(moe) => {
                    add("mlp.gate.weight", Role::Exact, & $($mutable)? moe.router);
                    add_option!("mlp.gate.bias", moe.router_bias);
                    add("mlp.experts.gate_up_proj", Role::Product, & $($mutable)? moe.gate_up);
                    add("mlp.experts.down_proj", Role::Product, & $($mutable)? moe.down);
                    if let Some((gate_up, down)) = & $($mutable)? moe.biases {
                        add("mlp.experts.gate_up_proj_bias", Role::Exact, gate_up);
                        add("mlp.experts.down_proj_bias", Role::Exact, down);
                    }
                    if let Some(shared) = moe.shared.$option() {
                        add("mlp.shared_experts.gate_up_proj", Role::Product, & $($mutable)? shared.gate_up);
                        add("mlp.shared_experts.down_proj", Role::Product, & $($mutable)? shared.down);
                        add_option!("mlp.shared_expert_gate.weight", shared.gate);
                    }
                    for extra in moe.extras.$iter() {
                        add(&format!("mlp.gate.{}", extra.name), Role::Exact, & $($mutable)? extra.tensor);
                    }
                }
            }
        }
    };
}

/// One list for both kinds of access, so that names and order cannot differ.
macro_rules! list_tensors {
    ($weights:expr, $iter:ident, $option:ident $(, $mutable:tt)?) => {{
        let weights = $weights;
        let mut list = Vec::new();
        let mut embedding = "model.embed_tokens.weight";
        if let Some(encoder) = weights.encoder.$option() {
            if let Some(tensor) = encoder.embedding.$option() {
                list.push(("model.encoder.embed_tokens.weight".to_owned(), Role::Product, tensor));
                embedding = "model.decoder.embed_tokens.weight";
            }
            if let Some(relative) = encoder.relative.$option() {
                list.push(("model.encoder.relative_bias.weight".to_owned(), Role::Exact, relative));
            }
            list_layers!(list, "model.encoder.layers.", encoder.layers, $iter, $option $(, $mutable)?);
            list.push(("model.encoder.norm.weight".to_owned(), Role::Exact, & $($mutable)? encoder.final_norm.weight));
        }
        list.push((embedding.to_owned(), Role::Product, & $($mutable)? weights.embedding));
        if let Some(positions) = weights.positions.$option() {
            list.push(("model.embed_positions.weight".to_owned(), Role::Exact, positions));
        }
        if let Some(relative) = weights.relative.$option() {
            list.push(("model.relative_bias.weight".to_owned(), Role::Exact, relative));
        }
        list_layers!(list, "model.layers.", weights.layers, $iter, $option $(, $mutable)?);
        list.push(("model.norm.weight".to_owned(), Role::Exact, & $($mutable)? weights.final_norm.weight));
        if let Some(bias) = weights.final_norm.bias.$option() {
            list.push(("model.norm.bias".to_owned(), Role::Exact, bias));
        }
        if let Some(head) = weights.head.$option() {
            list.push(("lm_head.weight".to_owned(), Role::Product, head));
        }
        if let Some(bias) = weights.head_bias.$option() {
            list.push(("lm_head.bias".to_owned(), Role::Exact, bias));
        }
        list
    }};
}

/// Whether the tensor that [`DecoderWeights::tensors`] names so belongs to routed experts: its first dimension is theirs.
#[must_use]
pub fn is_of_experts(name: &str) -> bool {
    name.contains(".mlp.experts.")
}

impl LayerWeights {
    /// The tensors for writing, in the order in which [`DecoderWeights::tensors`] has them.
    #[must_use]
    pub fn tensors_mut(&mut self) -> Vec<&mut Tensor> {
        let mut list = Vec::new();
        let layers = std::slice::from_mut(self);
        list_layers!(list, "", layers, iter_mut, as_mut, mut);
        list.into_iter().map(|(_, _, tensor)| tensor).collect()
    }
}

impl DecoderWeights {
    /// Every tensor with its name. Names are `transformers`' in-memory names where it has one; the order is that of the
    /// computation and never changes for a configuration.
    #[must_use]
    pub fn tensors(&self) -> Vec<(String, &Tensor)> {
        list_tensors!(self, iter, as_ref).into_iter().map(|(name, _, tensor)| (name, tensor)).collect()
    }

    /// As [`DecoderWeights::tensors`], for writing. Writing needs memory of its own: not that of weights that were read
    /// from a mapped file, of which [`DecoderWeights::compute_copy`] makes a copy.
    #[must_use]
    pub fn tensors_mut(&mut self) -> Vec<(String, &mut Tensor)> {
        list_tensors!(self, iter_mut, as_mut, mut).into_iter().map(|(name, _, tensor)| (name, tensor)).collect()
    }

    /// The role of each tensor, in the order of [`DecoderWeights::tensors`].
    #[must_use]
    pub fn roles(&self) -> Vec<Role> {
        list_tensors!(self, iter, as_ref).into_iter().map(|(_, role, _)| role).collect()
    }

    /// What the routers keep besides weights, with names behind which they are in files. Not among
    /// [`DecoderWeights::tensors`]: it has no gradient and no optimizer touches it.
    #[must_use]
    pub fn states(&self) -> Vec<(String, &Tensor)> {
        let layers = self.layers.iter().enumerate().filter_map(|(i, layer)| match &layer.feed_forward {
            FeedForwardWeights::Moe(moe) => Some((i, &moe.state)),
            FeedForwardWeights::Dense(_) => None,
        });
        let name = |i: usize, name: &str| format!("model.layers.{i}.mlp.gate.{name}");
        layers.flat_map(|(i, states)| states.iter().map(move |state| (name(i, state.name), &state.tensor))).collect()
    }

    /// Takes `table [ids, K]` as what ids of tokens go to in every layer whose router has a table; see
    /// [`balanced_hash`](moeworks_moe::balanced_hash).
    pub fn set_hash_tables(&mut self, table: &[u32]) {
        for layer in &mut self.layers {
            if let FeedForwardWeights::Moe(moe) = &mut layer.feed_forward {
                moe.set_hash_table(table);
            }
        }
    }

    /// The routers' states for writing, in the order of [`DecoderWeights::states`].
    pub(crate) fn states_mut(&mut self) -> Vec<&mut Tensor> {
        let layers = self.layers.iter_mut().filter_map(|layer| match &mut layer.feed_forward {
            FeedForwardWeights::Moe(moe) => Some(&mut moe.state),
            FeedForwardWeights::Dense(_) => None,
        });
        layers.flat_map(|states| states.iter_mut().map(|state| &mut state.tensor)).collect()
    }

    /// f32 weights, in memory of their own, of what `keep` gives for the name of each tensor and it, such as a part of it.
    #[must_use]
    pub fn kept(&self, ctx: &Context, mut keep: impl FnMut(&str, &Tensor) -> Tensor) -> Self {
        let mut kept = self.map_named(|name, tensor| match keep(name, tensor) {
            kept if kept.dtype().is_quantized() => quantized::dequantize(ctx, &kept, DType::F32),
            kept => elementwise::cast(ctx, &kept, DType::F32),
        });
        for state in kept.states_mut() {
            *state = elementwise::cast(ctx, state, DType::F32);
        }
        kept
    }

    /// The number of parameters.
    #[must_use]
    pub fn num_parameters(&self) -> usize {
        self.tensors().iter().map(|(_, tensor)| tensor.len()).sum()
    }

    /// The type of the attention's matrices.
    #[must_use]
    pub fn compute_dtype(&self) -> DType {
        self.layers.first().map_or(self.embedding.dtype(), |layer| layer.attention.o.weight.dtype())
    }

    /// Whether all matrices are of this type.
    #[must_use]
    pub fn are_all(&self, dtype: DType) -> bool {
        let all = list_tensors!(self, iter, as_ref);
        all.into_iter().all(|(_, role, tensor)| role == Role::Exact || tensor.dtype() == dtype)
    }

    /// Whether some matrices are in blocks of small integers: good for inference alone.
    #[must_use]
    pub fn has_blocks(&self) -> bool {
        self.tensors().iter().any(|(_, tensor)| tensor.dtype().is_quantized())
    }

    /// f32 zeros of the same shapes, where the device computes: gradients, moments.
    #[must_use]
    pub fn zeros_like(&self, ctx: &Context) -> Self {
        self.zero_gradients(ctx, DType::F32)
    }

    /// Zeros for gradients: f32, but `experts` (f32 or bf16) where they are of the matrices of routed experts.
    #[must_use]
    pub fn zero_gradients(&self, ctx: &Context, experts: DType) -> Self {
        self.map(|name, role, tensor| {
            let is_of_matrices = role == Role::Product && is_of_experts(name);
            ctx.zeros_there(tensor.shape(), if is_of_matrices { experts } else { DType::F32 })
        })
    }

    /// A copy whose matrices are of `dtype` and whose norm weights and routers are f32. It has memory of its own
    /// throughout, so that the originals can be written to while it lives; [`DecoderWeights::update_copy`] brings it up to
    /// date.
    #[must_use]
    pub fn compute_copy(&self, ctx: &Context, dtype: DType) -> Self {
        self.map(|_, role, tensor| match role {
            Role::Product if tensor.dtype().is_quantized() => quantized::dequantize(ctx, tensor, dtype),
            Role::Product => elementwise::cast(ctx, tensor, dtype),
            Role::Exact => elementwise::cast(ctx, tensor, DType::F32),
        })
    }

    /// Writes these weights into `copy`, which [`DecoderWeights::compute_copy`] made. With `only_exact` only its f32
    /// tensors are written: the optimizer's fused step has written the others.
    pub fn update_copy(&self, ctx: &Context, copy: &mut Self, only_exact: bool) {
        for ((_, role, from), (_, _, to)) in
            list_tensors!(self, iter, as_ref).into_iter().zip(list_tensors!(&mut *copy, iter_mut, as_mut, mut))
        {
            if role == Role::Exact || !only_exact {
                elementwise::cast_into(ctx, from, to);
            }
        }
        self.update_states(ctx, copy);
    }

    /// Writes the routers' states into those of `copy`.
    fn update_states(&self, ctx: &Context, copy: &mut Self) {
        for (from, to) in self.layers.iter().zip(&mut copy.layers) {
            if let (FeedForwardWeights::Moe(from), FeedForwardWeights::Moe(to)) =
                (&from.feed_forward, &mut to.feed_forward)
            {
                for (from, to) in from.state.iter().zip(&mut to.state) {
                    elementwise::cast_into(ctx, &from.tensor, &mut to.tensor);
                }
            }
        }
    }

    /// Moves the routers' states by what one whole step did: `layers` are the statistics of the MoE layers, first to last,
    /// summed over the step, which ends when `progress`, 0 to 1, of the run is done. The same is done to `copy`, if there is one.
    pub fn next_states(
        &mut self,
        ctx: &Context,
        config: &MoeConfig,
        (layers, progress): (&[LayerStats], f64),
        copy: Option<&mut Self>,
    ) {
        let moe_layers = self.layers.iter_mut().filter_map(|layer| match &mut layer.feed_forward {
            FeedForwardWeights::Moe(moe) => Some(moe),
            FeedForwardWeights::Dense(_) => None,
        });
        for (index, moe) in moe_layers.enumerate().take(layers.len()) {
            next_state(config, &mut moe.state, (layers, index), progress);
        }
        if let Some(copy) = copy {
            self.update_states(ctx, copy);
        }
    }

    /// The same structure with every tensor replaced by `f` of its name and it, such as a part of it; routers' states are shared.
    #[must_use]
    pub fn map_named(&self, mut f: impl FnMut(&str, &Tensor) -> Tensor) -> Self {
        let mut copy = self.shared();
        for ((name, from), (_, _, to)) in
            self.tensors().into_iter().zip(list_tensors!(&mut copy, iter_mut, as_mut, mut))
        {
            *to = f(&name, from);
        }
        copy
    }

    /// The same structure with every tensor replaced by `f` of its name, its role and it.
    pub(crate) fn map(&self, mut f: impl FnMut(&str, Role, &Tensor) -> Tensor) -> Self {
        let mut copy = self.shared();
        for ((name, role, from), (_, _, to)) in
            list_tensors!(self, iter, as_ref).into_iter().zip(list_tensors!(&mut copy, iter_mut, as_mut, mut))
        {
            *to = f(&name, role, from);
        }
        for ((name, from), to) in self.states().into_iter().zip(copy.states_mut()) {
            *to = f(&name, Role::Exact, from);
        }
        copy
    }

    /// The same tensors, whose memory is shared.
    fn shared(&self) -> Self {
        let Self { encoder, embedding, positions, relative, layers, final_norm, head, head_bias } = self;
        Self {
            encoder: encoder.clone(),
            relative: relative.clone(),
            embedding: embedding.clone(),
            positions: positions.clone(),
            layers: layers.clone(),
            final_norm: final_norm.clone(),
            head: head.clone(),
            head_bias: head_bias.clone(),
        }
    }

    /// The places of all tensors, with name and role, in the order of [`DecoderWeights::tensors`].
    pub(crate) fn places(&mut self) -> Vec<(String, Role, &mut Tensor)> {
        list_tensors!(self, iter_mut, as_mut, mut)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_blocks_are_worked_out_once_and_anew_for_a_clone() {
        let ctx = Context::cpu(1);
        let mut x = ctx.zeros(&[4, 32], DType::F32);
        x.f32s_mut()[33] = 127.0;
        let blocks = quantized::quantize(&ctx, &x, DType::Q8);
        let numbers = Numbers::default();
        let first = numbers.of(&ctx, &blocks, DType::F32).expect("numbers").f32s().as_ptr();
        let again = numbers.of(&ctx, &blocks, DType::F32).expect("numbers");
        assert_eq!((again.f32s().as_ptr(), again.f32s()[33]), (first, 127.0));
        assert!(numbers.of(&ctx, &blocks, DType::BF16).is_none(), "of one type");
        let clone = numbers.clone();
        assert_eq!(clone.of(&ctx, &blocks, DType::BF16).map(Tensor::dtype), Some(DType::BF16));
    }
}
