//! The output layer and its loss in one: logits `x w^T`, softmax cross entropy, and both gradients.
//!
//! Logits exist for a chunk of tokens at a time, never for all, so memory stays bounded for large vocabularies. The
//! gradient of the logits overwrites them, or takes their place in bf16 where products take it so.

mod part;

use moeworks_tensor::{DType, Device, Tensor, bf16};

use crate::cuda::{self, On};
use crate::deferred::Deferred;
use crate::elementwise::{add_rows, copy_rows, sum_rows};
use crate::linear::{Write, linear, linear_backward_input, linear_backward_weight};
use crate::parallel::{Lent, PIECE, piece_range};
use crate::simd::{LANES, Level, kernel, sum_lanes};
use crate::{Context, Isa, vmath};

pub use part::{VocabularyPart, head_loss_backward_of_part, head_loss_of_part};

/// The weights of an output layer.
#[derive(Clone, Copy)]
pub struct HeadWeights<'a> {
    /// `[V, D]`, f32 or bf16, which decides the precision of the products.
    pub weight: &'a Tensor,
    /// `[V]`, f32, where the layer has a bias.
    pub bias: Option<&'a Tensor>,
}

impl<'a> From<&'a Tensor> for HeadWeights<'a> {
    fn from(weight: &'a Tensor) -> Self {
        Self { weight, bias: None }
    }
}

impl HeadWeights<'_> {
    /// Returns the type in which the gradients of the logits are kept: that of the products that read them, or f32
    /// where they are also summed for a bias.
    fn dtype_of_gradients(self) -> DType {
        if self.bias.is_none() { self.weight.dtype() } else { DType::F32 }
    }
}

/// The gradients of a chunk's logits that a softmax leaves in place of the logits.
#[derive(Clone, Copy)]
pub(crate) struct LogitGrads {
    /// The factor of the gradients.
    pub(crate) scale: f32,
    /// The type in which products read them.
    pub(crate) dtype: DType,
}

/// The target of a token that does not count.
pub const IGNORE: u32 = u32::MAX;

/// The cross-entropy of a batch, and how often it was right.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HeadLoss {
    /// Sum over counted tokens of `-ln softmax(logits)[target]`, in nats.
    pub loss_sum: f64,
    /// Tokens that count.
    pub num_targets: usize,
    /// Counted tokens whose largest logit is the target's; the lowest index wins a tie.
    pub num_correct: usize,
}

/// The loss alone. `x` `[T, D]` is f32 or bf16, `w` `[V, D]` likewise and decides the products' precision; `targets`
/// `[T]` are below V, or [`IGNORE`].
#[must_use]
pub fn head_loss(ctx: &Context, x: &Tensor, w: &Tensor, targets: &[u32]) -> HeadLoss {
    head_loss_biased(ctx, x, w.into(), targets)
}

/// Computes [`head_loss`] with a bias `[V]` on the logits.
#[must_use]
pub fn head_loss_biased(ctx: &Context, x: &Tensor, weights: HeadWeights<'_>, targets: &[u32]) -> HeadLoss {
    check(x, weights.weight, targets);
    let step = tokens_of_chunk(ctx, weights.weight.rows());
    forward(ctx, x, weights, targets, step, &mut |logits, targets| softmax_rows(ctx, logits, targets, None))
}

/// A function that returns the loss of a chunk's logits and targets, and overwrites the logits with their gradients
/// where these are wanted.
type Softmax<'a> = &'a mut dyn FnMut(&mut Tensor, &[u32]) -> Deferred<HeadLoss>;

/// `step` tokens a chunk.
fn forward(
    ctx: &Context,
    x: &Tensor,
    weights: HeadWeights<'_>,
    targets: &[u32],
    step: usize,
    softmax: Softmax<'_>,
) -> HeadLoss {
    let mut losses = Vec::new();
    for chunk in Chunk::all(x.rows(), step) {
        let mut logits = biased_logits(ctx, &chunk.rows_of(ctx, x), weights);
        losses.push(softmax(&mut logits, &targets[chunk.range()]));
    }
    total(&losses)
}

/// Adds up the losses of all chunks. It runs when all chunks are in flight, so that a GPU does not wait between two
/// of them.
fn total(losses: &[Deferred<HeadLoss>]) -> HeadLoss {
    let mut total = HeadLoss::default();
    losses.iter().for_each(|loss| total.add(**loss));
    total
}

/// The gradients of the output layer's weights, f32.
pub struct HeadGrads<'a> {
    /// `[V, D]`.
    pub weight: &'a mut Tensor,
    /// `[V]`, where there is a bias.
    pub bias: Option<&'a mut Tensor>,
    /// The gradients replace those that are there, or are added to them.
    pub write: Write,
}

