//! A router's choice on a GPU where it is more than the largest of a softmax: scores by softmax or sigmoid, a bias
//! that counts in the choice alone, groups of experts, weights normalised and scaled (DeepSeek-V3, 2412.19437,
//! section 2.1.2).
//!
//! There is no CPU version here. Callers on the CPU take the same steps, and further kinds of them, row by row; the
//! kernels are tested against those. Without a GPU both functions return none.

use moeworks_tensor::Tensor;

use crate::Context;
use crate::cuda::{self, On};
use crate::deferred::{Deferred, List};
use crate::top_k::ScoreSums;

/// The rule by which experts are chosen and weighed.
#[derive(Clone, Copy, Debug)]
pub struct ScoreRule<'a> {
    /// Scores are sigmoids of the logits, each on its own; otherwise their softmax.
    pub is_sigmoid: bool,
    /// The divisor of the logits.
    pub temperature: f32,
    /// `[E]` f32: added to the scores for the choice alone.
    pub bias: Option<&'a Tensor>,
    /// The number of groups of consecutive experts; divides E.
    pub num_groups: usize,
    /// The number of groups that a token's experts may be in.
    pub top_groups: usize,
    /// Groups are chosen by the sum of their two best scores; otherwise by the best one.
    pub by_top_two: bool,
    /// K: experts of a token.
    pub top_k: usize,
    /// Weights are divided by their sum.
    pub is_normalized: bool,
    /// The factor of the weights, applied last.
    pub scale: f32,
    /// The first expert without weight; it and those after it do not count in the sum.
    pub first_null: usize,
    /// Sums over the rows are read soon and computed at once; otherwise they are computed when they are first read.
    pub are_sums_wanted: bool,
}

impl ScoreRule<'_> {
    /// Returns whether some groups are out of reach for a token.
    pub(crate) fn is_limited(&self) -> bool {
        self.top_groups < self.num_groups
    }
}

/// The result of [`score_top_k`].
pub struct Scored {
    /// `[T, E]` f32: a distribution, the softmax or the normalised sigmoids.
    pub probs: Tensor,
    /// `[T, E]` f32: the sigmoids, if scores are sigmoids.
    pub gates: Option<Tensor>,
    /// `[T, E]` f32: the logits over the temperature. A token with a logit that is not finite has zeros, and its
    /// scores are NaN.
    pub logits: Tensor,
    /// `[T]` f32: the log of the sum of exponentials of the logits.
    pub lse: Tensor,
    /// `[T, K]` u32: the chosen experts, best first, the lower index at a tie; `u32::MAX` where groups have no more.
    pub ids: Tensor,
    /// `[T, K]` f32: the weights of the chosen experts.
    pub weights: Tensor,
    /// Sums over the rows.
    pub sums: Deferred<ScoreSums>,
}

/// Computes the scores of the rows of `logits` `[T, E]` (f32) and the choices of each row.
#[must_use]
pub fn score_top_k(ctx: &Context, logits: Tensor, rule: &ScoreRule<'_>) -> Option<Scored> {
    let (e, k) = (logits.cols(), rule.top_k);
    assert!((1..=e).contains(&k), "top {k} of {e}");
    assert!(rule.num_groups > 0 && e.is_multiple_of(rule.num_groups), "{} groups of {e} experts", rule.num_groups);
    assert!(rule.bias.is_none_or(|bias| bias.len() == e), "biases of {e} experts");
    On::of(ctx).map(|on| cuda::router::score_top_k(on, logits, rule))
}

/// The gradients of the loss with respect to scores, for [`score_top_k_backward`].
#[derive(Clone, Copy)]
pub struct ScoredGrads<'a> {
    /// `[T, K]`: the gradient of the weights.
    pub weights: List<'a, f32>,
    /// `[parts, E]`: the gradient of the distribution of each token of a part; empty for none.
    pub probs: &'a [f32],
    /// The number of tokens of a part, at least one, and the number of tokens of the first part that precede these
    /// tokens.
    pub part: (usize, usize),
    /// The gradient of the sum of the squared log-sum-exps.
    pub lse_squared: f32,
}

/// Returns the gradient of the logits `[T, E]` before the division by the temperature. The choice has no gradient.
#[must_use]
pub fn score_top_k_backward(
    ctx: &Context,
    scored: &Scored,
    rule: &ScoreRule<'_>,
    grads: ScoredGrads<'_>,
) -> Option<Tensor> {
    let (t, e) = (scored.probs.rows(), scored.probs.cols());
    assert_eq!(grads.weights.len(), scored.ids.len(), "gradient of the weights");
    let num_parts = (grads.part.1 + t).div_ceil(grads.part.0);
    assert!(grads.probs.is_empty() || grads.probs.len() >= num_parts * e, "gradient of the distributions");
    On::of(ctx).map(|on| cuda::router::score_top_k_backward(on, scored, rule, grads))
}
