//! Layers one behind the other by the rules of training, with the way back.

use moeworks_moe::{LayerStats, LossGrad, RouterInput};
use moeworks_ops::Context;
use moeworks_ops::linear::Write;
use moeworks_tensor::{DType, Purpose, Random, Tensor};

use super::Pass;
use super::attention::{AttentionSaved, WRONG_KIND};
use super::cross::CrossSaved;
use super::feed_forward::FeedForwardSaved;
use super::stack::Stack;
use crate::pass::{PassOptions, RouterNoise};
use crate::weights::LayerWeights;

/// A training pass over the layers of a stack.
pub(crate) struct Training<'a> {
    pub(crate) stack: Stack<'a>,
    pub(crate) pass: &'a Pass<'a>,
    pub(crate) token_ids: &'a [u32],
    pub(crate) options: &'a PassOptions,
    /// Layers of the model before the stack's first.
    pub(crate) layers_before: usize,
    /// Layers of the model.
    pub(crate) num_layers: usize,
}

/// What a layer leaves for backward: its input, and the rest unless it is to be computed again.
pub(crate) struct LayerRecord {
    input: Tensor,
    /// The logits of the MoE layer before, with gating residuals.
    previous: Option<Tensor>,
    saved: Option<LayerSaved>,
}

impl LayerRecord {
    /// What the layer's router did, if it has one and this is still there: who looks at it waits for a GPU.
    pub(crate) fn stats(&self) -> Option<LayerStats> {
        self.saved.as_ref()?.feed_forward.stats()
    }
}

struct LayerSaved {
    attention: AttentionSaved,
    /// The residual stream before the attention to the encoder's result, and what that leaves.
    cross: Option<(Tensor, CrossSaved)>,
    /// The residual stream before the feed-forward.
    middle: Tensor,
    feed_forward: FeedForwardSaved,
}

/// What goes back through the layers.
pub(crate) struct Flow {
    /// The gradient of the residual stream.
    pub(crate) dx: Tensor,
    /// That of the logits of the next MoE layer before, with gating residuals.
    dnext: Option<Tensor>,
    /// That of what relative positions add to scores, the sum of the layers'.
    pub(crate) d_bias: Option<Vec<f32>>,
    /// The encoder's result, and its gradient, the sum of the layers'.
    pub(crate) encoded: Option<(Tensor, Tensor)>,
}

impl Flow {
    /// The way back begins with the gradient `dx` of the residual stream behind the last layer; a decoder's layers attend to
    /// `encoded`.
    pub(crate) fn new(ctx: &Context, dx: Tensor, encoded: Option<&Tensor>) -> Self {
        let encoded = encoded.map(|encoded| (encoded.clone(), ctx.zeros(encoded.shape(), DType::F32)));
        Self { dx, dnext: None, d_bias: None, encoded }
    }

    pub(super) fn add_bias(&mut self, d_bias: Option<Vec<f32>>) {
        match (&mut self.d_bias, d_bias) {
            (Some(sum), Some(d)) => sum.iter_mut().zip(d).for_each(|(sum, d)| *sum += d),
            (sum @ None, d) => *sum = d,
            (Some(_), None) => {}
        }
    }
}