fn biased_logits(ctx: &Context, x: &Tensor, weights: HeadWeights<'_>) -> Tensor {
    let mut logits = linear(ctx, x, weights.weight, DType::F32);
    if let Some(bias) = weights.bias {
        add_rows(ctx, &mut logits, bias);
    }
    logits
}

/// The loss, the gradient of `x` (returned, f32) and that of `w` (written or added to `dw`, f32) in one pass.
/// `grad_scale` multiplies the gradients of the sum of the losses: pass one over the number of targets for the mean.
#[must_use]
pub fn head_loss_backward(
    ctx: &Context,
    x: &Tensor,
    w: &Tensor,
    targets: &[u32],
    grad_scale: f32,
    write: Write,
    dw: &mut Tensor,
) -> (HeadLoss, Tensor) {
    let grads = HeadGrads { weight: dw, bias: None, write };
    head_loss_backward_biased(ctx, x, w.into(), targets, grad_scale, grads)
}

/// Computes [`head_loss_backward`] with a bias `[V]` on the logits.
#[must_use]
pub fn head_loss_backward_biased(
    ctx: &Context,
    x: &Tensor,
    weights: HeadWeights<'_>,
    targets: &[u32],
    grad_scale: f32,
    grads: HeadGrads<'_>,
) -> (HeadLoss, Tensor) {
    check(x, weights.weight, targets);
    // What only products take is rounded where it comes from, once.
    let gradient = LogitGrads { scale: grad_scale, dtype: weights.dtype_of_gradients() };
    let softmax: Softmax<'_> = &mut |logits, targets| softmax_rows(ctx, logits, targets, Some(gradient));
    let pass = BackwardPass { targets, step: tokens_of_chunk(ctx, weights.weight.rows()), softmax };
    backward(ctx, x, weights, pass, grads)
}

/// The work of a pass over all chunks that computes gradients.
struct BackwardPass<'a> {
    targets: &'a [u32],
    /// Tokens a chunk.
    step: usize,
    softmax: Softmax<'a>,
}

fn backward(
    ctx: &Context,
    x: &Tensor,
    weights: HeadWeights<'_>,
    pass: BackwardPass<'_>,
    grads: HeadGrads<'_>,
) -> (HeadLoss, Tensor) {
    let BackwardPass { targets, step, softmax } = pass;
    let w = weights.weight;
    let HeadGrads { weight: dw, bias: mut d_bias, mut write } = grads;
    let mut losses = Vec::new();
    let mut dx = ctx.empty_on_device(&[x.rows(), x.cols()], DType::F32);
    if write == Write::Replace && x.rows() == 0 {
        dw.f32s_mut().fill(0.0);
        d_bias.iter_mut().for_each(|d_bias| d_bias.f32s_mut().fill(0.0));
    }
    for chunk in Chunk::all(x.rows(), step) {
        let part = chunk.rows_of(ctx, x);
        let mut logits = biased_logits(ctx, &part, weights);
        losses.push(softmax(&mut logits, &targets[chunk.range()]));
        let part_dx = linear_backward_input(ctx, &logits, w, DType::F32);
        if chunk.end - chunk.start == x.rows() {
            dx = part_dx;
        } else {
            copy_rows(ctx, &part_dx, 0, &mut dx, chunk.start, part_dx.rows());
        }
        linear_backward_weight(ctx, &logits, &part, w.dtype(), write, dw);
        if let Some(d_bias) = &mut d_bias {
            sum_rows(ctx, &logits, write, d_bias);
        }
        write = Write::Add;
    }
    (total(&losses), dx)
}

/// The loss of a chunk; with a scale, the logits are replaced by their gradient, rounded to the type that products
/// take them in.
fn softmax_rows(ctx: &Context, logits: &mut Tensor, targets: &[u32], grads: Option<LogitGrads>) -> Deferred<HeadLoss> {
    let Some(on) = On::of(ctx) else {
        let mut rounded = grads.and_then(|grads| room_for_rounded(ctx, logits, grads.dtype));
        let losses = row_losses(ctx, (logits, rounded.as_mut()), targets, grads.map(|grads| grads.scale));
        if let Some(rounded) = rounded {
            *logits = rounded;
        }
        return Deferred::now(sum_losses(&losses, targets));
    };
    let (rows, targets) = (cuda::head_loss::softmax_rows(on, logits, targets, grads), targets.to_vec());
    Deferred::new(move || {
        let loss = |row: cuda::head_loss::Row| RowLoss {
            nats: f64::from(row.sum).ln() - f64::from(row.distance),
            is_correct: row.is_correct,
        };
        sum_losses(&cuda::head_loss::rows(&rows).map(loss).collect::<Vec<_>>(), &targets)
    })
}

