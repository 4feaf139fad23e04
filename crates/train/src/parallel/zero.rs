//! Gradients shared out among the ranks that hold the same weights (ZeRO-2, Rajbhandari et al., 1910.02054, section 5.2): as soon
//! as those of a layer are whole, each rank keeps the sum over ranks of its slice of them and frees the rest.
//!
//! Two layers' gradients are there at a time: those that are being summed, and those that are being computed. What belongs to no
//! layer (embedding, last norm, head) is there throughout, and summed after each pass.

use moeworks_comm::{CommError, Reduce};
use moeworks_model::{ParamSet, WeightSpec};
use moeworks_ops::Context;
use moeworks_ops::elementwise::add_assign;
use moeworks_tensor::{DType, Tensor};

use super::Ranks;
use super::zero_shards::PendingWhole;

/// This rank's slices of the gradients, summed over ranks and passes so far.
pub(crate) struct GradSlices {
    sums: Vec<Tensor>,
    /// By the number of the tensor: what was sent, and the slice that comes.
    under_way: Vec<(usize, PendingWhole)>,
    failure: Option<CommError>,
}

impl GradSlices {
    /// Zeros for this rank's slices.
    pub(super) fn new(ranks: &Ranks, ctx: &Context) -> Self {
        let zeros = |spec: &WeightSpec| {
            if !spec.is_trainable {
                return ctx.empty(&[0], DType::F32);
            }
            let mut slice = ranks.empty_slice(ctx, spec.index);
            slice.f32s_mut().fill(0.0);
            slice
        };
        Self { sums: ranks.table().specs().iter().map(zeros).collect(), under_way: Vec::new(), failure: None }
    }

    /// Before a pass, which writes gradients anew: room for those of the last layer.
    pub(crate) fn begin_pass(&self, ranks: &Ranks, ctx: &Context, grads: &mut dyn ParamSet) {
        if let Some(last) = ranks.table().num_layers().checked_sub(1) {
            make_room(ranks, ctx, last, grads);
        }
    }

    /// The gradients of a layer are whole: they are summed from now on, and there is room for those of the layer below.
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

    /// After a pass: what belongs to no layer is summed, and all that is under way waited for.
    pub(crate) fn end_pass(&mut self, ranks: &Ranks, ctx: &Context, grads: &dyn ParamSet) {
        self.settle(ctx);
        let grads = grads.params();
        for place in ranks.table().outside().filter(|&place| ranks.table().is_trainable(place)) {
            if self.failure.is_some() {
                return;
            }
            match ranks.summed_slice(ctx, place, grads[place]) {
                Ok(slice) => add_assign(ctx, &mut self.sums[place], &slice),
                Err(error) => self.failure = Some(error),
            }
        }
    }

    /// The sums.
    pub(super) fn finish(self) -> Result<Vec<Tensor>, CommError> {
        self.failure.map_or(Ok(self.sums), Err)
    }

    fn start(&mut self, ranks: &Ranks, ctx: &Context, place: usize, whole: Tensor) {
        if self.failure.is_some() || !ranks.table().is_trainable(place) {
            return;
        }
        let (slice, counts) = (ranks.empty_slice(ctx, place), ranks.slice_counts(place));
        match ranks.holders_of(place).start_reduce_scatter(whole, &counts, slice, Reduce::Sum) {
            Ok(pending) => self.under_way.push((place, pending)),
            Err(error) => self.failure = Some(error),
        }
    }

    /// Waits for what is under way.
    fn settle(&mut self, ctx: &Context) {
        for (place, pending) in self.under_way.drain(..) {
            match pending.finish() {
                Ok((_, slice)) => add_assign(ctx, &mut self.sums[place], &slice),
                Err(error) => self.failure = self.failure.take().or(Some(error)),
            }
        }
    }
}

/// Room for the gradients of a layer.
fn make_room(ranks: &Ranks, ctx: &Context, layer: usize, grads: &mut dyn ParamSet) {
    for (place, tensor) in ranks.table().in_layer(layer, grads) {
        *tensor = ctx.zeros(ranks.table().grad_shape(place), DType::F32);
    }
}

impl Ranks {
    /// Zeros for the gradients of `weights` or of slices of them; where ranks share gradients out, there is room for those of layers
    /// when they are computed.
    pub(crate) fn first_grads<P: ParamSet>(&self, ctx: &Context, weights: &P) -> P {
        if !self.shards_gradients() {
            return weights.gradients(ctx, self.table().weights(), DType::F32);
        }
        let outside: Vec<usize> = self.table().outside().collect();
        let grads = weights.map_params(self.table().weights(), |spec, _| {
            let shape = if outside.contains(&spec.index) { self.table().grad_shape(spec.index) } else { &[0] };
            ctx.zeros(shape, DType::F32)
        });
        grads.without_states(ctx)
    }
}
