//! Sums of gradients over all ranks, and their norm.

use std::collections::HashMap;
use std::sync::PoisonError;
use std::time::Instant;

use moeworks_comm::{CommError, Pending, Reduce};
use moeworks_model::ParamSet;
use moeworks_moe::LayerRanks;
use moeworks_ops::Context;
use moeworks_ops::elementwise::sum_of_squares;
use moeworks_plan::Placement;
use moeworks_tensor::{DType, Tensor};

use super::zero::GradSlices;
use super::{Ranks, fingerprint};
use crate::error::TrainError;

/// Sums of gradients in flight, by the index of the tensor, and the first error of starting one.
#[derive(Default)]
pub(crate) struct SumsUnderWay {
    pending: Vec<(usize, Pending<Tensor>)>,
    failure: Option<CommError>,
    /// The slices into which gradients are reduce-scattered, if they are sharded.
    pub(crate) slices: Option<GradSlices>,
}

/// The sums of gradients of experts that several ranks hold.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ReplicaSums {
    num_bytes: f64,
    seconds: f64,
}

impl ReplicaSums {
    /// Returns the bytes of gradients that were summed in a second; 0 without a sum.
    pub(crate) fn bytes_per_s(self) -> f64 {
        if self.seconds > 0.0 { self.num_bytes / self.seconds } else { 0.0 }
    }
}

impl Ranks {
    /// Begins the sums of a step's gradients; none is in flight yet.
    pub(crate) fn begin_sums(&self, ctx: &Context) -> SumsUnderWay {
        let slices = self.shards_gradients().then(|| GradSlices::new(self, ctx));
        SumsUnderWay { slices, ..SumsUnderWay::default() }
    }

    /// Starts summing the gradients of a layer, which [`sum_gradients`](Self::sum_gradients) finishes; until then
    /// they are not in `grads`. All ranks start the same layers in the same order.
    pub(crate) fn start_sums(
        &self,
        ctx: &Context,
        layer: usize,
        grads: &mut dyn ParamSet,
        under_way: &mut SumsUnderWay,
    ) {
        if let Some(slices) = &mut under_way.slices {
            return slices.layer_done(self, ctx, layer, grads);
        }
        let placements = self.experts.placements();
        let has_replicas = placements.layer(layer).is_some_and(Placement::has_replicas);
        for (place, tensor) in self.table().in_layer(layer, grads) {
            let spec = self.table().spec(place);
            let is_waiting = spec.role.is_of_experts() && has_replicas;
            let holders = self.holders(spec);
            let is_left = !spec.is_trainable || !self.holds(spec) || is_waiting;
            if is_left || holders.size() == 1 || under_way.failure.is_some() {
                continue;
            }
            let own = std::mem::replace(tensor, ctx.empty(&[0], DType::F32));
            match holders.start_all_reduce(own, Reduce::Sum) {
                Ok(pending) => under_way.pending.push((spec.index, pending)),
                Err(error) => under_way.failure = Some(error),
            }
        }
    }

    /// Waits for the started sums and puts them back in `grads`. Returns the indices of their tensors.
    fn finish_sums(&self, grads: &mut dyn ParamSet, under_way: SumsUnderWay) -> Result<Vec<usize>, TrainError> {
        under_way.failure.map_or(Ok(()), Err)?;
        let finished = under_way.pending.into_iter().map(|(index, pending)| Ok((index, pending.finish()?)));
        let mut sums = finished.collect::<Result<HashMap<_, _>, CommError>>()?;
        let mut done = Vec::with_capacity(sums.len());
        for (index, tensor) in grads.params_mut().into_iter().enumerate() {
            if let Some(sum) = sums.remove(&index) {
                *tensor = sum;
                done.push(index);
            }
        }
        Ok(done)
    }

    /// Sums the gradients of trainable weights over the ranks that hold them, so that they are those of all tokens,
    /// and finishes the sums `under_way`. Ranks then have equal bits of the weights they share.
    pub(crate) fn sum_gradients(&self, grads: &mut dyn ParamSet, under_way: SumsUnderWay) -> Result<(), TrainError> {
        let done = self.finish_sums(grads, under_way)?;
        for (spec, tensor) in self.table().specs().iter().zip(grads.params_mut()) {
            if done.contains(&spec.index) || !spec.is_trainable || !self.holds(spec) {
                continue;
            }
            self.holders(spec).all_reduce(tensor.f32s_mut(), Reduce::Sum)?;
            if spec.role.is_of_experts() {
                self.sum_replicas(&self.layer_of(spec), tensor)?;
            }
        }
        Ok(())
    }

