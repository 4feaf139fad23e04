//! Noise on a router's input and logits. The input has multiplicative jitter, uniform in `[1 - eps, 1 + eps]`
//! (Switch, 2101.03961), and dropout. The logits have Gumbel noise, or normal noise with a given or a learned
//! deviation. Noise is drawn again in backward instead of being saved.

use std::borrow::Cow;
use std::ops::Range;

use moeworks_ops::elementwise::multiply_into;
use moeworks_ops::linear::linear;
use moeworks_ops::random::{Factors, fill_coarse, fill_factors, fill_gumbels, fill_normals, times_factors};
use moeworks_ops::{Context, Isa};
use moeworks_tensor::{DType, Random, Tensor};

use super::input::Draw;

/// Elements per task.
const PIECE: usize = 1 << 14;
/// Rows per task of a product.
const PRODUCT_ROWS: usize = 256;
/// Elements whose factors are drawn at once.
const BUFFER: usize = 512;

/// The noise on the router's input in one pass.
#[derive(Clone, Copy)]
pub(crate) struct InputNoise {
    pub(crate) eps: f32,
    /// The dropout rate; the other elements are scaled by `1 / (1 - dropout)`.
    pub(crate) dropout: f32,
    pub(crate) random: Random,
    /// The index of the first element in the random stream.
    pub(crate) first: usize,
}

impl InputNoise {
    /// Computes the factors of the elements from `position` on.
    fn factors(&self, ctx: &Context, position: usize, factors: &mut [f32]) {
        let position = self.first + position;
        if self.eps > 0.0 {
            fill_factors(ctx.isa(), &self.random, Draw::Jitter.at(position), self.eps, factors);
        } else {
            factors.fill(1.0);
        }
        if self.dropout > 0.0 {
            let mut draws = [0.0; BUFFER];
            let draws = &mut draws[..factors.len()];
            fill_coarse(ctx.isa(), &self.random, Draw::Dropout.at(position), draws);
            let growth = 1.0 / (1.0 - self.dropout);
            for (factor, &draw) in factors.iter_mut().zip(&*draws) {
                *factor *= if draw >= self.dropout { growth } else { 0.0 };
            }
        }
    }

    /// Calls `work` with pieces of the elements `y`, which begin at `position`, their factors and their position.
    fn each(&self, ctx: &Context, position: usize, y: &mut [f32], mut work: impl FnMut(&mut [f32], &[f32], usize)) {
        let mut factors = [0.0; BUFFER];
        for (position, y) in (position..).step_by(BUFFER).zip(y.chunks_mut(BUFFER)) {
            let factors = &mut factors[..y.len()];
            self.factors(ctx, position, factors);
            work(y, factors, position);
        }
    }

    /// Returns `x` (f32 or bf16) multiplied by the noise, in f32.
    pub(crate) fn apply(&self, ctx: &Context, x: &Tensor) -> Tensor {
        times_factors(ctx, x, &self.as_factors()).unwrap_or_else(|| self.apply_to_rows(ctx, x, 0..x.rows()))
    }

    /// Returns the product of the noisy `x [T, D]` and `w [E, D]`, in f32. A thread applies the noise to a block of
    /// rows and multiplies it while it is in its cache.
    pub(crate) fn linear(&self, ctx: &Context, x: &Tensor, w: &Tensor) -> Tensor {
        if ctx.gpu().is_some() {
            return linear(ctx, &self.apply(ctx, x), w, DType::F32);
        }
        let (num_tokens, e) = (x.rows(), w.rows());
        let mut y = ctx.empty(&[num_tokens, e], DType::F32);
        ctx.threads().run_pieces(y.f32s_mut(), PRODUCT_ROWS * e, |piece, y| {
            let start = piece * PRODUCT_ROWS;
            let noisy = self.apply_to_rows(ctx, x, start..(start + PRODUCT_ROWS).min(num_tokens));
            y.copy_from_slice(linear(ctx, &noisy, w, DType::F32).f32s());
        });
        y
    }

    /// Describes the noise for the GPU's operation.
    fn as_factors(&self) -> Factors {
        let first = (Draw::Jitter.at(self.first), Draw::Dropout.at(self.first));
        Factors { random: self.random, eps: self.eps, dropout: self.dropout, first }
    }

