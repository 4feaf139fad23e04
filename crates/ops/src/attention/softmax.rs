//! The running softmax of attention's forward pass.

use super::blocks::{COL_UNIT, ROWS, lanes_of, lanes_of_mut, seen_by_all};
use super::words::Words;
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
    pub(super) words: Words,
}

kernel! {
    bf16
    /// Turns scores `[keys, ROWS]` into `2^(score - max)`, zero where a row does not see the key, after raising the rows'
    /// maxima; scales what the rows have summed up so far accordingly. `state` is the maximum and the sum of each row. The
    /// weights take the place of the scores, or go to `pairs` `[keys / 2, ROWS]` as pairs along the keys.
    pub(super) fn softmax<S: Level>(
        columns: Columns,
        scores: &mut [f32],
        pairs: &mut [f32],
        visible: &([i32; ROWS], [i32; ROWS]),
        state: (&mut [f32; ROWS], &mut [f32; ROWS]),
        o: &mut [f32],
    ) {
        let Columns { first_col, first_key, num_keys, .. } = columns;
        if num_keys == 0 {
            return;
        }
        let visible = (lanes_of(&visible.0, first_col), lanes_of(&visible.1, first_col));
        let (max, sum) = (lanes_of_mut(state.0, first_col), lanes_of_mut(state.1, first_col));
        let num_open = seen_by_all(first_key, num_keys, (visible.0, visible.1));
        let scores = &mut scores[..num_keys * ROWS];
        let new_max = raise(columns, num_open, scores, visible, *max);
        let new_sum = match columns.words {
            Words::Singles => weigh::<S>(columns, num_open, scores, &new_max),
            Words::Pairs => weigh_pairs::<S>(columns, num_open, scores, &new_max, pairs),
        };
        let mut factors = [0.0_f32; COL_UNIT];
        for i in 0..COL_UNIT {
            factors[i] = vmath::exp2_falling::<S>(max[i] - new_max[i]);
            sum[i] = S::mul_add(sum[i], factors[i], new_sum[i]);
        }
        *max = new_max;
        let width = o.len() / ROWS;
        for (row, factor) in o.chunks_exact_mut(width).skip(first_col).zip(factors) {
            // A later block rarely raises the maximum.
            if factor != 1.0 {
                row.iter_mut().for_each(|o| *o *= factor);
            }
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
    let Columns { first_col, first_key, scale, .. } = columns;
    let (open, edge) = scores.split_at_mut(num_open * ROWS);
    for scores in open.chunks_exact(ROWS) {
        let scores = lanes_of(scores, first_col);
        for i in 0..COL_UNIT {
            let score = scores[i] * scale;
            max[i] = if score > max[i] { score } else { max[i] };
        }
    }
    for (key, scores) in (first_key + num_open..).zip(edge.chunks_exact_mut(ROWS)) {
        let key = key as i32;
        let scores = lanes_of_mut(scores, first_col);
        let mut masked = scores.map(|score| score * scale);
        for i in 0..COL_UNIT {
            let is_seen = (key < visible[i]) & (key >= seen_from[i]);
            masked[i] = if is_seen { masked[i] } else { f32::NEG_INFINITY };
        }
        for i in 0..COL_UNIT {
            max[i] = if masked[i] > max[i] { masked[i] } else { max[i] };
        }
        *scores = masked;
    }
    max
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
    let mut weights = *lanes_of(&scores[key * ROWS..], columns.first_col);
    if key < num_open {
        // Rounded before the subtraction, as the maximum and backward's scores are: fused, what the two make of a large
        // score would differ.
        for i in 0..COL_UNIT {
            weights[i] = vmath::exp2_falling::<S>(weights[i] * columns.scale - max[i]);
        }
    } else {
        for i in 0..COL_UNIT {
            weights[i] = vmath::exp2_falling::<S>(weights[i] - max[i]);
        }
    }
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
        *lanes_of_mut(&mut scores[key * ROWS..], columns.first_col) = weights;
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
    for (pair, to) in (0..columns.num_keys.div_ceil(2)).zip(pairs.chunks_exact_mut(ROWS)) {
        let low = weights_of::<S>((columns, num_open), 2 * pair, scores, max, &mut sum);
        let high = if 2 * pair + 1 < columns.num_keys {
            weights_of::<S>((columns, num_open), 2 * pair + 1, scores, max, &mut sum)
        } else {
            [0.0; COL_UNIT]
        };
        let to = lanes_of_mut(to, columns.first_col);
        // SAFETY: each array is a vector of COL_UNIT lanes, as vectors have where pairs are multiplied.
        unsafe { S::store(to.as_mut_ptr(), S::pair(S::load(low.as_ptr()), S::load(high.as_ptr()))) };
    }
    sum
}
