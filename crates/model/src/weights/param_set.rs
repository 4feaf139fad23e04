//! A set of parameters: the tensors of a model in order, whatever struct holds them.
//!
//! The optimizer, reductions over ranks, shards of ZeRO and checkpoints know a model only by its [`WeightTable`] and
//! this trait.

use moeworks_ops::{Context, elementwise, quantized};
use moeworks_tensor::{DType, Tensor};

use super::spec::WeightSpec;
use super::structs::DecoderWeights;
use super::table::WeightTable;

/// The tensors of a model in the order of its [`WeightTable`]: weights, their gradients, or a rank's parts of these.
///
/// ```
/// use moeworks_model::ParamSet;
/// use moeworks_tensor::Tensor;
///
/// #[derive(Clone)]
/// struct TwoLayers {
///     first: Tensor,
///     second: Tensor,
/// }
///
/// impl ParamSet for TwoLayers {
///     fn params(&self) -> Vec<&Tensor> {
///         vec![&self.first, &self.second]
///     }
///
///     fn params_mut(&mut self) -> Vec<&mut Tensor> {
///         vec![&mut self.first, &mut self.second]
///     }
///
///     fn shared(&self) -> Self {
///         self.clone()
///     }
/// }
/// ```
pub trait ParamSet {
    /// Lists the tensors.
    fn params(&self) -> Vec<&Tensor>;

    /// Lists the tensors for writing, in the same order.
    fn params_mut(&mut self) -> Vec<&mut Tensor>;

    /// Lists the state that is updated without a gradient, such as routers' biases, with its names in files. A model
    /// without such state keeps the defaults of this method and the next.
    fn states(&self) -> Vec<(String, &Tensor)> {
        Vec::new()
    }

    /// Lists the state for writing, in the same order.
    fn states_mut(&mut self) -> Vec<&mut Tensor> {
        Vec::new()
    }

    /// Returns a copy that shares the memory of the tensors.
    #[must_use]
    fn shared(&self) -> Self
    where
        Self: Sized;

    /// Returns the set with every tensor replaced by `f` of its entry in `table` and its value. The state is shared.
    #[must_use]
    fn map_params(&self, table: &WeightTable, mut f: impl FnMut(&WeightSpec, &Tensor) -> Tensor) -> Self
    where
        Self: Sized,
    {
        let mut copy = self.shared();
        for (spec, tensor) in table.specs().iter().zip(copy.params_mut()) {
            *tensor = f(spec, tensor);
        }
        copy
    }

    /// Returns an f32 copy, in memory of its own, of the result of `keep` for each tensor, such as a slice of it.
    #[must_use]
    fn kept(&self, ctx: &Context, table: &WeightTable, mut keep: impl FnMut(&WeightSpec, &Tensor) -> Tensor) -> Self
    where
        Self: Sized,
    {
        let mut kept = self.map_params(table, |spec, tensor| match keep(spec, tensor) {
            kept if kept.dtype().is_quantized() => quantized::dequantize(ctx, &kept, DType::F32),
            kept => elementwise::cast(ctx, &kept, DType::F32),
        });
        for state in kept.states_mut() {
            *state = elementwise::cast(ctx, state, DType::F32);
        }
        kept
    }

    /// Returns zeros for the gradients of these weights: of type `experts` (f32 or bf16) for the matrices of routed
    /// experts, f32 otherwise. Gradients that a pass skips have no elements.
    #[must_use]
    fn gradients(&self, ctx: &Context, table: &WeightTable, experts: DType) -> Self
    where
        Self: Sized,
    {
        let gradients = self.map_params(table, |spec, tensor| {
            let is_of_matrices = spec.role.is_product() && spec.role.is_of_experts();
            let shape = if table.skips_gradient(spec) { &[0] } else { tensor.shape() };
            ctx.zeros_on_device(shape, if is_of_matrices { experts } else { DType::F32 })
        });
        gradients.without_states(ctx)
    }

    /// Returns the set with empty states: gradients have none, and one that is shared with the weights could not be
    /// written to.
    #[must_use]
    fn without_states(mut self, ctx: &Context) -> Self
    where
        Self: Sized,
    {
        for state in self.states_mut() {
            *state = ctx.empty(&[0], DType::F32);
        }
        self
    }

    /// Returns a copy for mixed precision in memory of its own: operands of matrix products are of type `dtype`,
    /// everything else is f32. [`update_copy`](Self::update_copy) updates it.
    #[must_use]
    fn copy_for_products(&self, ctx: &Context, table: &WeightTable, dtype: DType) -> Self
    where
        Self: Sized,
    {
        let mut copy = self.map_params(table, |spec, tensor| {
            elementwise::cast(ctx, tensor, if spec.role.is_product() { dtype } else { DType::F32 })
        });
        for state in copy.states_mut() {
            *state = elementwise::cast(ctx, state, DType::F32);
        }
        copy
    }

    /// Writes these weights and their state into `copy`, which [`copy_for_products`](Self::copy_for_products) made.
    fn update_copy(&self, ctx: &Context, copy: &mut Self)
    where
        Self: Sized,
    {
        for (from, to) in self.params().into_iter().zip(copy.params_mut()) {
            elementwise::cast_into(ctx, from, to);
        }
        self.update_states(ctx, copy);
    }

    /// Writes the state into that of `copy`.
    fn update_states(&self, ctx: &Context, copy: &mut Self)
    where
        Self: Sized,
    {
        for ((_, from), to) in self.states().into_iter().zip(copy.states_mut()) {
            elementwise::cast_into(ctx, from, to);
        }
    }
}

/// Plain tensors, such as the optimizer's moments.
impl ParamSet for Vec<Tensor> {
    fn params(&self) -> Vec<&Tensor> {
        self.iter().collect()
    }

    fn params_mut(&mut self) -> Vec<&mut Tensor> {
        self.iter_mut().collect()
    }

    fn shared(&self) -> Self {
        self.clone()
    }
}

impl ParamSet for DecoderWeights {
    fn params(&self) -> Vec<&Tensor> {
        self.entries().into_iter().map(|(_, _, tensor)| tensor).collect()
    }

    fn params_mut(&mut self) -> Vec<&mut Tensor> {
        self.entries_mut().into_iter().map(|(_, _, tensor)| tensor).collect()
    }

    fn states(&self) -> Vec<(String, &Tensor)> {
        Self::states(self)
    }

    fn states_mut(&mut self) -> Vec<&mut Tensor> {
        Self::states_mut(self)
    }

    fn shared(&self) -> Self {
        Self::shared(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ModelConfig;
    use crate::decoder::Decoder;

    #[test]
    fn a_decoders_weights_are_listed_in_the_order_of_its_table_and_written_in_place() {
        let config = ModelConfig { vocab_size: 11, num_layers: 2, moe_every: 2, ..ModelConfig::default() };
        let (ctx, decoder) = (Context::cpu(1), Decoder::new(config).unwrap());
        let mut weights = decoder.init(&ctx, 1, None);
        let table = decoder.weight_table();
        let set: &mut dyn ParamSet = &mut weights;
        for (spec, tensor) in table.specs().iter().zip(set.params_mut()) {
            assert_eq!(tensor.shape(), spec.shape, "{}", spec.name);
            tensor.f32s_mut().fill(spec.index as f32);
        }
        assert_eq!(set.params().len(), table.specs().len());
        let (name, last) = weights.tensors().pop().expect("a tensor");
        assert_eq!((name.as_str(), last.f32s()[0]), ("lm_head.weight", (table.specs().len() - 1) as f32));
    }
}
