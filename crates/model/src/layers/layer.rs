//! A layer of an encoder or a decoder: its blocks, forward for training and inference, and backward.

use std::borrow::Cow;

use moeworks_moe::{LayerStats, LossGrad, MoeSaved};
use moeworks_ops::Context;
use moeworks_tensor::{DType, Tensor};

use super::Pass;
use super::attention::{AttentionBlock, AttentionSaved};
use super::cross::{CrossBlock, CrossSaved, EncodedGrad};
use super::feed_forward::{FeedForwardBlock, FeedForwardOutputGrads, FeedForwardSaved};
use super::weight_grads::{BlockGradTask, TaskSink};
use crate::kv_cache::LayerKv;
use crate::weights::LayerWeights;

/// The largest number of tokens for which experts are predicted; more tokens use most experts of a layer.
const MAX_PREDICTED_TOKENS: usize = 8;

/// A layer. Weights are arguments.
#[derive(Clone, Debug)]
pub(crate) struct Layer {
    /// The index of the layer in its stack.
    pub(crate) index: usize,
    /// The number of the layer in the model, an encoder's before a decoder's; its stream of noise has this number.
    pub(crate) number: usize,
    /// The index of the layer among the MoE layers of its stack; none in a dense layer.
    pub(crate) moe_index: Option<usize>,
    pub(crate) attention: AttentionBlock,
    /// Cross-attention, in a decoder with an encoder.
    pub(crate) cross: Option<CrossBlock>,
    pub(crate) feed_forward: FeedForwardBlock,
    /// The configured `Variant::expert_capacity`.
    pub(crate) expert_capacity: usize,
}

/// The values that pass from layer to layer, and across a cut between stages. In a backward pass it holds their
/// gradients.
#[derive(Clone)]
pub struct ResidualStream {
    /// `[T, D]` f32: the residual stream.
    pub x: Tensor,
    /// `[T, E]` f32: the logits of the previous MoE layer, with gating residuals; none otherwise, and before the
    /// first MoE layer.
    pub router_logits: Option<Tensor>,
}

/// The next layer and its weights, for the prediction of its experts.
pub(crate) struct NextLayer<'a, 'w> {
    pub(crate) layer: &'a Layer,
    pub(crate) weights: &'a dyn Fn() -> Cow<'w, LayerWeights>,
}

/// The experts of the next layer that tokens will probably be routed to.
struct PredictedExperts<'a, 'w> {
    layer: &'a Layer,
    weights: Cow<'w, LayerWeights>,
    ids: Tensor,
}

/// The activations of a layer's forward pass that its backward pass needs.
pub(crate) struct LayerSaved {
    attention: Option<AttentionSaved>,
    cross: Option<CrossSaved>,
    feed_forward: FeedForwardSaved,
}

impl LayerSaved {
    /// Returns the routing; none in a dense layer.
    pub(crate) fn moe(&self) -> Option<&MoeSaved> {
        self.feed_forward.moe()
    }
}

/// A layer's input, and its activations for backward unless they are recomputed.
pub(crate) struct LayerRecord {
    input: ResidualStream,
    saved: Option<LayerSaved>,
}

impl LayerRecord {
    /// Makes the record of a layer from its input and its activations.
    pub(crate) fn new(input: ResidualStream, saved: Option<LayerSaved>) -> Self {
        Self { input, saved }
    }

    /// Returns the statistics of the layer's router, if it has one and they were kept. Reading them waits for a GPU.
    pub(crate) fn stats(&self) -> Option<LayerStats> {
        self.saved.as_ref()?.moe().map(MoeSaved::stats)
    }
}

/// The gradients that pass from layer to layer in the backward pass.
pub(crate) struct Flow {
    /// `[T, D]`: the gradient of the residual stream.
    pub(crate) dx: Tensor,
    /// `[T, E]`: the gradient of the previous MoE layer's logits, with gating residuals.
    pub(crate) d_router_logits: Option<Tensor>,
    /// The gradient of the relative position bias, summed over layers.
    pub(crate) d_bias: Option<Vec<f32>>,
    /// The encoder's output, which a decoder's layers attend to, and its gradient.
    pub(crate) sources: Option<EncodedGrad>,
    /// The gradients of the losses on the routers of the remaining MoE layers, in the order of the layers.
    pub(crate) loss_grads: Vec<LossGrad>,
}

impl Flow {
    /// Begins the backward pass with the gradient `dx` of the residual stream after the last layer.
    pub(crate) fn new(dx: Tensor, loss_grads: Vec<LossGrad>) -> Self {
        Self { dx, d_router_logits: None, d_bias: None, sources: None, loss_grads }
    }

    /// Adds the encoder's output `encoded` that a decoder's layers attend to.
    pub(crate) fn with_sources(self, ctx: &Context, encoded: Option<&Tensor>) -> Self {
        let sources = encoded
            .map(|encoded| EncodedGrad { encoded: encoded.clone(), d_encoded: ctx.zeros(encoded.shape(), DType::F32) });
        Self { sources, ..self }
    }

