use super::*;
use crate::Isa;
use crate::simd::kernel;

kernel! {
    fn exp_all<S: Level>(x: &mut [f32]) {
        for x in x {
            *x = exp::<S>(*x);
        }
    }
}

#[test]
fn exp_is_close_to_the_exact_value_everywhere() {
    let inputs: Vec<f32> = (-8733..=8872).flat_map(|i| [i as f32 * 0.01, i as f32 * 0.001, i as f32 * 1e-5]).collect();
    for isa in Isa::available() {
        let mut y = inputs.clone();
        exp_all(isa, &mut y);
        for (&x, &y) in inputs.iter().zip(&y) {
            let exact = f64::from(x).exp();
            assert!((f64::from(y) / exact - 1.0).abs() < 2.4e-7, "{isa:?}: exp({x}) = {y}, exactly {exact}");
        }
    }
}

#[test]
fn exp_of_extremes() {
    for isa in Isa::available() {
        let mut y =
            [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1e30, -1e30, -87.4, 88.73, f32::MIN_POSITIVE];
        exp_all(isa, &mut y);
        assert_eq!(y[..4], [1.0, 1.0, f32::INFINITY, 0.0]);
        assert!(y[4].is_nan());
        assert_eq!(y[5..], [f32::INFINITY, 0.0, 0.0, f32::INFINITY, 1.0]);
    }
}

kernel! {
    fn ln_all<S: Level>(x: &mut [f32]) {
        for x in x {
            *x = ln::<S>(*x);
        }
    }
}

#[test]
fn ln_is_close_to_the_exact_value_everywhere() {
    let near_one = (-1000..=1000).map(|i| 1.0 + i as f32 * f32::EPSILON);
    let inputs = (0x80_0000..f32::INFINITY.to_bits()).step_by(9_973).map(f32::from_bits).chain(near_one);
    let inputs: Vec<f32> = inputs.collect();
    for isa in Isa::available() {
        let mut y = inputs.clone();
        ln_all(isa, &mut y);
        for (&x, &y) in inputs.iter().zip(&y) {
            let exact = f64::from(x).ln();
            assert!((f64::from(y) - exact).abs() <= 3e-7 * exact.abs(), "{isa:?}: ln({x}) = {y}, exactly {exact}");
        }
    }
}

#[test]
fn ln_of_extremes() {
    for isa in Isa::available() {
        let mut y = [1.0, 0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, -1.0, f32::NAN];
        ln_all(isa, &mut y);
        assert_eq!(y[..4], [0.0, f32::NEG_INFINITY, f32::NEG_INFINITY, f32::INFINITY]);
        assert!(y[4..].iter().all(|y| y.is_nan()));
    }
}

kernel! {
    fn normal_all<S: Level>(x: &[f32], cdf: &mut [f32], pdf: &mut [f32]) {
        for ((&x, cdf), pdf) in x.iter().zip(cdf).zip(pdf) {
            (*cdf, *pdf) = normal::<S>(x);
        }
    }
}

