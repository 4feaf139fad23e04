//! Copies of all weights: in other types, as zeros, or transformed.

use moeworks_moe::{LayerStats, MoeConfig, next_state};
use moeworks_ops::{Context, elementwise, quantized};
use moeworks_tensor::{DType, Tensor};

use super::param_set::ParamSet;
use super::role::WeightRole;
use super::structs::{DecoderWeights, FeedForwardWeights};

impl DecoderWeights {
    /// Sets `table [ids, K]`, the experts of each token id, in every layer with hash routing; see
    /// [`balanced_hash`](moeworks_moe::balanced_hash).
    pub fn set_hash_tables(&mut self, table: &[u32]) {
        for layer in &mut self.layers {
            if let FeedForwardWeights::Moe(moe) = &mut layer.feed_forward {
                moe.set_hash_table(table);
            }
        }
    }

    /// Returns the number of parameters.
    #[must_use]
    pub fn num_parameters(&self) -> usize {
        self.entries().iter().map(|(_, _, tensor)| tensor.len()).sum()
    }

    /// Returns the type of attention's matrices.
    #[must_use]
    pub fn compute_dtype(&self) -> DType {
        self.layers.first().map_or(self.embedding.dtype(), |layer| layer.attention.o.weight.dtype())
    }

    /// Returns true if all matrices are of type `dtype`.
    #[must_use]
    pub fn are_all(&self, dtype: DType) -> bool {
        self.entries().into_iter().all(|(_, role, tensor)| !role.is_product() || tensor.dtype() == dtype)
    }

    /// Returns true if some matrices are in blocks of small integers, which only inference can use.
    #[must_use]
    pub fn has_blocks(&self) -> bool {
        self.entries().iter().any(|(_, _, tensor)| tensor.dtype().is_quantized())
    }

    /// Returns f32 zeros of the same shapes on the device, for gradients or moments.
    #[must_use]
    pub fn zeros_like(&self, ctx: &Context) -> Self {
        self.zero_gradients(ctx, DType::F32)
    }

    /// Returns zeros for gradients: of type `experts` (f32 or bf16) for the matrices of routed experts, f32
    /// otherwise.
    #[must_use]
    pub fn zero_gradients(&self, ctx: &Context, experts: DType) -> Self {
        self.map(|role, tensor| {
            let is_of_matrices = role.is_product() && role.is_of_experts();
            ctx.zeros_on_device(tensor.shape(), if is_of_matrices { experts } else { DType::F32 })
        })
    }

    /// Returns a copy with matrices of type `dtype` and f32 norm weights and routers. It shares no memory with the
    /// original, which may be written to; [`ParamSet::update_copy`] updates it.
    #[must_use]
    pub fn compute_copy(&self, ctx: &Context, dtype: DType) -> Self {
        self.map(|role, tensor| match role.is_product() {
            true if tensor.dtype().is_quantized() => quantized::dequantize(ctx, tensor, dtype),
            true => elementwise::cast(ctx, tensor, dtype),
            false => elementwise::cast(ctx, tensor, DType::F32),
        })
    }

    /// Updates the routers' states after a step. `layers` are the statistics of the MoE layers in order, summed over
    /// the step; `progress`, 0 to 1, is the share of the run that is done. The states of `copy`, if given, are
    /// updated too.
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
            next_state(config, &mut moe.state, layers, index, progress);
        }
        if let Some(copy) = copy {
            self.update_states(ctx, copy);
        }
    }

    /// Returns the weights with every tensor replaced by `f` of its name and value; routers' states are shared.
    #[must_use]
    pub fn map_named(&self, mut f: impl FnMut(&str, &Tensor) -> Tensor) -> Self {
        let names: Vec<String> = self.entries().into_iter().map(|(place, role, _)| role.name(place)).collect();
        let mut names = names.iter();
        self.map_tensors(|tensor| f(names.next().map_or("", String::as_str), tensor))
    }

    /// Returns the weights with every tensor replaced by `f` of it, in order; routers' states are shared.
    #[must_use]
    pub fn map_tensors(&self, mut f: impl FnMut(&Tensor) -> Tensor) -> Self {
        let mut copy = self.shared();
        for (_, _, tensor) in copy.entries_mut() {
            *tensor = f(tensor);
        }
        copy
    }

    /// Returns the weights with every tensor, including routers' states, replaced by `f` of its role and value.
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

    /// Returns a copy that shares the memory of the tensors.
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
