//! Attention of a single query for each sequence, as in a decoding step. Its time is that of reading the keys, so the
//! keys are divided as well (Dao et al., "Flash-Decoding", 2023).
//!
//! A task takes a range of keys for all heads and reads keys and values in the order of memory, some at a time. Few
//! queries meet each key, as in [products of few rows](crate::skinny_gemm). A task leaves for each head the maximum
//! of its scores, the sum of their exponentials and the weighted sum of values; these are joined in the order of the
//! ranges. Ranges are cut by the number of keys alone. Scores are held times log2(e).

use std::f32::consts::{LN_2, LOG2_E};
use std::ops::Range;

use moeworks_tensor::{DType, Tensor};

use super::sequences::{AttentionHeads, OwnedTask, Sequence, TaskList};
use super::token_rows::TokenRows;
use super::{AttentionInputs, Outputs};
use crate::parallel::piece_range;
use crate::prefetch::prefetch_far;
use crate::simd::{Float, LANES, Level, kernel, sum_lanes, with_float};
use crate::skinny_gemm::nn;
use crate::skinny_gemm::nt::dots;
use crate::skinny_gemm::rows::{Weight, block_len, spread};
use crate::vmath::exp2_falling;
use crate::{Context, Isa};

/// Keys of the shortest range.
const MIN_KEYS: usize = 32;
/// Ranges of a long sequence.
const MAX_RANGES: usize = 64;
/// The maximum of no scores. It is finite, as in the blockwise pass.
const LEAST: f32 = -f32::MAX;

/// The layout of a range's results in f32: weighted values of all heads, then a maximum and a sum for each head.
#[derive(Clone, Copy)]
struct Layout {
    num_heads: usize,
    /// The length of a head's weighted values: whole blocks, in the order of the values' vectors.
    width: usize,
}

impl Layout {
    /// Returns the number of f32 of a range's results.
    fn len(self) -> usize {
        self.num_heads * (self.width + 2)
    }

    /// Returns the results of a head.
    #[inline(always)]
    fn of_head(self, part: &[f32], head: usize) -> Part<'_> {
        let (values, statistics) = part.split_at(self.num_heads * self.width);
        Part {
            max: statistics[2 * head],
            sum: statistics[2 * head + 1],
            values: &values[head * self.width..][..self.width],
        }
    }
}

/// The results of a range for one head: the maximum, the sum and the weighted values.
#[derive(Clone, Copy, Default)]
struct Part<'a> {
    max: f32,
    sum: f32,
    values: &'a [f32],
}

/// The ranges that the keys of a sequence are cut into.
struct Cut {
    /// The first key that the query sees.
    start: usize,
    num_keys: usize,
    keys_per_range: usize,
    num_ranges: usize,
}

impl Cut {
    fn new(sequence: &Sequence<'_>) -> Self {
        let start = sequence.heads.window.map_or(0, |window| sequence.num_keys.saturating_sub(window));
        let num_keys = sequence.num_keys - start;
        let keys_per_range = num_keys.div_ceil(MAX_RANGES).next_multiple_of(MIN_KEYS);
        Self { start, num_keys, keys_per_range, num_ranges: num_keys.div_ceil(keys_per_range) }
    }

    /// Returns the keys of range `index`.
    fn range(&self, index: usize) -> Range<usize> {
        let Range { start, end } = piece_range(index, self.keys_per_range, self.num_keys);
        self.start + start..self.start + end
    }
}

/// The tasks of sequences of one query each: ranges of their keys.
pub(super) struct RangeTasks<'a> {
    isa: Isa,
    inputs: AttentionInputs<'a>,
    sequences: &'a [Sequence<'a>],
    cuts: Vec<Cut>,
    tasks: TaskList,
    queries: Queries,
    layout: Layout,
}

