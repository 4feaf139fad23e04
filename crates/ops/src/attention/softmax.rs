//! The running softmax of attention's forward pass.

use super::blocks::{COL_UNIT, ROWS, SCORE_COLS, lanes_of, lanes_of_mut, seen_by_all};
use super::operands::OperandFormat;
use crate::simd::{Level, kernel};
use crate::vmath;

/// The scores that [`softmax`] turns into weights: [`COL_UNIT`] query rows and a number of keys.
#[derive(Clone, Copy)]
pub(super) struct Columns {
    pub(super) first_col: usize,
    pub(super) first_key: usize,
    pub(super) num_keys: usize,
    /// The factor of the scores.
    pub(super) scale: f32,
    /// The format of the product that takes the weights.
    pub(super) format: OperandFormat,
}

/// The running state of the rows of a block: their maxima, sums and outputs, if there are any yet.
pub(super) struct RowState<'a> {
    pub(super) max: &'a mut [f32; ROWS],
    pub(super) sum: &'a mut [f32; ROWS],
    pub(super) o: Option<&'a mut [f32]>,
}

/// The keys that each row of a block sees: `from[row]..until[row]`.
pub(super) struct SeenKeys {
    pub(super) from: [i32; ROWS],
    pub(super) until: [i32; ROWS],
}

impl Columns {
    /// Returns the first column's place in a row of scores.
    #[inline(always)]
    fn at(&self) -> usize {
        self.first_col % SCORE_COLS
    }
}

kernel! {
    bf16
    /// Raises the rows' maxima and turns scores `[keys, SCORE_COLS]` into weights `2^(score - max)`, zero where a row
    /// does not see the key. Scales the rows' sums and, where there are any, their outputs `o` to the new maxima. The
    /// weights take the place of the scores; where the format has pairs they go to `pairs` `[keys / 2, SCORE_COLS]`
    /// as pairs along the keys.
    pub(super) fn softmax<S: Level>(
        columns: Columns,
        scores: &mut [f32],
        pairs: &mut [f32],
        seen: &SeenKeys,
        state: RowState<'_>,
    ) {
        let Columns { first_col, first_key, num_keys, .. } = columns;
        if num_keys == 0 {
            return;
        }
        let (seen_from, visible) = (lanes_of(&seen.from, first_col), lanes_of(&seen.until, first_col));
        let (max, sum) = (lanes_of_mut(state.max, first_col), lanes_of_mut(state.sum, first_col));
        let num_open = seen_by_all(first_key, num_keys, seen_from, visible);
        let scores = &mut scores[..num_keys * SCORE_COLS];
        let new_max = raise(columns, num_open, scores, seen_from, visible, *max);
        let new_sum = match columns.format {
            OperandFormat::F32 => weigh::<S>(columns, num_open, scores, &new_max),
            OperandFormat::Bf16Pairs | OperandFormat::AmxTiles => weigh_pairs::<S>(columns, num_open, scores, &new_max, pairs),
        };
        let mut factors = [0.0_f32; COL_UNIT];
        for i in 0..COL_UNIT {
            factors[i] = vmath::exp2_falling::<S>(max[i] - new_max[i]);
            sum[i] = S::mul_add(sum[i], factors[i], new_sum[i]);
        }
        *max = new_max;
        if let Some(o) = state.o {
            scale::<S>(o, columns, &factors);
        }
    }
}

/// Scales the outputs of the rows: `o [ROWS, width]`, with AMX tiles `[width, ROWS]`. Rows whose factor is 1 are
/// skipped, because a later block of keys rarely raises the maximum.
#[inline(always)]
fn scale<S: Level>(o: &mut [f32], columns: Columns, factors: &[f32; COL_UNIT]) {
    let Columns { first_col, format, .. } = columns;
    if format == OperandFormat::AmxTiles {
        if factors.iter().any(|&factor| factor != 1.0) {
            assert!(S::WIDTH == COL_UNIT, "vectors of sixteen lanes");
            for o in o.chunks_exact_mut(ROWS) {
                let o = lanes_of_mut(o, first_col).as_mut_ptr();
                // SAFETY: arrays of COL_UNIT lanes. By vectors: the compiler would gather what lies ROWS apart.
                unsafe { S::store(o, S::vector_mul_add(S::load(o), S::load(factors.as_ptr()), S::splat(0.0))) };
            }
        }
        return;
    }
    let width = o.len() / ROWS;
    for (row, &factor) in o.chunks_exact_mut(width).skip(first_col).zip(factors) {
        if factor != 1.0 {
            row.iter_mut().for_each(|o| *o *= factor);
        }
    }
}

/// Returns the greatest of `max` and the scaled scores. The first `num_open` keys, which all rows see, keep their
/// scores as they are. Scores of the other keys are scaled in place, and those that a row does not see become minus
/// infinity.
#[inline(always)]
fn raise(
    columns: Columns,
    num_open: usize,
    scores: &mut [f32],
    seen_from: &[i32; COL_UNIT],
    visible: &[i32; COL_UNIT],
    mut max: [f32; COL_UNIT],
) -> [f32; COL_UNIT] {
    let Columns { first_key, scale, .. } = columns;
    let (open, edge) = scores.split_at_mut(num_open * SCORE_COLS);
    let at = columns.at();
    max = if scale > 0.0 {
        // The greatest of the scaled scores is the greatest score scaled.
        greater(max, scaled(&greatest(open, at, [f32::NEG_INFINITY; COL_UNIT], |score| score), scale))
    } else {
        greatest(open, at, max, |score| score * scale)
    };
    for (key, scores) in (first_key + num_open..).zip(edge.chunks_exact_mut(SCORE_COLS)) {
        let key = key as i32;
        let scores = lanes_of_mut(scores, columns.at());
        let mut masked = scaled(scores, scale);
        for i in 0..COL_UNIT {
            let is_seen = (key < visible[i]) & (key >= seen_from[i]);
            masked[i] = if is_seen { masked[i] } else { f32::NEG_INFINITY };
        }
        max = greater(max, masked);
        *scores = masked;
    }
    max
}

