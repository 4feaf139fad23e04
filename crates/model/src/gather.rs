//! Weights of which a rank keeps a part, and which are whole only while a pass needs them.

use std::fmt;
use std::sync::Arc;

use moeworks_ops::Context;

use crate::decoder::Decoder;
use crate::weights::{DecoderWeights, LayerWeights};

/// Makes weights whole of which each rank keeps a part, when a pass comes to them (ZeRO-3, Rajbhandari et al., 1910.02054,
/// section 5.3).
///
/// All ranks ask for the same in the same order. Where a communication fails, the tensors have the right shapes, and the failure is
/// where the passes' owner looks for it.
pub trait Gather: fmt::Debug + Send + Sync {
    /// `parts` with all that belongs to no layer whole: embedding, last norm, head.
    fn outside(&self, ctx: &Context, parts: &DecoderWeights) -> DecoderWeights;

    /// Layer `index` of `parts`, whole. `next` is the layer that will be asked for after it: it may be begun with.
    fn layer(&self, ctx: &Context, parts: &DecoderWeights, index: usize, next: Option<usize>) -> LayerWeights;
}

impl Decoder {
    /// The same decoder for weights that are parts of what it needs: passes ask `gather` for the whole, layer by layer.
    #[must_use]
    pub fn gathering(mut self, gather: Arc<dyn Gather>) -> Self {
        self.stage.gather = Some(gather);
        self
    }
}

/// The layer after `index` of `num` on the way forward, if there is one.
pub(crate) fn after(index: usize, num: usize) -> Option<usize> {
    Some(index + 1).filter(|&next| next < num)
}
