//! A router's choice on a GPU where it is more than the highest of a softmax: scores by softmax or sigmoid, a bias
//! that counts in the choice alone, groups of experts, weights divided by their sum and scaled (DeepSeek-V3,
//! 2412.19437, section 2.1.2).
//!
//! There is no twin on the processor: whoever routes there takes the same steps row by row, and more kinds of them,
//! so these are what the kernels are checked against. Without a GPU both functions give nothing.

use moeworks_tensor::Tensor;

use crate::Context;
use crate::cuda::{self, On};
use crate::late::{Late, List};
use crate::top_k::ScoreSums;

/// How experts are chosen and weighed.
#[derive(Clone, Copy, Debug)]
pub struct ScoreRule<'a> {
    /// Whether scores are sigmoids of the logits, each by itself, and not their softmax.
    pub is_sigmoid: bool,
    /// Logits are divided by this first.
    pub temperature: f32,
    /// `[E]` f32: added to the scores for the choice.
    pub bias: Option<&'a Tensor>,
    /// Groups of consecutive experts; divides E.
    pub num_groups: usize,
    /// Groups that a token's experts may be in.
    pub top_groups: usize,
    /// Whether groups are chosen by the sum of their two best scores, and not by the best one.
    pub by_top_two: bool,
    /// K.
    pub top_k: usize,
    /// Whether weights are divided by their sum.
    pub is_normalized: bool,
    /// Multiplies the weights at the end.
    pub scale: f32,
    /// Experts from this one on have no weight and do not count in the sum.
    pub first_null: usize,
    /// Whether sums over the rows are looked at soon; others are taken when they are, if ever.
    pub are_sums_wanted: bool,
}

impl ScoreRule<'_> {
    /// Whether some groups are out of reach.
    pub(crate) fn is_limited(&self) -> bool {
        self.top_groups < self.num_groups
    }
}

/// What [`score_top_k`] finds.
pub struct Scored {
    /// `[T, E]` f32: a distribution, the softmax or the sigmoids divided by their sum.
    pub probs: Tensor,
    /// `[T, E]` f32: the sigmoids, if scores are these.
    pub gates: Option<Tensor>,
    /// `[T, E]` f32: the logits over the temperature; zeros for a token with one that is not finite, whose scores are
    /// NaN.
    pub logits: Tensor,
    /// `[T]` f32: logarithm of the sum of exponentials of the logits.
    pub lse: Tensor,
    /// `[T, K]` u32: the chosen experts, best first, the lower index at a tie; `u32::MAX` where groups have no more.
    pub ids: Tensor,
    /// `[T, K]` f32: their weights.
    pub weights: Tensor,
    /// Sums over the rows.
    pub sums: Late<ScoreSums>,
}

/// Scores of the rows of `logits` `[T, E]` (f32) and the choices of each.
#[must_use]
pub fn score_top_k(ctx: &Context, logits: Tensor, rule: &ScoreRule<'_>) -> Option<Scored> {
    let (e, k) = (logits.cols(), rule.top_k);
    assert!((1..=e).contains(&k), "top {k} of {e}");
    assert!(rule.num_groups > 0 && e.is_multiple_of(rule.num_groups), "{} groups of {e} experts", rule.num_groups);
    assert!(rule.bias.is_none_or(|bias| bias.len() == e), "biases of {e} experts");
    On::of(ctx).map(|on| cuda::router::score_top_k(on, logits, rule))
}

/// What the loss says of scores, for [`score_top_k_backward`].
#[derive(Clone, Copy)]
pub struct ScoredGrads<'a> {
    /// `[T, K]`: gradient of the weights.
    pub weights: List<'a, f32>,
    /// `[parts, E]`: gradient of the distribution of each token of a part; empty for none.
    pub probs: &'a [f32],
    /// Tokens of a part, at least one, and those of the first part that come before these tokens.
    pub part: (usize, usize),
    /// Gradient of the sum of the squared log-sum-exps.
    pub lse_squared: f32,
}

/// The gradient of the logits `[T, E]`, before temperature. The choice has none.
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
