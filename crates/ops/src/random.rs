//! Bulk random numbers, drawn with the vector instructions of the machine.

use moeworks_tensor::{Random, Tensor};

use crate::Context;
use crate::cuda::{self, On};
use crate::simd::kernel;

/// Random factors of elements: noise and dropout.
#[derive(Clone, Copy)]
pub struct Factors {
    /// The source of the random numbers.
    pub random: Random,
    /// The width of the noise, as in [`fill_factors`]; 0 for none.
    pub eps: f32,
    /// The share of elements that are dropped by the numbers of [`Random::coarse`]; the others are scaled up to
    /// compensate.
    pub dropout: f32,
    /// The positions of the first element's number for noise and for dropout, equal modulo 256.
    pub first: (u64, u64),
}

/// Multiplies the elements of `x` (f32 or bf16) by their factors, on a GPU; the result is f32. Returns none without a
/// GPU: the caller then draws the factors and multiplies.
#[must_use]
pub fn times_factors(ctx: &Context, x: &Tensor, factors: &Factors) -> Option<Tensor> {
    assert_eq!(factors.first.0 % 256, factors.first.1 % 256, "positions of factors");
    On::taking(ctx, &[x.dtype()]).map(|on| cuda::elementwise::times_factors(on, x, factors))
}

kernel! {
    /// Fills `numbers` with the numbers of [`Random::uniform`], in [0, 1), at `first` and the positions after it. All
    /// instruction sets give the same numbers.
    pub fn fill_uniform<S: Level>(random: &Random, first: u64, numbers: &mut [f32]) {
        random.fill_uniform(first, numbers);
    }
}

kernel! {
    /// Fills `numbers` like [`fill_uniform`], with the standard normal numbers of [`Random::normal`].
    pub fn fill_normals<S: Level>(random: &Random, first: u64, numbers: &mut [f32]) {
        random.fill_normal(first, numbers);
    }
}

kernel! {
    /// Fills `numbers` like [`fill_uniform`], with the standard Gumbel numbers of [`Random::gumbel`].
    pub fn fill_gumbels<S: Level>(random: &Random, first: u64, numbers: &mut [f32]) {
        random.fill_gumbel(first, numbers);
    }
}

kernel! {
    /// Fills `numbers` like [`fill_uniform`], with the numbers of [`Random::coarse`].
    pub fn fill_coarse<S: Level>(random: &Random, first: u64, numbers: &mut [f32]) {
        random.fill_coarse(first, numbers);
    }
}

kernel! {
    /// Fills `factors` with numbers uniform in `[1 - eps, 1 + eps]`: the middles of 256 even steps, chosen by the
    /// numbers of [`Random::byte`] at `first` and the positions after it.
    pub fn fill_factors<S: Level>(random: &Random, first: u64, eps: f32, factors: &mut [f32]) {
        random.fill_bytes(first, factors);
        let lowest = 1.0 - eps + eps / 256.0;
        factors.iter_mut().for_each(|factor| *factor = lowest + 2.0 * eps * *factor);
    }
}

#[cfg(test)]
mod tests {
    use moeworks_tensor::{DType, Purpose, Random};

    use super::{Factors, times_factors};
    use super::{fill_coarse, fill_factors, fill_gumbels, fill_normals, fill_uniform};

    #[test]
    fn factors_on_a_gpu_are_those_of_one_number_at_a_time() {
        let random = Random::new(0xfedc_ba98_7654_3210, Purpose::Test, 3);
        let x = crate::test_data::numbers(700, 1);
        for (ctx, dtype) in crate::test_data::gpus().flat_map(|ctx| [(ctx.clone(), DType::F32), (ctx, DType::BF16)]) {
            let x = crate::test_data::tensor(&ctx, &[7, 100], &x, dtype);
            for (first, eps, dropout) in [(0, 0.01, 0.0), (5, 0.0, 0.3), ((1 << 33) + 253, 0.25, 0.5)] {
                let far = first + (1 << 48);
                let factors = Factors { random, eps, dropout, first: (first, far) };
                let y = times_factors(&ctx, &x, &factors).expect("a GPU");
                for (i, (y, x)) in y.to_f32_vec().into_iter().zip(x.to_f32_vec()).enumerate() {
                    let mut factor = 1.0 - eps + eps / 256.0 + 2.0 * eps * random.byte(first + i as u64);
                    if dropout > 0.0 {
                        factor *= if random.coarse(far + i as u64) >= dropout { 1.0 / (1.0 - dropout) } else { 0.0 };
                    }
                    assert!((y - x * factor).abs() <= 1e-6 * x.abs(), "element {i} of {first}: {y}, {x} {factor}");
                }
            }
        }
    }

    #[test]
    fn many_numbers_are_those_of_one_at_a_time() {
        let random = Random::new(0x1234_5678_9abc, Purpose::Test, 1 << 40);
        for isa in crate::Isa::available() {
            for (first, count) in
                [(0, 200), (1, 67), (3, 1), (2, 1), (7, 64), (8, 0), ((1 << 48) + 5, 131), ((1 << 34) - 9, 800)]
            {
                let mut numbers = vec![0.0; count];
                let mut check = |fill: fn(crate::Isa, &Random, u64, &mut [f32]), one: fn(&Random, u64) -> f32| {
                    fill(isa, &random, first, &mut numbers);
                    let expected: Vec<f32> = (first..).take(count).map(|position| one(&random, position)).collect();
                    assert_eq!(numbers, expected, "{isa:?}, {count} from {first}");
                };
                check(fill_uniform, Random::uniform);
                check(fill_coarse, Random::coarse);
                check(fill_normals, Random::normal);
                check(fill_gumbels, Random::gumbel);
                check(
                    |isa, random, first, numbers| fill_factors(isa, random, first, 0.25, numbers),
                    |random, position| 0.75 + 0.25 / 256.0 + 0.5 * random.byte(position),
                );
            }
        }
    }
}
