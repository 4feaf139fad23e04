use super::*;

/// The known answers for philox4x32-10 in Random123 (`kat_vectors`).
#[test]
fn philox_gives_the_known_answers() {
    assert_eq!(philox4x32_10([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
    assert_eq!(philox4x32_10([u32::MAX; 4], [u32::MAX; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
    assert_eq!(
        philox4x32_10([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
        [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
    );
}

#[test]
fn streams_of_other_seeds_purposes_and_steps_differ() {
    let base = Random::new(1, Purpose::Init, 0).words(7);
    assert_ne!(base, Random::new(2, Purpose::Init, 0).words(7));
    assert_ne!(base, Random::new(1, Purpose::Router, 0).words(7));
    assert_ne!(base, Random::new(1, Purpose::Init, 1 << 33).words(7));
    assert_eq!(base, Random::new(1, Purpose::Init, 0).words(7));
}

#[test]
fn moments_are_those_of_the_distribution() {
    let random = Random::new(3, Purpose::Test, 0);
    let count = 100_000_u64;
    let mean = |f: &dyn Fn(u64) -> f64| (0..count).map(f).sum::<f64>() / count as f64;
    assert!((mean(&|i| f64::from(random.uniform(i))) - 0.5).abs() < 0.005);
    assert!((mean(&|i| f64::from(random.coarse(i))) - 0.5).abs() < 0.005);
    assert!((mean(&|i| f64::from(random.coarse(i) * random.coarse(i + 1))) - 0.25).abs() < 0.005);
    assert!((mean(&|i| f64::from(random.byte(i))) - 127.5 / 256.0).abs() < 0.005);
    assert!((mean(&|i| f64::from(random.byte(i) * random.byte(i + 16))) - (127.5_f64 / 256.0).powi(2)).abs() < 0.005);
    assert!(mean(&|i| f64::from(random.normal(i))).abs() < 0.015);
    assert!((mean(&|i| f64::from(random.normal(i)).powi(2)) - 1.0).abs() < 0.02);
    assert!((0..count).all(|i| random.below(i, 10) < 10 && random.normal(i).is_finite()));
}

#[test]
fn normal_and_gumbel_numbers_are_those_of_the_formulas() {
    let random = Random::new(9, Purpose::Test, 4);
    for i in 0..20_000_u64 {
        let words = random.words(i / 2);
        let pair = if i % 2 == 0 { [words[0], words[1]] } else { [words[2], words[3]] };
        let [u, v] = pair.map(|word| f64::from(word >> 8) / 16_777_216.0);
        let expected = (-2.0 * (1.0 - u).ln()).sqrt() * (std::f64::consts::TAU * v).cos();
        assert!((f64::from(random.normal(i)) - expected).abs() < 4e-7, "normal {i}: {expected}");
        let u = f64::from(random.uniform(i)).max(2.0_f64.powi(-25));
        let (value, expected) = (f64::from(random.gumbel(i)), -(-u.ln()).ln());
        assert!((value - expected).abs() < 4e-7 * (1.0 + expected.abs()), "gumbel {i}: {value}, {expected}");
    }
    for u in [0.0, f32::EPSILON, 0.5, 1.0 - 2.0_f32.powi(-24)] {
        assert!(gumbel(u).is_finite(), "{u}");
    }
    let (low, high) = (-(25.0 * std::f64::consts::LN_2).ln(), 24.0 * std::f64::consts::LN_2);
    assert!(
        (f64::from(gumbel(0.0)) - low).abs() < 1e-6 && (f64::from(gumbel(1.0 - 2.0_f32.powi(-24))) - high).abs() < 1e-5
    );
    // The extreme inputs of normal numbers.
    assert!((0..=255).all(|i| box_muller(u32::MAX, i << 24).is_finite() && box_muller(0, i << 24) == 0.0));
}
