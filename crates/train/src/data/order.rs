//! A pseudo-random order that can be asked for any position at once.
//!
//! A Feistel network permutes the numbers of `2 h` bits; walking along its cycle until a number below `n` comes makes a
//! permutation of `0..n` of it (Black & Rogaway, "Ciphers with arbitrary finite domains", 2002). Nothing is stored, so the
//! order of a billion windows costs no memory and a resumed run no time.

use moeworks_tensor::{Purpose, Random};

/// Four would do for large sizes (Luby & Rackoff); small ones mix better with more.
const ROUNDS: u64 = 8;

/// A permutation of `0..size`, given by (seed, stream).
#[derive(Clone, Copy, Debug)]
pub struct Permutation {
    size: u64,
    half_bits: u32,
    random: Random,
}

impl Permutation {
    /// The permutation of `0..size` that belongs to `seed` and `stream`, such as an epoch, below 2^56.
    #[must_use]
    pub fn new(size: u64, seed: u64, stream: u64) -> Self {
        let bits = u64::BITS - size.saturating_sub(1).leading_zeros();
        Self { size, half_bits: bits.div_ceil(2).max(1), random: Random::new(seed, Purpose::DataOrder, stream) }
    }

    /// Where `position`, below the size, goes.
    ///
    /// # Panics
    /// If `position` is not below the size.
    #[must_use]
    pub fn at(&self, position: u64) -> u64 {
        assert!(position < self.size, "position {position} in a permutation of {}", self.size);
        let mut value = self.feistel(position);
        while value >= self.size {
            value = self.feistel(value);
        }
        value
    }

    fn feistel(&self, value: u64) -> u64 {
        let mask = (1u64 << self.half_bits) - 1;
        let (mut left, mut right) = (value >> self.half_bits, value & mask);
        for round in 0..ROUNDS {
            let mixed = u64::from(self.random.words((round << 32) | right)[0]);
            (left, right) = (right, left ^ (mixed & mask));
        }
        (left << self.half_bits) | right
    }
}

#[cfg(test)]
#[path = "order_tests.rs"]
mod tests;
