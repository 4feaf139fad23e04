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
