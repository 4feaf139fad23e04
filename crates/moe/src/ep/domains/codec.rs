//! Encoding of the largest of many numbers: their places as gaps in a Rice code, their values in two bits or in half
//! precision.
//!
//! A message is of one length whatever the numbers are, so that no rank has to tell another how much it sends: for K
//! places among N a Rice code with parameter r takes at most `K (r + 1) + N / 2^r` bits.

use moeworks_tensor::f16;

/// The form of the values that travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Values {
    /// A sign, and one bit for the smaller or the larger of two magnitudes that are sent beside them. For differences
    /// of which the rest is made up for later.
    Levels,
    /// Half precision, as a share of the largest magnitude.
    Half,
}

/// The encoding of the largest numbers of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Codec {
    num: usize,
    kept: usize,
    /// r: the bits of a gap that are written as they are.
    rice: u32,
    values: Values,
}

/// Returns the most bits that `kept` ascending places among `num` take.
fn place_bits(num: usize, kept: usize, rice: u32) -> usize {
    kept * (rice as usize + 1) + (num >> rice)
}

impl Codec {
    /// Makes the encoding of `num` numbers of which the share `keep` travels, at least one.
    pub(super) fn new(num: usize, keep: f64, values: Values) -> Self {
        let kept = ((num as f64 * keep).ceil() as usize).clamp(num.min(1), num);
        let rice = (0..24).min_by_key(|&rice| place_bits(num, kept, rice)).unwrap_or(0);
        Self { num, kept, rice, values }
    }

    fn header_bytes(&self) -> usize {
        match self.values {
            Values::Levels => 8,
            Values::Half => 4,
        }
    }

    fn value_bits(&self) -> usize {
        match self.values {
            Values::Levels => 2,
            Values::Half => 16,
        }
    }

    /// Returns the bytes of a message.
    pub(super) fn bytes(&self) -> usize {
        let bits = self.kept * self.value_bits() + place_bits(self.num, self.kept, self.rice);
        if self.num == 0 { 0 } else { self.header_bytes() + bits.div_ceil(8) }
    }

    /// Encodes the largest of `numbers`. Of equal magnitudes the first are taken. NaN is larger than all numbers, so
    /// that a fault stays visible.
    pub(super) fn encode(&self, numbers: &[f32], out: &mut [u8]) {
        let places = largest(numbers, self.kept);
        if places.is_empty() {
            return;
        }
        let scale = Scale::new(self.values, &places, numbers);
        let (header, body) = out.split_at_mut(self.header_bytes());
        scale.write(header);
        body.fill(0);
        let (mut bits, mut next) = (BitWriter { bytes: body, at: 0 }, 0);
        for place in places {
            bits.rice(place - next, self.rice);
            bits.write(scale.code(numbers[place]), self.value_bits());
            next = place + 1;
        }
    }

    /// Adds the numbers of a message to `to`.
    pub(super) fn add(&self, bytes: &[u8], to: &mut [f32]) {
        if self.num == 0 {
            return;
        }
        let (header, body) = bytes.split_at(self.header_bytes());
        let scale = Scale::read(self.values, header);
        let (mut bits, mut next) = (BitReader { bytes: body, at: 0 }, 0);
        for _ in 0..self.kept {
            let place = next + bits.rice(self.rice);
            let value = scale.value(bits.read(self.value_bits()));
            // A place beyond the numbers cannot come from `encode`.
            if let Some(x) = to.get_mut(place) {
                *x += value;
            }
            next = place + 1;
        }
    }
}

/// Lists the places of the `kept` numbers of the largest magnitude, ascending.
fn largest(numbers: &[f32], kept: usize) -> Vec<usize> {
    let magnitude = |x: f32| x.to_bits() & 0x7fff_ffff;
    if kept == 0 {
        return Vec::new();
    }
    let mut magnitudes: Vec<u32> = numbers.iter().map(|&x| magnitude(x)).collect();
    let (above, &mut least, _) = magnitudes.select_nth_unstable_by(kept - 1, |a, b| b.cmp(a));
    let mut num_least = kept - above.iter().filter(|&&other| other > least).count();
    let mut places = Vec::with_capacity(kept);
    for (place, &x) in numbers.iter().enumerate() {
        let is_least = magnitude(x) == least;
        if magnitude(x) > least || is_least && num_least > 0 {
            num_least -= usize::from(is_least);
            places.push(place);
        }
    }
    places
}

