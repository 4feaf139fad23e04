//! Noise on the router's input: each element times a number uniform in `[1 - eps, 1 + eps]` (Switch, 2101.03961), and
//! elements left out. It is drawn again where it is needed, not kept.

use moeworks_ops::Context;
use moeworks_tensor::{DType, Random, Tensor, bf16};

use super::input::Draw;

/// Elements of one task.
const PIECE: usize = 1 << 14;

/// The noise of one pass.
#[derive(Clone, Copy)]
pub(crate) struct InputNoise {
    pub(crate) eps: f32,
    /// The share of elements left out; the others grow by as much.
    pub(crate) dropout: f32,
    pub(crate) random: Random,
}

impl InputNoise {
    /// The factor of the element at `position`.
    fn factor(&self, position: usize) -> f32 {
        let mut factor = 1.0;
        if self.eps > 0.0 {
            factor += self.eps * (2.0 * self.random.uniform(Draw::Jitter.at(position)) - 1.0);
        }
        if self.dropout > 0.0 {
            let is_kept = self.random.uniform(Draw::Dropout.at(position)) >= self.dropout;
            factor *= if is_kept { 1.0 / (1.0 - self.dropout) } else { 0.0 };
        }
        factor
    }

    /// `x` (f32 or bf16) times the noise, in f32.
    pub(crate) fn apply(&self, ctx: &Context, x: &Tensor) -> Tensor {
        let mut y = ctx.empty(x.shape(), DType::F32);
        match x.dtype() {
            DType::F32 => self.apply_to(ctx, x.f32s(), |x| x, &mut y),
            DType::BF16 => self.apply_to(ctx, x.bf16s(), bf16::to_f32, &mut y),
            dtype => panic!("the input of an MoE layer is {dtype:?}"),
        }
        y
    }

    fn apply_to<T: Copy + Sync>(&self, ctx: &Context, x: &[T], to_f32: impl Fn(T) -> f32 + Sync, y: &mut Tensor) {
        ctx.threads().run_pieces(y.f32s_mut(), PIECE, |piece, y| {
            let start = piece * PIECE;
            for (i, (y, &x)) in y.iter_mut().zip(&x[start..]).enumerate() {
                *y = to_f32(x) * self.factor(start + i);
            }
        });
    }

    /// Multiplies the gradient of the noisy input by the noise, which makes it that of the input.
    pub(crate) fn apply_assign(&self, ctx: &Context, dx: &mut Tensor) {
        ctx.threads().run_pieces(dx.f32s_mut(), PIECE, |piece, dx| {
            for (i, dx) in dx.iter_mut().enumerate() {
                *dx *= self.factor(piece * PIECE + i);
            }
        });
    }
}
