//! A router's scores: the softmax of each row of logits, the k largest logits of each row and their weights, and the
//! row's statistics for losses, in one pass.
//!
//! Rows are short (one number for each expert) and many, so a task takes a block of rows and keeps one row in a
//! padded scratch of whole vectors. The choice is made on the logits, which are ordered like the probabilities but
//! without their ties. A logit becomes an integer key of the same order with the complement of the expert's number in
//! its low half, so that the largest key is the choice and the lowest index wins a tie. NaN gets the least key and is
//! chosen last.
//!
//! Backward, with p the softmax, w the weights, g their gradient, b the gradient of p and c that of the log-sum-exp:
//! `dl = p (b - <p, b> + c)`, plus for the chosen `w (g - <w, g>)` where weights are normalised (they are then the
//! softmax of the chosen logits), and `w g - p <w, g>` where they are not.

use moeworks_tensor::{DType, Tensor};

use crate::Context;
use crate::counting_sort::SortedChoices;
use crate::cuda::{self, On};
use crate::deferred::{Deferred, List};
use crate::parallel::{Lent, piece_range};
use crate::simd::{LANES, Level, kernel, sum_lanes};
use crate::vmath::exp;

/// Rows of a task. Sums over rows are cut here, so results do not depend on the number of threads.
const ROWS: usize = 128;

/// The least k for which a row is sorted instead of searched k times.
const SORT_MIN_K: usize = 24;

/// The result of [`softmax_top_k`].
pub struct TopK {
    /// `[T, E]` f32: the softmax of the logits, in their memory.
    pub probs: Tensor,
    /// `[T, K]` u32: the indices of the largest logits of each row, largest first.
    pub ids: Tensor,
    /// `[T, K]` f32: the weight of each choice.
    pub weights: Tensor,
    /// `[T]` f32: the log of the sum of exponentials of each row.
    pub lse: Tensor,
    /// Sums over the rows.
    pub sums: Deferred<ScoreSums>,
    /// The choices sorted by expert, where a GPU sorted them in the same pass.
    pub sorted: Option<SortedChoices>,
}

/// Sums over all rows of a router's scores.
#[derive(Clone, Debug, PartialEq)]
pub struct ScoreSums {
    /// `[E]`: the sums of the probabilities.
    pub probs: Vec<f64>,
    /// The sum of the entropies of the rows' probabilities, in nats.
    pub entropy: f64,
    /// The sum of the squared log-sum-exps.
    pub lse_squared: f64,
    /// The sum of the squared logits, where a GPU computed it in the same pass.
    pub logits_squared: Option<f64>,
}

/// Computes the softmax over the rows of `logits` `[T, E]` and the `k` largest of each row. `logits` is f32 and not
/// shared: its memory becomes the probabilities. The weights are the probabilities of the chosen, divided by their
/// sum if `normalize`.
///
/// A tie goes to the lowest index. NaN counts as lower than everything when the choice is made; the row's
/// probabilities are then NaN, as they are if a logit is positive infinity or all are negative infinity.
#[must_use]
pub fn softmax_top_k(ctx: &Context, logits: Tensor, k: usize, normalize: bool) -> TopK {
    softmax_top_k_with(ctx, logits, k, normalize, true)
}

/// Computes [`softmax_top_k`]. Without `are_sums_wanted` a GPU computes the sums over the rows when they are first
/// read.
#[must_use]
pub fn softmax_top_k_with(ctx: &Context, mut logits: Tensor, k: usize, normalize: bool, are_sums_wanted: bool) -> TopK {
    let (rows, width) = (logits.rows(), logits.cols());
    assert!((1..=width).contains(&k), "top {k} of {width}");
    if let Some(on) = On::of(ctx) {
        return cuda::router::softmax_top_k(on, logits, k, normalize, are_sums_wanted);
    }
    let mut ids = ctx.empty(&[rows, k], DType::U32);
    let mut weights = ctx.empty(&[rows, k], DType::F32);
    let mut lse = ctx.empty(&[rows], DType::F32);
    let num_tasks = rows.div_ceil(ROWS);
    // A task's sums: the probabilities' [E], entropy, squared log-sum-exp.
    let mut partial = ctx.empty(&[num_tasks, width + 2], DType::F32);
    {
        let (probs, ids) = (Lent::new(logits.f32s_mut()), Lent::new(ids.u32s_mut()));
        let (weights, lse) = (Lent::new(weights.f32s_mut()), Lent::new(lse.f32s_mut()));
        let partial = Lent::new(partial.f32s_mut());
        ctx.threads().run(num_tasks, |task| {
            let range = piece_range(task, ROWS, rows);
            // SAFETY: the tasks' rows do not overlap, nor do their sums.
            let block = unsafe {
                Block {
                    probs: probs.range(range.start * width..range.end * width),
                    ids: ids.range(range.start * k..range.end * k),
                    weights: weights.range(range.start * k..range.end * k),
                    lse: lse.range(range.clone()),
                    sums: partial.range(task * (width + 2)..(task + 1) * (width + 2)),
                }
            };
            forward_kernel(ctx.isa(), block, width, normalize);
        });
    }
    let sums = Deferred::now(add_up(partial.f32s(), width));
    TopK { probs: logits, ids, weights, lse, sums, sorted: None }
}

