//! Execution of a training pass over microbatches, action by action of a [`PassOrder`](crate::PassOrder).

use std::borrow::Cow;

use moeworks_moe::LayerStats;
use moeworks_ops::Context;
use moeworks_ops::head_loss::HeadLoss;
use moeworks_ops::linear::Write;

use super::Decoder;
use crate::encoder::Encoded;
use crate::expert_parallel::{IdlePass, NO_LOSS};
use crate::gather::after;
use crate::layers::layer::Flow;
use crate::layers::weight_grads::TaskSink;
use crate::losses::{LossValues, RouterLoss, router_losses};
use crate::pass::{PassOptions, PassStats, TokenBatch};
use crate::pass_order::PassAction;
use crate::stage::{GradTarget, LossTargets, TrainingPass};
use crate::weights::{DecoderWeights, LayerWeights};

/// A training pass over checked microbatches; the weights outside the layers are whole.
pub(super) struct Executor<'a> {
    pub(super) decoder: &'a Decoder,
    pub(super) ctx: &'a Context,
    pub(super) weights: &'a DecoderWeights,
    pub(super) batches: &'a [TokenBatch<'a>],
    pub(super) options: &'a PassOptions,
}

/// The state of a microbatch in the pass.
struct Microbatch<'a> {
    batch: TokenBatch<'a>,
    options: PassOptions,
    write: Write,
    tokens: Tokens<'a>,
    /// The losses, after the forward pass.
    losses: Option<Losses>,
}

/// The pass of this rank's tokens in a microbatch, if it has any.
#[allow(clippy::large_enum_variant)] // one for each microbatch
enum Tokens<'a> {
    Some {
        encoded: Option<Encoded<'a>>,
        pass: TrainingPass<'a>,
        /// The gradients of the backward pass, after the losses.
        flow: Option<Flow>,
    },
    /// This rank's experts serve the rows of other ranks.
    None(IdlePass<'a>),
}

struct Losses {
    loss: HeadLoss,
    router: LossValues,
    layers: Vec<LayerStats>,
}

/// The index and the whole weights of the current layer.
type Layer<'w> = (usize, Cow<'w, LayerWeights>);

impl<'a> Executor<'a> {
    /// Runs all actions, and returns the statistics of each microbatch.
    pub(super) fn run(&self, target: GradTarget<'_>) -> Vec<PassStats> {
        let GradTarget { write, grads, mut done } = target;
        let num_layers = self.decoder.config().num_layers;
        let is_tied = self.decoder.weight_table().is_tied();
        let actions = self.options.order.actions(num_layers, self.batches.len(), is_tied);
        let mut microbatches: Vec<Option<Microbatch<'a>>> = self.batches.iter().map(|_| None).collect();
        let (mut layer, mut stats) = (None, Vec::new());
        for action in actions {
            let index = action.microbatch();
            match action {
                PassAction::Begin { .. } => {
                    layer = None;
                    microbatches[index] = Some(self.begin(index, write));
                }
                PassAction::Forward { layer: i, .. } => {
                    let w = self.whole_layer(&mut layer, i, after(i, num_layers));
                    at(&mut microbatches, index).forward(self.ctx, i, w);
                }
                PassAction::Losses { .. } => {
                    layer = None;
                    at(&mut microbatches, index).losses(self, grads);
                }
                PassAction::Backward { layer: i, .. } => {
                    let w = self.whole_layer(&mut layer, i, i.checked_sub(1));
                    at(&mut microbatches, index).backward(self.ctx, i, w, grads);
                    if let Some(done) = done.as_mut().filter(|_| index + 1 == self.batches.len()) {
                        done(i, grads);
                    }
                }
                PassAction::End { .. } => {
                    layer = None;
                    stats.extend(microbatches[index].take().map(|microbatch| microbatch.end(self, grads)));
                }
            }
        }
        stats
    }

    /// Returns the whole weights of layer `index`, gathering them if it is not the current one; `next` may be
    /// prefetched.
    fn whole_layer<'l>(&self, layer: &'l mut Option<Layer<'a>>, index: usize, next: Option<usize>) -> &'l LayerWeights {
        if layer.as_ref().is_none_or(|(at, _)| *at != index) {
            // Of sharded weights only one layer is whole at a time.
            *layer = None;
            *layer = Some((index, self.decoder.stage.whole_layer(self.ctx, self.weights, index, next)));
        }
        &layer.as_ref().expect("it was put there").1
    }

