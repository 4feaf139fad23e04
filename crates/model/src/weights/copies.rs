//! Copies of all weights: parts, other types, zeros of the same shapes.

use moeworks_moe::{LayerStats, MoeConfig, next_state};
use moeworks_ops::{Context, elementwise, quantized};
use moeworks_tensor::{DType, Tensor};

use super::role::WeightRole;
use super::spec::WeightSpec;
use super::structs::{DecoderWeights, FeedForwardWeights};
use super::table::WeightTable;

impl DecoderWeights {
    /// Takes `table [ids, K]` as what ids of tokens go to in every layer whose router has a table; see
    /// [`balanced_hash`](moeworks_moe::balanced_hash).
    pub fn set_hash_tables(&mut self, table: &[u32]) {
        for layer in &mut self.layers {
            if let FeedForwardWeights::Moe(moe) = &mut layer.feed_forward {
                moe.set_hash_table(table);
            }
        }
    }

    /// f32 weights, in memory of their own, of what `keep` gives for each tensor and its entry in `table`, such as a part of it.
    #[must_use]
    pub fn kept(
        &self,
        ctx: &Context,
        table: &WeightTable,
        mut keep: impl FnMut(&WeightSpec, &Tensor) -> Tensor,
    ) -> Self {
        let mut specs = table.specs().iter();
        let mut kept = self.map_tensors(|tensor| {
            let spec = specs.next().expect("the table is of the same model");
            match keep(spec, tensor) {
                kept if kept.dtype().is_quantized() => quantized::dequantize(ctx, &kept, DType::F32),
                kept => elementwise::cast(ctx, &kept, DType::F32),
            }
        });
        for state in kept.states_mut() {
            *state = elementwise::cast(ctx, state, DType::F32);
        }
        kept
    }

    /// The number of parameters.
    #[must_use]
    pub fn num_parameters(&self) -> usize {
        self.entries().iter().map(|(_, _, tensor)| tensor.len()).sum()
    }

    /// The type of the attention's matrices.
    #[must_use]
    pub fn compute_dtype(&self) -> DType {
        self.layers.first().map_or(self.embedding.dtype(), |layer| layer.attention.o.weight.dtype())
    }

    /// Whether all matrices are of this type.
    #[must_use]
    pub fn are_all(&self, dtype: DType) -> bool {
        self.entries().into_iter().all(|(_, role, tensor)| !role.is_product() || tensor.dtype() == dtype)
    }

    /// Whether some matrices are in blocks of small integers: good for inference alone.
    #[must_use]
    pub fn has_blocks(&self) -> bool {
        self.entries().iter().any(|(_, _, tensor)| tensor.dtype().is_quantized())
    }

    /// f32 zeros of the same shapes, where the device computes: gradients, moments.
    #[must_use]
    pub fn zeros_like(&self, ctx: &Context) -> Self {
        self.zero_gradients(ctx, DType::F32)
    }

    /// Zeros for gradients: f32, but `experts` (f32 or bf16) where they are of the matrices of routed experts.
    #[must_use]
    pub fn zero_gradients(&self, ctx: &Context, experts: DType) -> Self {
        self.map(|role, tensor| {
            let is_of_matrices = role.is_product() && role.is_of_experts();
            ctx.zeros_there(tensor.shape(), if is_of_matrices { experts } else { DType::F32 })
        })
    }

    /// Zeros for the gradients of `table`, the table of these weights: f32, but `experts` (f32 or bf16) where they are of the matrices of
    /// routed experts. Gradients that a pass leaves out have no elements.
    #[must_use]
    pub fn gradients(&self, ctx: &Context, table: &WeightTable, experts: DType) -> Self {
        let mut specs = table.specs().iter();
        let gradients = self.map_tensors(|tensor| {
            let spec = specs.next().expect("the table is of the same model");
            let is_of_matrices = spec.role.is_product() && spec.role.is_of_experts();
            let shape = if table.skips_gradient(spec) { &[0] } else { tensor.shape() };
            ctx.zeros_there(shape, if is_of_matrices { experts } else { DType::F32 })
        });
        gradients.without_states(ctx)
    }

    /// f32 zeros for the optimizer's moments of `table`, the table of these weights. Those of frozen weights have no elements.
    #[must_use]
    pub fn moments(&self, ctx: &Context, table: &WeightTable) -> Self {
        let mut specs = table.specs().iter();
        let moments = self.map_tensors(|tensor| {
            let spec = specs.next().expect("the table is of the same model");
            ctx.zeros_there(if spec.is_trainable { tensor.shape() } else { &[0] }, DType::F32)
        });
        moments.without_states(ctx)
    }

    /// A copy with routers' states that have no elements, for gradients and moments, which have no such state: what is shared
    /// with the weights' could not be written to.
    #[must_use]
    pub fn without_states(mut self, ctx: &Context) -> Self {
        for state in self.states_mut() {
            *state = ctx.empty(&[0], DType::F32);
        }
        self
    }

    /// A copy whose matrices are of `dtype` and whose norm weights and routers are f32. It has memory of its own
    /// throughout, so that the originals can be written to while it lives; [`DecoderWeights::update_copy`] brings it up to
    /// date.
    #[must_use]
    pub fn compute_copy(&self, ctx: &Context, dtype: DType) -> Self {
        self.map(|role, tensor| match role.is_product() {
            true if tensor.dtype().is_quantized() => quantized::dequantize(ctx, tensor, dtype),
            true => elementwise::cast(ctx, tensor, dtype),
            false => elementwise::cast(ctx, tensor, DType::F32),
        })
    }

    /// Writes these weights into `copy`, which [`DecoderWeights::compute_copy`] made. With `only_exact` only its f32
    /// tensors are written: the optimizer's fused step has written the others.
    pub fn update_copy(&self, ctx: &Context, copy: &mut Self, only_exact: bool) {
        for ((_, role, from), (_, _, to)) in self.entries().into_iter().zip(copy.entries_mut()) {
            if !role.is_product() || !only_exact {
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
        layers: &[LayerStats],
        progress: f64,
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

    /// Returns the structure with every tensor replaced by `f` of its name and it, such as a part of it; routers' states are shared.
    #[must_use]
    pub fn map_named(&self, mut f: impl FnMut(&str, &Tensor) -> Tensor) -> Self {
        let names: Vec<String> = self.entries().into_iter().map(|(place, role, _)| role.name(place)).collect();
        let mut names = names.iter();
        self.map_tensors(|tensor| f(names.next().map_or("", String::as_str), tensor))
    }

    /// Returns the structure with every tensor replaced by `f` of it, in their order; routers' states are shared.
    #[must_use]
    pub fn map_tensors(&self, mut f: impl FnMut(&Tensor) -> Tensor) -> Self {
        let mut copy = self.shared();
        for (_, _, tensor) in copy.entries_mut() {
            *tensor = f(tensor);
        }
        copy
    }

    /// Returns the structure with every tensor replaced by `f` of its role and it, routers' states, too.
    pub(crate) fn map(&self, mut f: impl FnMut(WeightRole, &Tensor) -> Tensor) -> Self {
        let mut copy = self.shared();
        for (_, role, tensor) in copy.entries_mut() {
            *tensor = f(role, tensor);
        }
        for state in copy.states_mut() {
            *state = f(WeightRole::RouterExtra(""), state);
        }
        copy
    }

    /// A copy that shares the memory of the tensors.
    pub(crate) fn shared(&self) -> Self {
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
}