/// Returns the greatest of `max` and `of(score)` of the scores of some keys, from column `at` on.
#[inline(always)]
fn greatest(scores: &[f32], at: usize, max: [f32; COL_UNIT], of: impl Fn(f32) -> f32) -> [f32; COL_UNIT] {
    let lanes = |scores: &[f32], key: usize| {
        let mut lanes = *lanes_of(scores, key * SCORE_COLS + at);
        for lane in &mut lanes {
            *lane = of(*lane);
        }
        lanes
    };
    // Several maxima, so that comparisons do not wait for each other.
    let mut maxima = [max; 4];
    let (fours, rest) = scores.as_chunks::<{ 4 * SCORE_COLS }>();
    for scores in fours {
        for (key, max) in maxima.iter_mut().enumerate() {
            *max = greater(*max, lanes(scores, key));
        }
    }
    for scores in rest.chunks_exact(SCORE_COLS) {
        maxima[0] = greater(maxima[0], lanes(scores, 0));
    }
    let [a, b, c, d] = maxima;
    greater(greater(a, b), greater(c, d))
}

#[inline(always)]
fn scaled(scores: &[f32; COL_UNIT], scale: f32) -> [f32; COL_UNIT] {
    let mut scaled = *scores;
    for score in &mut scaled {
        *score *= scale;
    }
    scaled
}

/// Returns the greater of each two, and the first where the second is NaN.
#[inline(always)]
fn greater(mut max: [f32; COL_UNIT], scores: [f32; COL_UNIT]) -> [f32; COL_UNIT] {
    for i in 0..COL_UNIT {
        max[i] = if scores[i] > max[i] { scores[i] } else { max[i] };
    }
    max
}

/// Returns powers of two, as precise as the format's words are.
#[inline(always)]
pub(super) fn powers<S: Level>(format: OperandFormat, x: [f32; COL_UNIT]) -> [f32; COL_UNIT] {
    if format.are_pairs() { S::exp2_falling_for_bf16(x) } else { S::exp2_falling(x) }
}

/// Returns the weights of key number `key` and adds them to `sum`. Keys from `num_open` on have been scaled already.
#[inline(always)]
fn weights_of<S: Level>(
    columns: Columns,
    num_open: usize,
    key: usize,
    scores: &[f32],
    max: &[f32; COL_UNIT],
    sum: &mut [f32; COL_UNIT],
) -> [f32; COL_UNIT] {
    let mut weights = *lanes_of(&scores[key * SCORE_COLS..], columns.at());
    if key < num_open {
        // The product is rounded before the subtraction, as the maximum and backward's scores are. A fused
        // multiply-add would give forward and backward different weights for large scores.
        weights = scaled(&weights, columns.scale);
    }
    for i in 0..COL_UNIT {
        weights[i] -= max[i];
    }
    weights = powers::<S>(columns.format, weights);
    for i in 0..COL_UNIT {
        sum[i] += weights[i];
    }
    weights
}

/// Replaces the scores by their weights. Returns the sums of the weights.
#[inline(always)]
fn weigh<S: Level>(columns: Columns, num_open: usize, scores: &mut [f32], max: &[f32; COL_UNIT]) -> [f32; COL_UNIT] {
    let mut sum = [0.0; COL_UNIT];
    for key in 0..columns.num_keys {
        let weights = weights_of::<S>(columns, num_open, key, scores, max, &mut sum);
        *lanes_of_mut(&mut scores[key * SCORE_COLS..], columns.at()) = weights;
    }
    sum
}

/// Writes the weights as pairs along the keys, with zeros for a missing last key. Returns the sums of the weights.
#[inline(always)]
fn weigh_pairs<S: Level>(
    columns: Columns,
    num_open: usize,
    scores: &[f32],
    max: &[f32; COL_UNIT],
    pairs: &mut [f32],
) -> [f32; COL_UNIT] {
    assert!(S::HAS_PAIR_DOT, "pairs of bf16");
    let mut sum = [0.0; COL_UNIT];
    for (pair, to) in (0..columns.num_keys.div_ceil(2)).zip(pairs.chunks_exact_mut(SCORE_COLS)) {
        let low = weights_of::<S>(columns, num_open, 2 * pair, scores, max, &mut sum);
        let high = if 2 * pair + 1 < columns.num_keys {
            weights_of::<S>(columns, num_open, 2 * pair + 1, scores, max, &mut sum)
        } else {
            [0.0; COL_UNIT]
        };
        let to = lanes_of_mut(to, columns.at());
        // SAFETY: each array is a vector of COL_UNIT lanes, as vectors have where pairs are multiplied.
        unsafe { S::store(to.as_mut_ptr(), S::pair(S::load(low.as_ptr()), S::load(high.as_ptr()))) };
    }
    sum
}
