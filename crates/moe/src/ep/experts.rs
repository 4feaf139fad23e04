//! Forward and backward of experts that are spread over several ranks.

use std::time::Instant;

use moeworks_ops::elementwise::add_assign;
use moeworks_ops::experts::{
    ExpertsSaved, ForwardOptions, add_bias_row_weight_grads, choice_weight_grads, experts_backward,
    experts_forward_with,
};
use moeworks_ops::linear::Write;
use moeworks_ops::{Activation, Context};
use moeworks_tensor::{DType, Tensor};

use super::ep_dispatch::SentRows;
use super::merge_chunks::{ChunkTensors, MergedChunks};
use super::shadow::{self, ShadowTask, Shadows, ShadowsSaved};
use super::{Arriving, DomainPass, EpDispatch, LayerRanks};
use crate::{Dispatch, MoeWeights, WgradTarget};

/// The inputs of the experts' part of a pass.
#[derive(Clone, Copy)]
pub(crate) struct ExpertsInput<'a> {
    pub(crate) weights: &'a MoeWeights,
    pub(crate) activation: Activation,
    /// `[T, D]`
    pub(crate) x: &'a Tensor,
    pub(crate) dispatch: &'a Dispatch,
    /// K of the routing, on this rank.
    pub(crate) num_choices: usize,
    pub(crate) is_training: bool,
    pub(crate) is_forward_only: bool,
}

/// The state that backward needs from forward: the arrived tokens, and the saved state of the experts held here.
pub(crate) struct RanksSaved {
    ranks: LayerRanks,
    /// The gathered experts of the rank's domain, if there are domains.
    domain: Option<DomainPass>,
    ep_dispatch: EpDispatch,
    /// The saved state of each chunk; empty after a forward-only pass.
    parts: Vec<SavedPart>,
    /// The fetched experts with their saved state; none after a forward-only pass.
    shadows: Option<ShadowsSaved>,
    width: usize,
    /// Choices per token on this rank.
    num_own: usize,
}

struct SavedPart {
    /// `[A, D]`
    x: Tensor,
    experts: ExpertsSaved,
}

/// The inputs of the experts' part of a backward pass.
pub(crate) struct RanksBackwardInput<'a> {
    pub(crate) activation: Activation,
    /// `[T, D]`
    pub(crate) dy: &'a Tensor,
    /// The target of the gradients of the experts' matrices, if they are computed at once.
    pub(crate) wgrad: Option<WgradTarget<'a>>,
}

/// The result of [`RanksSaved::backward`].
pub(crate) struct RanksBackward {
    /// `[T, D]` f32: the gradient of the input.
    pub(crate) dx: Tensor,
    /// `[T K]` f32: the gradient of each choice's weight.
    pub(crate) dweights: Tensor,
    /// The inputs of the weights' gradients.
    pub(crate) task: RanksTask,
}

/// The inputs of the gradients of the experts held here, for each chunk.
pub(crate) struct RanksTask {
    parts: Vec<TaskPart>,
    shadows: Option<ShadowTask>,
    /// The merged chunks, if backward has computed the gradients of the experts' matrices from them.
    merged: Option<MergedChunks>,
}

impl RanksTask {
    /// Returns whether backward has computed the gradients of the experts' matrices.
    pub(crate) fn is_done(&self) -> bool {
        self.merged.is_some()
    }
}

struct TaskPart {
    /// `[A, D]`
    dy: Tensor,
    dh: Tensor,
}

