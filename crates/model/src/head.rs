//! The last norm, the output projection and its loss. The projection's rows may be on several ranks.

use moeworks_ops::head_loss::{
    HeadGrads, HeadLoss, VocabularyPart, head_loss_backward_biased, head_loss_backward_of_part, head_loss_biased,
    head_loss_of_part,
};
use moeworks_ops::linear::{Write, linear};
use moeworks_ops::{Context, elementwise};
use moeworks_tensor::{DType, Tensor};

use crate::blocks::norm::Norm;
use crate::decoder::Decoder;
use crate::weights::DecoderWeights;

impl Decoder {
    pub(crate) fn head_logits(&self, ctx: &Context, weights: &DecoderWeights, x: &Tensor) -> Tensor {
        let head = weights.head.as_ref().unwrap_or(&weights.embedding);
        let (normed, _) = self.head_input(ctx, weights, x, head.dtype().of_activations());
        let mut logits = linear(ctx, &normed, head, DType::F32);
        if let Some(bias) = &weights.head_bias {
            elementwise::add_rows(ctx, &mut logits, bias);
        }
        logits
    }

    /// What the output projection multiplies: the last norm's result over the logits' divisor, and the norm's statistics.
    fn head_input(&self, ctx: &Context, weights: &DecoderWeights, x: &Tensor, dtype: DType) -> (Tensor, Tensor) {
        let (mut normed, statistics) = self.final_norm().forward(ctx, &weights.final_norm, x, dtype);
        let divisor = self.config().variant.logits_divisor;
        if divisor != 1.0 {
            elementwise::scale_assign(ctx, &mut normed, 1.0 / divisor);
        }
        (normed, statistics)
    }

    fn final_norm(&self) -> Norm {
        Norm { eps: self.config().norm_eps }
    }

    /// The loss for the residual stream `x [T, D]` after the last layer.
    pub(crate) fn head_loss(&self, ctx: &Context, weights: &DecoderWeights, x: &Tensor, targets: &[u32]) -> HeadLoss {
        let head = weights.head.as_ref().unwrap_or(&weights.embedding);
        let (normed, _) = self.head_input(ctx, weights, x, head.dtype().of_activations());
        let head = (head, weights.head_bias.as_ref());
        match &self.tensor {
            None => head_loss_biased(ctx, &normed, head, targets),
            Some(ranks) => ranks.with_vocabulary(|part| head_loss_of_part(ctx, &normed, head, targets, part)),
        }
    }

    /// The loss and the gradient of the residual stream after the last layer.
    pub(crate) fn head_backward(
        &self,
        ctx: &Context,
        weights: &DecoderWeights,
        x: &Tensor,
        targets: &[u32],
        (grad_scale, write): (f32, Write),
        grads: &mut DecoderWeights,
    ) -> (HeadLoss, Tensor) {
        let (head, d_head) = match (&weights.head, &mut grads.head) {
            (Some(head), Some(d_head)) => (head, d_head),
            _ => (&weights.embedding, &mut grads.embedding),
        };
        let (normed, statistics) = self.head_input(ctx, weights, x, head.dtype());
        let into = HeadGrads { weight: d_head, bias: grads.head_bias.as_mut() };
        let (head, how) = ((head, weights.head_bias.as_ref()), (grad_scale, write));
        let (loss, mut d_normed) = self.loss_backward(ctx, &normed, head, targets, how, into);
        let divisor = self.config().variant.logits_divisor;
        if divisor != 1.0 {
            elementwise::scale_assign(ctx, &mut d_normed, 1.0 / divisor);
        }
        let (norm, d_norm) = (&weights.final_norm, &mut grads.final_norm);
        let dx = self.final_norm().backward(ctx, norm, (x, &statistics), &d_normed, write, d_norm);
        (loss, dx)
    }

    /// The loss, and the gradient of `normed [T, D]`.
    fn loss_backward(
        &self,
        ctx: &Context,
        normed: &Tensor,
        head: (&Tensor, Option<&Tensor>),
        targets: &[u32],
        how: (f32, Write),
        into: HeadGrads<'_>,
    ) -> (HeadLoss, Tensor) {
        let Some(ranks) = &self.tensor else {
            return head_loss_backward_biased(ctx, normed, head, targets, how, into);
        };
        let backward =
            |part: &mut VocabularyPart<'_>| head_loss_backward_of_part(ctx, normed, head, targets, (how, part), into);
        let (loss, mut d_normed) = ranks.with_vocabulary(backward);
        ranks.sum(&mut d_normed);
        (loss, d_normed)
    }
}