/// Losses are added up in the order of the tokens, in f64.
fn sum_losses(losses: &[RowLoss], targets: &[u32]) -> HeadLoss {
    let mut total = HeadLoss::default();
    for (loss, _) in losses.iter().zip(targets).filter(|(_, target)| **target != IGNORE) {
        total.loss_sum += loss.nats;
        total.num_targets += 1;
        total.num_correct += usize::from(loss.is_correct);
    }
    total
}

/// Returns the loss of each row of logits; zeros for an ignored row.
fn row_losses(ctx: &Context, logits: Rows<'_>, targets: &[u32], grad_scale: Option<f32>) -> Vec<RowLoss> {
    map_rows(ctx, logits, targets, |_, row, target| {
        if target != IGNORE {
            return row_kernel(ctx.isa(), row, target as usize, grad_scale);
        }
        // Only a gradient is read again.
        if grad_scale.is_some() {
            row.fill(0.0);
        }
        RowLoss::default()
    })
}

/// Logits, and where their rows are to be put in bf16.
type Rows<'a> = (&'a mut Tensor, Option<&'a mut Tensor>);

/// Returns memory for the logits' gradients in bf16, if products take bf16. Without it both products would round them
/// again for every few columns.
fn room_for_rounded(ctx: &Context, logits: &Tensor, dtype: DType) -> Option<Tensor> {
    let are_rounded = dtype == DType::BF16 && ctx.isa() >= Isa::Avx512Bf16;
    are_rounded.then(|| ctx.empty(logits.shape(), DType::BF16))
}

/// `work(token, row, target)` of every row of logits, some rows a task; what it leaves in a row is then rounded.
fn map_rows<R: Clone + Default + Send + Sync>(
    ctx: &Context,
    (logits, rounded): Rows<'_>,
    targets: &[u32],
    work: impl Fn(usize, &mut [f32], u32) -> R + Sync,
) -> Vec<R> {
    let cols = logits.cols();
    let rows_per_task = (PIECE / cols).max(1);
    let mut results = vec![R::default(); targets.len()];
    let lent = Lent::new(&mut results);
    let rounded = rounded.map(|rounded| Lent::new(rounded.bf16s_mut()));
    ctx.threads().run_pieces(logits.f32s_mut(), rows_per_task * cols, |task, rows| {
        let range = piece_range(task, rows_per_task, targets.len());
        // SAFETY: the tasks' rows do not overlap.
        let results = unsafe { lent.range(range.clone()) };
        for ((token, row), result) in range.zip(rows.chunks_exact_mut(cols)).zip(results) {
            *result = work(token, row, targets[token]);
            if let Some(rounded) = &rounded {
                // SAFETY: as above.
                round_row(ctx.isa(), row, unsafe { rounded.range(token * cols..(token + 1) * cols) });
            }
        }
    });
    results
}

kernel! {
    bf16
    fn round_row<S: Level>(from: &[f32], to: &mut [bf16]) {
        S::round_all(from, to);
    }
}

#[derive(Clone, Copy, Default)]
struct RowLoss {
    nats: f64,
    is_correct: bool,
}

/// Classes less likely than the likeliest by this factor get no gradient, 2^-80: nothing in f32 would show it, but
/// products of such numbers are subnormal, which takes some processors a hundred times as long.
const LEAST: f32 = 8.271_806e-25;

kernel! {
    /// The loss of one row of logits; with a scale, the row is replaced by its gradient.
    fn row_kernel<S: Level>(row: &mut [f32], target: usize, grad_scale: Option<f32>) -> RowLoss {
        let logit = row[target];
        let max = largest(row);
        let is_correct = logit == max && !row[..target].contains(&max);
        let sum = exponentials::<S>(row, max);
        if let Some(scale) = grad_scale {
            let factor = scale / sum;
            row.iter_mut().for_each(|x| *x = if *x < LEAST { 0.0 } else { *x * factor });
            row[target] -= scale;
        }
        RowLoss { nats: f64::from(sum).ln() - (f64::from(logit) - f64::from(max)), is_correct }
    }
}

/// The largest number of a row.
#[inline(always)]
fn largest(row: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (groups, rest) = row.as_chunks::<LANES>();
    for group in groups {
        for i in 0..LANES {
            lanes[i] = if group[i] > lanes[i] { group[i] } else { lanes[i] };
        }
    }
    lanes.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max)
}

/// Replaces each x of a row by `exp(x - max)` and gives their sum.
#[inline(always)]
fn exponentials<S: Level>(row: &mut [f32], max: f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let (groups, rest) = row.as_chunks_mut::<LANES>();
    for group in groups {
        for x in group.iter_mut() {
            *x = vmath::exp::<S>(*x - max);
        }
        for (lane, x) in lanes.iter_mut().zip(group) {
            *lane += *x;
        }
    }
    for (x, lane) in rest.iter_mut().zip(&mut lanes) {
        *x = vmath::exp::<S>(*x - max);
        *lane += *x;
    }
    sum_lanes(lanes)
}

