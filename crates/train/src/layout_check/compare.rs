//! The comparison of two steps.

use std::fmt;

use super::step::StepResult;

/// A value that differs between one rank and several.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// The tensor, or the loss that differs.
    pub of: String,
    /// The rank whose copy of the tensor differs; none where it is the gradient that the ranks put together.
    pub rank: Option<usize>,
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
        let Self { of, rank, index, expected, found, share } = self;
        let copy = rank.map_or_else(String::new, |rank| format!(" in the copy of rank {rank}"));
        write!(f, "{of}[{index}] is {found:e}{copy}, on one rank {expected:e}: {share:.1e} of its largest value")
    }
}

/// The values of a step under their names, in the order in which they are compared.
fn values(step: &StepResult) -> impl Iterator<Item = (&str, &[f64], &[f32])> {
    let losses = step.losses.iter().map(|(name, values)| (name.as_str(), &values[..], &[][..]));
    losses.chain(step.grads.iter().map(|(name, values)| (name.as_str(), &[][..], &values[..])))
}

/// Two lists of the values of a tensor, of which the first are those of one rank.
struct Both<'a> {
    of: &'a str,
    rank: Option<usize>,
    ours: Vec<f64>,
    theirs: Vec<f64>,
}

impl Both<'_> {
    /// Returns the value that differs most.
    fn worst(&self) -> Difference {
        let Self { of, rank, ours, theirs } = self;
        let scale = ours.iter().fold(f64::from(f32::MIN_POSITIVE), |max, x| max.max(x.abs()));
        let (of, rank) = ((*of).to_owned(), *rank);
        let mut worst = Difference { of, rank, index: 0, expected: 0.0, found: 0.0, share: 0.0 };
        for (index, (&expected, &found)) in ours.iter().zip(theirs).enumerate() {
            let share = (expected - found).abs() / scale;
            // A value that is no number is worse than any.
            let share = if share.is_nan() { f64::INFINITY } else { share };
            if share > worst.share {
                worst = Difference { index, expected, found, share, ..worst };
            }
        }
        if ours.len() != theirs.len() {
            worst.share = f64::INFINITY;
        }
        worst
    }
}

fn wide(values: &[f32]) -> impl Iterator<Item = f64> + '_ {
    values.iter().map(|&x| f64::from(x))
}

/// The worst value of each tensor, in order, and then of each copy of one that ranks hold.
fn worst<'a>(one: &'a StepResult, many: &'a StepResult) -> impl Iterator<Item = Difference> + 'a {
    let whole = values(one).zip(values(many)).map(|((of, losses, grads), (_, other_losses, other_grads))| {
        let ours = losses.iter().copied().chain(wide(grads)).collect();
        Both { of, rank: None, ours, theirs: other_losses.iter().copied().chain(wide(other_grads)).collect() }.worst()
    });
    let copies = many.copies.iter().map(|copy| {
        let (of, ours) = &one.grads[copy.place];
        Both { of, rank: Some(copy.rank), ours: wide(ours).collect(), theirs: wide(&copy.values).collect() }.worst()
    });
    whole.chain(copies)
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
