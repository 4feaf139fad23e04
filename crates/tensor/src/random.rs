//! Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC
//! 2011).
//!
//! A value depends only on (seed, purpose, step, position). Results thus do not depend on the order in which threads
//! or ranks draw, and a resumed run draws what the uninterrupted one would have.

/// The purpose of random numbers. Two purposes never share a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Purpose {
    /// Initial weights.
    Init = 1,
    /// The order of training windows.
    DataOrder = 2,
    /// Multiplicative noise on router inputs, and other routing noise.
    Router = 3,
    /// Sampling of generated tokens.
    Sampling = 4,
    /// Tests and benchmarks.
    Test = 5,
    /// The spans to leave out of a text.
    Spans = 6,
}

/// The number of generator calls that are computed together.
const LANES: usize = 16;

/// The count of numbers of `bits` bits in the words of [`LANES`] calls.
const fn group_len(bits: u32) -> usize {
    LANES * 4 * 32 / bits as usize
}

/// A stream of random numbers addressed by position.
#[derive(Clone, Copy, Debug)]
pub struct Random {
    key: [u32; 2],
    stream: [u32; 2],
}

impl Random {
    /// Returns the stream of `seed` for `purpose` at `step`, which must be below 2^56.
    #[must_use]
    pub fn new(seed: u64, purpose: Purpose, step: u64) -> Self {
        let high = ((step >> 32) as u32 & 0x00ff_ffff) | (u32::from(purpose as u8) << 24);
        Self { key: [seed as u32, (seed >> 32) as u32], stream: [step as u32, high] }
    }

    /// Returns the state for a generator elsewhere: the key, and the upper half of the counter. The lower half is the
    /// position.
    #[must_use]
    pub fn key_and_stream(&self) -> [u32; 4] {
        [self.key[0], self.key[1], self.stream[0], self.stream[1]]
    }

    /// Returns four random words at `position`.
    #[must_use]
    pub fn words(&self, position: u64) -> [u32; 4] {
        let counter = [position as u32, (position >> 32) as u32, self.stream[0], self.stream[1]];
        philox4x32_10(counter, self.key)
    }

    /// Returns a number uniform in [0, 1) at `position`, on a grid of 2^-24.
    #[must_use]
    pub fn uniform(&self, position: u64) -> f32 {
        unit(self.words(position / 4)[(position % 4) as usize])
    }

    /// Fills `numbers` with [`uniform`](Self::uniform) at `first` and the positions after it, many at a time. Inlined
    /// into a caller compiled for vector instructions, it takes a tenth of the time.
    #[inline(always)]
    pub fn fill_uniform(&self, first: u64, numbers: &mut [f32]) {
        let head = (first.wrapping_neg() % 4).min(numbers.len() as u64);
        let (start, rest) = numbers.split_at_mut(head as usize);
        start.iter_mut().zip(first..).for_each(|(number, position)| *number = self.uniform(position));
        let mut position = (first + head) / 4;
        let mut blocks = rest.chunks_exact_mut(4 * LANES);
        for block in &mut blocks {
            let words = self.words_of::<LANES>(position);
            for (lane, numbers) in block.chunks_exact_mut(4).enumerate() {
                numbers.iter_mut().zip(&words).for_each(|(number, words)| *number = unit(words[lane]));
            }
            position += LANES as u64;
        }
        let rest = blocks.into_remainder();
        rest.iter_mut().zip(4 * position..).for_each(|(number, position)| *number = self.uniform(position));
    }

    /// Returns a number uniform in [0, 1) at `position`, on a grid of 2^-16. Eight share a call of the generator,
    /// instead of four for [`uniform`](Self::uniform), for large amounts of undemanding noise.
    #[must_use]
    pub fn coarse(&self, position: u64) -> f32 {
        self.part::<16>(position)
    }

    /// Returns a number uniform in [0, 1) at `position`, on a grid of 2^-8. Sixteen share a call of the generator.
    #[must_use]
    pub fn byte(&self, position: u64) -> f32 {
        self.part::<8>(position)
    }

    /// Fills `numbers` with [`coarse`](Self::coarse) at `first` and the positions after it, like
    /// [`fill_uniform`](Self::fill_uniform).
    #[inline(always)]
    pub fn fill_coarse(&self, first: u64, numbers: &mut [f32]) {
        self.fill_parts::<16>(first, numbers);
    }

