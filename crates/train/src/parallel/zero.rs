//! Gradients sharded over the ranks that hold the same weights (ZeRO-2, Rajbhandari et al., 1910.02054, section 5.2).
//! As soon as a layer's gradients are complete they are reduce-scattered: each rank keeps the sum of its slice and
//! frees the rest.
//!
//! The gradients of two layers exist at a time: those being reduced and those being computed. Gradients outside the
//! layers (embedding, last norm, head) exist throughout and are summed after each pass. In a pipeline a layer's
//! matrices get gradients with the weight gradients of each microbatch, and are reduced then; all other gradients
//! exist throughout and are summed after the step.

use moeworks_comm::{CommError, Reduce};
use moeworks_model::{ParamSet, WeightSpec};
use moeworks_ops::Context;
use moeworks_ops::elementwise::add_assign;
use moeworks_tensor::{DType, Tensor};

use super::Ranks;
use super::zero_shards::PendingWhole;

/// This rank's slices of the gradients, summed over ranks and the passes so far.
pub(crate) struct GradSlices {
    sums: Vec<Tensor>,
    /// Reduce-scatters in flight, by the index of the tensor: the sent tensor and the slice to receive.
    under_way: Vec<(usize, PendingWhole)>,
    failure: Option<CommError>,
}

impl GradSlices {
    /// Allocates zeros for this rank's slices.
    pub(super) fn new(ranks: &Ranks, ctx: &Context) -> Self {
        let zeros = |spec: &WeightSpec| {
            if !spec.is_trainable || !ranks.holds(spec) {
                return ctx.empty(&[0], DType::F32);
            }
            let mut slice = ranks.empty_slice(ctx, spec.index);
            slice.f32s_mut().fill(0.0);
            slice
        };
        Self { sums: ranks.table().specs().iter().map(zeros).collect(), under_way: Vec::new(), failure: None }
    }

    /// Prepares a pass, which overwrites gradients: allocates those of the last layer.
    pub(crate) fn begin_pass(&self, ranks: &Ranks, ctx: &Context, grads: &mut dyn ParamSet) {
        if let Some(last) = ranks.table().num_layers().checked_sub(1) {
            make_room(ranks, ctx, last, grads);
        }
    }

    /// Starts reducing a layer's complete gradients, and allocates those of the layer below.
    pub(super) fn layer_done(&mut self, ranks: &Ranks, ctx: &Context, layer: usize, grads: &mut dyn ParamSet) {
        self.settle(ctx);
        for (place, tensor) in ranks.table().in_layer(layer, grads) {
            let whole = std::mem::replace(tensor, ctx.empty(&[0], DType::F32));
            self.start(ranks, ctx, place, whole);
        }
        if layer > 0 {
            make_room(ranks, ctx, layer - 1, grads);
        }
    }

    /// Prepares the weight gradients of a microbatch in a layer of a pipeline: allocates those that are zeros until
    /// then.
    pub(crate) fn begin_layer(&self, ranks: &Ranks, ctx: &Context, layer: usize, grads: &mut dyn ParamSet) {
        for (place, tensor) in ranks.table().in_layer(layer, grads) {
            if ranks.reduces_at_once(place) {
                *tensor = ctx.zeros(&ranks.table().grad_shape(place), DType::F32);
            }
        }
    }

    /// Starts reducing the weight gradients of a microbatch in a layer of a pipeline, which are complete.
    pub(crate) fn end_layer(&mut self, ranks: &Ranks, ctx: &Context, layer: usize, grads: &mut dyn ParamSet) {
        self.settle(ctx);
        for (place, tensor) in ranks.table().in_layer(layer, grads) {
            if ranks.reduces_at_once(place) {
                let whole = std::mem::replace(tensor, ctx.empty(&[0], DType::F32));
                self.start(ranks, ctx, place, whole);
            }
        }
    }

    /// Ends a step of a pipeline: sums the gradients that were kept whole and waits for all reductions in flight.
    pub(crate) fn end_step(&mut self, ranks: &Ranks, ctx: &Context, grads: &dyn ParamSet) {
        self.settle(ctx);
        let grads = grads.params();
        let is_whole = |place: &usize| {
            let spec = ranks.table().spec(*place);
            spec.is_trainable && ranks.holds(spec) && !ranks.reduces_at_once(*place)
        };
        let places: Vec<usize> = (0..grads.len()).filter(is_whole).collect();
        self.sum_whole(ranks, ctx, &places, &grads);
    }

