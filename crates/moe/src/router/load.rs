//! The smooth load of experts under noise (Shazeer et al., 1701.06538, appendix A): the probability that a token
//! would choose an expert if that expert's noise were drawn again, summed over the tokens.
//!
//! `P(t, i) = Phi((c_ti - h_t) / sigma_ti)`, with c the logits before noise and h the K-th highest noisy logit of the
//! other experts.

use moeworks_ops::router_rows::normal_above;
use moeworks_ops::{Context, Isa};
use moeworks_tensor::Tensor;

use super::blocks::{self, ROWS};
use super::choice;
use super::noise::LogitNoise;
use super::score_router::RouterSaved;
use crate::NO_EXPERT;

/// The top K + 1 experts of a token's noisy logits, which determine all of its thresholds.
struct Ranks {
    ids: Vec<u32>,
    noisy: Vec<f32>,
}

impl Ranks {
    /// Allocates for tokens that choose `top_k` of `e` experts.
    fn new(e: usize, top_k: usize) -> Self {
        Self { ids: vec![NO_EXPERT; (top_k + 1).min(e)], noisy: vec![0.0; e] }
    }

    /// Loads token `t`.
    fn read(&mut self, saved: &RouterSaved, t: usize) {
        let e = self.noisy.len();
        let logits = saved.scores.logits.as_ref().map_or(&[][..], |logits| &logits.f32s()[t * e..(t + 1) * e]);
        self.noisy.iter_mut().zip(logits).for_each(|(noisy, logit)| *noisy = logit * saved.temperature);
        choice::top_k(&self.noisy, &mut self.ids);
    }

    /// Writes the threshold that each expert's noisy logit must exceed for the expert to be chosen; negative infinity
    /// if there are at most K experts.
    fn thresholds(&self, top_k: usize, thresholds: &mut [f32]) {
        let at = |rank: usize| self.ids.get(rank).map_or(f32::NEG_INFINITY, |&id| self.noisy[id as usize]);
        thresholds.fill(at(top_k - 1));
        self.ids.iter().take(top_k).for_each(|&id| thresholds[id as usize] = at(top_k));
    }

    /// Returns the expert that `expert` must beat to be chosen; none if there are at most K experts.
    fn rival(&self, expert: usize, top_k: usize) -> Option<usize> {
        let is_chosen = self.ids[..top_k.min(self.ids.len())].contains(&(expert as u32));
        let at = if is_chosen { top_k } else { top_k - 1 };
        self.ids.get(at).copied().filter(|&id| id != NO_EXPERT).map(|id| id as usize)
    }
}

/// Computes `[E]`: the smooth load of each expert.
pub(crate) fn smooth_load(ctx: &Context, saved: &RouterSaved, clean: &Tensor) -> Vec<f64> {
    let top_k = saved.top_k;
    let e = clean.cols();
    let mut partial = vec![0.0; clean.rows().div_ceil(ROWS) * e];
    blocks::for_each(ctx, partial.chunks_mut(e).zip(blocks::split(clean.f32s(), e)), |block, (load, clean)| {
        let (mut thresholds, mut ranks) = (vec![0.0; clean.len()], Ranks::new(e, top_k));
        for (t, thresholds) in (block * ROWS..).zip(thresholds.chunks_mut(e)) {
            ranks.read(saved, t);
            ranks.thresholds(top_k, thresholds);
        }
        let deviations = saved.noise.deviations(block * ROWS * e, clean.len()).unwrap_or_default();
        let mut above = vec![1.0; clean.len()];
        normal_above(ctx.isa(), clean, &deviations, &thresholds, &mut above);
        for above in above.chunks(e) {
            load.iter_mut().zip(above).for_each(|(load, &p)| *load += f64::from(p));
        }
    });
    let mut load = vec![0.0; e];
    for part in partial.chunks(e) {
        load.iter_mut().zip(part).for_each(|(load, part)| *load += part);
    }
    load
}

/// Adds the gradient of the loads, `dload [E]`, to the gradient of the logits before noise and to that of the
/// pre-activations of the learned deviations.
pub(crate) fn backward(
    ctx: &Context,
    saved: &RouterSaved,
    clean: &Tensor,
    dload: &[f32],
    dlogits: &mut Tensor,
    draw: Option<&mut Tensor>,
) {
    let e = clean.cols();
    let draws = draw.into_iter().flat_map(|draw| blocks::split_mut(draw.f32s_mut(), e)).map(Some);
    let draws = draws.chain(std::iter::repeat_with(|| None));
    let rows = blocks::split_mut(dlogits.f32s_mut(), e).zip(blocks::split(clean.f32s(), e)).zip(draws);
    blocks::for_each(ctx, rows, |block, ((dlogits, clean), draw)| {
        let mut draws = draw.map(|draw| draw.chunks_mut(e));
        let rows = dlogits.chunks_mut(e).zip(clean.chunks(e));
        for (t, (dlogits, clean)) in (block * ROWS..).zip(rows) {
            let draw = draws.as_mut().and_then(Iterator::next);
            let grads = TokenGrads { dlogits, draw };
            backward_row(ctx.isa(), saved, t, clean, dload, grads);
        }
    });
}

/// The gradients of one token.
struct TokenGrads<'a> {
    /// `[E]`: the gradient of the logits before noise.
    dlogits: &'a mut [f32],
    /// `[E]`: the gradient of the pre-activations of learned deviations.
    draw: Option<&'a mut [f32]>,
}

/// Adds the gradients of token `t`, whose logits before noise are `clean`.
fn backward_row(isa: Isa, saved: &RouterSaved, t: usize, clean: &[f32], dload: &[f32], grads: TokenGrads<'_>) {
    let TokenGrads { dlogits, mut draw } = grads;
    let (e, top_k) = (clean.len(), saved.top_k);
    let mut ranks = Ranks::new(e, top_k);
    ranks.read(saved, t);
    let (Some(sigmas), Some(noise)) = (saved.noise.deviations(t * e, e), saved.noise.draw(isa, t * e, e)) else {
        return;
    };
    for (i, &sigma) in sigmas.iter().enumerate() {
        let Some(rival) = ranks.rival(i, top_k) else { continue };
        let u = f64::from(clean[i] - ranks.noisy[rival]) / f64::from(sigma);
        let slope = (f64::from(dload[i]) * (-0.5 * u * u).exp() / (2.0 * std::f64::consts::PI).sqrt()) as f32 / sigma;
        dlogits[i] += slope;
        dlogits[rival] -= slope;
        if let Some(draw) = draw.as_deref_mut() {
            draw[i] -= slope * u as f32 * LogitNoise::slope(sigma);
            // The rival's noisy logit also depends on its own deviation.
            draw[rival] -= slope * noise[rival] / sigmas[rival] * LogitNoise::slope(sigmas[rival]);
        }
    }
}
