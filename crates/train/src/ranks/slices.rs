//! Optimizer state shared out among the ranks that hold the same weights (ZeRO-1, Rajbhandari et al., 1910.02054): each keeps
//! the moments of its slice of every tensor, sums only the gradients of that slice, and tells the others what came of it.

use moeworks_comm::{CommError, Reduce};
use moeworks_model::DecoderWeights;
use moeworks_ops::Context;
use moeworks_ops::elementwise::sum_of_squares;
use moeworks_tensor::{DType, Tensor};

use super::Ranks;
use crate::error::TrainError;
use crate::optimizer::Optimizer;

/// Elements of each of `n` ranks' slices of `len` elements.
fn counts(len: usize, n: usize) -> Vec<usize> {
    (0..n).map(|rank| len / n + usize::from(rank < len % n)).collect()
}

/// An empty slice of `len` elements of a tensor; it has as many dimensions as far as it matters: vectors are not decayed.
fn slice_of(ctx: &Context, tensor: &Tensor, len: usize) -> Tensor {
    let shape: &[usize] = if tensor.shape().len() > 1 { &[1, len] } else { &[len] };
    ctx.empty(shape, DType::F32)
}

impl Ranks {
    /// This rank's slice of every tensor.
    pub(crate) fn slices(&self, ctx: &Context, tensors: &DecoderWeights) -> DecoderWeights {
        tensors.map_named(|name, tensor| {
            let holders = self.holders(name);
            let counts = counts(tensor.len(), holders.size());
            let start = counts[..holders.rank()].iter().sum::<usize>();
            let mut slice = slice_of(ctx, tensor, counts[holders.rank()]);
            let values = &tensor.f32s()[start..start + slice.len()];
            slice.f32s_mut().copy_from_slice(values);
            slice
        })
    }

    /// This rank's slice of every gradient, summed over the ranks that hold the tensor.
    pub(crate) fn sum_to_slices(&self, ctx: &Context, grads: &DecoderWeights) -> Result<DecoderWeights, TrainError> {
        let mut failure = None;
        let slices = grads.map_named(|name, tensor| {
            let holders = self.holders(name);
            let counts = counts(tensor.len(), holders.size());
            let mut slice = slice_of(ctx, tensor, counts[holders.rank()]);
            if failure.is_none() {
                failure = holders.reduce_scatter(tensor.f32s(), &counts, slice.f32s_mut(), Reduce::Sum).err();
            }
            slice
        });
        failure.map_or(Ok(slices), |error: CommError| Err(error.into()))
    }

    /// The norm of all gradients as one vector, from everybody's slices: the same bits on all ranks.
    pub(crate) fn norm_of_slices(&self, ctx: &Context, slices: &DecoderWeights) -> Result<f64, TrainError> {
        let only = slices.tensors().into_iter().filter(|(name, _)| self.is_only_slice(name));
        let mut sum = [only.map(|(_, slice)| sum_of_squares(ctx, slice)).sum::<f64>()];
        self.world.all_reduce(&mut sum, Reduce::Sum)?;
        Ok(sum[0].sqrt())
    }

    /// Puts everybody's slices together in `whole`.
    pub(crate) fn join_slices(&self, slices: &DecoderWeights, whole: &mut DecoderWeights) -> Result<(), TrainError> {
        for ((name, slice), (_, whole)) in slices.tensors().into_iter().zip(whole.tensors_mut()) {
            let holders = self.holders(&name);
            let counts = counts(whole.len(), holders.size());
            holders.all_gather_v(slice.f32s(), whole.f32s_mut(), &counts)?;
        }
        Ok(())
    }

    /// The state of all of this rank's weights, from everybody's slices of it. `like` has their shapes.
    pub(crate) fn join_optimizer(
        &self,
        ctx: &Context,
        optimizer: &Optimizer,
        like: &DecoderWeights,
    ) -> Result<Optimizer, TrainError> {
        let (mut first, mut second) = (like.zeros_like(ctx), like.zeros_like(ctx));
        self.join_slices(&optimizer.first, &mut first)?;
        self.join_slices(&optimizer.second, &mut second)?;
        Ok(optimizer.with_moments(first, second))
    }

    /// The slices of a state of all of this rank's weights.
    pub(crate) fn slice_optimizer(&self, ctx: &Context, optimizer: &Optimizer) -> Optimizer {
        optimizer.with_moments(self.slices(ctx, &optimizer.first), self.slices(ctx, &optimizer.second))
    }
}
