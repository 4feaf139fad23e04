//! The scores of all tokens: noise, temperature and masking of the logits, then the score function, row by row.

use moeworks_ops::deferred::Deferred;
use moeworks_ops::router_rows::{RowSums, softmax_rows};
use moeworks_ops::top_k::ScoreSums;
use moeworks_ops::{Context, Isa};
use moeworks_tensor::{DType, Tensor};

use super::blocks::{self, ROWS};
use super::noise::LogitNoise;
use super::rows;

/// The function from logits to gates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gate {
    Softmax,
    Sigmoid,
    /// The logit, or 0 if it is negative.
    Relu,
}

/// The scores of all tokens.
pub(crate) struct Scores {
    /// `[T, E]`: each token's distribution over the experts.
    pub(crate) probs: Tensor,
    /// `[T, E]`: the source of the weights; none if it is the probabilities.
    pub(crate) gates: Option<Tensor>,
    /// `[T, E]`: the logits of the scores; none if the fused operation reused their memory.
    pub(crate) logits: Option<Tensor>,
    /// `[T]`: the log-sum-exps of the logits.
    pub(crate) lse: Tensor,
    pub(crate) sums: Deferred<ScoreSums>,
    /// The sum of the squared logits, before noise and temperature.
    pub(crate) squared_logits: Deferred<Vec<f64>>,
}

/// The steps between a token's logits and its scores.
pub(crate) struct LogitRule<'a> {
    pub(crate) gate: Gate,
    pub(crate) noise: &'a LogitNoise,
    pub(crate) temperature: f32,
    /// `[M][E]`: whether a modality may use an expert; empty if all may.
    pub(crate) reach: &'a [Vec<bool>],
    /// `[T]`: the modality of each token; empty if there is one.
    pub(crate) modalities: &'a [u32],
    /// The sum of squared log-sum-exps besides those of the logits; it is added to theirs.
    pub(crate) lower_lse_squared: f64,
}

impl Scores {
    /// Computes the scores of `logits [T, E]`. A token with a non-finite logit gets zero logits, by which it chooses
    /// the first experts, and NaN scores, which show in its output.
    pub(crate) fn new(ctx: &Context, mut logits: Tensor, rule: &LogitRule<'_>) -> Self {
        let (num_tokens, e) = (logits.rows(), logits.cols());
        let empty = |shape: &[usize]| ctx.empty(shape, DType::F32);
        let has_gates = rule.gate != Gate::Softmax;
        let mut probs = empty(&[num_tokens, e]);
        let mut gates = empty(&[if has_gates { num_tokens } else { 0 }, e]);
        let (mut lse, mut entropy) = (empty(&[num_tokens]), empty(&[num_tokens]));
        let outputs = blocks::split_mut(logits.f32s_mut(), e)
            .zip(blocks::split_mut(probs.f32s_mut(), e))
            .zip(blocks::split_mut(lse.f32s_mut(), 1))
            .zip(blocks::split_mut(entropy.f32s_mut(), 1));
        let gate_blocks = blocks::split_mut(gates.f32s_mut(), e).map(Some).chain(std::iter::repeat_with(|| None));
        blocks::for_each(ctx, outputs.zip(gate_blocks), |block, ((((logits, probs), lse), entropy), gates)| {
            rule.change(ctx.isa(), block * ROWS, logits, lse.len());
            let mut sums = [RowSums::default(); ROWS];
            let sums = &mut sums[..lse.len()];
            softmax_rows(ctx.isa(), logits, probs, sums);
            if let Some(gates) = gates {
                let rows = gates.chunks_mut(e).zip(probs.chunks_mut(e)).zip(logits.chunks(e));
                for (((gates, probs), logits), sums) in rows.zip(&mut *sums) {
                    sums.entropy = rule.gate.open(logits, gates, probs);
                }
            }
            lse.iter_mut().zip(entropy).zip(sums).for_each(|((lse, entropy), sums)| {
                (*lse, *entropy) = (sums.lse, sums.entropy);
            });
            for (t, logits) in (block * ROWS..).zip(logits.chunks_mut(e)).filter(|(_, logits)| logits[0].is_nan()) {
                logits.fill(0.0);
                rule.mask(t, logits);
            }
        });
        let mut sums = sums(ctx, &probs, &lse, &entropy);
        sums.lse_squared += rule.lower_lse_squared;
        let sums = Deferred::now(sums);
        let gates = has_gates.then_some(gates);
        Self { probs, gates, logits: Some(logits), lse, sums, squared_logits: Deferred::now(vec![0.0]) }
    }