fn add_up(partial: &[f32], width: usize) -> ScoreSums {
    let mut sums = ScoreSums { probs: vec![0.0; width], entropy: 0.0, lse_squared: 0.0, logits_squared: None };
    for task in partial.chunks_exact(width + 2) {
        sums.probs.iter_mut().zip(task).for_each(|(sum, &x)| *sum += f64::from(x));
        sums.entropy += f64::from(task[width]);
        sums.lse_squared += f64::from(task[width + 1]);
    }
    sums
}

/// The rows of a task. `probs` holds the logits on entry.
struct Block<'a> {
    probs: &'a mut [f32],
    ids: &'a mut [u32],
    weights: &'a mut [f32],
    lse: &'a mut [f32],
    sums: &'a mut [f32],
}

kernel! {
    fn forward_kernel<S: Level>(block: Block<'_>, width: usize, normalize: bool) {
        /// e^x is 0 below this: bounds the logit's distance in the entropy, where 0 times infinity would be NaN.
        const FAR: f32 = -104.0;
        let Block { probs, ids, weights, lse, sums } = block;
        let k = ids.len() / lse.len();
        let padded = width.next_multiple_of(LANES);
        let mut row = vec![f32::NEG_INFINITY; padded];
        let mut keys = vec![0_u64; padded];
        let mut prob_sums = vec![0.0_f32; padded];
        let (mut entropy_sum, mut square_sum) = (0.0, 0.0);
        let outputs = ids.chunks_exact_mut(k).zip(weights.chunks_exact_mut(k)).zip(lse);
        for (probs, ((ids, weights), lse)) in probs.chunks_exact_mut(width).zip(outputs) {
            row[..width].copy_from_slice(probs);
            choose(&row[..width], &mut keys, ids);
            let (groups, _) = row.as_chunks_mut::<LANES>();
            let mut tops = [f32::NEG_INFINITY; LANES];
            for group in groups.iter() {
                for (top, &x) in tops.iter_mut().zip(group) {
                    *top = if x > *top { x } else { *top };
                }
            }
            let top = tops.iter().fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a });
            let (mut totals, mut moments) = ([0.0; LANES], [0.0; LANES]);
            for group in groups.iter_mut() {
                for ((x, total), moment) in group.iter_mut().zip(&mut totals).zip(&mut moments) {
                    let distance = *x - top;
                    let e = exp::<S>(distance);
                    *x = e;
                    *total += e;
                    *moment = S::mul_add(e, if distance < FAR { FAR } else { distance }, *moment);
                }
            }
            let total = sum_lanes(totals);
            let scale = 1.0 / total;
            for (x, sum) in row.iter_mut().zip(&mut prob_sums) {
                *x *= scale;
                *sum += *x;
            }
            probs.copy_from_slice(&row[..width]);
            row[width..].fill(f32::NEG_INFINITY);
            let log_total = total.ln();
            *lse = top + log_total;
            entropy_sum += log_total - sum_lanes(moments) * scale;
            square_sum += *lse * *lse;
            for (weight, &id) in weights.iter_mut().zip(ids.iter()) {
                *weight = probs[id as usize];
            }
            if normalize {
                let scale = 1.0 / weights.iter().sum::<f32>();
                weights.iter_mut().for_each(|weight| *weight *= scale);
            }
        }
        sums[..width].copy_from_slice(&prob_sums[..width]);
        sums[width] = entropy_sum;
        sums[width + 1] = square_sum;
    }
}

