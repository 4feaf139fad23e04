//! Scores of all tokens: noise and temperature on the logits, experts out of reach, then the score function, row by row.

use moeworks_ops::Context;
use moeworks_ops::top_k::ScoreSums;
use moeworks_tensor::{DType, Random, Tensor};

use super::blocks::{self, ROWS};
use super::input::Draw;
use super::rows::{self, RowSums};

/// What makes gates of logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gate {
    Softmax,
    Sigmoid,
    /// The logit, or 0 if it is negative.
    Relu,
}

/// The scores of all tokens.
pub(crate) struct Scores {
    /// `[T, E]`: a distribution over the experts for each token.
    pub(crate) probs: Tensor,
    /// `[T, E]`: what weights are taken from, if not the probabilities.
    pub(crate) gates: Option<Tensor>,
    /// `[T, E]`: the logits that the scores were taken of; none where the fused operation took their memory.
    pub(crate) logits: Option<Tensor>,
    /// `[T]`.
    pub(crate) lse: Tensor,
    pub(crate) sums: ScoreSums,
    /// The sum of the squared logits, before noise and temperature.
    pub(crate) squared_logits: f64,
}

/// The random numbers of the logits of one pass.
#[derive(Clone, Copy)]
pub(crate) struct LogitDraws {
    pub(crate) random: Random,
    /// The position of the first logit.
    pub(crate) first: usize,
}

impl LogitDraws {
    /// The normal number of logit `i`.
    pub(crate) fn normal(&self, i: usize) -> f32 {
        self.random.normal(Draw::Logits.at(self.first + i))
    }

    /// Its number uniform in 0 to 1.
    fn uniform(&self, i: usize) -> f32 {
        self.random.uniform(Draw::Logits.at(self.first + i))
    }
}

/// Random numbers added to the logits.
pub(crate) enum LogitNoise {
    None,
    /// Normal, of this deviation.
    Normal(f32, LogitDraws),
    /// Normal, of deviation `softplus` of these, `[T, E]`.
    Learned(Tensor, LogitDraws),
    /// Gumbel.
    Gumbel(LogitDraws),
}

impl LogitNoise {
    /// The noise at a place, and the deviation it was multiplied by.
    pub(crate) fn at(&self, i: usize) -> f32 {
        match self {
            Self::None => 0.0,
            Self::Normal(std, draws) => std * draws.normal(i),
            Self::Learned(raw, draws) => softplus(raw.f32s()[i]) * draws.normal(i),
            // The grid of uniform numbers holds 0, whose logarithm is none.
            Self::Gumbel(draws) => -(-(draws.uniform(i) + 2.0_f32.powi(-25)).ln()).ln(),
        }
    }

    /// The deviation of the noise at a place, where it is normal.
    pub(crate) fn deviation(&self, i: usize) -> Option<f32> {
        match self {
            Self::Normal(std, _) => Some(*std),
            Self::Learned(raw, _) => Some(softplus(raw.f32s()[i])),
            Self::None | Self::Gumbel(_) => None,
        }
    }
}

/// `ln(1 + e^x)`.
fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

/// What happens to a token's logits before scores are taken.
pub(crate) struct LogitRule<'a> {
    pub(crate) gate: Gate,
    pub(crate) noise: &'a LogitNoise,
    pub(crate) temperature: f32,
    /// Whether an expert is in reach of a modality: `[M][E]`; empty for all.
    pub(crate) reach: &'a [Vec<bool>],
    /// `[T]`: the modality of each token; empty where there is one.
    pub(crate) modalities: &'a [u32],
}

