//! The concentration of a layer's load on few experts, as figures.

/// The concentration of the choices of one layer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Concentration {
    /// The largest load over the mean.
    pub max_over_mean: f64,
    /// The share of the choices that the busiest expert has.
    pub top_1: f64,
    /// The share that the busiest tenth of the experts has, rounded up to whole experts.
    pub top_tenth: f64,
    /// The entropy of the shares over its largest value, `ln E`: 1 when even, 0 when one expert has all.
    pub entropy: f64,
    /// The Gini coefficient: 0 when even, `1 - 1/E` when one expert has all.
    pub gini: f64,
    /// The exponent s of Zipf's law `load ~ rank^-s`: the least-squares slope of the logarithm of the load on that of
    /// its rank, over the experts that any token chose. 0 when even; none with fewer than two such experts.
    pub zipf: Option<f64>,
    /// Experts that no token chose.
    pub num_unused: usize,
}

impl Concentration {
    /// Measures the loads of the experts; all figures are 0 without any load.
    #[must_use]
    pub fn new(loads: &[u64]) -> Self {
        let total: f64 = loads.iter().map(|&load| load as f64).sum();
        let count = loads.len();
        let num_unused = loads.iter().filter(|&&load| load == 0).count();
        if total <= 0.0 {
            return Self { num_unused, ..Self::default() };
        }
        let mut shares: Vec<f64> = loads.iter().map(|&load| load as f64 / total).collect();
        shares.sort_by(|a, b| b.total_cmp(a));
        let entropy: f64 = shares.iter().filter(|&&share| share > 0.0).map(|share| -share * share.ln()).sum();
        let ranked = shares.iter().rev().zip(1..).map(|(share, rank)| share * f64::from(rank)).sum::<f64>();
        Self {
            max_over_mean: shares[0] * count as f64,
            top_1: shares[0],
            top_tenth: shares.iter().take(count.div_ceil(10)).sum(),
            entropy: if count > 1 { entropy / (count as f64).ln() } else { 1.0 },
            gini: 2.0 * ranked / count as f64 - (count as f64 + 1.0) / count as f64,
            zipf: zipf_exponent(&shares[..count - num_unused]),
            num_unused,
        }
    }
}

/// Fits the exponent to descending shares above 0.
fn zipf_exponent(shares: &[f64]) -> Option<f64> {
    if shares.len() < 2 {
        return None;
    }
    let points: Vec<[f64; 2]> =
        shares.iter().zip(1..).map(|(share, rank)| [f64::from(rank).ln(), share.ln()]).collect();
    let mean = |axis: usize| points.iter().map(|point| point[axis]).sum::<f64>() / points.len() as f64;
    let (x, y) = (mean(0), mean(1));
    let spread: f64 = points.iter().map(|point| (point[0] - x).powi(2)).sum();
    let rise: f64 = points.iter().map(|point| (point[0] - x) * (point[1] - y)).sum();
    // An even load has the exponent 0, not -0.
    Some((-rise / spread).max(0.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-9, "{a}, {b}");
    }

    #[test]
    fn an_even_load_and_one_on_a_single_expert_are_the_ends_of_all_figures() {
        let even = Concentration::new(&[50; 20]);
        near(even.max_over_mean, 1.0);
        near(even.top_1, 0.05);
        near(even.top_tenth, 0.1);
        near(even.entropy, 1.0);
        near(even.gini, 0.0);
        near(even.zipf.unwrap(), 0.0);
        let one = Concentration::new(&[0, 0, 7, 0]);
        near(one.max_over_mean, 4.0);
        near(one.entropy, 0.0);
        near(one.gini, 0.75);
        assert_eq!((one.top_1, one.zipf, one.num_unused), (1.0, None, 3));
        assert_eq!(Concentration::new(&[0; 4]), Concentration { num_unused: 4, ..Concentration::default() });
        assert_eq!(Concentration::new(&[]), Concentration::default());
    }

    #[test]
    fn the_exponent_of_zipfs_law_is_found() {
        for exponent in [0.4, 0.9, 1.3] {
            let load = |expert: usize| (1e12 / ((expert * 37 % 64 + 1) as f64).powf(exponent)) as u64;
            let loads: Vec<u64> = (0..64).map(load).collect();
            assert!((Concentration::new(&loads).zipf.unwrap() - exponent).abs() < 1e-6);
        }
    }

    #[test]
    fn the_gini_coefficient_is_half_the_relative_mean_difference() {
        let loads = [3_u64, 8, 1, 0, 12];
        let mut difference = 0.0;
        for a in loads {
            difference += loads.iter().map(|&b| a.abs_diff(b) as f64).sum::<f64>();
        }
        near(Concentration::new(&loads).gini, difference / (2.0 * 25.0 * (24.0 / 5.0)));
    }
}