    /// Ends a pass: sums the gradients outside the layers and waits for all reductions in flight.
    pub(crate) fn end_pass(&mut self, ranks: &Ranks, ctx: &Context, grads: &dyn ParamSet) {
        self.settle(ctx);
        let places: Vec<usize> = ranks.table().outside().filter(|&place| ranks.table().is_trainable(place)).collect();
        self.sum_whole(ranks, ctx, &places, &grads.params());
    }

    /// Adds the sums of whole gradients over ranks to this rank's slices.
    fn sum_whole(&mut self, ranks: &Ranks, ctx: &Context, places: &[usize], grads: &[&Tensor]) {
        for &place in places {
            if self.failure.is_some() {
                return;
            }
            match ranks.summed_slice(ctx, place, grads[place]) {
                Ok(slice) => add_assign(ctx, &mut self.sums[place], &slice),
                Err(error) => self.failure = Some(error),
            }
        }
    }

    /// Returns the sums.
    pub(super) fn finish(self) -> Result<Vec<Tensor>, CommError> {
        self.failure.map_or(Ok(self.sums), Err)
    }

    fn start(&mut self, ranks: &Ranks, ctx: &Context, place: usize, whole: Tensor) {
        if self.failure.is_some() || !ranks.table().is_trainable(place) {
            return;
        }
        let (slice, counts) = (ranks.empty_slice(ctx, place), ranks.slice_counts(place));
        let start = |whole| ranks.holders_of(place).start_reduce_scatter(whole, &counts, slice, Reduce::Sum);
        match ranks.owned_gradient(ctx, place, &whole).and_then(start) {
            Ok(pending) => self.under_way.push((place, pending)),
            Err(error) => self.failure = Some(error),
        }
    }

    /// Waits for the reductions in flight.
    fn settle(&mut self, ctx: &Context) {
        for (place, pending) in self.under_way.drain(..) {
            match pending.finish() {
                Ok((_, slice)) => add_assign(ctx, &mut self.sums[place], &slice),
                Err(error) => self.failure = self.failure.take().or(Some(error)),
            }
        }
    }
}

/// Allocates the gradients of a layer.
fn make_room(ranks: &Ranks, ctx: &Context, layer: usize, grads: &mut dyn ParamSet) {
    for (place, tensor) in ranks.table().in_layer(layer, grads) {
        *tensor = ctx.zeros(&ranks.table().grad_shape(place), DType::F32);
    }
}

impl Ranks {
    /// Returns whether the gradient of tensor `place` is reduced with each microbatch of a pipeline: that of a matrix
    /// in a layer. Vectors, which B computes, take little memory, and are kept to the end of the step as are the
    /// tensors outside the layers.
    fn reduces_at_once(&self, place: usize) -> bool {
        let spec = self.table().spec(place);
        spec.place.layer().is_some() && spec.shape.len() > 1 && spec.is_trainable && self.holds(spec)
    }

    /// Allocates gradients of zeros for `weights` or slices of them. With sharded gradients those of a layer are
    /// allocated when they are computed.
    pub(crate) fn first_grads<P: ParamSet>(&self, ctx: &Context, weights: &P) -> P {
        if !self.shards_gradients() {
            return weights.gradients(ctx, self.table().weights(), DType::F32);
        }
        let outside: Vec<usize> = self.table().outside().collect();
        let is_pipeline = self.pipeline_group().is_some();
        let is_kept = |spec: &WeightSpec| match is_pipeline {
            true => self.holds(spec) && spec.is_trainable && !self.reduces_at_once(spec.index),
            false => outside.contains(&spec.index),
        };
        let grads = weights.map_params(self.table().weights(), |spec, _| {
            let shape = if is_kept(spec) { self.table().grad_shape(spec.index) } else { vec![0] };
            ctx.zeros(&shape, DType::F32)
        });
        grads.without_states(ctx)
    }
}