    /// Refuses ranks whose `weights` have drifted apart. Ranks that hold the same weights have the same bits,
    /// provided that the MPI library's sums give all ranks equal results. All ranks call this.
    pub(crate) fn check_copies(&self, weights: &dyn ParamSet) -> Result<(), TrainError> {
        if self.shards_weights() {
            return Ok(());
        }
        let held = self.table().specs().iter().zip(weights.params()).filter(|(spec, _)| self.holds(spec));
        for (spec, tensor) in held {
            let holders = self.holders(spec);
            if let Some(rank) = holders.first_other(&fingerprint(tensor.bytes()))? {
                return Err(TrainError::Drifted { rank, of: holders.world_ranks()[0], tensor: spec.name.clone() });
            }
        }
        Ok(())
    }

    /// Sums the gradients `[held, ..]` of a layer's experts that several ranks of a group hold.
    pub(super) fn sum_replicas(&self, layer: &LayerRanks, tensor: &mut Tensor) -> Result<(), CommError> {
        let placement = layer.placement();
        let replicated: Vec<usize> =
            (0..placement.num_experts()).filter(|&expert| placement.ranks_of(expert).len() > 1).collect();
        if replicated.is_empty() {
            return Ok(());
        }
        let size = tensor.shape()[1..].iter().product::<usize>();
        let mut sums = vec![0.0_f32; replicated.len() * size];
        let places = |expert: &usize| layer.held().binary_search(expert).ok();
        for (sum, expert) in sums.chunks_mut(size).zip(&replicated) {
            if let Some(place) = places(expert) {
                sum.copy_from_slice(&tensor.f32s()[place * size..(place + 1) * size]);
            }
        }
        let start = Instant::now();
        self.experts.group().all_reduce(&mut sums, Reduce::Sum)?;
        self.count_replica_sum(size_of_val(&sums[..]), start);
        for (sum, expert) in sums.chunks(size).zip(&replicated) {
            if let Some(place) = places(expert) {
                tensor.f32s_mut()[place * size..(place + 1) * size].copy_from_slice(sum);
            }
        }
        Ok(())
    }

    /// Counts a sum of gradients of replicas, which began at `start`.
    fn count_replica_sum(&self, num_bytes: usize, start: Instant) {
        let mut sums = self.replica_sums.lock().unwrap_or_else(PoisonError::into_inner);
        sums.num_bytes += num_bytes as f64;
        sums.seconds += start.elapsed().as_secs_f64();
    }

    /// Returns the sums of gradients of replicas since the last call.
    pub(crate) fn take_replica_sums(&self) -> ReplicaSums {
        std::mem::take(&mut *self.replica_sums.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Computes the norm of the summed gradients of all trainable weights as one vector, each expert counted once;
    /// all ranks get the same bits.
    pub(crate) fn global_norm(&self, ctx: &Context, grads: &dyn ParamSet) -> Result<f64, TrainError> {
        let mut dense = [0.0];
        let mut experts = [0.0];
        let tensors = self.table().specs().iter().zip(grads.params());
        for (spec, tensor) in tensors.filter(|(spec, _)| spec.is_trainable && self.is_first_pp_rank(spec)) {
            if spec.role.is_of_experts() {
                experts[0] += self.squares_of_own(ctx, &self.layer_of(spec), tensor);
            } else if self.is_first_holder(spec) {
                dense[0] += sum_of_squares(ctx, tensor);
            }
        }
        if let Some(ranks) = self.tensor_ranks() {
            ranks.group().all_reduce(&mut dense, Reduce::Sum)?;
        }
        self.experts.group().all_reduce(&mut experts, Reduce::Sum)?;
        let mut squares = [dense[0] + experts[0]];
        if let Some(pipeline_group) = &self.pipeline_group {
            pipeline_group.all_reduce(&mut squares, Reduce::Sum)?;
        }
        Ok(squares[0].sqrt())
    }

    /// Sums the squares of a layer's `[held, ..]` over the experts whose first rank this is.
    fn squares_of_own(&self, ctx: &Context, layer: &LayerRanks, tensor: &Tensor) -> f64 {
        let (placement, rank) = (layer.placement(), layer.group().rank());
        if !placement.has_replicas() {
            return sum_of_squares(ctx, tensor);
        }
        let size = tensor.shape()[1..].iter().product::<usize>();
        let own = layer.held().iter().zip(tensor.f32s().chunks(size.max(1)));
        let own = own.filter(|(expert, _)| placement.ranks_of(**expert)[0] == rank);
        own.map(|(_, grads)| grads.iter().map(|&g| f64::from(g).powi(2)).sum::<f64>()).sum()
    }
}
