//! Unequal load of experts: how much more the hottest rank has than the mean.

/// The load of experts that a plan reckons with.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Skew {
    /// Equal loads.
    #[default]
    Even,
    /// A coefficient of variation (standard deviation over mean) of the experts' loads, which are log-normal.
    Variation(f64),
    /// An exponent s of Zipf's law: the r-th expert has a load in proportion to `r^-s`.
    Zipf(f64),
    /// Recorded loads: for each MoE layer those of its experts, in the order in which ranks hold them.
    Recorded(Vec<Vec<f64>>),
}

/// The load of the hottest rank over the mean of all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HotRank {
    /// In time: the mean over layers of each layer's hottest rank, since ranks wait for each other in each layer.
    pub time: f64,
    /// In memory: the rank with the most over all layers.
    pub memory: f64,
}

impl Skew {
    /// Returns the hottest rank if the experts lie on `num_ranks` ranks in equal parts, the first ones first.
    ///
    /// The hottest rank holds the hottest expert, and otherwise experts of mean load, unless loads were recorded.
    /// Experts that do not divide over the ranks make the fullest rank hotter.
    #[must_use]
    pub fn hot_rank(&self, num_experts: usize, num_ranks: usize) -> HotRank {
        let num_ranks = num_ranks.max(1);
        if num_experts == 0 || num_ranks == 1 {
            return HotRank { time: 1.0, memory: 1.0 };
        }
        if let Self::Recorded(layers) = self {
            return recorded(layers, num_ranks);
        }
        let (experts, each) = (num_experts as f64, num_experts.div_ceil(num_ranks) as f64);
        let hottest = self.hottest_expert(num_experts);
        let others = if num_experts > 1 { (experts - hottest) / (experts - 1.0) } else { 0.0 };
        let load = (hottest + (each - 1.0) * others) * num_ranks as f64 / experts;
        HotRank { time: load.max(1.0), memory: load.max(1.0) }
    }

    /// Returns the load of the hottest of `num_experts` experts over the mean.
    #[must_use]
    pub fn hottest_expert(&self, num_experts: usize) -> f64 {
        let n = num_experts.max(1);
        let over_mean = |load: &dyn Fn(usize) -> f64| {
            let loads: Vec<f64> = (0..n).map(load).collect();
            let mean = loads.iter().sum::<f64>() / n as f64;
            loads.iter().copied().fold(0.0, f64::max) / mean
        };
        match self {
            Self::Even => 1.0,
            Self::Variation(variation) => {
                let sigma = (1.0 + variation * variation).ln().sqrt();
                over_mean(&|expert| (sigma * normal_quantile((expert as f64 + 0.5) / n as f64)).exp())
            }
            Self::Zipf(exponent) => over_mean(&|expert| (expert as f64 + 1.0).powf(-exponent)),
            Self::Recorded(layers) => {
                let of_layer = |loads: &Vec<f64>| {
                    let mean = loads.iter().sum::<f64>() / loads.len().max(1) as f64;
                    if mean > 0.0 { loads.iter().copied().fold(0.0, f64::max) / mean } else { 1.0 }
                };
                layers.iter().map(of_layer).sum::<f64>() / layers.len().max(1) as f64
            }
        }
    }
}

fn recorded(layers: &[Vec<f64>], num_ranks: usize) -> HotRank {
    let mut sums = vec![0.0; num_ranks];
    let mut time = 0.0;
    for loads in layers {
        let each = loads.len().div_ceil(num_ranks).max(1);
        let ranks: Vec<f64> = loads.chunks(each).map(|part| part.iter().sum()).collect();
        let mean = loads.iter().sum::<f64>() / num_ranks as f64;
        let hottest = ranks.iter().copied().fold(0.0, f64::max);
        time += if mean > 0.0 { hottest / mean } else { 1.0 };
        sums.iter_mut().zip(&ranks).for_each(|(sum, load)| *sum += if mean > 0.0 { load / mean } else { 1.0 });
    }
    let num_layers = layers.len().max(1) as f64;
    let memory = sums.iter().copied().fold(0.0, f64::max) / num_layers;
    HotRank { time: (time / num_layers).max(1.0), memory: memory.max(1.0) }
}

/// Returns the quantile of the standard normal distribution (Acklam's rational approximation, to nine digits).
fn normal_quantile(p: f64) -> f64 {
    const A: [f64; 6] = [
        -3.969_683_028_665_376e1,
        2.209_460_984_245_205e2,
        -2.759_285_104_469_687e2,
        1.383_577_518_672_69e2,
        -3.066_479_806_614_716e1,
        2.506_628_277_459_239,
    ];
    const B: [f64; 5] = [
        -5.447_609_879_822_406e1,
        1.615_858_368_580_409e2,
        -1.556_989_798_598_866e2,
        6.680_131_188_771_972e1,
        -1.328_068_155_288_572e1,
    ];
    const C: [f64; 6] = [
        -7.784_894_002_430_293e-3,
        -3.223_964_580_411_365e-1,
        -2.400_758_277_161_838,
        -2.549_732_539_343_734,
        4.374_664_141_464_968,
        2.938_163_982_698_783,
    ];
    const D: [f64; 4] =
        [7.784_695_709_041_462e-3, 3.224_671_290_700_398e-1, 2.445_134_137_142_996, 3.754_408_661_907_416];
    let horner = |coefficients: &[f64], x: f64| coefficients.iter().fold(0.0, |sum, c| sum * x + c);
    let p = p.clamp(1e-12, 1.0 - 1e-12);
    if !(0.02425..=1.0 - 0.02425).contains(&p) {
        let q = (-2.0 * p.min(1.0 - p).ln()).sqrt();
        let x = horner(&C, q) / (horner(&D, q) * q + 1.0);
        return if p < 0.5 { x } else { -x };
    }
    let q = p - 0.5;
    let r = q * q;
    horner(&A, r) * q / (horner(&B, r) * r + 1.0)
}
