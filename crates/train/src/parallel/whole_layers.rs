//! Weights sharded over the ranks that hold the same ones (ZeRO-3, Rajbhandari et al., 1910.02054, section 5.3). A
//! layer is gathered for a pass while the previous one computes. Weights outside the layers are gathered for the
//! whole pass, or in a pipeline for a whole step.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use moeworks_model::{DecoderWeights, Gather, LayerWeights, ParamSet};
use moeworks_ops::Context;
use moeworks_tensor::Tensor;

use super::Ranks;
use super::zero_shards::PendingWhole;

/// Gathers the slices of all ranks where a pass needs them.
pub(crate) struct WholeLayers {
    ranks: Arc<Ranks>,
    /// True if the weights outside the layers are whole before a pass.
    has_whole_ends: bool,
    /// The layers that are being gathered. Of two passes that take turns each has one.
    next: Mutex<Vec<OnItsWay>>,
}

/// A layer that is being gathered; tensors whose communication failed are none.
struct OnItsWay {
    index: usize,
    tensors: Vec<Option<PendingWhole>>,
}

impl Ranks {
    fn start_whole(&self, ctx: &Context, place: usize, slice: &Tensor) -> Option<PendingWhole> {
        let start = || self.start_joining(ctx, place, slice).map(Some);
        self.experts.attempt(None, start)
    }

    /// Waits for a whole tensor. It is zeros if the communication failed.
    fn finish_whole(&self, ctx: &Context, place: usize, slice: &Tensor, pending: Option<PendingWhole>) -> Tensor {
        let finish = |pending: PendingWhole| self.spread_replicas(ctx, place, pending.finish()?.1).map(Some);
        let whole = pending.and_then(|pending| self.experts.attempt(None, || finish(pending)));
        whole.unwrap_or_else(|| ctx.zeros(&self.table().shape(place), slice.dtype()))
    }

    /// Gathers the weights outside the layers out of the slices `parts`. All ranks call this.
    pub(crate) fn gather_outside(&self, ctx: &Context, parts: &DecoderWeights) -> DecoderWeights {
        let outside: Vec<usize> =
            self.table().outside().filter(|&place| self.holds(self.table().spec(place))).collect();
        let join = |place: usize, slice: &Tensor| match outside.contains(&place) {
            true => self.finish_whole(ctx, place, slice, self.start_whole(ctx, place, slice)),
            false => slice.clone(),
        };
        let join = || parts.map_params(self.table().weights(), |spec, slice| join(spec.index, slice));
        self.experts.time("weights: gather", join)
    }
}

impl WholeLayers {
    /// Gathers everything that a pass needs.
    pub(crate) fn new(ranks: Arc<Ranks>) -> Self {
        Self { ranks, has_whole_ends: false, next: Mutex::default() }
    }

    /// Gathers layers for passes whose weights outside the layers are whole.
    pub(crate) fn with_whole_ends(ranks: Arc<Ranks>) -> Self {
        Self { has_whole_ends: true, ..Self::new(ranks) }
    }

    fn start_layer(&self, ctx: &Context, parts: &DecoderWeights, index: usize) -> OnItsWay {
        let mut layer = parts.layers[index].clone();
        let slices = self.ranks.table().layer(index).zip(layer.tensors_mut());
        OnItsWay { index, tensors: slices.map(|(place, slice)| self.ranks.start_whole(ctx, place, slice)).collect() }
    }

    /// Returns the layer on its way, and starts to gather the one after it.
    fn take(&self, ctx: &Context, parts: &DecoderWeights, index: usize, next: Option<usize>) -> OnItsWay {
        let mut on_their_way = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let place = on_their_way.iter().position(|layer| layer.index == index);
        let now = place.map(|place| on_their_way.swap_remove(place));
        let now = now.unwrap_or_else(|| self.start_layer(ctx, parts, index));
        if let Some(next) = next.filter(|next| on_their_way.iter().all(|layer| layer.index != *next)) {
            on_their_way.push(self.start_layer(ctx, parts, next));
        }
        now
    }
}

impl Gather for WholeLayers {
    fn outside(&self, ctx: &Context, parts: &DecoderWeights) -> DecoderWeights {
        if self.has_whole_ends {
            return parts.map_params(self.ranks.table().weights(), |_, whole| whole.clone());
        }
        self.ranks.gather_outside(ctx, parts)
    }

    fn layer(&self, ctx: &Context, parts: &DecoderWeights, index: usize, next: Option<usize>) -> LayerWeights {
        let now = self.take(ctx, parts, index, next);
        let mut layer = parts.layers[index].clone();
        let tensors = self.ranks.table().layer(index).zip(layer.tensors_mut()).zip(now.tensors);
        self.ranks.experts.time("weights: gather", || {
            for ((place, tensor), pending) in tensors {
                *tensor = self.ranks.finish_whole(ctx, place, tensor, pending);
            }
        });
        layer
    }
}

impl fmt::Debug for WholeLayers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "slices of rank {} of {}", self.ranks.rank(), self.ranks.num_ranks())
    }
}
