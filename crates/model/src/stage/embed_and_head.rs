//! The embedding of a stage and its output projection with the loss.

use std::borrow::Cow;

use moeworks_moe::is_left_out;
use moeworks_ops::embedding::{embedding, embedding_backward, embedding_of_drawn};
use moeworks_ops::head_loss::{
    HeadGrads, HeadLoss, HeadWeights, VocabularyPart, head_loss_backward_biased, head_loss_backward_of_part,
    head_loss_biased, head_loss_of_part,
};
use moeworks_ops::linear::{Write, linear};
use moeworks_ops::sampling::DrawnTokens;
use moeworks_ops::{Context, elementwise};
use moeworks_tensor::{DType, Tensor};

use super::Stage;
use crate::layers::Pass;
use crate::layers::norm::{Norm, NormBackward};
use crate::tensor_ranks::TensorRanks;
use crate::weights::DecoderWeights;

/// Token ids: known to the host, or sampled and possibly not known to it yet.
#[derive(Clone, Copy)]
pub(crate) enum Ids<'a> {
    Known(&'a [u32]),
    Drawn(&'a DrawnTokens),
}

impl<'a> Ids<'a> {
    /// Returns the ids; the host may have to wait for them.
    pub(crate) fn in_host(self) -> Cow<'a, [u32]> {
        match self {
            Self::Known(ids) => ids.into(),
            Self::Drawn(drawn) => drawn.wait().iter().map(|drawn| drawn.id).collect(),
        }
    }

    /// Returns the number of tokens.
    pub(crate) fn len(self) -> usize {
        match self {
            Self::Known(ids) => ids.len(),
            Self::Drawn(drawn) => drawn.ids().len(),
        }
    }

    /// Returns the ids that the host knows.
    pub(crate) fn known(self) -> &'a [u32] {
        match self {
            Self::Known(ids) => ids,
            Self::Drawn(_) => &[],
        }
    }
}

impl Stage {
    /// Returns the ranks that shard the embedding, if any.
    fn embedding_ranks(&self) -> Option<&TensorRanks> {
        self.tensor.as_ref().filter(|_| self.cut_ends.embedding)
    }

    /// Returns the ranks that shard the output projection, if any.
    fn head_ranks(&self) -> Option<&TensorRanks> {
        self.tensor.as_ref().filter(|_| self.cut_ends.head)
    }

    /// Embeds tokens, `[T, D]` f32.
    pub(crate) fn embed(&self, pass: &Pass<'_>, weights: &DecoderWeights, ids: Ids<'_>) -> Tensor {
        let mut x = match (self.embedding_ranks(), ids) {
            (None, Ids::Known(ids)) => embedding(pass.ctx, ids, &weights.embedding, DType::F32),
            (None, Ids::Drawn(drawn)) => embedding_of_drawn(pass.ctx, drawn, &weights.embedding, DType::F32),
            (Some(ranks), ids) => ranks.embed(pass.ctx, &ids.in_host(), &weights.embedding),
        };
        let multiplier = self.config.variant.embedding_multiplier;
        if multiplier != 1.0 {
            elementwise::scale_assign(pass.ctx, &mut x, multiplier);
        }
        if let Some(positions) = &weights.positions {
            let positions = embedding(pass.ctx, pass.positions.u32s(), positions, DType::F32);
            elementwise::add_assign(pass.ctx, &mut x, &positions);
        }
        x
    }

    /// Computes the gradients of embedding and positions from that of the embedded tokens. A tied output projection
    /// has already written its share, to which this is added.
    pub(crate) fn embed_backward(&self, pass: &Pass<'_>, mut dx: Tensor, write: Write, grads: &mut DecoderWeights) {
        if let Some(d_positions) = &mut grads.positions {
            if write == Write::Replace {
                elementwise::fill(pass.ctx, d_positions, 0.0);
            }
            embedding_backward(pass.ctx, pass.positions.u32s(), &dx, d_positions);
        }
        if is_left_out(&grads.embedding) {
            return;
        }
        if write == Write::Replace && !self.table.is_tied() {
            elementwise::fill(pass.ctx, &mut grads.embedding, 0.0);
        }
        let multiplier = self.config.variant.embedding_multiplier;
        if multiplier != 1.0 {
            elementwise::scale_assign(pass.ctx, &mut dx, multiplier);
        }
        match self.embedding_ranks() {
            None => embedding_backward(pass.ctx, pass.token_ids(), &dx, &mut grads.embedding),
            Some(ranks) => ranks.embed_backward(pass.ctx, pass.token_ids(), &dx, &mut grads.embedding),
        }
    }