    /// Fills `numbers` with [`byte`](Self::byte) at `first` and the positions after it.
    #[inline(always)]
    pub fn fill_bytes(&self, first: u64, numbers: &mut [f32]) {
        self.fill_parts::<8>(first, numbers);
    }

    /// Returns the number at `position`: `BITS` bits of a word over `2^BITS`. Sixteen generator calls make a group of
    /// numbers: the lowest bits of all their words in order, then the next bits, so that consecutive numbers are one
    /// operation on a vector of words.
    fn part<const BITS: u32>(&self, position: u64) -> f32 {
        let group = const { group_len(BITS) as u64 };
        let (part, at) = (position % group / (4 * LANES as u64), position / LANES as u64 % 4);
        let words = self.words(position / group * LANES as u64 + position % LANES as u64);
        part_unit::<BITS>(words[at as usize] >> (part as u32 * BITS))
    }

    #[inline(always)]
    fn fill_parts<const BITS: u32>(&self, first: u64, numbers: &mut [f32]) {
        let group = const { group_len(BITS) };
        let mut position = first;
        let mut left = numbers;
        while !left.is_empty() {
            let skipped = (position % group as u64) as usize;
            let (now, later) = left.split_at_mut((group - skipped).min(left.len()));
            let mut drawn = [0.0; group_len(8)];
            let mut words = self.words_of::<LANES>(position / group as u64 * LANES as u64);
            let words = words.as_flattened_mut();
            for numbers in drawn[..group].chunks_exact_mut(words.len()) {
                for (number, word) in numbers.iter_mut().zip(words.iter_mut()) {
                    *number = part_unit::<BITS>(*word);
                    *word >>= BITS;
                }
            }
            now.copy_from_slice(&drawn[skipped..skipped + now.len()]);
            position += now.len() as u64;
            left = later;
        }
    }

    /// Returns the words at `first` and the positions after it; word w of the i-th is at `[w][i]`.
    #[inline(always)]
    fn words_of<const N: usize>(&self, first: u64) -> [[u32; N]; 4] {
        let (mut low, mut high) = ([0; N], [0; N]);
        for ((low, high), position) in low.iter_mut().zip(&mut high).zip(first..) {
            (*low, *high) = (position as u32, (position >> 32) as u32);
        }
        let mut counter = [low, high, [self.stream[0]; N], [self.stream[1]; N]];
        let mut key = self.key;
        for _ in 0..10 {
            let mut next = [[0; N]; 4];
            for lane in 0..N {
                let left = u64::from(counter[0][lane]) * 0xD251_1F53;
                let right = u64::from(counter[2][lane]) * 0xCD9E_8D57;
                next[0][lane] = (right >> 32) as u32 ^ counter[1][lane] ^ key[0];
                next[1][lane] = right as u32;
                next[2][lane] = (left >> 32) as u32 ^ counter[3][lane] ^ key[1];
                next[3][lane] = left as u32;
            }
            counter = next;
            key = next_key(key);
        }
        counter
    }

    /// Returns a standard normal number at `position` (Box-Muller).
    #[must_use]
    pub fn normal(&self, position: u64) -> f32 {
        let words = self.words(position / 2);
        let pair = if position.is_multiple_of(2) { [words[0], words[1]] } else { [words[2], words[3]] };
        box_muller(pair[0], pair[1])
    }

    /// Fills `numbers` with [`normal`](Self::normal) at `first` and the positions after it, like
    /// [`fill_uniform`](Self::fill_uniform).
    #[inline(always)]
    pub fn fill_normal(&self, first: u64, numbers: &mut [f32]) {
        let head = (first % 2).min(numbers.len() as u64);
        let (start, rest) = numbers.split_at_mut(head as usize);
        start.iter_mut().zip(first..).for_each(|(number, position)| *number = self.normal(position));
        let mut position = (first + head) / 2;
        let mut blocks = rest.chunks_exact_mut(2 * LANES);
        for block in &mut blocks {
            let words = self.words_of::<LANES>(position);
            let mut pairs = [[0.0; LANES]; 2];
            for (numbers, words) in pairs.iter_mut().zip(words.chunks_exact(2)) {
                for (lane, number) in numbers.iter_mut().enumerate() {
                    *number = box_muller(words[0][lane], words[1][lane]);
                }
            }
            for (lane, numbers) in block.chunks_exact_mut(2).enumerate() {
                numbers.iter_mut().zip(&pairs).for_each(|(number, half)| *number = half[lane]);
            }
            position += LANES as u64;
        }
        let rest = blocks.into_remainder();
        rest.iter_mut().zip(2 * position..).for_each(|(number, position)| *number = self.normal(position));
    }

