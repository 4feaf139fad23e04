//! Random numbers by the thousand, drawn with the vector instructions of the machine.

use moeworks_tensor::Random;

use crate::simd::kernel;

kernel! {
    /// Fills `numbers` with the numbers uniform in [0, 1) at `first` and the positions after it: those of
    /// [`Random::uniform`], whatever the instruction set.
    pub fn fill_uniform<S: Level>(random: &Random, first: u64, numbers: &mut [f32]) {
        random.fill_uniform(first, numbers);
    }
}

kernel! {
    /// As [`fill_uniform`] with the standard normal numbers of [`Random::normal`].
    pub fn fill_normals<S: Level>(random: &Random, first: u64, numbers: &mut [f32]) {
        random.fill_normal(first, numbers);
    }
}

kernel! {
    /// As [`fill_uniform`] with the standard Gumbel numbers of [`Random::gumbel`].
    pub fn fill_gumbels<S: Level>(random: &Random, first: u64, numbers: &mut [f32]) {
        random.fill_gumbel(first, numbers);
    }
}

kernel! {
    /// As [`fill_uniform`] with the numbers of [`Random::coarse`].
    pub fn fill_coarse<S: Level>(random: &Random, first: u64, numbers: &mut [f32]) {
        random.fill_coarse(first, numbers);
    }
}

kernel! {
    /// Fills `factors` with numbers uniform in `[1 - eps, 1 + eps]`: the middles of 256 even steps, by the numbers of
    /// [`Random::byte`] at `first` and the positions after it.
    pub fn fill_factors<S: Level>(random: &Random, first: u64, eps: f32, factors: &mut [f32]) {
        random.fill_bytes(first, factors);
        let lowest = 1.0 - eps + eps / 256.0;
        factors.iter_mut().for_each(|factor| *factor = lowest + 2.0 * eps * *factor);
    }
}

#[cfg(test)]
mod tests {
    use moeworks_tensor::{Purpose, Random};

    use super::{fill_coarse, fill_factors, fill_gumbels, fill_normals, fill_uniform};

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