/// The header of a message, by which values are read.
#[derive(Clone, Copy)]
enum Scale {
    /// The smaller and the larger magnitude.
    Levels {
        small: f32,
        large: f32,
    },
    Half {
        largest: f32,
    },
}

impl Scale {
    fn new(values: Values, places: &[usize], numbers: &[f32]) -> Self {
        let magnitudes = || places.iter().map(|&place| numbers[place].abs());
        match values {
            Values::Half => {
                // Not `f32::max`, which would hide NaN.
                let larger = |most: f32, x: f32| if x > most || x.is_nan() { x } else { most };
                Self::Half { largest: magnitudes().fold(0.0, larger) }
            }
            Values::Levels => {
                let mean = mean(magnitudes()).unwrap_or(0.0);
                let small = mean_below(magnitudes(), mean);
                let large = self::mean(magnitudes().filter(|&x| x > mean)).unwrap_or(small);
                Self::Levels { small, large }
            }
        }
    }

    fn write(self, header: &mut [u8]) {
        let numbers = match self {
            Self::Levels { small, large } => [small, large],
            Self::Half { largest } => [largest, 0.0],
        };
        for (out, number) in header.chunks_exact_mut(4).zip(numbers) {
            out.copy_from_slice(&number.to_le_bytes());
        }
    }

    fn read(values: Values, header: &[u8]) -> Self {
        let number = |at: usize| f32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        match values {
            Values::Levels => Self::Levels { small: number(0), large: number(4) },
            Values::Half => Self::Half { largest: number(0) },
        }
    }

    fn code(self, x: f32) -> u32 {
        match self {
            Self::Levels { small, large } => {
                let is_large = (x.abs() - large).abs() < (x.abs() - small).abs();
                u32::from(x < 0.0) | u32::from(is_large) << 1
            }
            Self::Half { largest } => {
                let share = if largest == 0.0 { 0.0 } else { x / largest };
                u32::from(f16::from_f32(share).to_bits())
            }
        }
    }

    fn value(self, code: u32) -> f32 {
        match self {
            Self::Levels { small, large } => {
                let magnitude = if code & 2 == 0 { small } else { large };
                if code & 1 == 0 { magnitude } else { -magnitude }
            }
            Self::Half { largest } => f16::from_bits(code as u16).to_f32() * largest,
        }
    }
}

/// Returns the mean of some numbers; none without any.
fn mean(numbers: impl Iterator<Item = f32>) -> Option<f32> {
    let (sum, count) = numbers.fold((0.0, 0_u32), |(sum, count), x| (sum + f64::from(x), count + 1));
    (count > 0).then(|| (sum / f64::from(count)) as f32)
}

/// Returns the mean of the numbers that are not above `limit`, NaN included.
fn mean_below(numbers: impl Iterator<Item = f32>, limit: f32) -> f32 {
    mean(numbers.filter(|&x| x.is_nan() || limit.is_nan() || x <= limit)).unwrap_or(limit)
}

/// Writes numbers of some bits, the lowest bit first, into zeros.
struct BitWriter<'a> {
    bytes: &'a mut [u8],
    /// Bits written.
    at: usize,
}

impl BitWriter<'_> {
    fn write(&mut self, number: u32, num_bits: usize) {
        for bit in 0..num_bits {
            self.bytes[self.at / 8] |= ((number >> bit & 1) as u8) << (self.at % 8);
            self.at += 1;
        }
    }

    /// Writes the quotient by 2^rice as that many zeros and a one, then the remainder.
    fn rice(&mut self, number: usize, rice: u32) {
        self.at += number >> rice;
        self.write(1, 1);
        self.write((number & ((1 << rice) - 1)) as u32, rice as usize);
    }
}

