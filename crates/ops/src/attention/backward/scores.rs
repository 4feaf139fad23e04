//! The softmax of attention backward, recomputed from its log-sums, and the gradient of its scores.

use crate::attention::blocks::{COL_UNIT, ROWS, lanes_of, lanes_of_mut, seen_by_all};
use crate::attention::operands::OperandFormat;
use crate::attention::softmax::powers;
use crate::simd::{Level, kernel};

/// The scores of a block of rows and a block of keys, a row for each key.
pub(super) struct Scores<'a> {
    /// `[KEYS, ROWS]`: scores, then the softmax.
    pub(super) p: &'a mut [f32],
    /// `[KEYS, ROWS]`: the gradient of the softmax, then of the scores.
    pub(super) ds: &'a mut [f32],
    /// `[KEYS, ROWS / 2]`: the softmax as pairs along the query rows.
    pub(super) p_words: &'a mut [f32],
    /// `[KEYS, ROWS / 2]`: the gradient of the scores as pairs along the query rows.
    pub(super) ds_words: &'a mut [f32],
    /// `[KEYS / 2, ROWS]`: the gradient of the scores as pairs along the keys.
    pub(super) ds_pairs: &'a mut [f32],
}

impl Scores<'_> {
    /// The format of the products that take the results.
    pub(super) fn left_operands(&self, format: OperandFormat) -> [&[f32]; 3] {
        match format {
            OperandFormat::F32 => [self.p, self.ds, self.ds],
            OperandFormat::Bf16Pairs | OperandFormat::AmxTiles => [self.p_words, self.ds_words, self.ds_pairs],
        }
    }
}

/// One number for each query row.
pub(super) struct Statistics {
    /// The log of the softmax's sum, times log2(e).
    pub(super) lse: [f32; ROWS],
    /// `rowsum(d_o o)`.
    pub(super) delta: [f32; ROWS],
    /// The first key that the row sees.
    pub(super) seen_from: [i32; ROWS],
    /// The first key behind those that the row sees.
    pub(super) visible: [i32; ROWS],
}

/// [`Statistics`] of [`COL_UNIT`] rows, and the keys that they meet.
struct SomeRows {
    lse: [f32; COL_UNIT],
    delta: [f32; COL_UNIT],
    seen_from: [i32; COL_UNIT],
    visible: [i32; COL_UNIT],
    first_key: usize,
    /// Keys at the start that all of the rows see.
    num_open: usize,
}

impl Statistics {
    #[inline(always)]
    /// Returns the statistics of the rows and keys of `columns`.
    fn for_columns(&self, columns: Columns) -> SomeRows {
        let Columns { first_col, first_key, num_keys, .. } = columns;
        let (seen_from, visible) = (*lanes_of(&self.seen_from, first_col), *lanes_of(&self.visible, first_col));
        let num_open = seen_by_all(first_key, num_keys, &seen_from, &visible);
        let (lse, delta) = (*lanes_of(&self.lse, first_col), *lanes_of(&self.delta, first_col));
        SomeRows { lse, delta, seen_from, visible, first_key, num_open }
    }
}

/// A part of the scores: [`COL_UNIT`] query rows and a number of keys.
#[derive(Clone, Copy)]
pub(super) struct Columns {
    pub(super) first_col: usize,
    /// The offset of the first key's scores.
    pub(super) at: usize,
    /// The distance from one key's scores to the next key's.
    pub(super) stride: usize,
    pub(super) first_key: usize,
    pub(super) num_keys: usize,
    /// The format of the products that take the softmax and the gradients.
    pub(super) format: OperandFormat,
}