impl HeadLoss {
    fn add(&mut self, other: Self) {
        self.loss_sum += other.loss_sum;
        self.num_targets += other.num_targets;
        self.num_correct += other.num_correct;
    }
}

/// Tokens whose logits are in memory together.
fn tokens_of_chunk(ctx: &Context, vocabulary: usize) -> usize {
    match ctx.device() {
        // 8 Mi logits, 32 MiB, which caches may hold; but the weights are read, and their gradient is read and
        // written, for each chunk: 512 tokens where that is at most 128 MiB, and never fewer than 256.
        Device::Cpu => {
            let of_logits = |count: usize| count / vocabulary.max(1);
            of_logits(8 << 20).max(of_logits(32 << 20).min(512)).clamp(256, 4096)
        }
        // A GPU has tiles for all of its multiprocessors only with thousands of tokens, and the weights' gradient is
        // read and written for each chunk: at most 256 Mi logits, 1 GiB, and a power of two, so that there are no
        // rests of tiles.
        Device::Cuda => 1 << ((256 << 20) / vocabulary.max(1)).clamp(256, 1 << 20).ilog2(),
    }
}

/// A range of tokens whose logits are in memory together.
#[derive(Clone, Copy)]
struct Chunk {
    start: usize,
    end: usize,
}

impl Chunk {
    fn all(num_tokens: usize, step: usize) -> impl Iterator<Item = Self> {
        (0..num_tokens).step_by(step).map(move |start| Self { start, end: (start + step).min(num_tokens) })
    }

    fn range(self) -> std::ops::Range<usize> {
        self.start..self.end
    }

    fn rows_of(self, ctx: &Context, x: &Tensor) -> Tensor {
        if self.end - self.start == x.rows() {
            return x.clone();
        }
        let mut rows = ctx.empty_on_device(&[self.end - self.start, x.cols()], x.dtype());
        copy_rows(ctx, x, self.start, &mut rows, 0, self.end - self.start);
        rows
    }
}

fn check(x: &Tensor, w: &Tensor, targets: &[u32]) {
    assert_eq!(x.cols(), w.cols(), "head_loss: x {:?}, w {:?}", x.shape(), w.shape());
    assert_eq!(x.rows(), targets.len(), "head_loss: targets for x {:?}", x.shape());
    let bad = targets.iter().find(|&&target| target != IGNORE && target as usize >= w.rows());
    assert!(bad.is_none(), "head_loss: target {bad:?} of {} classes", w.rows());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_data::{kinds, numbers, tensor};

    /// Chunks of any number of tokens add up to the same on every device.
    #[test]
    fn a_loss_in_chunks_is_that_of_all_tokens_at_once() {
        let (t, d, v) = (50, 24, 40);
        let targets: Vec<u32> = (0..t as u32).map(|t| if t % 7 == 3 { IGNORE } else { t * 5 % v as u32 }).collect();
        for (ctx, dtype) in kinds().flat_map(|ctx| [(ctx.clone(), DType::F32), (ctx, DType::BF16)]) {
            let (x, w) = (numbers(t * d, 1), numbers(v * d, 2));
            let (x, w) = (tensor(&ctx, &[t, d], &x, dtype), tensor(&ctx, &[v, d], &w, dtype));
            let of = |step: usize| {
                let mut dw = tensor(&ctx, &[v, d], &vec![f32::NAN; v * d], DType::F32);
                let gradient = LogitGrads { scale: 0.5, dtype };
                let softmax: Softmax<'_> = &mut |logits, targets| softmax_rows(&ctx, logits, targets, Some(gradient));
                let grads = HeadGrads { weight: &mut dw, bias: None, write: Write::Replace };
                let pass = BackwardPass { targets: &targets, step, softmax };
                let (loss, dx) = backward(&ctx, &x, (&w).into(), pass, grads);
                (loss, dx.f32s().to_vec(), dw.f32s().to_vec())
            };
            let whole = of(t);
            for step in [1, 16, 49] {
                let chunks = of(step);
                assert_eq!(chunks.0.num_correct, whole.0.num_correct, "{}", ctx.describe());
                assert!((chunks.0.loss_sum - whole.0.loss_sum).abs() < 1e-4 * whole.0.loss_sum);
                // A chunk of few tokens has another kernel, and in bf16 numbers between two are rounded either way.
                let tolerance = if dtype == DType::BF16 { 2e-2 } else { 1e-5 };
                for (a, b) in chunks.1.iter().chain(&chunks.2).zip(whole.1.iter().chain(&whole.2)) {
                    assert!((a - b).abs() <= tolerance * (0.1 + b.abs()), "{}, {step}: {a}, {b}", ctx.describe());
                }
            }
        }
    }
}