impl RanksSaved {
    /// Sends tokens `x [T, D]` through their experts on all ranks. `arriving` are the experts of the rank's domain.
    /// `meanwhile` runs while the first tokens travel. Returns `y [T, D]`, f32.
    pub(crate) fn forward(
        ctx: &Context,
        own: &LayerRanks,
        input: ExpertsInput<'_>,
        arriving: Arriving,
        meanwhile: impl FnOnce(),
    ) -> (Tensor, Self) {
        let start = Instant::now();
        let ExpertsInput { weights, activation, x, dispatch, num_choices, is_training, is_forward_only } = input;
        let ranks = &arriving.ranks(own);
        ranks.wait_as_for(1, |pace| pace.attention_forward_s);
        if is_training && !is_forward_only {
            arriving.note_hidden(ranks);
        }
        let wire = ranks.exchange().wire;
        let fetched = shadow::choose(ranks, &input);
        // No token moves if every expert was fetched.
        let num_chunks = if fetched.len() == ranks.placement().num_experts() { 0 } else { ranks.num_chunks() };
        let has_fetched = !fetched.is_empty();
        let fetch = || Shadows::fetch(ctx, ranks, &input, fetched);
        let shadows = has_fetched.then(fetch);
        let is_fetched = |expert| shadows.as_ref().is_some_and(|shadows| shadows.has(expert));
        let plan = || EpDispatch::new(ctx, ranks, dispatch, num_choices, num_chunks, is_fetched);
        let ep_dispatch = ranks.time("plan dispatch", plan);
        let mut y = ctx.zeros(&[x.rows(), x.cols()], DType::F32);
        let (mut parts, mut here) = (Vec::with_capacity(num_chunks), None);
        let (mut arriving, mut domain) = (Some(arriving), None);
        let returning = ep_dispatch.dispatch(
            ctx,
            SentRows { rows: x, wire },
            || {
                meanwhile();
                here = shadows.map(|shadows| shadows.forward(ctx, x, is_forward_only));
            },
            |_, chunk, x| {
                if let Some(arriving) = arriving.take() {
                    domain = arriving.finish(ctx, own, weights);
                }
                let weights = domain.as_ref().map_or(weights, DomainPass::weights);
                let (experts, biases) = (weights.experts(activation), weights.expert_biases());
                let rows = chunk.arrived().rows();
                let forward = || {
                    ranks.wait_as_for(num_chunks, |pace| pace.experts_forward_s);
                    ranks.wait_as_for_rows(|| chunk.num_rows(), |pace| pace.row_forward_s);
                    experts_forward_with(ctx, &x, experts, rows, ForwardOptions { biases, base: None, is_forward_only })
                };
                let (y, saved) =
                    if is_training { ranks.time_experts("experts", forward) } else { ranks.time("experts", forward) };
                parts.extend(saved.map(|experts| SavedPart { x, experts }));
                vec![(y, wire.of_sums())]
            },
        );
        // Without a chunk nobody has waited for the experts.
        let domain = domain.or_else(|| arriving.and_then(|arriving| arriving.finish(ctx, own, weights)));
        ep_dispatch.combine(ctx, returning, |tokens, sums| write_rows(&mut y, tokens.start, &sums[0]));
        let shadows = here.and_then(|(own, shadows)| {
            add_assign(ctx, &mut y, &own);
            shadows
        });
        ranks.count_forward(start.elapsed(), is_training);
        let (ranks, width) = (ranks.clone(), x.cols());
        (y, Self { ranks, domain, ep_dispatch, parts, shadows, width, num_own: num_choices })
    }

    /// Returns the handle to the layer's ranks.
    pub(crate) fn ranks(&self) -> &LayerRanks {
        &self.ranks
    }

    /// Computes the gradients from `dy [T, D]`, f32 or bf16, the gradient of the output. `meanwhile` runs while the
    /// first rows of it travel.
    pub(crate) fn backward(
        &self,
        ctx: &Context,
        weights: &MoeWeights,
        input: RanksBackwardInput<'_>,
        meanwhile: impl FnOnce(),
    ) -> RanksBackward {
        let RanksBackwardInput { activation, dy, wgrad } = input;
        let start = Instant::now();
        let weights = self.domain.as_ref().map_or(weights, DomainPass::weights);
        let num_choices = self.ep_dispatch.num_choices();
        let wire = self.ranks.backward_wire();
        let mut dx = ctx.zeros(&[dy.rows(), dy.cols()], DType::F32);
        let mut dweights = ctx.zeros(&[dy.rows() * num_choices], DType::F32);
        let (mut parts, mut here) = (Vec::with_capacity(self.parts.len()), None);
        let num_chunks = self.ep_dispatch.chunks().len();
        let returning = self.ep_dispatch.dispatch(
            ctx,
            SentRows { rows: dy, wire },
            || {
                meanwhile();
                here = self.shadows.as_ref().map(|shadows| shadows.backward(ctx, dy));
            },
            |index, chunk, dy| {
                let rows = chunk.arrived().rows();
                let saved = &self.parts[index].experts;
                let backward = || {
                    self.ranks.wait_as_for(num_chunks, |pace| pace.experts_backward_s);
                    self.ranks.wait_as_for_rows(|| chunk.num_rows(), |pace| pace.row_backward_s);
                    experts_backward(ctx, &dy, weights.experts(activation), rows, saved)
                };
                let mut backward = self.ranks.time_experts("experts, backward", backward);
                if let Some((_, down)) = &weights.biases {
                    add_bias_row_weight_grads(ctx, &dy, down, rows, &mut backward.d_row_weights);
                }
                let of_choices = choice_weight_grads(ctx, rows, &backward.d_row_weights);
                let of_choices = of_choices.reshaped(&[chunk.num_arrived(), num_choices]);
                parts.push(TaskPart { dy, dh: backward.dh });
                vec![(backward.dx, wire), (of_choices, moeworks_plan::Wire::F32)]
            },
        );
        // The gradients of the experts' matrices fill in while the gradients of the inputs travel.
        let merged = wgrad.map(|wgrad| {
            let merged = self.merge(ctx, &parts);
            self.weight_grads(ctx, activation, &merged, wgrad);
            merged
        });
        self.ep_dispatch.combine(ctx, returning, |tokens, sums| {
            write_rows(&mut dx, tokens.start, &sums[0]);
            write_rows(&mut dweights, tokens.start * num_choices, &sums[1]);
        });
        let mut dweights = self.own_choices(ctx, dweights);
        let shadows = here.map(|back| {
            add_assign(ctx, &mut dx, &back.dx);
            add_assign(ctx, &mut dweights, &back.dweights);
            back.task
        });
        self.ranks.wait_as_for(1, |pace| pace.attention_backward_s);
        self.ranks.count_backward(start.elapsed());
        RanksBackward { dx, dweights, task: RanksTask { parts, shadows, merged } }
    }

