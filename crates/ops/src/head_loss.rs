//! The output layer and its loss in one: logits `x w^T`, softmax cross entropy, and both gradients.
//!
//! Logits exist for a chunk of tokens at a time, never for all, so memory stays bounded for large vocabularies. The
//! gradient of the logits overwrites them.

use moeworks_tensor::{DType, Tensor};

use crate::Context;
use crate::linear::{Write, linear, linear_backward_input, linear_backward_weight};

/// The target of a token that does not count.
pub const IGNORE: u32 = u32::MAX;

/// What the loss says about a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HeadLoss {
    /// Sum over counted tokens of `-ln softmax(logits)[target]`, in nats.
    pub loss_sum: f64,
    /// Tokens that count.
    pub num_targets: usize,
    /// Of these, tokens whose largest logit is the target's; the lowest index wins a tie.
    pub num_correct: usize,
}

/// The loss alone. `x` `[T, D]` is f32 or bf16, `w` `[V, D]` likewise and decides the products' precision; `targets`
/// `[T]` are below V, or [`IGNORE`].
#[must_use]
pub fn head_loss(ctx: &Context, x: &Tensor, w: &Tensor, targets: &[u32]) -> HeadLoss {
    check(x, w, targets);
    let mut total = HeadLoss::default();
    for chunk in Chunk::all(x.rows(), w.rows()) {
        let mut logits = linear(ctx, &chunk.rows_of(ctx, x), w, DType::F32);
        total.add(softmax_rows(ctx, &mut logits, &targets[chunk.range()], None));
    }
    total
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
    check(x, w, targets);
    let mut total = HeadLoss::default();
    let mut dx = ctx.empty(&[x.rows(), x.cols()], DType::F32);
    if write == Write::Replace && x.rows() == 0 {
        dw.f32s_mut().fill(0.0);
    }
    let mut write = write;
    for chunk in Chunk::all(x.rows(), w.rows()) {
        let part = chunk.rows_of(ctx, x);
        let mut logits = linear(ctx, &part, w, DType::F32);
        total.add(softmax_rows(ctx, &mut logits, &targets[chunk.range()], Some(grad_scale)));
        let part_dx = linear_backward_input(ctx, &logits, w, DType::F32);
        dx.f32s_mut()[chunk.start * x.cols()..chunk.end * x.cols()].copy_from_slice(part_dx.f32s());
        linear_backward_weight(ctx, &logits, &part, w.dtype(), write, dw);
        write = Write::Add;
    }
    (total, dx)
}

/// The loss of a chunk; with a scale, the logits are replaced by their gradient.
fn softmax_rows(_ctx: &Context, logits: &mut Tensor, targets: &[u32], grad_scale: Option<f32>) -> HeadLoss {
    let mut total = HeadLoss::default();
    let cols = logits.cols();
    for (row, &target) in logits.f32s_mut().chunks_exact_mut(cols).zip(targets) {
        if target == IGNORE {
            row.fill(0.0);
            continue;
        }
        let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = row.iter().map(|x| f64::from(x - max).exp()).sum();
        total.loss_sum += sum.ln() - f64::from(row[target as usize] - max);
        total.num_targets += 1;
        total.num_correct += usize::from(row.iter().position(|&x| x == max) == Some(target as usize));
        if let Some(scale) = grad_scale {
            for (i, x) in row.iter_mut().enumerate() {
                let p = (f64::from(*x - max).exp() / sum) as f32;
                *x = scale * (p - if i == target as usize { 1.0 } else { 0.0 });
            }
        }
    }
    total
}

impl HeadLoss {
    fn add(&mut self, other: Self) {
        self.loss_sum += other.loss_sum;
        self.num_targets += other.num_targets;
        self.num_correct += other.num_correct;
    }
}

/// A range of tokens whose logits are in memory together.
#[derive(Clone, Copy)]
struct Chunk {
    start: usize,
    end: usize,
}

impl Chunk {
    fn all(num_tokens: usize, vocabulary: usize) -> impl Iterator<Item = Self> {
        // 8 Mi logits, 32 MiB; but never so few tokens that the product turns memory-bound.
        let step = ((8 << 20) / vocabulary.max(1)).clamp(128, 1024);
        (0..num_tokens).step_by(step).map(move |start| Self { start, end: (start + step).min(num_tokens) })
    }

    fn range(self) -> std::ops::Range<usize> {
        self.start..self.end
    }

    fn rows_of(self, ctx: &Context, x: &Tensor) -> Tensor {
        let row_bytes = x.cols() * x.dtype().size();
        let mut rows = ctx.empty(&[self.end - self.start, x.cols()], x.dtype());
        rows.bytes_mut().copy_from_slice(&x.bytes()[self.start * row_bytes..self.end * row_bytes]);
        rows
    }
}

fn check(x: &Tensor, w: &Tensor, targets: &[u32]) {
    assert_eq!(x.cols(), w.cols(), "head_loss: x {:?}, w {:?}", x.shape(), w.shape());
    assert_eq!(x.rows(), targets.len(), "head_loss: targets for x {:?}", x.shape());
    let bad = targets.iter().find(|&&target| target != IGNORE && target as usize >= w.rows());
    assert!(bad.is_none(), "head_loss: target {bad:?} of {} classes", w.rows());
}
