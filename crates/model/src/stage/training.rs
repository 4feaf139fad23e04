//! Training of a stage: a forward pass that keeps activations, and a backward pass that computes the gradients of
//! weights at once or as tasks.

use moeworks_moe::{LayerStats, LossGrad};
use moeworks_ops::Context;
use moeworks_ops::head_loss::HeadLoss;
use moeworks_ops::linear::Write;
use moeworks_tensor::Tensor;

use super::embed_and_head::{Ids, LossTargets};
use super::{RoutingHook, Stage};
use crate::gather::after;
use crate::layers::layer::{Flow, LayerRecord, ResidualStream};
use crate::layers::weight_grads::{TaskSink, WeightGradTasks, WeightGrads};
use crate::layers::{EncoderOutput, Pass, RouterRules, Sequences};
use crate::mode::Mode;
use crate::pass::{BatchError, PassOptions, TokenBatch};
use crate::weights::{DecoderWeights, LayerWeights};

/// A training pass of one microbatch through a stage, layer by layer.
pub(crate) struct TrainingPass<'a> {
    stage: &'a Stage,
    pub(crate) pass: Pass<'a>,
    /// Keeps only each layer's input and recomputes the layer in backward.
    checkpoint_layers: bool,
    /// The residual stream after the layers so far; none after the forward pass.
    stream: Option<ResidualStream>,
    records: Vec<LayerRecord>,
    stats: Vec<LayerStats>,
}

impl<'a> TrainingPass<'a> {
    /// Begins a pass with `stream`.
    pub(crate) fn new(stage: &'a Stage, pass: Pass<'a>, stream: ResidualStream, options: &PassOptions) -> Self {
        let checkpoint_layers = options.checkpoint_layers;
        Self { stage, pass, checkpoint_layers, stream: Some(stream), records: Vec::new(), stats: Vec::new() }
    }

    /// Runs forward through the next layer, `index`.
    pub(crate) fn forward(&mut self, index: usize, w: &LayerWeights) {
        let input = self.stream.take().expect("a way forward that has not ended");
        let (behind, saved) = self.stage.layer_block(index).forward(&self.pass, w, &input, None, None);
        self.stream = Some(behind);
        let saved = if self.checkpoint_layers {
            self.stats.extend(saved.moe().map(moeworks_moe::MoeSaved::stats));
            None
        } else {
            Some(saved)
        };
        self.records.push(LayerRecord::new(input, saved));
    }

    /// Ends the forward pass; returns the residual stream after the last layer.
    pub(crate) fn finish_forward(&mut self) -> ResidualStream {
        if !self.checkpoint_layers {
            self.stats = self.records.iter().filter_map(LayerRecord::stats).collect();
        }
        self.stream.take().expect("a way forward that has not ended")
    }

    /// Returns the statistics of the MoE layers, after the forward pass.
    pub(crate) fn stats(&self) -> &[LayerStats] {
        &self.stats
    }

    /// Runs backward through layer `index`, the last one that is left.
    pub(crate) fn backward(
        &mut self,
        index: usize,
        w: &LayerWeights,
        flow: &mut Flow,
        sink: &mut TaskSink<'_>,
        grads: &mut LayerWeights,
    ) {
        let record = self.records.pop().expect("forward went through the layer");
        self.stage.layer_block(index).backward(&self.pass, w, record, flow, sink, grads);
    }
}

/// The result of a stage's forward pass.
pub struct StageForward<'a> {
    /// The residual stream for the next stage; none if this one has the head.
    pub stream: Option<ResidualStream>,
    /// The activations that its backward pass needs.
    pub saved: StageSaved<'a>,
}

/// The activations of a stage's forward pass that its backward pass needs.
pub struct StageSaved<'a> {
    training: TrainingPass<'a>,
    /// The residual stream after the last layer, for the head.
    last: Option<ResidualStream>,
    loss: LossTargets<'a>,
}

impl StageSaved<'_> {
    /// Returns the statistics of the stage's MoE layers, in order. [`router_losses`](crate::router_losses) computes
    /// the losses on routers from those of all stages together.
    #[must_use]
    pub fn stats(&self) -> &[LayerStats] {
        self.training.stats()
    }
}

/// The gradients that a stage's backward pass starts from.
#[derive(Default)]
pub struct StageOutputGrads {
    /// The gradient of the residual stream after it; none if the stage has the head, whose loss it starts from.
    pub stream: Option<ResidualStream>,
    /// The gradients of the losses on the routers of its MoE layers, in order.
    pub loss_grads: Vec<LossGrad>,
}

