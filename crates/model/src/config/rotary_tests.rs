use super::*;

fn rotary(scaling: RopeScaling) -> Rotary {
    Rotary { scaling, ..Rotary::default() }
}

fn assert_close(found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!((found / expected - 1.0).abs() < 1e-6, "{found}, expected {expected}");
    }
}

/// Values of `_compute_llama3_parameters` for head width 8, base 10000.
#[test]
fn llama3_divides_low_frequencies_and_keeps_high_ones() {
    let scaling = RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_len: 256 };
    let (frequencies, amplitude) = rotary(scaling).frequencies(8, 10_000.0, 1);
    // Turns in the original context: 40.7, 4.07, 0.41, 0.04.
    assert_close(&frequencies, &[1.0, 0.1, 0.01 / 8.0, 0.001 / 8.0]);
    assert_eq!(amplitude, 1.0);
}

#[test]
fn yarn_ramps_between_division_and_none_and_raises_the_amplitude() {
    let yarn = |truncate, mscale: Option<f64>| RopeScaling::Yarn {
        factor: 4.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original_len: 4096,
        truncate,
        attention_factor: None,
        mscale,
        mscale_all_dim: mscale,
    };
    let (frequencies, amplitude) = rotary(yarn(true, None)).frequencies(16, 10_000.0, 1);
    // 32 turns at frequency 2.6 and 1 turn at 5.6 of 8, rounded outwards to 2 and 6.
    let plain = default_frequencies(16, 10_000.0);
    let divided = [0.0, 0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0];
    let expected: Vec<f64> =
        plain.iter().zip(divided).map(|(f, divided)| f * (divided / 4.0 + 1.0 - divided)).collect();
    assert_close(&frequencies, &expected);
    assert!((amplitude - (0.1 * 4.0_f64.ln() + 1.0)).abs() < 1e-12);
    let with_mscale = yarn(false, Some(0.7));
    assert_eq!(with_mscale.yarn_amplitude(), 1.0);
    assert!((with_mscale.score_factor() - (0.07 * 4.0_f64.ln() + 1.0).powi(2)).abs() < 1e-12);
}

#[test]
fn long_sequences_get_the_long_factors() {
    let scaling = RopeScaling::LongRope {
        short_factor: vec![1.0, 2.0],
        long_factor: vec![10.0, 20.0],
        short_amplitude: 1.1,
        long_amplitude: 1.3,
        original_len: 8,
    };
    let rotary = rotary(scaling);
    assert_eq!(rotary.frequencies(4, 100.0, 8), (vec![1.0, 0.05], 1.1));
    assert_eq!(rotary.frequencies(4, 100.0, 9), (vec![0.1, 0.005], 1.3));
    assert!(rotary.validate(4).is_ok() && rotary.validate(6).is_err());
}

#[test]
fn numbers_that_no_scaling_has_are_refused() {
    for factor in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let error = rotary(RopeScaling::Linear { factor }).validate(8).unwrap_err();
        assert_eq!(error.setting, "variant.rotary.scaling");
    }
    let crossed = RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 4.0, high_freq_factor: 4.0, original_len: 256 };
    assert!(rotary(crossed).validate(8).is_err());
    assert!(Rotary { dim: 3, ..Rotary::default() }.validate(8).is_err());
    assert!(Rotary { dim: 10, ..Rotary::default() }.validate(8).is_err());
}
