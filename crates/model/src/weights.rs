//! The weights of a decoder: a plain struct of tensors, which also holds gradients and the optimizer's moments.
//!
//! Shape letters: V vocabulary, D width, H query heads, G key and value heads, h head width, E experts, F hidden width of
//! a feed-forward, A = 2 for gated activations (the gate's rows come first) and 1 otherwise.

use moeworks_moe::{LayerStats, MoeWeights, RouterConfig, SharedWeights, next_state};
use moeworks_ops::{Context, elementwise};
use moeworks_tensor::{DType, Tensor};

/// Weights of an attention block.
pub struct AttentionWeights {
    /// `[H h, D]`.
    pub q: Tensor,
    /// `[G h, D]`.
    pub k: Tensor,
    /// `[G h, D]`.
    pub v: Tensor,
    /// `[D, H h]`.
    pub o: Tensor,
    /// Norm of queries, `[h]` or `[H h]`; none without a norm.
    pub q_norm: Option<Tensor>,
    /// Norm of keys, `[h]` or `[G h]`; none without a norm.
    pub k_norm: Option<Tensor>,
}

/// Weights of a dense feed-forward: an expert without a router.
pub struct DenseWeights {
    /// `[1, A F, D]`.
    pub gate_up: Tensor,
    /// `[1, D, F]`.
    pub down: Tensor,
}

/// Weights of a feed-forward block.
#[allow(clippy::large_enum_variant)] // one for each layer: nothing is gained by another allocation
pub enum FeedForwardWeights {
    /// Every token takes the same way.
    Dense(DenseWeights),
    /// Every token goes to some experts.
    Moe(MoeWeights),
}

/// Weights of one layer.
pub struct LayerWeights {
    /// `[D]`: norm before attention.
    pub attention_norm: Tensor,
    /// Attention.
    pub attention: AttentionWeights,
    /// `[D]`: norm before the feed-forward.
    pub feed_forward_norm: Tensor,
    /// Feed-forward.
    pub feed_forward: FeedForwardWeights,
}

/// All weights of a decoder. The same struct holds gradients and optimizer moments, all f32 then.
///
/// Norm weights and routers are f32; the matrices are f32 or bf16, and their type is the precision of the products.
/// Cloning shares no memory by accident: there is no `Clone`, copies are made with [`DecoderWeights::compute_copy`].
pub struct DecoderWeights {
    /// `[V, D]`.
    pub embedding: Tensor,
    /// The layers, first to last.
    pub layers: Vec<LayerWeights>,
    /// `[D]`: norm before the output projection.
    pub final_norm: Tensor,
    /// `[V, D]`: output projection; none if it is the embedding.
    pub head: Option<Tensor>,
}

/// What a tensor is for, which decides its type in mixed precision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// An operand of matrix products (and the embedding): bf16 in mixed precision.
    Product,
    /// Norm weights and routers: always f32.
    Exact,
}

