//! The running softmax of attention's forward pass.

use super::blocks::{COL_UNIT, ROWS, SCORE_COLS, lanes_of, lanes_of_mut, seen_by_all};
use super::operands::OperandFormat;
use crate::simd::{Level, kernel};
use crate::vmath;

/// Which scores [`softmax`] turns into weights: [`COL_UNIT`] query rows and a number of keys.
#[derive(Clone, Copy)]
pub(super) struct Columns {
    pub(super) first_col: usize,
    pub(super) first_key: usize,
    pub(super) num_keys: usize,
    /// What scores are to be multiplied by.
    pub(super) scale: f32,
    /// What the weights are for.
    pub(super) format: OperandFormat,
}

impl Columns {
    /// Where the columns are among those of the scores.
    #[inline(always)]
    fn at(&self) -> usize {
        self.first_col % SCORE_COLS
    }
}

kernel! {
    bf16
    /// Turns scores `[keys, SCORE_COLS]` into `2^(score - max)`, zero where a row does not see the key, after raising the rows'
    /// maxima; scales what the rows have summed up so far (`o`), if anything, accordingly. `state` is the maximum and the sum of each row. The
    /// weights take the place of the scores, or go to `pairs` `[keys / 2, SCORE_COLS]` as pairs along the keys.
    pub(super) fn softmax<S: Level>(
        columns: Columns,
        scores: &mut [f32],
        pairs: &mut [f32],
        visible: &([i32; ROWS], [i32; ROWS]),
        state: (&mut [f32; ROWS], &mut [f32; ROWS]),
        o: Option<&mut [f32]>,
    ) {
        let Columns { first_col, first_key, num_keys, .. } = columns;
        if num_keys == 0 {
            return;
        }
        let visible = (lanes_of(&visible.0, first_col), lanes_of(&visible.1, first_col));
        let (max, sum) = (lanes_of_mut(state.0, first_col), lanes_of_mut(state.1, first_col));
        let num_open = seen_by_all(first_key, num_keys, (visible.0, visible.1));
        let scores = &mut scores[..num_keys * SCORE_COLS];
        let new_max = raise(columns, num_open, scores, visible, *max);
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
        if let Some(o) = o {
            scale::<S>(o, columns, &factors);
        }
    }
}

/// Scales what each of the rows has summed up: `o [ROWS, width]`, with tiles `[width, ROWS]`. A later block rarely raises the maximum.
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

/// The greatest of `max` and the scaled scores. Scores of keys that some row does not see are scaled in place, and those
/// that are not seen become minus infinity; the first `num_open` stay as they are.
#[inline(always)]
fn raise(
    columns: Columns,
    num_open: usize,
    scores: &mut [f32],
    (seen_from, visible): (&[i32; COL_UNIT], &[i32; COL_UNIT]),
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

/// The greatest of `max` and what `of` makes of the scores of some keys, from column `at` on.
#[inline(always)]
fn greatest(scores: &[f32], at: usize, max: [f32; COL_UNIT], of: impl Fn(f32) -> f32) -> [f32; COL_UNIT] {
    let lanes = |scores: &[f32], key: usize| {
        let mut lanes = *lanes_of(scores, key * SCORE_COLS + at);
        for lane in &mut lanes {
            *lane = of(*lane);
        }
        lanes
    };
    // Several maxima that do not wait for each other.
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

/// The greater of each two, the first where the second is no number.
#[inline(always)]
fn greater(mut max: [f32; COL_UNIT], scores: [f32; COL_UNIT]) -> [f32; COL_UNIT] {
    for i in 0..COL_UNIT {
        max[i] = if scores[i] > max[i] { scores[i] } else { max[i] };
    }
    max
}

/// Powers of two, as precise as words are.
#[inline(always)]
pub(super) fn powers<S: Level>(format: OperandFormat, x: [f32; COL_UNIT]) -> [f32; COL_UNIT] {
    if format.are_pairs() { S::exp2_falling_for_bf16(x) } else { S::exp2_falling(x) }
}

/// The weights of key number `key`, added to `sum`; keys from `num_open` on have been scaled.
#[inline(always)]
fn weights_of<S: Level>(
    (columns, num_open): (Columns, usize),
    key: usize,
    scores: &[f32],
    max: &[f32; COL_UNIT],
    sum: &mut [f32; COL_UNIT],
) -> [f32; COL_UNIT] {
    let mut weights = *lanes_of(&scores[key * SCORE_COLS..], columns.at());
    if key < num_open {
        // Rounded before the subtraction, as the maximum and backward's scores are: fused, what the two make of a large
        // score would differ.
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

/// Puts the weights in the place of the scores, and returns their sums.
#[inline(always)]
fn weigh<S: Level>(columns: Columns, num_open: usize, scores: &mut [f32], max: &[f32; COL_UNIT]) -> [f32; COL_UNIT] {
    let mut sum = [0.0; COL_UNIT];
    for key in 0..columns.num_keys {
        let weights = weights_of::<S>((columns, num_open), key, scores, max, &mut sum);
        *lanes_of_mut(&mut scores[key * SCORE_COLS..], columns.at()) = weights;
    }
    sum
}

/// Writes the weights as pairs along the keys, zero for a key that is missing at the end, and returns their sums.
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
        let low = weights_of::<S>((columns, num_open), 2 * pair, scores, max, &mut sum);
        let high = if 2 * pair + 1 < columns.num_keys {
            weights_of::<S>((columns, num_open), 2 * pair + 1, scores, max, &mut sum)
        } else {
            [0.0; COL_UNIT]
        };
        let to = lanes_of_mut(to, columns.at());
        // SAFETY: each array is a vector of COL_UNIT lanes, as vectors have where pairs are multiplied.
        unsafe { S::store(to.as_mut_ptr(), S::pair(S::load(low.as_ptr()), S::load(high.as_ptr()))) };
    }
    sum
}