    /// Computes the gradients of the matrices of the experts held here.
    pub(crate) fn weight_grads(
        &self,
        ctx: &Context,
        activation: Activation,
        merged: &MergedChunks,
        wgrad: WgradTarget<'_>,
    ) {
        let (inputs, rows) = merged.inputs();
        let grads = |wgrad: WgradTarget<'_>| {
            let grads = || {
                self.ranks.wait_as_for(1, |pace| pace.experts_weights_s);
                wgrad.of_experts(ctx, inputs, activation, rows);
            };
            self.ranks.time_experts("experts, weights", grads);
        };
        match &self.domain {
            Some(domain) => domain.weight_grads(ctx, wgrad, grads),
            None => grads(wgrad),
        }
    }

    /// Computes the gradients of the experts' biases by `work`, which writes those before the activation and those
    /// after the down projection.
    pub(crate) fn bias_grads(
        &self,
        ctx: &Context,
        write: Write,
        to: [&mut Tensor; 2],
        work: impl FnOnce(Write, &mut Tensor, &mut Tensor),
    ) {
        match (&self.domain, to) {
            (Some(domain), to) => domain.bias_grads(ctx, write, to, work),
            (None, [gate_up, down]) => work(write, gate_up, down),
        }
    }

    /// Waits as long as the gradients of an attention block's weights take, where waits stand for computations.
    pub(crate) fn wait_as_for_attention_weights(&self) {
        self.ranks.wait_as_for(1, |pace| pace.attention_weights_s);
    }

    /// Cuts `[T K]` from the K that was sent to this rank's own K.
    fn own_choices(&self, ctx: &Context, sent: Tensor) -> Tensor {
        let (most, own) = (self.ep_dispatch.num_choices(), self.num_own);
        if most == own {
            return sent;
        }
        let mut choices = ctx.empty(&[sent.len() / most * own], DType::F32);
        for (to, from) in choices.f32s_mut().chunks_exact_mut(own.max(1)).zip(sent.f32s().chunks_exact(most)) {
            to.copy_from_slice(&from[..own]);
        }
        choices
    }

    /// Merges the chunks' inputs of the weight gradients, so that each expert's gradient is read and written once.
    pub(crate) fn merged(&self, ctx: &Context, task: &mut RanksTask) -> MergedChunks {
        task.merged.take().unwrap_or_else(|| self.merge(ctx, &task.parts))
    }

    fn merge(&self, ctx: &Context, parts: &[TaskPart]) -> MergedChunks {
        let of = |saved: &SavedPart, task: &TaskPart| ChunkTensors {
            x: saved.x.clone(),
            dy: task.dy.clone(),
            h: saved.experts.h.clone(),
            dh: task.dh.clone(),
        };
        let parts: Vec<_> = self.parts.iter().zip(parts).map(|(saved, task)| of(saved, task)).collect();
        MergedChunks::new(ctx, &self.ep_dispatch, self.ranks.held().len(), self.width, parts)
    }
}

impl RanksSaved {
    /// Adds to `grads` the gradients of fetched experts, each on the rank that owns it. `x` and `dy` are this rank's.
    pub(crate) fn shadow_weight_grads(
        &self,
        ctx: &Context,
        x: &Tensor,
        dy: &Tensor,
        task: &RanksTask,
        grads: &mut MoeWeights,
    ) {
        if let (Some(shadows), Some(task)) = (&self.shadows, &task.shadows) {
            shadows.weight_grads(ctx, x, dy, task, grads);
        }
    }
}

/// Writes the rows of `part` over those of `whole` from row `first` on; elements if `whole` has one dimension.
fn write_rows(whole: &mut Tensor, first: usize, part: &Tensor) {
    let start = first * if whole.shape().len() > 1 { whole.cols() } else { 1 };
    whole.f32s_mut()[start..start + part.len()].copy_from_slice(part.f32s());
}