    /// Begins microbatch `index` and embeds its tokens. Gradients of the first are written as `write` says, those of
    /// the others are added.
    fn begin(&self, index: usize, write: Write) -> Microbatch<'a> {
        let batch = self.batches[index];
        let options = self.options.of_microbatch(index);
        let write = if index == 0 { write } else { Write::Add };
        let tokens = if batch.inputs.is_empty() {
            Tokens::None(IdlePass::training(&self.decoder.stage, &options, batch.expert_ids))
        } else {
            let encoder = self.decoder.encoder.as_ref();
            let encoded = encoder.map(|encoder| encoder.training_forward(self.ctx, self.weights, &batch, &options));
            let output = encoded.as_ref().map(|encoded| encoded.output(self.weights));
            let stage = &self.decoder.stage;
            let pass = stage.training_pass(self.ctx, self.weights, &batch, &options, None, output);
            Tokens::Some { encoded, pass, flow: None }
        };
        Microbatch { batch, options, write, tokens, losses: None }
    }
}

fn at<'m, 'a>(microbatches: &'m mut [Option<Microbatch<'a>>], index: usize) -> &'m mut Microbatch<'a> {
    microbatches[index].as_mut().expect("the microbatch has begun")
}

impl Microbatch<'_> {
    fn forward(&mut self, ctx: &Context, layer: usize, w: &LayerWeights) {
        match &mut self.tokens {
            Tokens::Some { pass, .. } => pass.forward(layer, w),
            Tokens::None(idle) => idle.forward(ctx, layer, w),
        }
    }

    /// Ends the forward pass: computes the losses of tokens and routers, and the gradient of the residual stream
    /// after the last layer.
    fn losses(&mut self, executor: &Executor<'_>, grads: &mut DecoderWeights) {
        let Executor { decoder, ctx, weights, .. } = *executor;
        let last = match &mut self.tokens {
            Tokens::Some { pass, .. } => Some(pass.finish_forward()),
            Tokens::None(_) => None,
        };
        let mut layers = self.stats();
        decoder.merge_stats(&mut layers);
        let RouterLoss { values: router, grads: mut loss_grads } =
            router_losses(decoder.config(), &layers, &self.options);
        decoder.take_share(self.num_routed(decoder), &layers, &mut loss_grads);
        let loss = match (&mut self.tokens, last) {
            (Tokens::Some { encoded, flow, .. }, Some(last)) => {
                let targets = LossTargets { targets: self.batch.targets, grad_scale: self.options.grad_scale };
                let (loss, dx) = decoder.stage.head_backward(ctx, weights, &last.x, targets, self.write, grads);
                let encoded = encoded.as_ref().map(|encoded| &encoded.result);
                *flow = Some(Flow::new(dx, loss_grads).with_sources(ctx, encoded));
                loss
            }
            (Tokens::None(idle), _) => {
                idle.begin_backward(loss_grads, self.write, grads);
                NO_LOSS
            }
            (Tokens::Some { .. }, None) => unreachable!("tokens have a stream"),
        };
        self.losses = Some(Losses { loss, router, layers });
    }

    /// Returns the number of tokens that this rank takes through layers with experts.
    fn num_routed(&self, decoder: &Decoder) -> usize {
        match &self.tokens {
            Tokens::Some { .. } => decoder.routed_tokens(&self.batch, self.options.sequence_coef != 0.0).len(),
            Tokens::None(_) => 0,
        }
    }

    fn stats(&self) -> Vec<LayerStats> {
        match &self.tokens {
            Tokens::Some { encoded, pass, .. } => {
                let encoder = encoded.as_ref().map_or(&[][..], Encoded::stats);
                encoder.iter().chain(pass.stats()).cloned().collect()
            }
            Tokens::None(idle) => idle.stats(),
        }
    }

    fn backward(&mut self, ctx: &Context, layer: usize, w: &LayerWeights, grads: &mut DecoderWeights) {
        let grads = &mut grads.layers[layer];
        match &mut self.tokens {
            Tokens::Some { pass, flow, .. } => {
                let flow = flow.as_mut().expect("the losses come before the way back");
                pass.backward(layer, w, flow, &mut TaskSink::Run(self.write), grads);
            }
            Tokens::None(idle) => idle.backward(ctx, layer, w, grads),
        }
    }

    /// Ends the backward pass: computes the gradients of the embedding and of an encoder. Returns the statistics of
    /// the microbatch.
    fn end(self, executor: &Executor<'_>, grads: &mut DecoderWeights) -> PassStats {
        let Self { tokens, write, losses, .. } = self;
        if let Tokens::Some { encoded, pass, flow: Some(flow) } = tokens {
            pass.pass.relative_backward(&flow, write, grads.relative.as_mut());
            let Flow { dx, sources, loss_grads, .. } = flow;
            executor.decoder.stage.embed_backward(&pass.pass, dx, write, grads);
            if let (Some(encoder), Some(encoded), Some(sources)) = (executor.decoder.encoder(), encoded, sources) {
                encoder.backward(executor.weights, encoded, &sources.d_encoded, loss_grads, write, grads);
            }
        }
        let Losses { loss, router, layers } = losses.expect("the losses come before the end");
        executor.decoder.pass_stats(loss, router, layers)
    }
}
