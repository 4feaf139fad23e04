//! Attention of a single query to each sequence, which is a step of decoding: the keys are divided as well (Dao et al.,
//! "Flash-Decoding", 2023), since the time is that of reading them.
//!
//! A task takes a range of keys for all heads, so that keys and values are read from one end to the other as they lie, and
//! leaves for each head the maximum of its scores, the sum of their exponentials and the weighted sum of values. These are
//! joined in the order of the ranges. The ranges are cut by the number of keys alone. Scores are times log2(e).

use std::f32::consts::{LN_2, LOG2_E};
use std::ops::Range;

use moeworks_tensor::{DType, Tensor};

use super::AttentionShape;
use crate::Context;
use crate::parallel::{Lent, piece_range};
use crate::simd::{Float, LANES, kernel, sum_lanes, with_float};
use crate::vmath::exp2_falling;

/// Keys of the shortest range.
const MIN_KEYS: usize = 32;
/// Ranges of a long sequence.
const MAX_RANGES: usize = 64;
/// The maximum of no score; finite, as in the pass over blocks.
const LEAST: f32 = -f32::MAX;
/// Where a head's weighted values begin in what a range leaves of it: after the maximum and the sum.
const VALUES: usize = 2;

/// Computes `o` and `lse` where `shape.seq_len` is 1.
pub(super) fn run(
    ctx: &Context,
    (q, k, v): (&Tensor, &Tensor, &Tensor),
    (sinks, shape): (Option<&[f32]>, &AttentionShape),
    o: &mut Tensor,
    lse: &mut Tensor,
) {
    let seen = shape.window.map_or(0, |window| shape.kv_len.saturating_sub(window))..shape.kv_len;
    let keys_per_range = seen.len().div_ceil(MAX_RANGES).next_multiple_of(MIN_KEYS);
    let num_ranges = seen.len().div_ceil(keys_per_range);
    let (heads, part) = (shape.num_heads, VALUES + shape.value_dim);
    let q = scaled(q, shape.scale * LOG2_E);
    let mut parts = ctx.empty(&[shape.batch * num_ranges, heads * part], DType::F32);
    with_float!(k.dtype(), K => with_float!(v.dtype(), V => {
        let (k, v) = (k.slice::<K>(), v.slice::<V>());
        ctx.threads().run_pieces(parts.f32s_mut(), heads * part, |task, parts| {
            let (batch, range) = (task / num_ranges, piece_range(task % num_ranges, keys_per_range, seen.len()));
            let keys = batch * shape.kv_capacity + seen.start + range.start;
            let keys = keys..keys + range.len();
            let q = &q[batch * heads * shape.head_dim..][..heads * shape.head_dim];
            range_kernel::<K, V>(ctx.isa(), shape, q, k, v, keys, parts);
        });
    }));
    let (parts, lse) = (parts.f32s(), Lent::new(lse.f32s_mut()));
    with_float!(o.dtype(), T => {
        ctx.threads().run_pieces(o.slice_mut::<T>(), shape.value_dim.max(1), |row, o| {
            let (batch, head) = (row / heads, row % heads);
            let parts = parts[batch * num_ranges * heads * part..].chunks_exact(heads * part).take(num_ranges);
            let of_head = parts.map(|parts| &parts[head * part..][..part]);
            let mut parts: [&[f32]; MAX_RANGES] = [&[]; MAX_RANGES];
            parts.iter_mut().zip(of_head).for_each(|(to, part)| *to = part);
            // SAFETY: each row is one task's.
            let lse = unsafe { lse.range(row..row + 1) };
            lse[0] = join_kernel::<T>(ctx.isa(), &parts[..num_ranges], sinks.map(|sinks| sinks[head]), o);
        });
    });
}

/// The queries in f32, scaled.
fn scaled(q: &Tensor, scale: f32) -> Vec<f32> {
    let mut q = q.to_f32_vec();
    q.iter_mut().for_each(|x| *x *= scale);
    q
}

kernel! {
    /// What the keys `keys` (rows of `k` and `v`) leave of each head.
    fn range_kernel<S: Level, K: Float, V: Float>(
        shape: &AttentionShape,
        q: &[f32],
        k: &[K],
        v: &[V],
        keys: Range<usize>,
        parts: &mut [f32],
    ) {
        let AttentionShape { num_heads, num_kv_heads, head_dim, value_dim, .. } = *shape;
        let (group, part) = (num_heads / num_kv_heads, VALUES + value_dim);
        let mut scores = vec![0.0_f32; keys.len() * num_heads];
        let rows = k[keys.start * num_kv_heads * head_dim..].chunks_exact(num_kv_heads * head_dim);
        for (scores, row) in scores.chunks_exact_mut(num_heads).zip(rows) {
            for (head, score) in scores.iter_mut().enumerate() {
                let key = &row[head / group * head_dim..][..head_dim];
                *score = dot::<S, K>(&q[head * head_dim..][..head_dim], key);
            }
        }
        for (head, part) in parts.chunks_exact_mut(part).enumerate() {
            let scores = scores[head..].iter().step_by(num_heads);
            part[0] = scores.fold(LEAST, |max, &score| if score > max { score } else { max });
            part[1..].fill(0.0);
        }
        let rows = v[keys.start * num_kv_heads * value_dim..].chunks_exact(num_kv_heads * value_dim);
        for (scores, row) in scores.chunks_exact(num_heads).zip(rows) {
            for (head, (&score, part)) in scores.iter().zip(parts.chunks_exact_mut(part)).enumerate() {
                let weight = exp2_falling::<S>(score - part[0]);
                part[1] += weight;
                let values = &row[head / group * value_dim..][..value_dim];
                for (sum, value) in part[VALUES..].iter_mut().zip(values) {
                    *sum = S::mul_add(weight, value.load(), *sum);
                }
            }
        }
    }
}

#[inline(always)]
fn dot<S: crate::simd::Level, T: Float>(a: &[f32], b: &[T]) -> f32 {
    let mut lanes = [0.0; LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        for i in 0..LANES {
            lanes[i] = S::mul_add(a[i], b[i].load(), lanes[i]);
        }
    }
    for ((lane, a), b) in lanes.iter_mut().zip(a_rest).zip(b_rest) {
        *lane = S::mul_add(*a, b.load(), *lane);
    }
    sum_lanes(lanes)
}

kernel! {
    /// Joins what the ranges left of a head, and returns the log of the softmax's sum.
    fn join_kernel<S: Level, T: Float>(parts: &[&[f32]], sink: Option<f32>, o: &mut [T]) -> f32 {
        let start = sink.map_or(LEAST, |sink| sink * LOG2_E);
        let max = parts.iter().fold(start, |max, part| if part[0] > max { part[0] } else { max });
        // A sink is a key without a value.
        let mut sum = if sink.is_some() { exp2_falling::<S>(start - max) } else { 0.0 };
        let mut sums = vec![0.0_f32; o.len()];
        for part in parts {
            let factor = exp2_falling::<S>(part[0] - max);
            sum = S::mul_add(part[1], factor, sum);
            for (sum, value) in sums.iter_mut().zip(&part[VALUES..]) {
                *sum = S::mul_add(*value, factor, *sum);
            }
        }
        let scale = 1.0 / sum;
        o.iter_mut().zip(&sums).for_each(|(o, sum)| *o = T::store(sum * scale));
        max * LN_2 + sum.ln()
    }
}
