//! A stage in training: forward with everything that backward needs, and backward with the gradients of weights at once or as tasks.

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
    /// Whether each layer's input alone is kept and the layer computed again in backward.
    checkpoint_layers: bool,
    /// The stream behind the last layer so far; none once the way forward has ended.
    stream: Option<ResidualStream>,
    records: Vec<LayerRecord>,
    stats: Vec<LayerStats>,
}

impl<'a> TrainingPass<'a> {
    /// A pass that begins with `stream`.
    pub(crate) fn new(stage: &'a Stage, pass: Pass<'a>, stream: ResidualStream, options: &PassOptions) -> Self {
        let checkpoint_layers = options.checkpoint_layers;
        Self { stage, pass, checkpoint_layers, stream: Some(stream), records: Vec::new(), stats: Vec::new() }
    }

    /// Goes through the next layer, `index`.
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

    /// Ends the way forward: the stream behind the last layer.
    pub(crate) fn finish_forward(&mut self) -> ResidualStream {
        if !self.checkpoint_layers {
            self.stats = self.records.iter().filter_map(LayerRecord::stats).collect();
        }
        self.stream.take().expect("a way forward that has not ended")
    }

    /// The statistics of the MoE layers, after the way forward.
    pub(crate) fn stats(&self) -> &[LayerStats] {
        &self.stats
    }

    /// Takes `flow` back through layer `index`, the last that it has not been through.
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
    /// The stream for the stage behind it; none with an output projection.
    pub stream: Option<ResidualStream>,
    /// The values that its backward pass needs.
    pub saved: StageSaved<'a>,
}

/// The values of a stage's forward pass that its backward pass needs.
pub struct StageSaved<'a> {
    training: TrainingPass<'a>,
    /// The stream behind the last layer, for the output projection.
    last: Option<ResidualStream>,
    loss: LossTargets<'a>,
}

impl StageSaved<'_> {
    /// The statistics of the stage's MoE layers, first to last, of which the losses on routers are made: those of all stages together, by
    /// [`router_losses`](crate::router_losses).
    #[must_use]
    pub fn stats(&self) -> &[LayerStats] {
        self.training.stats()
    }
}

/// The gradients that a stage's backward pass begins with.
#[derive(Default)]
pub struct StageOutputGrads {
    /// The gradient of the stream behind it; none with an output projection, where the loss is.
    pub stream: Option<ResidualStream>,
    /// The gradients of the losses on the routers of its MoE layers, first to last.
    pub loss_grads: Vec<LossGrad>,
}

/// The result of a stage's backward pass.
pub struct StageBackward {
    /// The gradient of the stream before it; none with an embedding.
    pub stream: Option<ResidualStream>,
    /// The loss; none without an output projection.
    pub loss: Option<HeadLoss>,
    /// The gradients of matrices that are still to be computed; empty with [`WeightGrads::AtOnce`].
    pub tasks: WeightGradTasks,
}

/// A hook that is told that the gradients of a layer are whole.
pub type LayerDone<'a> = &'a mut dyn FnMut(usize, &mut DecoderWeights);

/// The gradients of weights that a backward pass writes.
pub struct GradTarget<'a> {
    /// Whether they replace what is there or are added to it.
    pub write: Write,
    /// The gradients, f32.
    pub grads: &'a mut DecoderWeights,
    /// A hook that is told that the gradients of a layer (its number) are whole, but for those that are tasks, last layer first. It runs
    /// before the backward pass of the layers below.
    pub done: Option<LayerDone<'a>>,
}

impl<'a> GradTarget<'a> {
    /// The gradients `grads`, of which nobody is told.
    #[must_use]
    pub fn new(write: Write, grads: &'a mut DecoderWeights) -> Self {
        Self { write, grads, done: None }
    }
}

impl Stage {
    /// The way forward of `batch` in training. A stage without embedding takes the stream `from` the stage before; all look at the tokens,
    /// by which some routers choose. The loss of a stage with an output projection is found with its gradient, in
    /// [`backward`](Self::backward).
    ///
    /// Fails if the batch is not one for the model, or a stream is missing or not wanted.
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

    /// A training pass that has come to the first layer.
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

    /// The way back from the loss, or from the gradients of the stage behind; the gradients of the layers' matrices are computed as
    /// `weight_grads` says. Where the output projection is the embedding and this stage
    /// has only the latter, its gradient is added to what the stage with the projection wrote, whatever `target` says.
    ///
    /// Fails if a gradient of the stream is missing or not wanted.
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

    /// The end of the way back: the gradient for the stage before, or that of the embedding.
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

    /// Refuses a stream that is missing, or that a stage with an end there does not take.
    pub(super) fn check_stream(&self, is_missing: bool, has_end: bool) -> Result<(), BatchError> {
        if is_missing == has_end { Ok(()) } else { Err(BatchError::Stream { is_missing }) }
    }

    /// The stream behind the stage for the inputs of `batch` in a pass that keeps nothing, by the rules of `mode`. A stage without
    /// embedding takes the stream `from` the stage before.
    ///
    /// Fails if the batch is not one for the model, or a stream is missing or not wanted.
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

    /// The logits `[T, V]` f32 of the stream behind the last layer. The stage has the output projection.
    #[must_use]
    pub fn logits(&self, ctx: &Context, weights: &DecoderWeights, stream: &ResidualStream) -> Tensor {
        self.head_logits(ctx, weights, &stream.x)
    }

    /// The loss of `targets` for the stream behind the last layer. The stage has the output projection.
    #[must_use]
    pub fn loss(&self, ctx: &Context, weights: &DecoderWeights, stream: &ResidualStream, targets: &[u32]) -> HeadLoss {
        self.head_loss(ctx, weights, &stream.x, targets)
    }
}
