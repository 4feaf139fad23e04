use super::*;

/// The known answers that Random123 ships for philox4x32-10 (`kat_vectors`).
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
    assert!(mean(&|i| f64::from(random.normal(i))).abs() < 0.015);
    assert!((mean(&|i| f64::from(random.normal(i)).powi(2)) - 1.0).abs() < 0.02);
    assert!((0..count).all(|i| random.below(i, 10) < 10 && random.normal(i).is_finite()));
}