impl Scores {
    /// Scores of `logits [T, E]`. A token with a logit that is not finite gets zeros as logits, by which it chooses the
    /// first experts, and NaN as scores, which its output then shows.
    pub(crate) fn of(ctx: &Context, mut logits: Tensor, rule: &LogitRule<'_>) -> Self {
        let (num_tokens, e) = (logits.rows(), logits.cols());
        let empty = |shape: &[usize]| ctx.empty(shape, DType::F32);
        let has_gates = rule.gate != Gate::Softmax;
        let mut probs = empty(&[num_tokens, e]);
        let mut gates = empty(&[if has_gates { num_tokens } else { 0 }, e]);
        let (mut lse, mut entropy) = (empty(&[num_tokens]), empty(&[num_tokens]));
        let outputs = blocks::of_mut(logits.f32s_mut(), e)
            .zip(blocks::of_mut(probs.f32s_mut(), e))
            .zip(blocks::of_mut(lse.f32s_mut(), 1))
            .zip(blocks::of_mut(entropy.f32s_mut(), 1));
        let gate_blocks = blocks::of_mut(gates.f32s_mut(), e).map(Some).chain(std::iter::repeat_with(|| None));
        blocks::for_each(ctx, outputs.zip(gate_blocks), |block, ((((logits, probs), lse), entropy), gates)| {
            let mut gates = gates.map(|gates| gates.chunks_mut(e));
            let rows = logits.chunks_mut(e).zip(probs.chunks_mut(e)).zip(lse).zip(entropy);
            for (t, (((logits, probs), lse), entropy)) in (block * ROWS..).zip(rows) {
                let gates = gates.as_mut().and_then(Iterator::next);
                let sums = rule.score(t, logits, probs, gates);
                (*lse, *entropy) = (sums.lse, sums.entropy);
            }
        });
        let sums = sums(ctx, &probs, &lse, &entropy);
        let gates = has_gates.then_some(gates);
        Self { probs, gates, logits: Some(logits), lse, sums, squared_logits: 0.0 }
    }

    /// What weights are taken from.
    pub(crate) fn gates(&self) -> &Tensor {
        self.gates.as_ref().unwrap_or(&self.probs)
    }
}

impl LogitRule<'_> {
    /// Scores of token `t`.
    fn score(&self, t: usize, logits: &mut [f32], probs: &mut [f32], gates: Option<&mut [f32]>) -> RowSums {
        let e = logits.len();
        if !matches!(self.noise, LogitNoise::None) || self.temperature != 1.0 {
            for (i, logit) in logits.iter_mut().enumerate() {
                *logit = (*logit + self.noise.at(t * e + i)) / self.temperature;
            }
        }
        let is_spoilt = logits.iter().any(|logit| !logit.is_finite());
        if is_spoilt {
            logits.fill(0.0);
        }
        if let Some(reach) = self.reach.get(self.modalities.get(t).copied().unwrap_or(0) as usize) {
            logits.iter_mut().zip(reach).filter(|(_, is_near)| !**is_near).for_each(|(l, _)| *l = f32::NEG_INFINITY);
        }
        if is_spoilt {
            probs.fill(f32::NAN);
            gates.into_iter().for_each(|gates| gates.fill(f32::NAN));
            return RowSums { lse: f32::NAN, entropy: f32::NAN };
        }
        match (self.gate, gates) {
            (Gate::Sigmoid, Some(gates)) => rows::sigmoid(logits, gates, probs),
            (Gate::Relu, Some(gates)) => rows::relu(logits, gates, probs),
            _ => rows::softmax(logits, probs),
        }
    }
}

/// Sums over the rows, block by block.
fn sums(ctx: &Context, probs: &Tensor, lse: &Tensor, entropy: &Tensor) -> ScoreSums {
    let e = probs.cols();
    let mut partial = vec![0.0_f64; probs.rows().div_ceil(ROWS) * (e + 2)];
    let inputs = partial.chunks_mut(e + 2).zip(blocks::of(probs.f32s(), e));
    let inputs = inputs.zip(blocks::of(lse.f32s(), 1)).zip(blocks::of(entropy.f32s(), 1));
    blocks::for_each(ctx, inputs, |_, (((sums, probs), lse), entropy)| {
        for probs in probs.chunks(e) {
            sums.iter_mut().zip(probs).for_each(|(sum, &p)| *sum += f64::from(p));
        }
        sums[e] = entropy.iter().map(|&x| f64::from(x)).sum();
        sums[e + 1] = lse.iter().map(|&x| f64::from(x).powi(2)).sum();
    });
    let mut sums = ScoreSums { probs: vec![0.0; e], entropy: 0.0, lse_squared: 0.0 };
    for block in partial.chunks(e + 2) {
        sums.probs.iter_mut().zip(block).for_each(|(sum, x)| *sum += x);
        sums.entropy += block[e];
        sums.lse_squared += block[e + 1];
    }
    sums
}
