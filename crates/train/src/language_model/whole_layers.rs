//! Weights sharded over the ranks that hold the same ones (ZeRO-3, Rajbhandari et al., 1910.02054, section 5.3). A
//! layer is gathered for a pass while the previous one computes. Weights outside the layers are gathered for the
//! whole pass.

use std::fmt;
use std::sync::{Arc, Mutex};

use moeworks_model::{DecoderWeights, Gather, LayerWeights, ParamSet};
use moeworks_ops::Context;
use moeworks_tensor::Tensor;

use crate::parallel::{PendingWhole, Ranks};

/// Gathers the slices of all ranks where a pass needs them.
pub(super) struct WholeLayers {
    ranks: Arc<Ranks>,
    /// The layer that is being gathered.
    next: Mutex<Option<OnItsWay>>,
}

/// A layer that is being gathered; tensors whose communication failed are none.
struct OnItsWay {
    index: usize,
    tensors: Vec<Option<PendingWhole>>,
}

impl WholeLayers {
    pub(super) fn new(ranks: Arc<Ranks>) -> Self {
        Self { ranks, next: Mutex::default() }
    }

    fn start(&self, ctx: &Context, place: usize, slice: &Tensor) -> Option<PendingWhole> {
        let start = || self.ranks.start_joining(ctx, place, slice).map(Some);
        self.ranks.experts().attempt(None, start)
    }

    /// Waits for a whole tensor. It is zeros if the communication failed.
    fn finish(&self, ctx: &Context, place: usize, slice: &Tensor, pending: Option<PendingWhole>) -> Tensor {
        let experts = self.ranks.experts();
        let finish = |pending: PendingWhole| self.ranks.spread_replicas(ctx, place, pending.finish()?.1).map(Some);
        let whole = pending.and_then(|pending| experts.attempt(None, || finish(pending)));
        whole.unwrap_or_else(|| ctx.zeros(&self.ranks.table().shape(place), slice.dtype()))
    }

    fn start_layer(&self, ctx: &Context, parts: &DecoderWeights, index: usize) -> OnItsWay {
        let mut layer = parts.layers[index].clone();
        let slices = self.ranks.table().layer(index).zip(layer.tensors_mut());
        OnItsWay { index, tensors: slices.map(|(place, slice)| self.start(ctx, place, slice)).collect() }
    }
}

impl Gather for WholeLayers {
    fn outside(&self, ctx: &Context, parts: &DecoderWeights) -> DecoderWeights {
        let outside: Vec<usize> = self.ranks.table().outside().collect();
        let join = |place: usize, slice: &Tensor| match outside.contains(&place) {
            true => self.finish(ctx, place, slice, self.start(ctx, place, slice)),
            false => slice.clone(),
        };
        let table = self.ranks.table().weights();
        let join = || parts.map_params(table, |spec, slice| join(spec.index, slice));
        self.ranks.experts().time("weights: gather", join)
    }

    fn layer(&self, ctx: &Context, parts: &DecoderWeights, index: usize, next: Option<usize>) -> LayerWeights {
        let mut on_its_way = self.next.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let now = on_its_way.take().filter(|layer| layer.index == index);
        let now = now.unwrap_or_else(|| self.start_layer(ctx, parts, index));
        *on_its_way = next.map(|next| self.start_layer(ctx, parts, next));
        let mut layer = parts.layers[index].clone();
        let tensors = self.ranks.table().layer(index).zip(layer.tensors_mut()).zip(now.tensors);
        self.ranks.experts().time("weights: gather", || {
            for ((place, tensor), pending) in tensors {
                *tensor = self.finish(ctx, place, tensor, pending);
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