impl Training<'_> {
    /// The residual stream behind layer `i`, and what the layer leaves. What its router did is in there; of a layer that is to be computed
    /// again it is added to `stats`.
    pub(crate) fn forward(
        &self,
        (i, w): (usize, &LayerWeights),
        x: Tensor,
        previous: &mut Option<Tensor>,
        stats: &mut Vec<LayerStats>,
    ) -> (Tensor, LayerRecord) {
        let (y, saved) = self.layer((i, w), &x, previous.as_ref());
        let has_record = !self.options.checkpoint_layers;
        if !has_record {
            stats.extend(saved.feed_forward.stats());
        }
        let logits = saved.feed_forward.moe().map_or_else(|| previous.clone(), |saved| saved.logits().cloned());
        let previous = std::mem::replace(previous, logits);
        (y, LayerRecord { input: x, previous, saved: has_record.then_some(saved) })
    }

    fn layer(&self, (i, w): (usize, &LayerWeights), x: &Tensor, previous: Option<&Tensor>) -> (Tensor, LayerSaved) {
        let (options, pass) = (self.options, self.pass);
        // Each pass has as many consecutive streams as there are layers.
        let noise = options.noise.map(|RouterNoise { seed, step }| {
            let first = step.wrapping_mul(self.num_layers as u64);
            Random::new(seed, Purpose::Router, first.wrapping_add((self.layers_before + i) as u64))
        });
        let (mut middle, attention) = self.stack.attention[i].forward(pass, w, x);
        let cross = self.stack.cross.map(|cross| {
            let (Some(w), Some(memory)) = (&w.cross, pass.memory) else { panic!("{WRONG_KIND}") };
            let (y, saved) = cross.forward(pass, w, &middle, (memory, i));
            (std::mem::replace(&mut middle, y), saved)
        });
        let seq_len = if options.sequence_coef == 0.0 { 0 } else { pass.seq_len };
        let PassOptions { progress, first_token, .. } = *options;
        let (token_ids, capacity, has_gshard_loss) =
            (self.token_ids, self.stack.capacity(pass), options.has_gshard_loss());
        let input = RouterInput { noise, token_ids, seq_len, progress, first_token, ..RouterInput::default() };
        let input = RouterInput { previous, capacity, has_gshard_loss, ..input };
        let (y, feed_forward) = self.stack.feed_forward[i].forward(pass, w, &middle, &input);
        (y, LayerSaved { attention, cross, middle, feed_forward })
    }

    /// Takes `flow` back through layer `i`, of whose router the last of `loss_grads` is, if it has one, and writes the
    /// gradients of its weights.
    pub(crate) fn backward(
        &self,
        (i, w): (usize, &LayerWeights),
        record: LayerRecord,
        (flow, loss_grads): (&mut Flow, &mut Vec<LossGrad>),
        write: Write,
        grads: &mut LayerWeights,
    ) {
        let (pass, block) = (self.pass, &self.stack.feed_forward[i]);
        let LayerRecord { input, previous, saved } = record;
        let saved = saved.unwrap_or_else(|| self.layer((i, w), &input, previous.as_ref()).1);
        let LayerSaved { attention, cross, middle, feed_forward } = saved;
        let loss_grad = block.moe.is_some().then(|| loss_grads.pop()).flatten();
        let dy = (&flow.dx, flow.dnext.as_ref(), loss_grad.as_ref());
        let (d_middle, task) = block.backward(
            pass,
            w,
            (&middle, feed_forward),
            dy,
            write,
            (&mut grads.feed_forward_norm, &mut grads.feed_forward),
        );
        task.replace_dnext(&mut flow.dnext);
        task.run(pass, write, &mut grads.feed_forward);
        flow.dx = d_middle;
        if let Some(saved) = cross {
            self.cross_backward((i, w), saved, flow, write, grads);
        }
        let (dx, mut task) = self.stack.attention[i].backward(pass, w, (&input, attention), &flow.dx, write, grads);
        flow.dx = dx;
        flow.add_bias(task.take_bias());
        task.run(pass.ctx, write, &mut grads.attention);
    }

    fn cross_backward(
        &self,
        (i, w): (usize, &LayerWeights),
        (x, saved): (Tensor, CrossSaved),
        flow: &mut Flow,
        write: Write,
        grads: &mut LayerWeights,
    ) {
        let (Some(cross), Some(w), Some(memory)) = (self.stack.cross, &w.cross, self.pass.memory) else {
            panic!("{WRONG_KIND}")
        };
        let (Some(grads), Some((encoded, d_encoded))) = (&mut grads.cross, &mut flow.encoded) else {
            panic!("{WRONG_KIND}")
        };
        let memory = (memory, i, d_encoded);
        let (dx, task) = cross.backward(self.pass, w, (&x, saved), memory, &flow.dx, (write, &mut grads.norm));
        flow.dx = dx;
        task.run(self.pass.ctx, encoded, write, grads);
    }
}