    /// Returns a standard Gumbel number at `position`: `-ln(-ln u)` of the uniform number u there. A u of 0 counts as
    /// half of the smallest positive one, so that the result is finite.
    #[must_use]
    pub fn gumbel(&self, position: u64) -> f32 {
        gumbel(self.uniform(position))
    }

    /// Fills `numbers` with [`gumbel`](Self::gumbel), like [`fill_uniform`](Self::fill_uniform).
    #[inline(always)]
    pub fn fill_gumbel(&self, first: u64, numbers: &mut [f32]) {
        self.fill_uniform(first, numbers);
        numbers.iter_mut().for_each(|number| *number = gumbel(*number));
    }

    /// Returns an integer uniform in [0, bound) at `position`. `bound` must not be 0.
    #[must_use]
    pub fn below(&self, position: u64, bound: u64) -> u64 {
        let [low, high, ..] = self.words(position);
        let word = u128::from(low) | (u128::from(high) << 32);
        ((word * u128::from(bound)) >> 64) as u64
    }
}

fn unit(word: u32) -> f32 {
    (word >> 8) as f32 * (1.0 / 16_777_216.0)
}

#[inline(always)]
fn part_unit<const BITS: u32>(word: u32) -> f32 {
    (word & ((1 << BITS) - 1)) as i32 as f32 * const { 1.0 / (1_u32 << BITS) as f32 }
}

/// Computes a normal number from two random words.
#[inline(always)]
fn box_muller(radius: u32, angle: u32) -> f32 {
    ((-2.0 * ln(1.0 - unit(radius))).sqrt() * cos_of_turns(unit(angle))) as f32
}

#[inline(always)]
fn gumbel(uniform: f32) -> f32 {
    const HALF_STEP: f32 = 1.0 / 33_554_432.0;
    let u = if uniform > HALF_STEP { uniform } else { HALF_STEP };
    -ln(-ln(u) as f32) as f32
}

/// Computes the natural logarithm of a normal `x` above 0 with a relative error of 1e-15. It has no branches and
/// calls, so that loops over it are vectorised with the same bits.
#[inline(always)]
fn ln(x: f32) -> f64 {
    const ROOT_HALF: u32 = 0x3f35_04f3;
    // x = 2^k m with m from the root of 1/2 to that of 2.
    let k = (x.to_bits().wrapping_sub(ROOT_HALF) as i32) >> 23;
    let m = f64::from(f32::from_bits(x.to_bits().wrapping_sub((k << 23) as u32)));
    // ln m = 2 artanh((m - 1) / (m + 1)), whose argument is below 0.172.
    let s = (m - 1.0) / (m + 1.0);
    let z = s * s;
    let mut p = 1.0 / 17.0;
    for power in [15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0] {
        p = p * z + 1.0 / power;
    }
    f64::from(k) * std::f64::consts::LN_2 + 2.0 * s * (p * z + 1.0)
}

/// Computes `cos(2 pi x)` for x in [0, 1], with an error below 1e-13.
#[inline(always)]
fn cos_of_turns(x: f32) -> f64 {
    // cos(2 pi x) = -sin(y) with y of at most a quarter turn, by its series.
    let y = std::f64::consts::TAU * (0.25 - (f64::from(x) - 0.5).abs());
    let z = y * y;
    let mut p = 1.0;
    for n in [16.0, 14.0, 12.0, 10.0, 8.0, 6.0, 4.0, 2.0] {
        p = 1.0 - p * z * (1.0 / (n * (n + 1.0)));
    }
    -y * p
}

#[inline(always)]
fn next_key(key: [u32; 2]) -> [u32; 2] {
    [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)]
}

fn philox4x32_10(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let left = u64::from(counter[0]) * 0xD251_1F53;
        let right = u64::from(counter[2]) * 0xCD9E_8D57;
        counter = [
            (right >> 32) as u32 ^ counter[1] ^ key[0],
            right as u32,
            (left >> 32) as u32 ^ counter[3] ^ key[1],
            left as u32,
        ];
        key = next_key(key);
    }
    counter
}

#[cfg(test)]
#[path = "random_tests.rs"]
mod tests;