/// Writes the indices of the largest elements of `row`, as many as `ids` has places. `keys` is scratch as long as the
/// row, rounded up to whole vectors; elements beyond the row must be 0 and stay 0.
#[inline(always)]
fn choose(row: &[f32], keys: &mut [u64], ids: &mut [u32]) {
    for (index, (key, &x)) in keys.iter_mut().zip(row).enumerate() {
        *key = (u64::from(ordered(x)) << 32) | u64::from(!(index as u32));
    }
    if ids.len() >= SORT_MIN_K {
        keys[..row.len()].sort_unstable_by(|a, b| b.cmp(a));
        ids.iter_mut().zip(keys.iter()).for_each(|(id, &key)| *id = !(key as u32));
        return;
    }
    let mut last = u64::MAX;
    for id in ids {
        let mut tops = [0_u64; LANES];
        for group in keys.as_chunks::<LANES>().0 {
            for (top, &key) in tops.iter_mut().zip(group) {
                let key = if key < last { key } else { 0 };
                *top = if key > *top { key } else { *top };
            }
        }
        last = tops.iter().fold(0, |a, &b| if b > a { b } else { a });
        *id = !(last as u32);
    }
}

/// Sums over the choices of each expert.
#[derive(Clone, Debug, PartialEq)]
pub struct ChoiceSums {
    /// `[E]`: the number of tokens whose first choice it is.
    pub firsts: Vec<u32>,
    /// `[E]`: the sum of the weights of its choices.
    pub weights: Vec<f64>,
}

/// Returns the sums of the choices `ids [T, K]` (u32) of `num_experts` experts with their `weights [T, K]` (f32). Ids
/// that are out of range are skipped.
#[must_use]
pub fn choice_sums(ctx: &Context, ids: &Tensor, weights: &Tensor, num_experts: usize) -> Deferred<ChoiceSums> {
    assert_eq!(weights.shape(), ids.shape(), "choice_sums: weights {:?}, ids {:?}", weights.shape(), ids.shape());
    match On::of(ctx) {
        Some(on) => cuda::router::choice_sums(on, ids, weights, num_experts),
        None => choice_sums_in_host(ids, weights, num_experts),
    }
}

/// Returns [`choice_sums`], computed by the host when they are first read.
#[must_use]
pub fn choice_sums_in_host(ids: &Tensor, weights: &Tensor, num_experts: usize) -> Deferred<ChoiceSums> {
    let (ids, weights) = (ids.clone(), weights.clone());
    Deferred::new(move || {
        let mut sums = ChoiceSums { firsts: vec![0; num_experts], weights: vec![0.0; num_experts] };
        for (i, (&id, &weight)) in ids.u32s().iter().zip(weights.f32s()).enumerate() {
            if let Some(sum) = sums.weights.get_mut(id as usize) {
                *sum += f64::from(weight);
                sums.firsts[id as usize] += u32::from(i % ids.cols() == 0);
            }
        }
        sums
    })
}

/// Returns an integer in the order of the float, the same for both zeros; NaN gets 0, the least.
#[inline(always)]
fn ordered(x: f32) -> u32 {
    let bits = (x + 0.0).to_bits();
    let sign = ((bits as i32) >> 31) as u32;
    let key = bits ^ (sign | 0x8000_0000);
    if x.is_nan() { 0 } else { key }
}

/// The gradients of the loss with respect to a router's scores, for [`softmax_top_k_backward`].
#[derive(Clone, Copy)]
pub struct ScoreGrads<'a> {
    /// `[T, K]`: the gradient of the weights.
    pub weights: List<'a, f32>,
    /// `[E]`: the gradient of the probabilities, the same in each row; empty for none.
    pub probs: &'a [f32],
    /// The gradient of the sum of the squared log-sum-exps.
    pub lse_squared: f32,
}

