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

/// The distribution function of the standard normal distribution, within 1e-15 of itself: `erfc(-x / sqrt 2) / 2`.
fn normal_cdf(x: f64) -> f64 {
    let y = x.abs() * std::f64::consts::FRAC_1_SQRT_2;
    if y <= 0.468_75 {
        return 0.5 + (0.5 * x * std::f64::consts::FRAC_1_SQRT_2) * small_erf(y * y);
    }
    let tail = 0.5 * erfc(y);
    if x > 0.0 { 1.0 - tail } else { tail }
}

/// `erf(y) / y` for `y^2` up to 0.22, by Cody's rational approximation ("Rational Chebyshev approximations for the error
/// function", Math. Comp. 23, 1969), as [`erfc`].
fn small_erf(square: f64) -> f64 {
    const P: [f64; 5] = [
        1.857_777_061_846_031_5e-1,
        3.161_123_743_870_565_5,
        1.138_641_541_510_501_6e2,
        3.774_852_376_853_02e2,
        3.209_377_589_138_469_4e3,
    ];
    const Q: [f64; 5] =
        [1.0, 2.360_129_095_234_412_2e1, 2.440_246_379_344_441_7e2, 1.282_616_526_077_372_3e3, 2.844_236_833_439_171e3];
    polynomial(&P, square) / polynomial(&Q, square)
}

/// `erfc(y)` for `y` above 0.46875.
fn erfc(y: f64) -> f64 {
    const P: [f64; 9] = [
        2.153_115_354_744_038_3e-8,
        5.641_884_969_886_701e-1,
        8.883_149_794_388_375,
        6.611_919_063_714_163e1,
        2.986_351_381_974_001e2,
        8.819_522_212_417_69e2,
        1.712_047_612_634_070_7e3,
        2.051_078_377_826_071_6e3,
        1.230_339_354_797_997_2e3,
    ];
    const Q: [f64; 9] = [
        1.0,
        1.574_492_611_070_983_5e1,
        1.176_939_508_913_125e2,
        5.371_811_018_620_099e2,
        1.621_389_574_566_690_3e3,
        3.290_799_235_733_459_7e3,
        4.362_619_090_143_247e3,
        3.439_367_674_143_721_6e3,
        1.230_339_354_803_749_3e3,
    ];
    const FAR_P: [f64; 6] = [
        1.631_538_713_730_209_7e-2,
        3.053_266_349_612_323_6e-1,
        3.603_448_999_498_044_5e-1,
        1.257_817_261_112_292_6e-1,
        1.608_378_514_874_228e-2,
        6.587_491_615_298_378e-4,
    ];
    const FAR_Q: [f64; 6] = [
        1.0,
        2.568_520_192_289_822,
        1.872_952_849_923_467_3,
        5.279_051_029_514_285e-1,
        6.051_834_131_244_132e-2,
        2.335_204_976_268_691_8e-3,
    ];
    let bell = (-y * y).exp();
    if y <= 4.0 {
        return bell * polynomial(&P, y) / polynomial(&Q, y);
    }
    let inverse = 1.0 / (y * y);
    let rest = inverse * polynomial(&FAR_P, inverse) / polynomial(&FAR_Q, inverse);
    bell * (std::f64::consts::FRAC_2_SQRT_PI / 2.0 - rest) / y
}

/// The polynomial whose coefficients are these, the highest first.
fn polynomial(coefficients: &[f64], x: f64) -> f64 {
    coefficients.iter().fold(0.0, |sum, c| sum * x + c)
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
