//! Tensors sharded over the ranks that hold the same weights (ZeRO, Rajbhandari et al., 1910.02054): each rank has a
//! slice of every tensor. With a sharded optimizer state (stage 1) a rank reduces only the gradients of its slice and
//! all-gathers the updated weights.
//!
//! An expert on several ranks of a group is sharded once: over the ranks that hold what one of them, its
//! [owner](moeworks_plan::Placement::owner), holds. Its gradients are first summed in the group, and its joined
//! weights sent from the owner to the others.

use moeworks_comm::{CommError, Pending, Reduce};
use moeworks_model::{ParamSet, WeightSpec};
use moeworks_moe::select_experts;
use moeworks_ops::Context;
use moeworks_ops::elementwise::sum_of_squares;
use moeworks_plan::Placement;
use moeworks_tensor::{DType, Tensor};

use super::{Ranks, SumsUnderWay};
use crate::error::TrainError;

/// An all-gather or reduce-scatter in flight: the sent tensor and the one to receive.
pub(super) type PendingWhole = Pending<(Tensor, Tensor)>;

/// Returns the number of elements of each of `n` ranks' slices of `len` elements.
pub(super) fn counts(len: usize, n: usize) -> Vec<usize> {
    (0..n).map(|rank| len / n + usize::from(rank < len % n)).collect()
}

impl Ranks {
    /// Returns the number of elements of each holder's slice of tensor `place`.
    pub(super) fn slice_counts(&self, place: usize) -> Vec<usize> {
        counts(self.sliced_shape(place).iter().product(), self.holders_of(place).size())
    }

    /// Returns the owners of a tensor's experts, if some experts are on several ranks.
    fn owners(&self, place: usize) -> Option<Placement> {
        let spec = self.table().spec(place);
        if !spec.role.is_of_experts() || !self.holds(spec) {
            return None;
        }
        let layer = self.layer_of(spec);
        layer.placement().has_replicas().then(|| layer.placement().owners())
    }

    /// Returns the shape of what holders share out in slices: this rank's part without experts that others own.
    fn sliced_shape(&self, place: usize) -> Vec<usize> {
        let mut shape = self.table().shape(place);
        if let Some(owners) = self.owners(place) {
            shape[0] = owners.experts_of(self.experts.group().rank()).len();
        }
        shape
    }

    /// Returns what holders share out of this rank's part of a tensor.
    fn owned(&self, ctx: &Context, place: usize, part: &Tensor) -> Tensor {
        let Some(owners) = self.owners(place) else { return part.clone() };
        let layer = self.layer_of(self.table().spec(place));
        let rank = layer.group().rank();
        let rows = (0..layer.held().len()).filter(|&row| owners.holds(rank, layer.held()[row]));
        select_experts(ctx, part, &rows.collect::<Vec<_>>())
    }

    /// Returns what holders share out of this rank's part of a gradient, with the gradients of replicas summed.
    pub(super) fn owned_gradient(&self, ctx: &Context, place: usize, part: &Tensor) -> Result<Tensor, CommError> {
        if self.owners(place).is_none() {
            return Ok(part.clone());
        }
        let layer = self.layer_of(self.table().spec(place));
        let mut sum = select_experts(ctx, part, &(0..layer.held().len()).collect::<Vec<_>>());
        self.sum_replicas(&layer, &mut sum)?;
        Ok(self.owned(ctx, place, &sum))
    }

    /// Sends experts from their owners to all ranks that hold them: `owned` becomes this rank's part. All ranks of a
    /// group call this.
    pub(crate) fn spread_replicas(&self, ctx: &Context, place: usize, owned: Tensor) -> Result<Tensor, CommError> {
        let Some(owners) = self.owners(place) else { return Ok(owned) };
        let (layer, mut part) = (self.layer_of(self.table().spec(place)), owned);
        self.experts.move_experts(ctx, &owners, layer.placement(), vec![&mut part])?;
        Ok(part)
    }

    /// Allocates this rank's slice of tensor `place`.
    pub(super) fn empty_slice(&self, ctx: &Context, place: usize) -> Tensor {
        let len = self.slice_counts(place)[self.holders_of(place).rank()];
        ctx.empty(&[len], DType::F32)
    }

    /// Returns this rank's slice of tensor `place`.
    pub(super) fn slice(&self, ctx: &Context, place: usize, tensor: &Tensor) -> Tensor {
        let start = self.slice_counts(place)[..self.holders_of(place).rank()].iter().sum::<usize>();
        let (mut slice, tensor) = (self.empty_slice(ctx, place), self.owned(ctx, place, tensor));
        let values = &tensor.f32s()[start..start + slice.len()];
        slice.f32s_mut().copy_from_slice(values);
        slice
    }

    /// Returns this rank's slice of every trainable tensor; empty tensors for the others.
    pub(crate) fn trainable_slices(&self, ctx: &Context, tensors: &dyn ParamSet) -> Vec<Tensor> {
        self.slices_of_some(ctx, tensors, &|_| true)
    }

    /// Returns this rank's slice of every trainable tensor whose index is chosen; empty tensors for the others.
    pub(crate) fn slices_of_some(
        &self,
        ctx: &Context,
        tensors: &dyn ParamSet,
        is_chosen: &dyn Fn(usize) -> bool,
    ) -> Vec<Tensor> {
        let is_taken = |spec: &WeightSpec| spec.is_trainable && self.holds(spec) && is_chosen(spec.index);
        let slice_of = |(spec, tensor): (&WeightSpec, &Tensor)| match is_taken(spec) {
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
        let (mut slice, tensor) = (self.empty_slice(ctx, place), self.owned_gradient(ctx, place, tensor)?);
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
    pub(crate) fn join_slices(
        &self,
        ctx: &Context,
        slices: &[Tensor],
        whole: &mut dyn ParamSet,
    ) -> Result<(), TrainError> {
        self.join_some(ctx, slices, whole, &|_| true)
    }

    /// All-gathers the slices of trainable tensors whose index is chosen into `whole`.
    pub(crate) fn join_some(
        &self,
        ctx: &Context,
        slices: &[Tensor],
        whole: &mut dyn ParamSet,
        is_chosen: &dyn Fn(usize) -> bool,
    ) -> Result<(), TrainError> {
        let tensors = slices.iter().zip(whole.params_mut()).enumerate();
        let is_joined =
            |place: usize| is_chosen(place) && self.table().is_trainable(place) && self.holds(self.table().spec(place));
        for (place, (slice, whole)) in tensors.filter(|(place, _)| is_joined(*place)) {
            let (holders, counts) = (self.holders_of(place), self.slice_counts(place));
            if self.owners(place).is_none() {
                holders.all_gather_v(slice.f32s(), whole.f32s_mut(), &counts)?;
                continue;
            }
            let mut owned = ctx.empty(&self.sliced_shape(place), DType::F32);
            holders.all_gather_v(slice.f32s(), owned.f32s_mut(), &counts)?;
            *whole = self.spread_replicas(ctx, place, owned)?;
        }
        Ok(())
    }

    /// Starts the all-gather of tensor `place`, or of the experts of it that this rank owns.
    pub(super) fn start_joining(&self, ctx: &Context, place: usize, slice: &Tensor) -> Result<PendingWhole, CommError> {
        let whole = ctx.empty(&self.sliced_shape(place), slice.dtype());
        self.holders_of(place).start_all_gather_v(slice.clone(), whole, &self.slice_counts(place))
    }
}