    /// Returns the logits `[T, V]` f32 of the residual stream after the last layer.
    pub(crate) fn head_logits(&self, ctx: &Context, weights: &DecoderWeights, x: &Tensor) -> Tensor {
        let head = weights.head.as_ref().unwrap_or(&weights.embedding);
        let (normed, _) = self.head_input(ctx, weights, x, head.dtype().of_activations());
        let mut logits = linear(ctx, &normed, head, DType::F32);
        if let Some(bias) = &weights.head_bias {
            elementwise::add_rows(ctx, &mut logits, bias);
        }
        match self.head_ranks() {
            None => logits,
            Some(ranks) => ranks.whole_logits(ctx, &logits),
        }
    }

    /// Computes the loss from the residual stream after the last layer.
    pub(crate) fn head_loss(&self, ctx: &Context, weights: &DecoderWeights, x: &Tensor, targets: &[u32]) -> HeadLoss {
        let head = weights.head.as_ref().unwrap_or(&weights.embedding);
        let (normed, _) = self.head_input(ctx, weights, x, head.dtype().of_activations());
        let head = HeadWeights { weight: head, bias: weights.head_bias.as_ref() };
        match self.head_ranks() {
            None => head_loss_biased(ctx, &normed, head, targets),
            Some(ranks) => ranks.with_vocabulary(|part| head_loss_of_part(ctx, &normed, head, targets, part)),
        }
    }

    /// Returns the input of the output projection, the final norm's output over the logits' divisor, and the norm's
    /// statistics.
    fn head_input(&self, ctx: &Context, weights: &DecoderWeights, x: &Tensor, dtype: DType) -> (Tensor, Tensor) {
        let (mut normed, statistics) = self.final_norm().forward(ctx, &weights.final_norm, x, dtype);
        let divisor = self.config.variant.logits_divisor;
        if divisor != 1.0 {
            elementwise::scale_assign(ctx, &mut normed, 1.0 / divisor);
        }
        (normed, statistics)
    }

    fn final_norm(&self) -> Norm {
        Norm { eps: self.config.norm_eps }
    }

    /// Computes the loss, and the gradient of the residual stream `x` after the last layer. The gradients of the
    /// final norm and the output projection are written.
    pub(crate) fn head_backward(
        &self,
        ctx: &Context,
        weights: &DecoderWeights,
        x: &Tensor,
        loss: LossTargets<'_>,
        write: Write,
        grads: &mut DecoderWeights,
    ) -> (HeadLoss, Tensor) {
        let (head, d_head) = match (&weights.head, &mut grads.head) {
            (Some(head), Some(d_head)) => (head, d_head),
            _ => (&weights.embedding, &mut grads.embedding),
        };
        let (normed, statistics) = self.head_input(ctx, weights, x, head.dtype());
        let into = HeadGrads { weight: d_head, bias: grads.head_bias.as_mut(), write };
        let head = HeadWeights { weight: head, bias: weights.head_bias.as_ref() };
        let LossTargets { targets, grad_scale } = loss;
        let (loss, mut d_normed) = match self.head_ranks() {
            None => head_loss_backward_biased(ctx, &normed, head, targets, grad_scale, into),
            Some(ranks) => {
                let backward = |part: &mut VocabularyPart<'_>| {
                    head_loss_backward_of_part(ctx, &normed, head, targets, grad_scale, part, into)
                };
                let (loss, mut d_normed) = ranks.with_vocabulary(backward);
                ranks.sum(&mut d_normed);
                (loss, d_normed)
            }
        };
        let divisor = self.config.variant.logits_divisor;
        if divisor != 1.0 {
            elementwise::scale_assign(ctx, &mut d_normed, 1.0 / divisor);
        }
        let last = NormBackward { x, statistics: &statistics, dy: &d_normed, base: None };
        let dx = self.final_norm().backward(ctx, &weights.final_norm, last, write, &mut grads.final_norm);
        (loss, dx)
    }
}

/// The targets of a loss.
#[derive(Clone, Copy)]
pub(crate) struct LossTargets<'a> {
    /// `[T]`: the id to predict at each position.
    pub(crate) targets: &'a [u32],
    /// The factor of the gradient of the summed losses.
    pub(crate) grad_scale: f32,
}
