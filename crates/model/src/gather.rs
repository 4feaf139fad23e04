//! Weights of which each rank keeps a shard, gathered while a pass needs them.

use std::fmt;
use std::sync::Arc;

use moeworks_ops::Context;

use crate::decoder::Decoder;
use crate::stage::Stage;
use crate::weights::{DecoderWeights, LayerWeights};

/// Gathers sharded weights when a pass needs them (ZeRO-3, Rajbhandari et al., 1910.02054, section 5.3).
///
/// All ranks gather the same tensors in the same order. If communication fails, the tensors have the right shapes,
/// and the owner of the passes finds the failure in its communicator.
pub trait Gather: fmt::Debug + Send + Sync {
    /// Gathers the weights of `parts` that belong to no layer: embedding, final norm, head.
    fn outside(&self, ctx: &Context, parts: &DecoderWeights) -> DecoderWeights;

    /// Gathers layer `index` of `parts`. `next` is the layer that will be needed after it, which may be prefetched.
    fn layer(&self, ctx: &Context, parts: &DecoderWeights, index: usize, next: Option<usize>) -> LayerWeights;
}

impl Decoder {
    /// Returns the same decoder for sharded weights: passes gather whole weights with `gather`, layer by layer.
    #[must_use]
    pub fn gathering(mut self, gather: Arc<dyn Gather>) -> Self {
        self.stage.gather = Some(gather);
        self
    }
}

impl Stage {
    /// Returns the same stage for sharded weights; see [`Decoder::gathering`].
    #[must_use]
    pub fn gathering(mut self, gather: Arc<dyn Gather>) -> Self {
        self.gather = Some(gather);
        self
    }
}

/// Returns the layer after `index` of `num`, if there is one.
pub(crate) fn after(index: usize, num: usize) -> Option<usize> {
    Some(index + 1).filter(|&next| next < num)
}