impl<'a> RangeTasks<'a> {
    /// Cuts sequences that share `heads` into tasks.
    pub(super) fn new(
        ctx: &Context,
        inputs: &AttentionInputs<'a>,
        heads: &AttentionHeads,
        sequences: &'a [Sequence<'a>],
    ) -> Self {
        let isa = isa_for(ctx.isa(), inputs.q.dtype());
        let cuts: Vec<Cut> = sequences.iter().map(Cut::new).collect();
        Self {
            isa,
            inputs: *inputs,
            sequences,
            tasks: TaskList::new(cuts.iter().map(|cut| cut.num_ranges)),
            cuts,
            queries: with_float!(inputs.k.dtype(), K => Queries::new::<K>(isa, inputs.q, heads, sequences)),
            layout: Layout { num_heads: heads.num_heads, width: heads.value_dim.next_multiple_of(block_len(isa)) },
        }
    }

    pub(super) fn len(&self) -> usize {
        self.tasks.len()
    }

    /// Returns the number of f32 that a task leaves.
    pub(super) fn part_len(&self) -> usize {
        self.layout.len()
    }

    /// Computes the results of the range of task `task` for each head.
    pub(super) fn run(&self, task: usize, part: &mut [f32]) {
        let OwnedTask { owner, index } = self.tasks.find(task);
        let Sequence { heads, keys, .. } = &self.sequences[owner];
        let runs = keys.runs(self.cuts[owner].range(index));
        let AttentionInputs { k, v, .. } = self.inputs;
        let [row, value_row] = [heads.head_dim, heads.value_dim].map(|dim| heads.num_kv_heads * dim);
        with_float!(k.dtype(), K => with_float!(v.dtype(), V => {
            let mut k = TokenRows::new(k.slice::<K>(), row, &runs);
            let mut v = TokenRows::new(v.slice::<V>(), value_row, &runs);
            range_kernel::<K, V>(self.isa, heads, self.queries.of_sequence(owner), &mut k, &mut v, self.layout, part);
        }));
    }

    /// Returns the number of heads of all sequences together.
    pub(super) fn num_rows(&self) -> usize {
        self.sequences.len() * self.layout.num_heads
    }

    /// Writes `o` and `lse` of one head of a sequence from the `parts` that all tasks left.
    pub(super) fn join<T: Float>(&self, row: usize, parts: &[f32], Outputs { o, lse }: Outputs<'_, T>) {
        let (owner, head) = (row / self.layout.num_heads, row % self.layout.num_heads);
        let (sequence, num_ranges, len) = (&self.sequences[owner], self.cuts[owner].num_ranges, self.layout.len());
        let of_ranges = parts[self.tasks.first(owner) * len..].chunks_exact(len).take(num_ranges);
        let mut parts = [Part::default(); MAX_RANGES];
        parts.iter_mut().zip(of_ranges).for_each(|(to, part)| *to = self.layout.of_head(part, head));
        let (parts, sink) = (&parts[..num_ranges], self.inputs.sinks.map(|sinks| sinks.f32s()[head]));
        let (statistic, dim) = (sequence.statistic(0, head), sequence.heads.value_dim);
        // SAFETY: each row is one task's; the only query of a sequence has its statistics in the order of the rows of
        // `o`.
        let (o, lse) =
            unsafe { (o.range(statistic * dim..(statistic + 1) * dim), lse.range(statistic..statistic + 1)) };
        lse[0] = with_float!(self.inputs.v.dtype(), V => join_kernel::<V, T>(self.isa, parts, sink, o));
    }
}

/// Returns the instruction set for queries of a type. Without pairs of bf16, where queries are not bf16, so that they
/// are not rounded.
fn isa_for(isa: Isa, queries: DType) -> Isa {
    if queries == DType::BF16 { isa } else { isa.min(Isa::Avx512) }
}

/// The queries of all sequences; those that share a key head are laid out by [`spread`].
struct Queries {
    values: Vec<f32>,
    per_sequence: usize,
}

