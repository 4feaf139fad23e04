//! How likely tokens are, relative to the most likely one.

use crate::Isa;
use crate::simd::{LANES, kernel};
use crate::vmath::exp;

/// `exp((l - max) / temperature)` of every logit, in f32; 0 for what is not a number. `temperature` is above 0. If the largest
/// logit is infinite, it alone has weight 1, and so have its equals.
#[must_use]
pub fn relative_weights(isa: Isa, logits: &[f32], temperature: f32) -> Vec<f32> {
    let max = largest(isa, logits);
    if max == f32::INFINITY {
        return logits.iter().map(|&logit| if logit == max { 1.0 } else { 0.0 }).collect();
    }
    let mut weights = vec![0.0; logits.len()];
    weights_kernel(isa, logits, (max, temperature), &mut weights);
    weights
}

kernel! {
    /// The largest element; what is not a number is none.
    fn largest<S: Level>(values: &[f32]) -> f32 {
        let mut most = [f32::NEG_INFINITY; LANES];
        let (blocks, rest) = values.as_chunks::<LANES>();
        for block in blocks {
            for (most, &value) in most.iter_mut().zip(block) {
                *most = if value > *most { value } else { *most };
            }
        }
        most.iter().chain(rest).fold(f32::NEG_INFINITY, |most, &value| if value > most { value } else { most })
    }
}

kernel! {
    fn weights_kernel<S: Level>(logits: &[f32], of: (f32, f32), weights: &mut [f32]) {
        let (max, temperature) = of;
        for (weight, &logit) in weights.iter_mut().zip(logits) {
            let relative = exp::<S>((logit - max) / temperature);
            *weight = if logit > f32::NEG_INFINITY { relative } else { 0.0 };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_those_of_f64_in_every_instruction_set() {
        let logits: Vec<f32> = (0..1003).map(|i| (i * 7919 % 1003) as f32 * 0.11 - 60.0).collect();
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        for isa in Isa::available() {
            for temperature in [0.3_f32, 1.0, 2.5] {
                let weights = relative_weights(isa, &logits, temperature);
                for (&logit, weight) in logits.iter().zip(weights) {
                    let exact = ((f64::from(logit) - f64::from(max)) / f64::from(temperature)).exp();
                    assert!(
                        (f64::from(weight) - exact).abs() <= 3e-5 * exact + 1e-37,
                        "{isa:?}: {logit} at {temperature}"
                    );
                }
            }
        }
    }

    #[test]
    fn what_is_no_number_has_no_weight_and_the_infinite_all() {
        for isa in Isa::available() {
            let bad = [f32::NAN, 0.0, f32::NEG_INFINITY, 0.0, f32::NAN];
            assert_eq!(relative_weights(isa, &bad, 1.0), [0.0, 1.0, 0.0, 1.0, 0.0]);
            assert_eq!(relative_weights(isa, &[3.0, f32::INFINITY, f32::NAN], 1.0), [0.0, 1.0, 0.0]);
            assert_eq!(relative_weights(isa, &[f32::NAN; 20], 1.0), [0.0; 20]);
            assert_eq!(relative_weights(isa, &[3.0, 2.0], 1e-40), [1.0, 0.0]);
            assert!(relative_weights(isa, &[], 1.0).is_empty());
        }
    }
}
