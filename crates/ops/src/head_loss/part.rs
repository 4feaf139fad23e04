//! The loss of a vocabulary that is sharded over ranks (Megatron-LM, 1909.08053, section 3).
//!
//! Each rank has the logits of its part of the vocabulary. For each token a rank shares its largest logit, the sum of
//! exponentials relative to it, and the target's logit if the target is in its part. From the shares of all ranks
//! each rank computes the loss and the gradients of its own logits. There is one collective for each chunk of tokens;
//! the sums are rescaled to the largest logit of all ranks afterwards.

use moeworks_tensor::Tensor;

use super::{
    BackwardPass, HeadGrads, HeadLoss, HeadWeights, IGNORE, LogitGrads, Softmax, backward, exponentials, forward,
    largest, map_rows, room_for_rounded, tokens_of_chunk,
};
use crate::Context;
use crate::deferred::Deferred;
use crate::simd::kernel;

/// A rank's part of a vocabulary whose parts are consecutive in the order of ranks.
pub struct VocabularyPart<'a> {
    /// The first class of each rank's part, and the end of the last part.
    pub starts: &'a [usize],
    /// This rank's number.
    pub rank: usize,
    /// Gathers the numbers of all ranks in the order of ranks. Each rank passes equally many, and all ranks call it
    /// equally often.
    pub gather: &'a mut dyn FnMut(&[f32]) -> Vec<f32>,
}

impl VocabularyPart<'_> {
    /// Returns the tokens of a chunk. All ranks use the same number, because their collectives must match.
    fn tokens_of_chunk(&self, ctx: &Context) -> usize {
        let largest = self.starts.windows(2).map(|pair| pair[1] - pair[0]).max();
        tokens_of_chunk(ctx, largest.unwrap_or(0))
    }
}

/// The share of a rank for a token: its largest logit, the sum of `exp(logit - largest)`, the target's logit if the
/// target is in its part, and 1 if that is the first of the largest.
type Told = [f32; 4];

/// Computes [`head_loss_biased`](super::head_loss_biased) of a sharded vocabulary: the loss of the whole vocabulary,
/// on every rank. `w` `[V', D]` and `bias` `[V']` are the rows of this rank's `part`; `targets` are classes of the
/// whole vocabulary.
pub fn head_loss_of_part(
    ctx: &Context,
    x: &Tensor,
    weights: HeadWeights<'_>,
    targets: &[u32],
    part: &mut VocabularyPart<'_>,
) -> HeadLoss {
    let step = part.tokens_of_chunk(ctx);
    let softmax: Softmax<'_> = &mut |logits, targets| Deferred::now(softmax_rows(ctx, logits, targets, None, part));
    forward(ctx, x, weights, targets, step, softmax)
}

/// Computes [`head_loss_backward_biased`](super::head_loss_backward_biased) of a sharded vocabulary. `w` `[V', D]`
/// and `bias` `[V']` are the rows of this rank's `part`; `targets` are classes of the whole vocabulary.
///
/// The loss is that of the whole vocabulary. The gradient of `x` is this rank's share, to be summed over the ranks;
/// the gradients of the weights are those of this rank's rows.
pub fn head_loss_backward_of_part(
    ctx: &Context,
    x: &Tensor,
    weights: HeadWeights<'_>,
    targets: &[u32],
    grad_scale: f32,
    part: &mut VocabularyPart<'_>,
    grads: HeadGrads<'_>,
) -> (HeadLoss, Tensor) {
    let step = part.tokens_of_chunk(ctx);
    let gradient = LogitGrads { scale: grad_scale, dtype: weights.dtype_of_gradients() };
    let softmax: Softmax<'_> =
        &mut |logits, targets| Deferred::now(softmax_rows(ctx, logits, targets, Some(gradient), &mut *part));
    backward(ctx, x, weights, BackwardPass { targets, step, softmax }, grads)
}

/// Computes the loss of a chunk. With `grads` the logits of this rank's classes are replaced by their gradient,
/// rounded to the type that products take.
fn softmax_rows(
    ctx: &Context,
    logits: &mut Tensor,
    targets: &[u32],
    grads: Option<LogitGrads>,
    part: &mut VocabularyPart<'_>,
) -> HeadLoss {
    let own = part.starts[part.rank]..part.starts[part.rank + 1];
    let place = |target: u32| own.contains(&(target as usize)).then(|| target as usize - own.start);
    let told = tell(ctx, logits, targets, &place);
    let all = (part.gather)(told.as_flattened());
    let all: Vec<&[Told]> = all.as_chunks().0.chunks(targets.len()).collect();
    let (loss, factors) = combine(&all, targets, part);
    let Some(LogitGrads { scale, dtype }) = grads else { return loss };
    let mut rounded = room_for_rounded(ctx, logits, dtype);
    map_rows(ctx, (logits, rounded.as_mut()), targets, |token, row, target| {
        row.iter_mut().for_each(|x| *x *= scale * factors[token]);
        if let Some(place) = place(target) {
            row[place] -= scale;
        }
    });
    if let Some(rounded) = rounded {
        *logits = rounded;
    }
    loss
}

/// Computes the loss of a chunk from the shares of all ranks, and for each token the factor that turns this rank's
/// exponentials into probabilities.
fn combine(all: &[&[Told]], targets: &[u32], part: &VocabularyPart<'_>) -> (HeadLoss, Vec<f32>) {
    let mut loss = HeadLoss::default();
    let mut factors = vec![0.0; targets.len()];
    for (token, &target) in targets.iter().enumerate().filter(|(_, target)| **target != IGNORE) {
        let told: Vec<Told> = all.iter().map(|told| told[token]).collect();
        let max = told.iter().fold(f32::NEG_INFINITY, |max, told| max.max(told[0]));
        let shrunk = |largest: f32| f64::from(largest - max).exp();
        let sum: f64 = told.iter().map(|&[largest, sum, ..]| f64::from(sum) * shrunk(largest)).sum();
        let home = part.starts.partition_point(|&start| start <= target as usize) - 1;
        let [largest, _, logit, is_first] = told[home];
        let is_correct = is_first > 0.0 && largest == max && told[..home].iter().all(|told| told[0] < max);
        loss.loss_sum += sum.ln() - (f64::from(logit) - f64::from(max));
        loss.num_targets += 1;
        loss.num_correct += usize::from(is_correct);
        factors[token] = (shrunk(told[part.rank][0]) / sum) as f32;
    }
    (loss, factors)
}

/// Returns this rank's share for each token and replaces its logits by their exponentials. Ignored tokens get zeros.
fn tell(
    ctx: &Context,
    logits: &mut Tensor,
    targets: &[u32],
    place: &(dyn Fn(u32) -> Option<usize> + Sync),
) -> Vec<Told> {
    map_rows(ctx, (logits, None), targets, |_, row, target| {
        if target == IGNORE {
            row.fill(0.0);
            return Told::default();
        }
        tell_kernel(ctx.isa(), row, place(target))
    })
}

kernel! {
    fn tell_kernel<S: Level>(row: &mut [f32], target: Option<usize>) -> Told {
        let max = largest(row);
        let logit = target.map_or(0.0, |target| row[target]);
        let is_first = target.is_some_and(|target| logit == max && !row[..target].contains(&max));
        [max, exponentials::<S>(row, max), logit, f32::from(u8::from(is_first))]
    }
}