impl Queries {
    /// Lays out the queries of all sequences.
    fn new<K: Weight>(isa: Isa, q: &Tensor, heads: &AttentionHeads, sequences: &[Sequence<'_>]) -> Self {
        let (h, group) = (heads.head_dim, heads.group());
        let padded = h.next_multiple_of(block_len(isa));
        let per_sequence = heads.num_heads * padded;
        let mut room = vec![0.0; padded];
        let mut values = vec![0.0; sequences.len() * per_sequence];
        with_float!(q.dtype(), Q => for (sequence, values) in sequences.iter().zip(values.chunks_exact_mut(per_sequence)) {
            let q = &q.slice::<Q>()[sequence.query_elements()];
            for (q, values) in q.chunks_exact(group * h).zip(values.chunks_exact_mut(group * padded)) {
                for (row, q) in q.chunks_exact(h).enumerate() {
                    room.iter_mut().zip(q).for_each(|(to, x)| *to = x.load());
                    spread::<K>(isa, &room, row, group, values);
                }
            }
        });
        Self { values, per_sequence }
    }

    /// Returns the queries of a sequence.
    fn of_sequence(&self, index: usize) -> &[f32] {
        &self.values[index * self.per_sequence..][..self.per_sequence]
    }
}

kernel! {
    bf16 if matches!(K::DTYPE, DType::BF16) || matches!(V::DTYPE, DType::BF16);
    /// Computes the results of the keys `k` and values `v` of some tokens for each head.
    fn range_kernel<S: Level, K: Weight, V: Weight>(
        heads: &AttentionHeads,
        queries: &[f32],
        k: &mut TokenRows<'_, K>,
        v: &mut TokenRows<'_, V>,
        layout: Layout,
        part: &mut [f32],
    ) {
        let Layout { num_heads, width } = layout;
        let num_keys = k.len();
        let mut scores = vec![0.0_f32; num_heads * num_keys];
        scores_of::<S, K>(heads, queries, k, &mut scores);
        let (sums, statistics) = part.split_at_mut(num_heads * width);
        for (scores, statistics) in scores.chunks_exact_mut(num_keys).zip(statistics.as_chunks_mut().0) {
            *statistics = exponentials::<S>(scores, heads.scale * LOG2_E);
        }
        sums.fill(0.0);
        weigh_values::<S, V>(heads, &scores, v, sums);
    }
}

/// The distance in keys of the prefetch.
const KEYS_AHEAD: usize = 8;

/// Calls [`dots`] with the numbers of keys and of queries as constants.
macro_rules! by_size {
    ($size:expr, $K:ident, $keys:expr, $depth:expr, $a:expr, $group:expr, $put:expr, $($n:literal: $($r:literal)*),*) => {
        match $size {
            $($(($n, $r) => dots::<S, $K, $n, $r>(std::array::from_fn($keys), $depth, $a, $group, $put),)*)*
            _ => unreachable!("keys and queries are taken by fours, twos and ones"),
        }
    };
}

/// Computes `scores [H, keys]`, the products of queries and keys. Some consecutive keys at a time meet the queries
/// that share them.
#[inline(always)]
fn scores_of<S: Level, K: Weight>(
    heads: &AttentionHeads,
    queries: &[f32],
    k: &mut TokenRows<'_, K>,
    scores: &mut [f32],
) {
    let AttentionHeads { num_heads, num_kv_heads, head_dim, .. } = *heads;
    let (group, row, words) = (num_heads / num_kv_heads, k.width(), K::block_words::<S>());
    let (num_keys, padded) = (scores.len() / num_heads, queries.len() / num_heads);
    assert!(row == num_kv_heads * head_dim && padded >= head_dim.div_ceil(2 * S::WIDTH) * words, "queries and keys");
    let most = if S::WIDTH >= 16 { 4 } else { 2 };
    let mut first = 0;
    while first < num_keys {
        let count = if first + most <= num_keys { most } else { 1 };
        let rows = k.group(first, count);
        for kv_head in 0..num_kv_heads {
            let keys = rows[kv_head * head_dim..].as_ptr();
            for key in KEYS_AHEAD..KEYS_AHEAD + count {
                for line in (0..head_dim).step_by(64 / size_of::<K>()) {
                    prefetch_far(keys.wrapping_add(key * row + line).cast());
                }
            }
            for head in (0..group).step_by(most) {
                let a = queries[kv_head * group * padded + head * words..].as_ptr();
                let to = (kv_head * group + head) * num_keys + first;
                let put = |n: usize, r: usize, score| scores[to + r * num_keys + n] = score;
                let keys = |n: usize| keys.wrapping_add(n * row);
                let size = (count, (group - head).min(most));
                // SAFETY: `count` keys are at hand, and the group's queries are blocks that alternate, as asserted.
                unsafe {
                    by_size!(size, K, keys, head_dim, a, group, put, 4: 1 2 3 4, 2: 1 2, 1: 1 2 3 4);
                }
            }
        }
        first += count;
    }
}

/// Scales scores and replaces them by powers of two relative to the largest. Returns the largest and the sum.
#[inline(always)]
fn exponentials<S: Level>(scores: &mut [f32], scale: f32) -> [f32; 2] {
    let (whole, rest) = scores.as_chunks_mut::<LANES>();
    // Each lane has its own maximum, so that comparisons do not wait for each other.
    let mut maxima = [LEAST; LANES];
    for scores in whole.iter_mut() {
        for (score, max) in scores.iter_mut().zip(&mut maxima) {
            *score *= scale;
            *max = if *score > *max { *score } else { *max };
        }
    }
    rest.iter_mut().for_each(|score| *score *= scale);
    let max = maxima.iter().chain(&*rest).fold(LEAST, |max, &score| if score > max { score } else { max });
    let mut lanes = [0.0; LANES];
    for scores in whole {
        scores.iter_mut().for_each(|score| *score -= max);
        *scores = S::exp2_falling(*scores);
        lanes.iter_mut().zip(scores).for_each(|(lane, score)| *lane += *score);
    }
    rest.iter_mut().for_each(|score| *score = exp2_falling::<S>(*score - max));
    [max, sum_lanes(lanes) + rest.iter().sum::<f32>()]
}

/// Adds the values, times their weights `[H, keys]`, to `sums`, a row of whole blocks for each head.
#[inline(always)]
fn weigh_values<S: Level, V: Weight>(
    heads: &AttentionHeads,
    weights: &[f32],
    v: &mut TokenRows<'_, V>,
    sums: &mut [f32],
) {
    let AttentionHeads { num_heads, num_kv_heads, value_dim, .. } = *heads;
    let (group, row) = (num_heads / num_kv_heads, v.width());
    let (num_keys, stride) = (weights.len() / num_heads, sums.len() / num_heads);
    assert!(row == num_kv_heads * value_dim && stride >= value_dim.next_multiple_of(2 * S::WIDTH), "values and sums");
    // With one query a key the sums are loaded and stored as often as the values: fewer streams are faster.
    let most = if S::WIDTH >= 16 && group > 1 { 8 } else { 4 };
    let mut first = 0;
    while first < num_keys {
        let count = if first + most <= num_keys { most } else { 1 };
        let values = v.group(first, count);
        for kv_head in 0..num_kv_heads {
            let head = kv_head * group;
            let rows = nn::Rows {
                weights: values[kv_head * value_dim..].as_ptr(),
                stride: row,
                columns: value_dim,
                a: weights[head * num_keys + first..].as_ptr(),
                a_stride: num_keys,
            };
            let to = nn::SumRows { to: sums[head * stride..].as_mut_ptr(), stride, num_rows: group };
            // SAFETY: `count` values, their weights and whole blocks of the heads' sums exist, as asserted.
            unsafe {
                match count {
                    8 => rows.add::<S, 8>(0, to, &mut ()),
                    4 => rows.add::<S, 4>(0, to, &mut ()),
                    _ => rows.add::<S, 1>(0, to, &mut ()),
                }
            }
        }
        first += count;
    }
}

kernel! {
    /// Joins the results of the ranges for a head. Returns the log of the softmax's sum.
    fn join_kernel<S: Level, V: Weight, T: Float>(parts: &[Part<'_>], sink: Option<f32>, o: &mut [T]) -> f32 {
        let start = sink.map_or(LEAST, |sink| sink * LOG2_E);
        let max = parts.iter().fold(start, |max, part| if part.max > max { part.max } else { max });
        // A sink is a key without a value.
        let mut sum = if sink.is_some() { exp2_falling::<S>(start - max) } else { 0.0 };
        let mut sums = vec![0.0_f32; parts.first().map_or(0, |part| part.values.len())];
        for part in parts {
            let factor = exp2_falling::<S>(part.max - max);
            sum = S::mul_add(part.sum, factor, sum);
            for (sum, value) in sums.iter_mut().zip(part.values) {
                *sum = S::mul_add(*value, factor, *sum);
            }
        }
        let (scale, block) = (1.0 / sum, 2 * S::WIDTH);
        for (i, o) in o.iter_mut().enumerate() {
            *o = T::store(sums[i / block * block + V::place(i % block, S::WIDTH)] * scale);
        }
        max * LN_2 + sum.ln()
    }
}
