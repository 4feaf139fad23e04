//! Layers one behind the other, without a way back: how encoders and decoders are used.

use std::borrow::Cow;

use moeworks_moe::{FixedCapacity, MoeSaved, RouterInput};
use moeworks_tensor::Tensor;

use super::Pass;
use super::attention::{AttentionBlock, WRONG_KIND};
use super::cross::CrossBlock;
use super::feed_forward::FeedForwardBlock;
use crate::kv_cache::LayerCache;
use crate::weights::LayerWeights;

/// More tokens than these go to most experts of a layer.
const MAX_FORESEEN_TOKENS: usize = 8;

/// The blocks of some layers.
#[derive(Clone, Copy)]
pub(crate) struct Stack<'a> {
    pub(crate) attention: &'a [AttentionBlock],
    /// The block of a decoder with an encoder, the same in all layers.
    pub(crate) cross: Option<&'a CrossBlock>,
    pub(crate) feed_forward: &'a [FeedForwardBlock],
    /// As `Variant::expert_capacity`.
    pub(crate) expert_capacity: usize,
}

impl Stack<'_> {
    /// What routers are told of the capacity of an expert.
    pub(super) fn capacity(&self, pass: &Pass<'_>) -> Option<FixedCapacity> {
        (self.expert_capacity > 0)
            .then_some(FixedCapacity { num_tokens: self.expert_capacity as u32, group_tokens: pass.seq_len })
    }

    /// The residual stream `[T, D]` behind the last layer; `layer` has the weights of each. Shows `watch` what each MoE layer decided.
    pub(crate) fn forward<'w>(
        &self,
        pass: &Pass<'_>,
        layer: impl Fn(usize) -> Cow<'w, LayerWeights>,
        mut x: Tensor,
        input: &RouterInput<'_>,
        caches: Option<&mut [LayerCache]>,
        mut watch: impl FnMut(usize, &MoeSaved),
    ) -> Tensor {
        let input = RouterInput { capacity: self.capacity(pass), ..*input };
        let mut previous: Option<Tensor> = None;
        let mut caches = caches.map(|caches| caches.iter_mut());
        for (i, (attention, block)) in self.attention.iter().zip(self.feed_forward).enumerate() {
            let w = layer(i);
            let mut middle = match caches.as_mut().and_then(Iterator::next) {
                Some(cache) => attention.forward_cached(pass, &w, &x, cache),
                None => attention.forward(pass, &w, &x).0,
            };
            if let Some(cross) = self.cross {
                let (Some(w), Some(memory)) = (&w.cross, pass.memory) else { panic!("{WRONG_KIND}") };
                middle = cross.forward(pass, w, &middle, (memory, i)).0;
            }
            let input = RouterInput { previous: previous.as_ref(), ..input };
            let foreseen = self.foresee(pass, (i + 1, &layer), &middle, &input);
            let (y, saved) = block.forward(pass, &w, &middle, &input);
            if let Some((next, ids)) = foreseen {
                self.feed_forward[i + 1].send_ahead(pass.ctx, &next, &ids);
            }
            if let Some(saved) = saved.moe() {
                watch(i, saved);
                previous = saved.logits().cloned();
            }
            x = y;
        }
        x
    }

    /// What a layer's router says of the residual stream `middle` of the layer before, which is much like what it will see ("Fast Inference
    /// of Mixture-of-Experts Language Models with Offloading", 2312.17238, section 3.2): the layer's weights and the experts, in the
    /// host, before those of the layer at work are computed. None where all experts are there.
    fn foresee<'w>(
        &self,
        pass: &Pass<'_>,
        (index, layer): (usize, &impl Fn(usize) -> Cow<'w, LayerWeights>),
        middle: &Tensor,
        input: &RouterInput<'_>,
    ) -> Option<(Cow<'w, LayerWeights>, Tensor)> {
        let has_room = pass.ctx.gpu().is_some_and(|gpu| gpu.expert_cache_stats().is_some());
        let next = self.feed_forward.get(index).filter(|_| has_room && middle.rows() <= MAX_FORESEEN_TOKENS)?;
        let weights = layer(index);
        let ids = next.foresee(pass, &weights, middle, input)?;
        // They are in the host when the experts before them begin.
        let _: &[u32] = ids.u32s();
        Some((weights, ids))
    }
}