kernel! {
    bf16
    /// Turns scores, times `scale`, into the softmax, and its gradient into the gradient of the scores. Both are zero
    /// where a row does not see the key. Results stay in place, or go to `p_words`, `ds_words` and `ds_pairs` where
    /// the format has pairs.
    pub(super) fn score_grads<S: Level>(columns: Columns, scale: f32, scores: &mut Scores<'_>, statistics: &Statistics) {
        let Columns { first_col, at, stride, num_keys, format, .. } = columns;
        let rows = statistics.for_columns(columns);
        if format == OperandFormat::F32 {
            let keys = scores.p.chunks_exact_mut(stride).zip(scores.ds.chunks_exact_mut(stride)).take(num_keys);
            for (key, (p, ds)) in keys.enumerate() {
                grads_of_key::<S>(&rows, scale, format, key, lanes_of_mut(p, at), lanes_of_mut(ds, at));
            }
            return;
        }
        let pairs = scores.p.chunks_exact(2 * stride).zip(scores.ds.chunks_exact(2 * stride)).take(num_keys / 2);
        let p_words = scores.p_words.chunks_exact_mut(ROWS);
        let ds_words = scores.ds_words.chunks_exact_mut(ROWS).zip(scores.ds_pairs.chunks_exact_mut(ROWS));
        for (pair, ((p, ds), (p_words, (ds_words, ds_pairs)))) in pairs.zip(p_words.zip(ds_words)).enumerate() {
            let (mut low, mut ds_low) = (*lanes_of(p, at), *lanes_of(ds, at));
            grads_of_key::<S>(&rows, scale, format, 2 * pair, &mut low, &mut ds_low);
            let (mut high, mut ds_high) = (*lanes_of(p, stride + at), *lanes_of(ds, stride + at));
            grads_of_key::<S>(&rows, scale, format, 2 * pair + 1, &mut high, &mut ds_high);
            _ = pack_two_keys::<S>(&low, &high, first_col, p_words);
            *lanes_of_mut(ds_pairs, first_col) = pack_two_keys::<S>(&ds_low, &ds_high, first_col, ds_words);
        }
    }
}

/// Computes the softmax and the gradient of the scores of one key and [`COL_UNIT`] rows, in place.
#[inline(always)]
fn grads_of_key<S: Level>(
    rows: &SomeRows,
    scale: f32,
    format: OperandFormat,
    key: usize,
    p: &mut [f32; COL_UNIT],
    ds: &mut [f32; COL_UNIT],
) {
    for (p, lse) in p.iter_mut().zip(&rows.lse) {
        *p = *p * scale - lse;
    }
    *p = powers::<S>(format, *p);
    for i in 0..COL_UNIT {
        ds[i] = p[i] * (ds[i] - rows.delta[i]);
    }
    if key >= rows.num_open {
        let key = (rows.first_key + key) as i32;
        for i in 0..COL_UNIT {
            let is_seen = (key < rows.visible[i]) & (key >= rows.seen_from[i]);
            p[i] = if is_seen { p[i] } else { 0.0 };
            ds[i] = if is_seen { ds[i] } else { 0.0 };
        }
    }
}

/// Writes the values of two consecutive keys as pairs along the query rows, at `first_col` of `words` `[2, ROWS /
/// 2]`. Returns them as pairs along the keys.
#[inline(always)]
fn pack_two_keys<S: Level>(
    low: &[f32; COL_UNIT],
    high: &[f32; COL_UNIT],
    first_col: usize,
    words: &mut [f32],
) -> [f32; COL_UNIT] {
    assert!(S::HAS_PAIR_DOT, "pairs of bf16");
    let (mut rounded, mut pairs) = ([0.0; COL_UNIT], [0.0; COL_UNIT]);
    // SAFETY: vectors have COL_UNIT lanes where pairs are multiplied.
    unsafe {
        let [in_order, in_turn] = S::round_and_pair(S::load(low.as_ptr()), S::load(high.as_ptr()));
        S::store(rounded.as_mut_ptr(), in_order);
        S::store(pairs.as_mut_ptr(), in_turn);
    }
    let (low, high) = rounded.split_at(COL_UNIT / 2);
    let (to_low, to_high) = words.split_at_mut(ROWS / 2);
    to_low[first_col / 2..][..COL_UNIT / 2].copy_from_slice(low);
    to_high[first_col / 2..][..COL_UNIT / 2].copy_from_slice(high);
    pairs
}