    /// Returns the gates that weights are taken from.
    pub(crate) fn gates(&self) -> &Tensor {
        self.gates.as_ref().unwrap_or(&self.probs)
    }
}

impl LogitRule<'_> {
    /// Applies noise, temperature and masking to the `logits` of `num_tokens` tokens from `first` on. A token with a
    /// non-finite logit becomes NaN throughout.
    fn change(&self, isa: Isa, first: usize, logits: &mut [f32], num_tokens: usize) {
        let e = logits.len() / num_tokens.max(1);
        if let Some(noise) = self.noise.draw(isa, first * e, logits.len()) {
            logits.iter_mut().zip(noise).for_each(|(logit, noise)| *logit += noise);
        }
        if self.temperature != 1.0 {
            logits.iter_mut().for_each(|logit| *logit /= self.temperature);
        }
        for (t, logits) in (first..).zip(logits.chunks_mut(e)) {
            if logits.iter().all(|logit| logit.is_finite()) {
                self.mask(t, logits);
            } else {
                logits.fill(f32::NAN);
            }
        }
    }

    /// Masks the experts that token `t` may not use.
    fn mask(&self, t: usize, logits: &mut [f32]) {
        if let Some(reach) = self.reach.get(self.modalities.get(t).copied().unwrap_or(0) as usize) {
            logits.iter_mut().zip(reach).filter(|(_, is_near)| !**is_near).for_each(|(l, _)| *l = f32::NEG_INFINITY);
        }
    }
}

impl Gate {
    /// Writes the gates of one token, and to `probs` the gates divided by their sum. Returns the entropy of `probs`.
    fn open(self, logits: &[f32], gates: &mut [f32], probs: &mut [f32]) -> f32 {
        match self {
            Self::Relu => rows::relu(logits, gates, probs),
            _ => rows::sigmoid(logits, gates, probs),
        }
    }
}

/// Sums over the rows, block by block.
fn sums(ctx: &Context, probs: &Tensor, lse: &Tensor, entropy: &Tensor) -> ScoreSums {
    let e = probs.cols();
    let mut partial = vec![0.0_f64; probs.rows().div_ceil(ROWS) * (e + 2)];
    let inputs = partial.chunks_mut(e + 2).zip(blocks::split(probs.f32s(), e));
    let inputs = inputs.zip(blocks::split(lse.f32s(), 1)).zip(blocks::split(entropy.f32s(), 1));
    blocks::for_each(ctx, inputs, |_, (((sums, probs), lse), entropy)| {
        for probs in probs.chunks(e) {
            sums.iter_mut().zip(probs).for_each(|(sum, &p)| *sum += f64::from(p));
        }
        sums[e] = entropy.iter().map(|&x| f64::from(x)).sum();
        sums[e + 1] = lse.iter().map(|&x| f64::from(x).powi(2)).sum();
    });
    let mut sums = ScoreSums { probs: vec![0.0; e], entropy: 0.0, lse_squared: 0.0, logits_squared: None };
    for block in partial.chunks(e + 2) {
        sums.probs.iter_mut().zip(block).for_each(|(sum, x)| *sum += x);
        sums.entropy += block[e];
        sums.lse_squared += block[e + 1];
    }
    sums
}