    fn apply_to_rows(&self, ctx: &Context, x: &Tensor, rows: Range<usize>) -> Tensor {
        let first = rows.start * x.cols();
        let mut y = ctx.empty(&[rows.len(), x.cols()], DType::F32);
        ctx.threads().run_pieces(y.f32s_mut(), PIECE, |piece, y| {
            self.each(ctx, first + piece * PIECE, y, |y, factors, position| {
                multiply_into(ctx.isa(), x, position, factors, y);
            });
        });
        y
    }

    /// Multiplies the gradient of the noisy input by the noise, which gives the gradient of the input.
    pub(crate) fn apply_assign(&self, ctx: &Context, dx: &mut Tensor) {
        if let Some(product) = times_factors(ctx, dx, &self.as_factors()) {
            *dx = product;
            return;
        }
        ctx.threads().run_pieces(dx.f32s_mut(), PIECE, |piece, dx| {
            self.each(ctx, piece * PIECE, dx, |dx, factors, _| {
                dx.iter_mut().zip(factors).for_each(|(dx, factor)| *dx *= factor);
            });
        });
    }
}

/// The random stream of the logits of one pass.
#[derive(Clone, Copy)]
pub(crate) struct LogitDraws {
    pub(crate) random: Random,
    /// The index of the first logit in the stream.
    pub(crate) first: usize,
}

impl LogitDraws {
    /// Draws `count` normal numbers from logit `i` on.
    pub(crate) fn normals(&self, isa: Isa, i: usize, count: usize) -> Vec<f32> {
        let mut numbers = vec![0.0; count];
        fill_normals(isa, &self.random, Draw::Logits.at(self.first + i), &mut numbers);
        numbers
    }
}

/// The noise added to the logits.
pub(crate) enum LogitNoise {
    None,
    /// Normal noise of this standard deviation.
    Normal(f32, LogitDraws),
    /// Normal noise of these deviations, `[T, E]`: the softplus of a learned function of the token.
    Learned(Tensor, LogitDraws),
    /// Gumbel noise.
    Gumbel(LogitDraws),
}

impl LogitNoise {
    /// Draws the noise on `count` logits from logit `i` on; `None` without noise.
    pub(crate) fn draw(&self, isa: Isa, i: usize, count: usize) -> Option<Vec<f32>> {
        match self {
            Self::None => None,
            Self::Gumbel(draws) => {
                let mut numbers = vec![0.0; count];
                fill_gumbels(isa, &draws.random, Draw::Logits.at(draws.first + i), &mut numbers);
                Some(numbers)
            }
            Self::Normal(_, draws) | Self::Learned(_, draws) => {
                let mut numbers = draws.normals(isa, i, count);
                let deviations = self.deviations(i, count)?;
                numbers.iter_mut().zip(&*deviations).for_each(|(number, deviation)| *number *= deviation);
                Some(numbers)
            }
        }
    }

    /// Adds the noise to `logits [T, E]`.
    pub(crate) fn add(&self, ctx: &Context, logits: &mut Tensor) {
        if matches!(self, Self::None) {
            return;
        }
        ctx.threads().run_pieces(logits.f32s_mut(), PIECE, |piece, logits| {
            if let Some(noise) = self.draw(ctx.isa(), piece * PIECE, logits.len()) {
                logits.iter_mut().zip(noise).for_each(|(logit, noise)| *logit += noise);
            }
        });
    }

    /// Returns the deviations of normal noise on `count` logits from logit `i` on; `None` for other noise.
    pub(crate) fn deviations(&self, i: usize, count: usize) -> Option<Cow<'_, [f32]>> {
        match self {
            Self::Normal(std, _) => Some(vec![*std; count].into()),
            Self::Learned(deviations, _) => Some(deviations.f32s()[i..i + count].into()),
            Self::None | Self::Gumbel(_) => None,
        }
    }

    /// Returns the derivative of `softplus` at the point where its value is `deviation`.
    pub(crate) fn slope(deviation: f32) -> f32 {
        -(-deviation).exp_m1()
    }

    /// Returns whether the noise is normal.
    pub(crate) fn is_normal(&self) -> bool {
        matches!(self, Self::Normal(..) | Self::Learned(..))
    }
}