struct BitReader<'a> {
    bytes: &'a [u8],
    /// Bits read.
    at: usize,
}

impl BitReader<'_> {
    /// Reads the next bit; a one after the end.
    fn bit(&mut self) -> u32 {
        let bit = self.bytes.get(self.at / 8).map_or(1, |byte| u32::from(byte >> (self.at % 8) & 1));
        self.at += 1;
        bit
    }

    fn read(&mut self, num_bits: usize) -> u32 {
        (0..num_bits).fold(0, |number, at| number | self.bit() << at)
    }

    fn rice(&mut self, rice: u32) -> usize {
        let mut quotient = 0;
        while self.bit() == 0 {
            quotient += 1;
        }
        (quotient << rice) + self.read(rice as usize) as usize
    }
}

#[cfg(test)]
mod tests {
    use moeworks_tensor::{Purpose, Random};

    use super::*;

    fn random(len: usize) -> Vec<f32> {
        let random = Random::new(4, Purpose::Test, 0);
        (0..len).map(|i| random.normal(i as u64).powi(3)).collect()
    }

    /// Sends numbers, of which a share travels.
    fn sent(numbers: &[f32], keep: f64, values: Values) -> Vec<f32> {
        let codec = Codec::new(numbers.len(), keep, values);
        let mut bytes = vec![0xff; codec.bytes()];
        codec.encode(numbers, &mut bytes);
        let mut back = vec![0.0; numbers.len()];
        codec.add(&bytes, &mut back);
        back
    }

    #[test]
    fn the_largest_numbers_arrive_at_their_places_and_the_others_are_left_out() {
        for (len, keep) in [(1, 0.5), (7, 0.3), (1000, 0.01), (1000, 0.2), (1000, 0.9), (70_000, 0.001)] {
            let numbers = random(len);
            let places = largest(&numbers, Codec::new(len, keep, Values::Half).kept);
            let back = sent(&numbers, keep, Values::Half);
            let most = numbers.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
            for (place, (x, back)) in numbers.iter().zip(&back).enumerate() {
                let expected = if places.contains(&place) { *x } else { 0.0 };
                assert!((back - expected).abs() <= 5e-4 * most, "{len}, {keep}: {back}, not {expected}");
            }
        }
    }

    #[test]
    fn two_levels_leave_less_than_there_was_and_repeated_messages_bring_the_rest() {
        let numbers = random(1000);
        let mut rest = numbers.clone();
        let mut last = f32::INFINITY;
        for _ in 0..60 {
            let back = sent(&rest, 0.1, Values::Levels);
            rest.iter_mut().zip(&back).for_each(|(rest, back)| *rest -= back);
            let square = rest.iter().map(|x| x * x).sum::<f32>();
            assert!(square < last, "{square} after {last}");
            last = square;
        }
        let all: f32 = numbers.iter().map(|x| x * x).sum();
        assert!(last < 1e-3 * all, "{last} of {all} is left");
    }

    #[test]
    fn messages_are_of_about_the_bytes_that_places_need() {
        let bits =
            |keep: f64, values: Values| Codec::new(1 << 16, keep, values).bytes() as f64 * 8.0 / f64::from(1 << 16);
        // The entropy of places: 0.29 bits a number at a share of 0.05, 0.08 at 0.01.
        assert!(bits(0.05, Values::Levels) < 0.29 + 0.1 + 0.03);
        assert!(bits(0.01, Values::Levels) < 0.08 + 0.02 + 0.01);
        assert!(bits(0.05, Values::Half) < 0.29 + 0.8 + 0.03);
    }

    #[test]
    fn a_number_that_is_none_stays_visible() {
        for values in [Values::Levels, Values::Half] {
            assert!(sent(&[1.0, f32::NAN, 0.5, 2.0], 0.5, values).iter().any(|x| x.is_nan()), "{values:?}");
        }
    }
}