#[test]
fn the_normal_distribution_matches_its_integral() {
    // Simpson's rule over the density from 0.
    let density = |x: f64| (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt();
    let (step, mut integral, mut inputs, mut expected) = (1e-3, 0.5, Vec::new(), Vec::new());
    for i in 0..8_000 {
        let x = f64::from(i) * step;
        inputs.extend([x as f32, -x as f32]);
        expected.extend([integral, 1.0 - integral]);
        integral += step / 6.0 * (density(x) + 4.0 * density(x + step / 2.0) + density(x + step));
    }
    for isa in Isa::available() {
        let (mut cdf, mut pdf) = (vec![0.0; inputs.len()], vec![0.0; inputs.len()]);
        normal_all(isa, &inputs, &mut cdf, &mut pdf);
        for (i, &x) in inputs.iter().enumerate() {
            assert!((f64::from(cdf[i]) - expected[i]).abs() < 3e-7, "{isa:?}: cdf({x}) = {}", cdf[i]);
            assert!((f64::from(pdf[i]) - density(f64::from(x))).abs() < 3e-7, "{isa:?}: pdf({x}) = {}", pdf[i]);
        }
    }
}

#[test]
fn sigmoid_and_normal_keep_infinities_and_nan() {
    type S = crate::simd::Baseline;
    assert_eq!([sigmoid::<S>(f32::INFINITY), sigmoid::<S>(f32::NEG_INFINITY), sigmoid::<S>(0.0)], [1.0, 0.0, 0.5]);
    assert_eq!([normal::<S>(f32::INFINITY).0, normal::<S>(f32::NEG_INFINITY).0], [1.0, 0.0]);
    assert!(sigmoid::<S>(f32::NAN).is_nan() && normal::<S>(f32::NAN).0.is_nan());
}

kernel! {
    fn tanh_all<S: Level>(x: &mut [f32]) {
        for x in x {
            *x = tanh::<S>(*x);
        }
    }
}

#[test]
fn tanh_is_close_to_the_exact_value_everywhere() {
    let inputs: Vec<f32> = (-3000..=3000).flat_map(|i| [i as f32 * 0.01, i as f32 * 3e-4, i as f32 * 1e-7]).collect();
    for isa in Isa::available() {
        let mut y = inputs.clone();
        tanh_all(isa, &mut y);
        for (&x, &y) in inputs.iter().zip(&y) {
            let exact = f64::from(x).tanh();
            let error = (f64::from(y) - exact).abs();
            assert!(error <= 6e-7 * exact.abs(), "{isa:?}: tanh({x}) = {y}, exactly {exact}");
        }
    }
    let mut extremes = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1e30];
    tanh_all(Isa::detect(), &mut extremes);
    assert_eq!([extremes[0], extremes[1], extremes[3]], [1.0, -1.0, 1.0]);
    assert!(extremes[2].is_nan());
}

kernel! {
    fn exp2_all<S: Level>(x: &mut [f32]) {
        for x in x {
            *x = exp2_falling::<S>(*x);
        }
    }
}

kernel! {
    /// Computes powers of two with the instruction set's own function, for f32 or as precise as bf16 needs.
    fn exp2_by_sixteen<S: Level>(x: &mut [f32], is_for_bf16: bool) {
        for x in x.as_chunks_mut().0 {
            *x = if is_for_bf16 { S::exp2_falling_for_bf16(*x) } else { S::exp2_falling(*x) };
        }
    }
}

#[test]
fn exp2_of_numbers_up_to_zero_is_close_to_the_exact_value() {
    let all = |i: i32| [i as f32 * -0.01, i as f32 * -0.001, i as f32 * -1e-5];
    let mut inputs: Vec<f32> = (0..=12500).flat_map(all).collect();
    inputs.resize(inputs.len().next_multiple_of(16), -125.0);
    let mut extremes = [0.0, -0.0, f32::NEG_INFINITY, -125.1, f32::NAN, f32::from_bits(0x7fc0_0001)].to_vec();
    extremes.resize(16, f32::MIN);
    for isa in Isa::available() {
        type Way<'a> = (f64, &'a dyn Fn(&mut [f32]));
        let ways: [Way<'_>; 3] = [
            (2.4e-7, &|x| exp2_all(isa, x)),
            (2.4e-7, &|x| exp2_by_sixteen(isa, x, false)),
            (3e-6, &|x| exp2_by_sixteen(isa, x, true)),
        ];
        for (tolerance, exp2) in ways {
            let mut y = inputs.clone();
            exp2(&mut y);
            for (&x, &y) in inputs.iter().zip(&y) {
                let exact = f64::from(x).exp2();
                assert!((f64::from(y) / exact - 1.0).abs() < tolerance, "{isa:?}: exp2({x}) = {y}, exactly {exact}");
            }
            let mut y = extremes.clone();
            exp2(&mut y);
            assert_eq!(y[..4], [1.0, 1.0, 0.0, 0.0]);
            assert!(y[4].is_nan() && y[5].is_nan() && y[6..].iter().all(|&y| y == 0.0));
        }
    }
}