/// One list for both kinds of access, so that names and order cannot differ.
macro_rules! list_tensors {
    ($weights:expr, $iter:ident, $option:ident $(, $mutable:tt)?) => {{
        let weights = $weights;
        let mut list = vec![("model.embed_tokens.weight".to_owned(), Role::Product, & $($mutable)? weights.embedding)];
        for (i, layer) in weights.layers.$iter().enumerate() {
            let mut add = |name: &str, role, tensor| list.push((format!("model.layers.{i}.{name}"), role, tensor));
            add("input_layernorm.weight", Role::Exact, & $($mutable)? layer.attention_norm);
            let attention = & $($mutable)? layer.attention;
            add("self_attn.q_proj.weight", Role::Product, & $($mutable)? attention.q);
            add("self_attn.k_proj.weight", Role::Product, & $($mutable)? attention.k);
            add("self_attn.v_proj.weight", Role::Product, & $($mutable)? attention.v);
            add("self_attn.o_proj.weight", Role::Product, & $($mutable)? attention.o);
            if let Some(norm) = attention.q_norm.$option() {
                add("self_attn.q_norm.weight", Role::Exact, norm);
            }
            if let Some(norm) = attention.k_norm.$option() {
                add("self_attn.k_norm.weight", Role::Exact, norm);
            }
            add("post_attention_layernorm.weight", Role::Exact, & $($mutable)? layer.feed_forward_norm);
            match & $($mutable)? layer.feed_forward {
                FeedForwardWeights::Dense(dense) => {
                    add("mlp.gate_up_proj", Role::Product, & $($mutable)? dense.gate_up);
                    add("mlp.down_proj", Role::Product, & $($mutable)? dense.down);
                }
                FeedForwardWeights::Moe(moe) => {
                    add("mlp.gate.weight", Role::Exact, & $($mutable)? moe.router);
                    add("mlp.experts.gate_up_proj", Role::Product, & $($mutable)? moe.gate_up);
                    add("mlp.experts.down_proj", Role::Product, & $($mutable)? moe.down);
                    if let Some(shared) = moe.shared.$option() {
                        add("mlp.shared_experts.gate_up_proj", Role::Product, & $($mutable)? shared.gate_up);
                        add("mlp.shared_experts.down_proj", Role::Product, & $($mutable)? shared.down);
                    }
                }
            }
        }
        list.push(("model.norm.weight".to_owned(), Role::Exact, & $($mutable)? weights.final_norm));
        if let Some(head) = weights.head.$option() {
            list.push(("lm_head.weight".to_owned(), Role::Product, head));
        }
        list
    }};
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

    /// The number of parameters.
    #[must_use]
    pub fn num_parameters(&self) -> usize {
        self.tensors().iter().map(|(_, tensor)| tensor.len()).sum()
    }

    /// The type that matrix products are taken in.
    #[must_use]
    pub fn compute_dtype(&self) -> DType {
        self.layers.first().map_or(self.embedding.dtype(), |layer| layer.attention.q.dtype())
    }

    /// f32 zeros of the same shapes: gradients, moments.
    #[must_use]
    pub fn zeros_like(&self, ctx: &Context) -> Self {
        self.map(|_, tensor| ctx.zeros(tensor.shape(), DType::F32))
    }

    /// A copy whose matrices are of `dtype` and whose norm weights and routers are f32. It has memory of its own
    /// throughout, so that the originals can be written to while it lives; [`DecoderWeights::update_copy`] brings it up to
    /// date.
    #[must_use]
    pub fn compute_copy(&self, ctx: &Context, dtype: DType) -> Self {
        self.map(|role, tensor| match role {
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
    /// summed over the step. The same is done to `copy`, if there is one.
    pub fn next_states(
        &mut self,
        ctx: &Context,
        config: &RouterConfig,
        layers: &[LayerStats],
        copy: Option<&mut Self>,
    ) {
        let moe_layers = self.layers.iter_mut().filter_map(|layer| match &mut layer.feed_forward {
            FeedForwardWeights::Moe(moe) => Some(moe),
            FeedForwardWeights::Dense(_) => None,
        });
        for (moe, stats) in moe_layers.zip(layers) {
            next_state(config, &mut moe.state, stats);
        }
        if let Some(copy) = copy {
            self.update_states(ctx, copy);
        }
    }

    /// The same structure with every tensor replaced by `f` of it.
    pub(crate) fn map(&self, mut f: impl FnMut(Role, &Tensor) -> Tensor) -> Self {
        let embedding = f(Role::Product, &self.embedding);
        let layers = self.layers.iter().map(|layer| layer.map(&mut f)).collect();
        let final_norm = f(Role::Exact, &self.final_norm);
        Self { embedding, layers, final_norm, head: self.head.as_ref().map(|head| f(Role::Product, head)) }
    }
}

impl LayerWeights {
    fn map(&self, f: &mut impl FnMut(Role, &Tensor) -> Tensor) -> Self {
        let attention_norm = f(Role::Exact, &self.attention_norm);
        let a = &self.attention;
        let attention = AttentionWeights {
            q: f(Role::Product, &a.q),
            k: f(Role::Product, &a.k),
            v: f(Role::Product, &a.v),
            o: f(Role::Product, &a.o),
            q_norm: a.q_norm.as_ref().map(|norm| f(Role::Exact, norm)),
            k_norm: a.k_norm.as_ref().map(|norm| f(Role::Exact, norm)),
        };
        let feed_forward_norm = f(Role::Exact, &self.feed_forward_norm);
        let feed_forward = match &self.feed_forward {
            FeedForwardWeights::Dense(dense) => FeedForwardWeights::Dense(DenseWeights {
                gate_up: f(Role::Product, &dense.gate_up),
                down: f(Role::Product, &dense.down),
            }),
            FeedForwardWeights::Moe(moe) => FeedForwardWeights::Moe(MoeWeights {
                router: f(Role::Exact, &moe.router),
                gate_up: f(Role::Product, &moe.gate_up),
                down: f(Role::Product, &moe.down),
                shared: moe.shared.as_ref().map(|shared| SharedWeights {
                    gate_up: f(Role::Product, &shared.gate_up),
                    down: f(Role::Product, &shared.down),
                }),
                state: moe.state.iter().map(|state| state.map(|tensor| f(Role::Exact, tensor))).collect(),
            }),
        };
        Self { attention_norm, attention, feed_forward_norm, feed_forward }
    }
}
