//! The softmax of attention backward, recomputed from its log-sums, and the gradient of its scores.

use crate::attention::blocks::{COL_UNIT, ROWS, lanes_of, lanes_of_mut, seen_by_all};
use crate::attention::operands::OperandFormat;
use crate::attention::softmax::powers;
use crate::simd::{Level, kernel};

/// What the rows and a block of keys are to each other.
pub(super) struct Scores<'a> {
    /// `[KEYS, ROWS]`: scores, then the softmax.
    pub(super) p: &'a mut [f32],
    /// `[KEYS, ROWS]`: gradient of the softmax, then of the scores.
    pub(super) ds: &'a mut [f32],
    /// Both as pairs along the rows of queries, and the second as pairs along the keys.
    pub(super) p_words: &'a mut [f32],
    pub(super) ds_words: &'a mut [f32],
    pub(super) ds_pairs: &'a mut [f32],
}

impl Scores<'_> {
    /// The softmax and the gradient of the scores as left operands with the inner dimension along the rows of queries, and
    /// the latter with the inner dimension along the keys.
    pub(super) fn left_operands(&self, format: OperandFormat) -> [&[f32]; 3] {
        match format {
            OperandFormat::F32 => [self.p, self.ds, self.ds],
            OperandFormat::Bf16Pairs | OperandFormat::AmxTiles => [self.p_words, self.ds_words, self.ds_pairs],
        }
    }
}

/// One number for each query row.
pub(super) struct Statistics {
    /// Times log2(e).
    pub(super) lse: [f32; ROWS],
    /// Sum over a row of `d_o o`.
    pub(super) delta: [f32; ROWS],
    /// The first key that the row sees.
    pub(super) seen_from: [i32; ROWS],
    /// The first key behind the row.
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
    fn of(&self, columns: Columns) -> SomeRows {
        let Columns { first_col, first_key, num_keys, .. } = columns;
        let (seen_from, visible) = (*lanes_of(&self.seen_from, first_col), *lanes_of(&self.visible, first_col));
        let num_open = seen_by_all(first_key, num_keys, (&seen_from, &visible));
        let (lse, delta) = (*lanes_of(&self.lse, first_col), *lanes_of(&self.delta, first_col));
        SomeRows { lse, delta, seen_from, visible, first_key, num_open }
    }
}

/// Which scores [`score_grads`] treats: [`COL_UNIT`] query rows and a number of keys.
#[derive(Clone, Copy)]
pub(super) struct Columns {
    pub(super) first_col: usize,
    /// Where the first key's scores are, and what the next one's are from there.
    pub(super) at: usize,
    pub(super) stride: usize,
    pub(super) first_key: usize,
    pub(super) num_keys: usize,
    /// What the softmax and the gradients are for.
    pub(super) format: OperandFormat,
}

kernel! {
    bf16
    /// Turns scores, to be multiplied by `scale`, into the softmax and its gradient into that of the scores; both zero
    /// where a row does not see the key. They stay in place, or go to `p_words`, `ds_words` and `ds_pairs`.
    pub(super) fn score_grads<S: Level>(columns: Columns, scale: f32, scores: &mut Scores<'_>, statistics: &Statistics) {
        let Columns { first_col, at, stride, num_keys, format, .. } = columns;
        let rows = statistics.of(columns);
        if format == OperandFormat::F32 {
            let keys = scores.p.chunks_exact_mut(stride).zip(scores.ds.chunks_exact_mut(stride)).take(num_keys);
            for (key, (p, ds)) in keys.enumerate() {
                grads_of_key::<S>((&rows, scale, format), key, lanes_of_mut(p, at), lanes_of_mut(ds, at));
            }
            return;
        }
        let pairs = scores.p.chunks_exact(2 * stride).zip(scores.ds.chunks_exact(2 * stride)).take(num_keys / 2);
        let p_words = scores.p_words.chunks_exact_mut(ROWS);
        let ds_words = scores.ds_words.chunks_exact_mut(ROWS).zip(scores.ds_pairs.chunks_exact_mut(ROWS));
        for (pair, ((p, ds), (p_words, (ds_words, ds_pairs)))) in pairs.zip(p_words.zip(ds_words)).enumerate() {
            let (mut low, mut ds_low) = (*lanes_of(p, at), *lanes_of(ds, at));
            grads_of_key::<S>((&rows, scale, format), 2 * pair, &mut low, &mut ds_low);
            let (mut high, mut ds_high) = (*lanes_of(p, stride + at), *lanes_of(ds, stride + at));
            grads_of_key::<S>((&rows, scale, format), 2 * pair + 1, &mut high, &mut ds_high);
            _ = pack_two_keys::<S>(&low, &high, first_col, p_words);
            *lanes_of_mut(ds_pairs, first_col) = pack_two_keys::<S>(&ds_low, &ds_high, first_col, ds_words);
        }
    }
}

/// The softmax and the gradient of the scores of key number `key` and some rows, in place.
#[inline(always)]
fn grads_of_key<S: Level>(
    (rows, scale, format): (&SomeRows, f32, OperandFormat),
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

/// Writes what two keys, one after the other, have for some rows as pairs along the rows of queries, at `first_col` of
/// `words` `[2, ROWS / 2]`, and returns it as pairs along the keys.
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
