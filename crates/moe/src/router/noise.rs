//! Noise on the router's input: each element times a number uniform in `[1 - eps, 1 + eps]` (Switch, 2101.03961), and
//! elements left out. It is drawn again where it is needed, not kept.

use moeworks_ops::Context;
use moeworks_ops::random::fill_uniform;
use moeworks_tensor::{DType, Random, Tensor, bf16};

use super::input::Draw;

/// Elements of one task.
const PIECE: usize = 1 << 14;
/// Elements whose factors are drawn together.
const BUFFER: usize = 512;

/// The noise of one pass.
#[derive(Clone, Copy)]
pub(crate) struct InputNoise {
    pub(crate) eps: f32,
    /// The share of elements left out; the others grow by as much.
    pub(crate) dropout: f32,
    pub(crate) random: Random,
    /// The position of the first element.
    pub(crate) first: usize,
}

impl InputNoise {
    /// The factors of the elements from `position` on.
    fn factors(&self, ctx: &Context, position: usize, factors: &mut [f32]) {
        let position = self.first + position;
        let mut draws = [0.0; BUFFER];
        let draws = &mut draws[..factors.len()];
        factors.fill(1.0);
        if self.eps > 0.0 {
            fill_uniform(ctx.isa(), &self.random, Draw::Jitter.at(position), draws);
            factors.iter_mut().zip(&*draws).for_each(|(factor, draw)| *factor += self.eps * (2.0 * draw - 1.0));
        }
        if self.dropout > 0.0 {
            fill_uniform(ctx.isa(), &self.random, Draw::Dropout.at(position), draws);
            let growth = 1.0 / (1.0 - self.dropout);
            for (factor, &draw) in factors.iter_mut().zip(&*draws) {
                *factor *= if draw >= self.dropout { growth } else { 0.0 };
            }
        }
    }

    /// Gives `work` the elements `y` from `position` on, some at a time, with their factors and where they begin.
    fn each(&self, ctx: &Context, position: usize, y: &mut [f32], mut work: impl FnMut(&mut [f32], &[f32], usize)) {
        let mut factors = [0.0; BUFFER];
        for (position, y) in (position..).step_by(BUFFER).zip(y.chunks_mut(BUFFER)) {
            let factors = &mut factors[..y.len()];
            self.factors(ctx, position, factors);
            work(y, factors, position);
        }
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
            self.each(ctx, piece * PIECE, y, |y, factors, start| {
                for ((y, &x), factor) in y.iter_mut().zip(&x[start..]).zip(factors) {
                    *y = to_f32(x) * factor;
                }
            });
        });
    }

    /// Multiplies the gradient of the noisy input by the noise, which makes it that of the input.
    pub(crate) fn apply_assign(&self, ctx: &Context, dx: &mut Tensor) {
        ctx.threads().run_pieces(dx.f32s_mut(), PIECE, |piece, dx| {
            self.each(ctx, piece * PIECE, dx, |dx, factors, _| {
                dx.iter_mut().zip(factors).for_each(|(dx, factor)| *dx *= factor);
            });
        });
    }
}
