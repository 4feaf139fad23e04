//! Constants fitted on measured steps.

use moeworks_plan::machine::{Machine, Overhead, PredictedStep};
use moeworks_train::TrainError;
use moeworks_train::config::RunConfig;

use super::predict;

/// A measured step.
pub(super) struct MeasuredStep {
    pub(super) config: RunConfig,
    pub(super) seconds: f64,
}

/// A constant of [`Overhead`].
pub(super) type Constant = fn(&mut Overhead) -> &mut f64;

/// The constants of steps on one rank.
pub(super) const OF_STEPS: [Constant; 6] = [
    |overhead| &mut overhead.layer_s,
    |overhead| &mut overhead.passes,
    |overhead| &mut overhead.step_s,
    |overhead| &mut overhead.weight_s,
    |overhead| &mut overhead.choice_s,
    |overhead| &mut overhead.score_s,
];

/// The constants that steps on several ranks have in addition.
pub(super) const OF_RANKS: [Constant; 3] =
    [|overhead| &mut overhead.ranks_s, |overhead| &mut overhead.wait_s, |overhead| &mut overhead.link_share];

/// Fits constants so that predicted steps come near the measured ones, each by its share of the measured time. The
/// other constants stay. None of the fitted ones is negative.
pub(super) fn fit(machine: &Machine, constants: &[Constant], steps: &[MeasuredStep]) -> Result<Overhead, TrainError> {
    let with = |values: &[f64]| {
        let mut overhead = machine.overhead;
        constants.iter().zip(values).for_each(|(constant, &value)| *constant(&mut overhead) = value);
        overhead
    };
    let mut rows = Vec::new();
    for step in steps {
        let total = |values: &[f64]| -> Result<f64, TrainError> {
            let machine = Machine { overhead: with(values), ..machine.clone() };
            Ok(PredictedStep::total(&predict(&machine, &step.config)?) / step.seconds)
        };
        let none = vec![0.0; constants.len()];
        let base = total(&none)?;
        let feature = |index: usize| {
            let mut values = none.clone();
            values[index] = 1.0;
            Ok(total(&values)? - base)
        };
        let features = (0..constants.len()).map(feature).collect::<Result<Vec<_>, TrainError>>()?;
        rows.push(Row { features, rest: 1.0 - base });
    }
    Ok(with(&least_squares(&rows, constants.len())))
}

/// An equation: `rest` is the sum of the features times the constants.
struct Row {
    features: Vec<f64>,
    rest: f64,
}

/// Returns the constants, none of them negative, with the least squares of what the rows leave. There are few: each
/// set of constants that are not zero is tried.
fn least_squares(rows: &[Row], num: usize) -> Vec<f64> {
    let left = |values: &[f64]| {
        let error = |row: &Row| row.rest - row.features.iter().zip(values).map(|(a, b)| a * b).sum::<f64>();
        rows.iter().map(|row| error(row).powi(2)).sum::<f64>()
    };
    let sets = (0..1_usize << num).map(|set| (0..num).filter(|index| (set >> index) & 1 == 1).collect::<Vec<_>>());
    let solved = sets.filter_map(|set| {
        let mut values = vec![0.0; num];
        let found = solve(rows, &set)?;
        set.iter().zip(found).for_each(|(&index, value)| values[index] = value);
        values.iter().all(|value| *value >= 0.0).then_some(values)
    });
    solved.min_by(|a, b| left(a).total_cmp(&left(b))).unwrap_or_else(|| vec![0.0; num])
}

/// Solves the normal equations of some constants; none if they do not decide them.
fn solve(rows: &[Row], set: &[usize]) -> Option<Vec<f64>> {
    let norms: Vec<f64> =
        set.iter().map(|&index| rows.iter().map(|row| row.features[index].powi(2)).sum::<f64>().sqrt()).collect();
    let feature = |row: &Row, at: usize| row.features[set[at]] / norms[at];
    let size = set.len();
    // The matrix with the right-hand side as its last column.
    let mut matrix: Vec<Vec<f64>> = (0..size)
        .map(|i| {
            let left = (0..size).map(|j| rows.iter().map(|row| feature(row, i) * feature(row, j)).sum());
            left.chain([rows.iter().map(|row| feature(row, i) * row.rest).sum()]).collect()
        })
        .collect();
    for pivot in 0..size {
        let largest = (pivot..size).max_by(|&a, &b| matrix[a][pivot].abs().total_cmp(&matrix[b][pivot].abs()))?;
        matrix.swap(pivot, largest);
        if matrix[pivot][pivot].is_nan() || matrix[pivot][pivot].abs() <= 1e-9 {
            return None;
        }
        let row = matrix[pivot].clone();
        for (_, other) in matrix.iter_mut().enumerate().filter(|&(index, _)| index != pivot) {
            let factor = other[pivot] / row[pivot];
            other.iter_mut().zip(&row).skip(pivot).for_each(|(value, of_pivot)| *value -= factor * of_pivot);
        }
    }
    Some((0..size).map(|i| matrix[i][size] / matrix[i][i] / norms[i]).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(features: &[f64], rest: f64) -> Row {
        Row { features: features.to_vec(), rest }
    }

    #[test]
    fn exact_equations_give_their_constants_whatever_their_scales() {
        let rows = [row(&[1.0, 2e6], 2.0 + 6.0), row(&[3.0, 1e6], 6.0 + 3.0), row(&[1.0, 0.0], 2.0)];
        let found = least_squares(&rows, 2);
        assert!((found[0] - 2.0).abs() < 1e-9 && (found[1] - 3e-6).abs() < 1e-15, "{found:?}");
    }

    #[test]
    fn a_constant_that_would_be_negative_is_zero_and_the_others_are_the_best_without_it() {
        let found = least_squares(&[row(&[1.0, 1.0], 2.0), row(&[1.0, 3.0], 1.0)], 2);
        assert_eq!(found, [1.5, 0.0]);
    }

    #[test]
    fn steps_that_leave_nothing_or_do_not_decide_give_zeros() {
        assert_eq!(least_squares(&[row(&[0.0, 0.0], 0.0)], 2), [0.0; 2]);
        assert_eq!(least_squares(&[], 2), [0.0; 2]);
    }
}