/// Returns the gradient of the logits `[T, E]`, f32. `normalize` as in [`softmax_top_k`].
#[must_use]
pub fn softmax_top_k_backward(ctx: &Context, scores: &TopK, normalize: bool, grads: ScoreGrads<'_>) -> Tensor {
    let (rows, width, k) = (scores.probs.rows(), scores.probs.cols(), scores.ids.cols());
    assert_eq!(grads.weights.len(), rows * k, "top_k backward: gradient of the weights");
    assert!([0, width].contains(&grads.probs.len()), "top_k backward: gradient of the probabilities");
    if let Some(on) = On::of(ctx) {
        return cuda::router::softmax_top_k_backward(on, scores, normalize, grads);
    }
    let (mut dlogits, dweights) = (ctx.empty(&[rows, width], DType::F32), &*grads.weights);
    ctx.threads().run_pieces(dlogits.f32s_mut(), ROWS * width, |task, dlogits| {
        let range = piece_range(task, ROWS, rows);
        let choices = range.start * k..range.end * k;
        let inputs = BackwardBlock {
            probs: &scores.probs.f32s()[range.start * width..range.end * width],
            ids: &scores.ids.u32s()[choices.clone()],
            weights: &scores.weights.f32s()[choices.clone()],
            lse: &scores.lse.f32s()[range],
            grads: ScoreGrads { weights: List::Host(&dweights[choices]), ..grads },
        };
        backward_kernel(ctx.isa(), inputs, normalize, dlogits);
    });
    dlogits
}

/// The rows of a task of the backward pass.
struct BackwardBlock<'a> {
    probs: &'a [f32],
    ids: &'a [u32],
    weights: &'a [f32],
    lse: &'a [f32],
    grads: ScoreGrads<'a>,
}

kernel! {
    fn backward_kernel<S: Level>(block: BackwardBlock<'_>, normalize: bool, dlogits: &mut [f32]) {
        let BackwardBlock { probs, ids, weights, lse, grads } = block;
        let (width, k) = (probs.len() / lse.len(), ids.len() / lse.len());
        let rows = probs.chunks_exact(width).zip(dlogits.chunks_exact_mut(width)).zip(lse);
        let choices = ids.chunks_exact(k).zip(weights.chunks_exact(k)).zip(grads.weights.chunks_exact(k));
        for (((probs, dlogits), &lse), ((ids, weights), dweights)) in rows.zip(choices) {
            // First the gradient of the probabilities.
            if grads.probs.is_empty() {
                dlogits.fill(0.0);
            } else {
                dlogits.copy_from_slice(grads.probs);
            }
            if !normalize {
                for (&id, g) in ids.iter().zip(dweights) {
                    dlogits[id as usize] += g;
                }
            }
            // The softmax's backward depends on differences alone. Differences from the likeliest expert lose no
            // digits where its probability is nearly 1.
            let base = dlogits[ids[0] as usize];
            let shift = 2.0 * lse * grads.lse_squared - mean_difference::<S>(probs, dlogits, base);
            for (d, p) in dlogits.iter_mut().zip(probs) {
                *d = p * ((*d - base) + shift);
            }
            if normalize {
                for (i, (&id, w)) in ids.iter().zip(weights).enumerate() {
                    dlogits[id as usize] += w * centered(i, weights, dweights);
                }
            }
        }
    }
}

/// Returns `g_i - <w, g>` for weights that add up to 1, as `sum_j w_j (g_i - g_j)`: where one weight is nearly 1, the
/// difference of the two would be all rounding error.
#[inline(always)]
fn centered(i: usize, weights: &[f32], grads: &[f32]) -> f32 {
    weights.iter().zip(grads).map(|(w, g)| w * (grads[i] - g)).sum()
}

/// Returns `sum_e p_e (d_e - base)`.
#[inline(always)]
fn mean_difference<S: Level>(p: &[f32], d: &[f32], base: f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let ((p_groups, p_rest), (d_groups, d_rest)) = (p.as_chunks::<LANES>(), d.as_chunks::<LANES>());
    for (p, d) in p_groups.iter().zip(d_groups) {
        for ((lane, p), d) in lanes.iter_mut().zip(p).zip(d) {
            *lane = S::mul_add(*p, *d - base, *lane);
        }
    }
    for ((lane, p), d) in lanes.iter_mut().zip(p_rest).zip(d_rest) {
        *lane = S::mul_add(*p, *d - base, *lane);
    }
    sum_lanes(lanes)
}

#[cfg(test)]
#[path = "top_k_tests.rs"]
mod tests;
