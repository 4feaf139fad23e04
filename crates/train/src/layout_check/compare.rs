//! The comparison of two steps.

use std::fmt;

use super::step::StepResult;

/// A value that differs between one rank and several.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// The tensor, or the loss that differs.
    pub of: String,
    /// The place of the value in the tensor.
    pub index: usize,
    /// The value on one rank.
    pub expected: f64,
    /// The value on several ranks.
    pub found: f64,
    /// The difference as a share of the largest value of the tensor.
    pub share: f64,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { of, index, expected, found, share } = self;
        write!(f, "{of}[{index}] is {found:e}, on one rank {expected:e}: {share:.1e} of its largest value")
    }
}

/// The values of a step under their names, in the order in which they are compared.
fn values(step: &StepResult) -> impl Iterator<Item = (&str, &[f64], &[f32])> {
    let losses = step.losses.iter().map(|(name, values)| (name.as_str(), &values[..], &[][..]));
    losses.chain(step.grads.iter().map(|(name, values)| (name.as_str(), &[][..], &values[..])))
}

/// The worst value of each tensor, in order.
fn worst<'a>(one: &'a StepResult, many: &'a StepResult) -> impl Iterator<Item = Difference> + 'a {
    values(one).zip(values(many)).map(|((of, losses, grads), (_, other_losses, other_grads))| {
        let ours = losses.iter().copied().chain(grads.iter().map(|&x| f64::from(x)));
        let theirs = other_losses.iter().copied().chain(other_grads.iter().map(|&x| f64::from(x)));
        let scale = ours.clone().fold(f64::from(f32::MIN_POSITIVE), |max, x| max.max(x.abs()));
        let mut worst = Difference { of: of.to_owned(), index: 0, expected: 0.0, found: 0.0, share: 0.0 };
        for (index, (expected, found)) in ours.zip(theirs).enumerate() {
            let share = (expected - found).abs() / scale;
            // A value that is no number is worse than any.
            let share = if share.is_nan() { f64::INFINITY } else { share };
            if share > worst.share {
                worst = Difference { index, expected, found, share, ..worst };
            }
        }
        if losses.len() + grads.len() != other_losses.len() + other_grads.len() {
            worst.share = f64::INFINITY;
        }
        worst
    })
}

/// The largest difference of any tensor.
pub(super) fn largest(one: &StepResult, many: &StepResult) -> f64 {
    worst(one, many).fold(0.0, |max, worst| max.max(worst.share))
}

/// The first tensor that differs by more than `tolerance`, with its worst value: losses first, then gradients in the
/// order of the table.
pub(super) fn first(one: &StepResult, many: &StepResult, tolerance: f64) -> Option<Difference> {
    worst(one, many).find(|worst| worst.share > tolerance)
}