/// The result of a stage's backward pass.
pub struct StageBackward {
    /// The gradient of the residual stream before it; none if the stage has the embedding.
    pub stream: Option<ResidualStream>,
    /// The loss; none unless the stage has the head.
    pub loss: Option<HeadLoss>,
    /// The tasks of matrices' gradients that are still to be computed; empty with [`WeightGrads::AtOnce`].
    pub tasks: WeightGradTasks,
}

/// A hook that is called when the gradients of a layer are complete.
pub type LayerDone<'a> = &'a mut dyn FnMut(usize, &mut DecoderWeights);

/// The gradients of weights that a backward pass writes.
pub struct GradTarget<'a> {
    /// Replaces gradients or adds to them.
    pub write: Write,
    /// The gradients, f32.
    pub grads: &'a mut DecoderWeights,
    /// A hook that is called with each layer's number when its gradients are complete, except those that are tasks,
    /// last layer first. It runs before the backward pass of the layers below.
    pub done: Option<LayerDone<'a>>,
}

impl<'a> GradTarget<'a> {
    /// Returns a target without a hook.
    #[must_use]
    pub fn new(write: Write, grads: &'a mut DecoderWeights) -> Self {
        Self { write, grads, done: None }
    }
}

impl Stage {
    /// Runs the forward pass of `batch` in training. A stage without embedding takes the residual stream `from` the
    /// stage before; all stages need the token ids, by which some routers choose. The loss of a stage with head is
    /// computed with its gradient, in [`backward`](Self::backward).
    ///
    /// Fails if the batch does not fit the model, or if a residual stream is missing or unexpected.
    pub fn forward<'a>(
        &'a self,
        ctx: &'a Context,
        weights: &DecoderWeights,
        batch: &TokenBatch<'a>,
        options: &PassOptions,
        from: Option<ResidualStream>,
    ) -> Result<StageForward<'a>, BatchError> {
        self.check_stream(from.is_none(), self.part.has_embedding)?;
        self.check_batch(batch)?;
        let gathered = self.gathered(ctx, weights);
        let weights = gathered.as_ref().unwrap_or(weights);
        let mut training = self.training_pass(ctx, weights, batch, options, from, None);
        for index in self.part.layers.clone() {
            let w = self.whole_layer(ctx, weights, index, after(index, self.part.layers.end));
            training.forward(index, &w);
        }
        let stream = Some(training.finish_forward());
        let (stream, last) = if self.part.has_head { (None, stream) } else { (stream, None) };
        let loss = LossTargets { targets: batch.targets, grad_scale: options.grad_scale };
        Ok(StageForward { stream, saved: StageSaved { training, last, loss } })
    }

    /// Begins a training pass at the first layer.
    pub(crate) fn training_pass<'a>(
        &'a self,
        ctx: &'a Context,
        weights: &DecoderWeights,
        batch: &TokenBatch<'a>,
        options: &PassOptions,
        from: Option<ResidualStream>,
        encoder_output: Option<EncoderOutput>,
    ) -> TrainingPass<'a> {
        let sequences = Sequences::whole(batch.num_sequences, batch.seq_len);
        let rules = self.training_rules(batch.inputs, options);
        let mut pass = self.pass(ctx, weights, Mode::Train, sequences, rules, encoder_output);
        self.set_documents(&mut pass, batch);
        pass.expert_ids = batch.expert_ids;
        let stream = self.entry(&pass, weights, Ids::Known(batch.inputs), from);
        TrainingPass::new(self, pass, stream, options)
    }

    /// Runs the backward pass from the loss, or from the gradients of the next stage. The gradients of matrices are
    /// computed as `weight_grads` says. If embedding and head are tied and this stage has only the embedding, its
    /// gradient is added to that of the stage with the head, whatever `target` says.
    ///
    /// Fails if a gradient of the residual stream is missing or unexpected.
    pub fn backward(
        &self,
        ctx: &Context,
        weights: &DecoderWeights,
        saved: StageSaved<'_>,
        output: StageOutputGrads,
        target: GradTarget<'_>,
        weight_grads: WeightGrads,
    ) -> Result<StageBackward, BatchError> {
        let gathered = self.gathered(ctx, weights);
        let weights = gathered.as_ref().unwrap_or(weights);
        let StageSaved { mut training, last, loss: targets } = saved;
        let GradTarget { write, grads, mut done } = target;
        let (mut flow, loss) = match (output.stream, last) {
            (None, Some(last)) => {
                let (loss, dx) = self.head_backward(ctx, weights, &last.x, targets, write, grads);
                (Flow::new(dx, output.loss_grads), Some(loss))
            }
            (Some(ResidualStream { x, router_logits }), None) => {
                (Flow { d_router_logits: router_logits, ..Flow::new(x, output.loss_grads) }, None)
            }
            (stream, _) => return Err(BatchError::Stream { is_missing: stream.is_none() }),
        };
        let mut tasks = WeightGradTasks::default();
        for index in self.part.layers.clone().rev() {
            let next = Some(index).filter(|&index| index > self.part.layers.start).map(|index| index - 1);
            let w = self.whole_layer(ctx, weights, index, next);
            let mut sink = TaskSink::new(weight_grads, write, &mut tasks);
            training.backward(index, &w, &mut flow, &mut sink, &mut grads.layers[index]);
            if let Some(done) = &mut done {
                done(index, grads);
            }
        }
        let Flow { dx, d_router_logits, .. } = flow;
        let stream = self.leave(&training.pass, ResidualStream { x: dx, router_logits: d_router_logits }, write, grads);
        Ok(StageBackward { stream, loss, tasks })
    }

    /// Ends the backward pass: returns the gradient for the stage before, or computes that of the embedding.
    fn leave(
        &self,
        pass: &Pass<'_>,
        stream: ResidualStream,
        write: Write,
        grads: &mut DecoderWeights,
    ) -> Option<ResidualStream> {
        if !self.part.has_embedding {
            return Some(stream);
        }
        self.embed_backward(pass, stream.x, write, grads);
        None
    }

    /// Fails if a residual stream is missing, or given to a stage with an end of the model on that side.
    pub(super) fn check_stream(&self, is_missing: bool, has_end: bool) -> Result<(), BatchError> {
        if is_missing == has_end { Ok(()) } else { Err(BatchError::Stream { is_missing }) }
    }

    /// Returns the residual stream after the stage for the inputs of `batch` in a pass that keeps nothing, by the
    /// rules of `mode`. A stage without embedding takes the stream `from` the stage before.
    ///
    /// Fails if the batch does not fit the model, or if a residual stream is missing or unexpected.
    pub fn infer(
        &self,
        ctx: &Context,
        weights: &DecoderWeights,
        batch: &TokenBatch<'_>,
        mode: Mode,
        from: Option<ResidualStream>,
    ) -> Result<ResidualStream, BatchError> {
        self.observe(ctx, weights, batch, mode, from, None)
    }

    /// Passes as [`infer`](Self::infer) does; `hook` sees what each MoE layer decided.
    pub fn observe(
        &self,
        ctx: &Context,
        weights: &DecoderWeights,
        batch: &TokenBatch<'_>,
        mode: Mode,
        from: Option<ResidualStream>,
        hook: Option<RoutingHook<'_>>,
    ) -> Result<ResidualStream, BatchError> {
        self.check_stream(from.is_none(), self.part.has_embedding)?;
        self.check_batch(batch)?;
        let gathered = self.gathered(ctx, weights);
        let weights = gathered.as_ref().unwrap_or(weights);
        let sequences = Sequences::whole(batch.num_sequences, batch.seq_len);
        let rules = RouterRules::plain(batch.inputs, &sequences);
        let mut pass = self.pass(ctx, weights, mode.without_backward(), sequences, rules, None);
        self.set_documents(&mut pass, batch);
        pass.expert_ids = batch.expert_ids;
        let stream = self.entry(&pass, weights, Ids::Known(batch.inputs), from);
        Ok(self.forward_layers(&pass, weights, stream, None, hook))
    }

    /// Returns the logits `[T, V]` f32 of the residual stream after the last layer. The stage must have the head.
    #[must_use]
    pub fn logits(&self, ctx: &Context, weights: &DecoderWeights, stream: &ResidualStream) -> Tensor {
        self.head_logits(ctx, weights, &stream.x)
    }

    /// Computes the loss of `targets` from the residual stream after the last layer. The stage must have the head.
    #[must_use]
    pub fn loss(&self, ctx: &Context, weights: &DecoderWeights, stream: &ResidualStream, targets: &[u32]) -> HeadLoss {
        self.head_loss(ctx, weights, &stream.x, targets)
    }
}