    fn add_bias(&mut self, d_bias: Option<Vec<f32>>) {
        match (&mut self.d_bias, d_bias) {
            (Some(sum), Some(d)) => sum.iter_mut().zip(d).for_each(|(sum, d)| *sum += d),
            (sum @ None, d) => *sum = d,
            (Some(_), None) => {}
        }
    }
}

impl Layer {
    /// Returns the residual stream after the layer, and the activations that backward needs, all of them in
    /// [`Mode::Train`](crate::Mode::Train).
    ///
    /// With `cache` the tokens continue the sequences there. With `next`, in inference, experts that the next layer
    /// will probably need are copied to a GPU that caches only some of them.
    pub(crate) fn forward(
        &self,
        pass: &Pass<'_>,
        w: &LayerWeights,
        stream: &ResidualStream,
        cache: Option<LayerKv<'_>>,
        next: Option<NextLayer<'_, '_>>,
    ) -> (ResidualStream, LayerSaved) {
        self.feed_forward.start_gathering(pass, w);
        let (mut middle, attention) = self.attention.forward(pass, w, &stream.x, cache);
        let mut saved_cross = None;
        if let Some(cross) = &self.cross {
            let (y, saved) = cross.forward(pass, w, middle);
            middle = y;
            saved_cross = pass.mode.keeps_for_backward().then_some(saved);
        }
        let previous = stream.router_logits.as_ref();
        let input = pass.router_input(self, previous);
        let predicted = next.and_then(|next| next.predict_experts(pass, &middle));
        let (x, feed_forward) = self.feed_forward.forward(pass, w, middle, &input);
        if let Some(PredictedExperts { layer, weights, ids }) = predicted {
            layer.feed_forward.prefetch_experts(pass.ctx, &weights, &ids);
        }
        let router_logits = match feed_forward.moe() {
            Some(saved) => saved.logits().cloned(),
            None => stream.router_logits.clone(),
        };
        (ResidualStream { x, router_logits }, LayerSaved { attention, cross: saved_cross, feed_forward })
    }

    /// Runs `flow` backward through the layer. The gradients of norms are written to `grads`; those of matrices are
    /// tasks for `sink`.
    pub(crate) fn backward(
        &self,
        pass: &Pass<'_>,
        w: &LayerWeights,
        record: LayerRecord,
        flow: &mut Flow,
        sink: &mut TaskSink<'_>,
        grads: &mut LayerWeights,
    ) {
        let (ctx, how) = (pass.ctx, sink.how());
        let LayerRecord { input, saved } = record;
        let saved = saved.unwrap_or_else(|| self.forward(pass, w, &input, None, None).1);
        let LayerSaved { attention, cross, feed_forward } = saved;
        let loss_grad = if self.feed_forward.moe.is_some() { flow.loss_grads.pop() } else { None };
        let d_router_logits = flow.d_router_logits.as_ref();
        let output = FeedForwardOutputGrads { dy: &flow.dx, d_router_logits, loss_grad: loss_grad.as_ref() };
        let (dx, task) = self.feed_forward.backward(pass, w, feed_forward, output, how, grads);
        task.replace_d_router_logits(&mut flow.d_router_logits);
        sink.take(ctx, self.index, BlockGradTask::FeedForward(task), grads);
        flow.dx = dx;
        if let (Some(cross), Some(saved)) = (&self.cross, cross) {
            let task = cross.backward(pass, w, saved, flow, how.write, grads);
            sink.take(ctx, self.index, BlockGradTask::Cross(task), grads);
        }
        let attention = attention.expect("a pass that was to be forward only has no backward pass");
        let (dx, mut task) = self.attention.backward(pass, w, attention, &flow.dx, how.write, grads);
        flow.dx = dx;
        flow.add_bias(task.take_bias());
        sink.take(ctx, self.index, BlockGradTask::Attention(task), grads);
    }
}

impl<'a, 'w> NextLayer<'a, 'w> {
    /// Predicts experts from the residual stream `middle` of the previous layer, which resembles the router's input
    /// ("Fast Inference of Mixture-of-Experts Language Models with Offloading", 2312.17238, section 3.2). The host
    /// has them before the previous layer's experts are computed. None if all experts are on the device.
    fn predict_experts(self, pass: &Pass<'_>, middle: &Tensor) -> Option<PredictedExperts<'a, 'w>> {
        let has_room = pass.ctx.gpu().is_some_and(|gpu| gpu.expert_cache_stats().is_some());
        // Experts that are handed in need no prediction.
        let is_known = !pass.expert_ids.is_empty();
        if !has_room || is_known || middle.rows() > MAX_PREDICTED_TOKENS {
            return None;
        }
        let (layer, weights) = (self.layer, (self.weights)());
        let input = pass.router_input(layer, None);
        let ids = layer.feed_forward.predict_next_experts(pass, &weights, middle, &input)?;
        // Waits until the host has them, before the experts of the previous layer begin.
        let _: &[u32] = ids.u32s();
        Some(PredictedExperts { layer, weights, ids })
    }
}
