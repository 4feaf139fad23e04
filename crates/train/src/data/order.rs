//! A pseudo-random permutation with random access.
//!
//! A Feistel network permutes the numbers of `2 h` bits. Following its cycle until a number below `n` appears gives a
//! permutation of `0..n` (Black & Rogaway, "Ciphers with arbitrary finite domains", 2002). Nothing is stored, so that
//! the order of a billion windows needs no memory, and a resumed run no time.

use moeworks_tensor::{Purpose, Random};

/// The rounds of the network. Four suffice for large sizes (Luby & Rackoff); small ones mix better with more.
const ROUNDS: u64 = 8;

/// A permutation of `0..size`, given by (seed, stream).
#[derive(Clone, Copy, Debug)]
pub struct Permutation {
    size: u64,
    half_bits: u32,
    random: Random,
}

impl Permutation {
    /// Creates the permutation of `0..size` for `seed` and `stream`, such as an epoch; the stream must be below 2^56.
    #[must_use]
    pub fn new(size: u64, seed: u64, stream: u64) -> Self {
        let bits = u64::BITS - size.saturating_sub(1).leading_zeros();
        Self { size, half_bits: bits.div_ceil(2).max(1), random: Random::new(seed, Purpose::DataOrder, stream) }
    }

    /// Returns the value at `position`.
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
