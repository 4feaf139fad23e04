//! The smooth load of experts under noise (Shazeer et al., 1701.06538, appendix A): the probability that a token would
//! choose an expert if that expert's noise were drawn again, added up over the tokens.
//!
//! `P(t, i) = Phi((c_ti - h_t) / sigma_ti)`, with c the logits before noise and h the K-th highest noisy logit of the
//! others.

use moeworks_ops::Context;
use moeworks_tensor::Tensor;

use super::blocks::{self, ROWS};
use super::choice;
use super::flat::FlatSaved;
use super::scores::LogitNoise;
use crate::NO_EXPERT;

/// The experts at rank K and K + 1 of a token's noisy logits, by which all of its thresholds are known.
struct Ranks {
    ids: Vec<u32>,
    noisy: Vec<f32>,
}

impl Ranks {
    fn of(saved: &FlatSaved, t: usize, e: usize, top_k: usize) -> Self {
        let logits = saved.scores.logits.as_ref().map_or(&[][..], |logits| &logits.f32s()[t * e..(t + 1) * e]);
        let noisy: Vec<f32> = logits.iter().map(|logit| logit * saved.temperature).collect();
        let mut ids = vec![NO_EXPERT; (top_k + 1).min(e)];
        choice::top_k(&noisy, &mut ids);
        Self { ids, noisy }
    }

    /// The expert that `expert` must beat to be chosen; none if there are no more than K.
    fn rival(&self, expert: usize, top_k: usize) -> Option<usize> {
        let is_chosen = self.ids[..top_k.min(self.ids.len())].contains(&(expert as u32));
        let at = if is_chosen { top_k } else { top_k - 1 };
        self.ids.get(at).copied().filter(|&id| id != NO_EXPERT).map(|id| id as usize)
    }
}

/// `[E]`: the smooth load of each expert.
pub(crate) fn smooth_load(ctx: &Context, saved: &FlatSaved, clean: &Tensor, top_k: usize) -> Vec<f64> {
    let e = clean.cols();
    let mut partial = vec![0.0; clean.rows().div_ceil(ROWS) * e];
    blocks::for_each(ctx, partial.chunks_mut(e).zip(blocks::of(clean.f32s(), e)), |block, (load, clean)| {
        for (t, clean) in (block * ROWS..).zip(clean.chunks(e)) {
            let ranks = Ranks::of(saved, t, e, top_k);
            for (i, load) in load.iter_mut().enumerate() {
                *load += match (ranks.rival(i, top_k), saved.noise.deviation(t * e + i)) {
                    (Some(rival), Some(sigma)) => {
                        normal_cdf(f64::from(clean[i] - ranks.noisy[rival]) / f64::from(sigma))
                    }
                    _ => 1.0,
                };
            }
        }
    });
    let mut load = vec![0.0; e];
    for part in partial.chunks(e) {
        load.iter_mut().zip(part).for_each(|(load, part)| *load += part);
    }
    load
}

/// Adds the gradient of the loads, `dload [E]`, to those of the logits before noise and of what the learned deviations are
/// taken of.
pub(crate) fn backward(
    ctx: &Context,
    saved: &FlatSaved,
    clean: &Tensor,
    top_k: usize,
    dload: &[f32],
    dlogits: &mut Tensor,
    draw: Option<&mut Tensor>,
) {
    let e = clean.cols();
    let draws = draw.into_iter().flat_map(|draw| blocks::of_mut(draw.f32s_mut(), e)).map(Some);
    let draws = draws.chain(std::iter::repeat_with(|| None));
    let rows = blocks::of_mut(dlogits.f32s_mut(), e).zip(blocks::of(clean.f32s(), e)).zip(draws);
    blocks::for_each(ctx, rows, |block, ((dlogits, clean), draw)| {
        let mut draws = draw.map(|draw| draw.chunks_mut(e));
        let rows = dlogits.chunks_mut(e).zip(clean.chunks(e));
        for (t, (dlogits, clean)) in (block * ROWS..).zip(rows) {
            let draw = draws.as_mut().and_then(Iterator::next);
            backward_row(saved, (t, clean), top_k, dload, dlogits, draw);
        }
    });
}

fn backward_row(
    saved: &FlatSaved,
    (t, clean): (usize, &[f32]),
    top_k: usize,
    dload: &[f32],
    dlogits: &mut [f32],
    mut draw: Option<&mut [f32]>,
) {
    let e = clean.len();
    let ranks = Ranks::of(saved, t, e, top_k);
    for i in 0..e {
        let at = t * e + i;
        let (Some(rival), Some(sigma)) = (ranks.rival(i, top_k), saved.noise.deviation(at)) else { continue };
        let u = f64::from(clean[i] - ranks.noisy[rival]) / f64::from(sigma);
        let slope = (f64::from(dload[i]) * (-0.5 * u * u).exp() / (2.0 * std::f64::consts::PI).sqrt()) as f32 / sigma;
        dlogits[i] += slope;
        dlogits[rival] -= slope;
        if let (Some(draw), LogitNoise::Learned(raw, _)) = (draw.as_deref_mut(), &saved.noise) {
            let sigmoid = |r: f32| 1.0 / (1.0 + (-r).exp());
            draw[i] -= slope * u as f32 * sigmoid(raw.f32s()[at]);
            // The rival's noisy logit moves with its own deviation.
            let rival_at = t * e + rival;
            let noise = saved.noise.at(rival_at) / saved.noise.deviation(rival_at).unwrap_or(1.0);
            draw[rival] -= slope * noise * sigmoid(raw.f32s()[rival_at]);
        }
    }
}

/// The distribution function of the standard normal distribution, within 1e-12: by the series of the error function near
/// 0 and its continued fraction far from it.
fn normal_cdf(x: f64) -> f64 {
    let density = (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt();
    if x.abs() > 38.0 {
        return if x > 0.0 { 1.0 } else { 0.0 };
    }
    if x.abs() < 3.0 {
        let (mut term, mut sum) = (x, x);
        let mut n = 1.0;
        while term.abs() > 1e-17 * sum.abs() {
            term *= x * x / (2.0 * n + 1.0);
            sum += term;
            n += 1.0;
        }
        return 0.5 + density * sum;
    }
    let tail = (1..=60).rev().fold(0.0, |tail, n| f64::from(n) / (x.abs() + tail));
    let tail = density / (x.abs() + tail);
    if x > 0.0 { 1.0 - tail } else { tail }
}

#[cfg(test)]
mod tests {
    use super::normal_cdf;

    #[test]
    fn the_normal_distribution_has_its_known_values() {
        for (x, expected) in [(0.0, 0.5), (1.0, 0.841_344_746_068_542_9), (-2.0, 0.022_750_131_948_179_2)] {
            assert!((normal_cdf(x) - expected).abs() < 1e-13, "{x}");
        }
        assert!((normal_cdf(-4.0) / 3.167_124_183_311_998e-5 - 1.0).abs() < 1e-10);
        assert!((normal_cdf(3.0) - normal_cdf(3.0 - 1e-12)).abs() < 1e-11);
        assert_eq!([normal_cdf(-40.0), normal_cdf(40.0)], [0.0, 1.0]);
    }
}
