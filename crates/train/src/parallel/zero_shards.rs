//! Tensors sharded over the ranks that hold the same weights (ZeRO, Rajbhandari et al., 1910.02054): each rank has a
//! slice of every tensor. With a sharded optimizer state (stage 1) a rank reduces only the gradients of its slice and
//! all-gathers the updated weights.

use moeworks_comm::{CommError, Pending, Reduce};
use moeworks_model::{ParamSet, WeightSpec};
use moeworks_ops::Context;
use moeworks_ops::elementwise::sum_of_squares;
use moeworks_tensor::{DType, Tensor};

use super::{Ranks, SumsUnderWay};
use crate::error::TrainError;

/// An all-gather or reduce-scatter in flight: the sent tensor and the one to receive.
pub(super) type PendingWhole = Pending<(Tensor, Tensor)>;

/// Returns the number of elements of each of `n` ranks' slices of `len` elements.
fn counts(len: usize, n: usize) -> Vec<usize> {
    (0..n).map(|rank| len / n + usize::from(rank < len % n)).collect()
}

impl Ranks {
    /// Returns the number of elements of each holder's slice of tensor `place`.
    pub(super) fn slice_counts(&self, place: usize) -> Vec<usize> {
        counts(self.table().shape(place).iter().product(), self.holders_of(place).size())
    }

    /// Allocates this rank's slice of tensor `place`.
    pub(super) fn empty_slice(&self, ctx: &Context, place: usize) -> Tensor {
        let len = self.slice_counts(place)[self.holders_of(place).rank()];
        ctx.empty(&[len], DType::F32)
    }

    /// Returns this rank's slice of tensor `place`.
    pub(super) fn slice(&self, ctx: &Context, place: usize, tensor: &Tensor) -> Tensor {
        let start = self.slice_counts(place)[..self.holders_of(place).rank()].iter().sum::<usize>();
        let mut slice = self.empty_slice(ctx, place);
        let values = &tensor.f32s()[start..start + slice.len()];
        slice.f32s_mut().copy_from_slice(values);
        slice
    }

    /// Returns this rank's slice of every trainable tensor; empty tensors for the others.
    pub(crate) fn trainable_slices(&self, ctx: &Context, tensors: &dyn ParamSet) -> Vec<Tensor> {
        let slice_of = |(spec, tensor): (&WeightSpec, &Tensor)| match spec.is_trainable && self.holds(spec) {
            true => self.slice(ctx, spec.index, tensor),
            false => ctx.empty(&[0], DType::F32),
        };
        self.table().specs().iter().zip(tensors.params()).map(slice_of).collect()
    }

    /// Returns this rank's slice of every trainable tensor's gradient, summed over the ranks that hold the tensor:
    /// the slices of `under_way`, or else reduce-scattered `grads`.
    pub(crate) fn sum_to_slices(
        &self,
        ctx: &Context,
        grads: &dyn ParamSet,
        under_way: SumsUnderWay,
    ) -> Result<Vec<Tensor>, TrainError> {
        if let Some(slices) = under_way.slices {
            return Ok(slices.finish()?);
        }
        let slice_of = |(spec, tensor): (&WeightSpec, &Tensor)| match spec.is_trainable && self.holds(spec) {
            true => self.summed_slice(ctx, spec.index, tensor),
            false => Ok(ctx.empty(&[0], DType::F32)),
        };
        Ok(self.table().specs().iter().zip(grads.params()).map(slice_of).collect::<Result<_, _>>()?)
    }

    /// Reduce-scatters a tensor over the ranks that hold it. Returns this rank's slice of the sum.
    pub(super) fn summed_slice(&self, ctx: &Context, place: usize, tensor: &Tensor) -> Result<Tensor, CommError> {
        let mut slice = self.empty_slice(ctx, place);
        let counts = self.slice_counts(place);
        self.holders_of(place).reduce_scatter(tensor.f32s(), &counts, slice.f32s_mut(), Reduce::Sum)?;
        Ok(slice)
    }

    /// Computes the norm of the gradients of all trainable weights as one vector, from every rank's slices; all ranks
    /// get the same bits.
    pub(crate) fn norm_of_slices(&self, ctx: &Context, slices: &[Tensor]) -> Result<f64, TrainError> {
        let slices = self.table().specs().iter().zip(slices);
        let only = slices.filter(|(spec, _)| spec.is_trainable && self.is_only_slice(spec));
        let mut sum = [only.map(|(_, slice)| sum_of_squares(ctx, slice)).sum::<f64>()];
        self.world.all_reduce(&mut sum, Reduce::Sum)?;
        Ok(sum[0].sqrt())
    }

    /// All-gathers the slices of trainable tensors into `whole`.
    pub(crate) fn join_slices(&self, slices: &[Tensor], whole: &mut dyn ParamSet) -> Result<(), TrainError> {
        let tensors = slices.iter().zip(whole.params_mut()).enumerate();
        let is_joined = |place: usize| self.table().is_trainable(place) && self.holds(self.table().spec(place));
        for (place, (slice, whole)) in tensors.filter(|(place, _)| is_joined(*place)) {
            self.holders_of(place).all_gather_v(slice.f32s(), whole.f32s_mut(), &self.slice_counts(place))?;
        }
        Ok(())
    }

    /// Starts the all-gather of tensor `place`.
    pub(super) fn start_joining(&self, ctx: &Context, place: usize, slice: &Tensor) -> Result<PendingWhole, CommError> {
        let whole = ctx.empty(&self.table().shape(place), slice.dtype());
        self.holders_of(place).start_all_gather_v(slice.clone(), whole, &self.slice_counts(place))
    }
}
