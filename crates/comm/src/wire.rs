//! Encoding of rows for the wire: f32, bf16, f16, scaled bytes, or the largest numbers alone.

use half::{bf16, f16};
use moeworks_plan::Wire;

/// Encodes a row.
pub(crate) fn encode(wire: Wire, row: &[f32], out: &mut [u8]) {
    match wire {
        Wire::F32 => out.copy_from_slice(bytemuck::cast_slice(row)),
        Wire::Bf16 => row.iter().zip(out.chunks_exact_mut(2)).for_each(|(&x, out)| {
            out.copy_from_slice(&bf16::from_f32(x).to_ne_bytes());
        }),
        Wire::F16 => row.iter().zip(out.chunks_exact_mut(2)).for_each(|(&x, out)| {
            out.copy_from_slice(&f16::from_f32(x).to_ne_bytes());
        }),
        Wire::Byte { block } => encode_bytes(row, block.max(1), out),
        Wire::TopK { per_mille } => encode_largest(row, Wire::num_kept(per_mille, row.len()), &Halves, out),
        Wire::TopKByte { per_mille } => {
            encode_largest(row, Wire::num_kept(per_mille, row.len()), &Scaled::new(row), out);
        }
    }
}

/// Decodes a row.
pub(crate) fn decode(wire: Wire, bytes: &[u8], row: &mut [f32]) {
    match wire {
        Wire::F32 => bytemuck::cast_slice_mut(row).copy_from_slice(bytes),
        Wire::Bf16 => row.iter_mut().zip(bytes.chunks_exact(2)).for_each(|(x, pair)| {
            *x = bf16::from_ne_bytes([pair[0], pair[1]]).to_f32();
        }),
        Wire::F16 => row.iter_mut().zip(bytes.chunks_exact(2)).for_each(|(x, pair)| {
            *x = f16::from_ne_bytes([pair[0], pair[1]]).to_f32();
        }),
        Wire::Byte { block } => decode_bytes(bytes, block.max(1), row),
        Wire::TopK { per_mille } => decode_largest::<Halves>(bytes, Wire::num_kept(per_mille, row.len()), row),
        Wire::TopKByte { per_mille } => decode_largest::<Scaled>(bytes, Wire::num_kept(per_mille, row.len()), row),
    }
}

/// Writes the f32 scales of all blocks, then each number as a multiple of its scale from -127 to 127. A block with a
/// number that is not finite gets a NaN scale, so that all of it decodes to NaN and a fault stays visible.
fn encode_bytes(row: &[f32], block: usize, out: &mut [u8]) {
    let (scales, numbers) = out.split_at_mut(4 * row.len().div_ceil(block));
    let blocks = row.chunks(block).zip(scales.chunks_exact_mut(4)).zip(numbers.chunks_mut(block));
    for ((row, scale_out), numbers) in blocks {
        let is_finite = row.iter().all(|x| x.is_finite());
        let greatest = row.iter().fold(0.0_f32, |greatest, x| greatest.max(x.abs()));
        let scale = if is_finite { greatest / 127.0 } else { f32::NAN };
        scale_out.copy_from_slice(&scale.to_ne_bytes());
        let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
        for (number, x) in numbers.iter_mut().zip(row) {
            *number = (x * inverse).round().clamp(-127.0, 127.0) as i8 as u8;
        }
    }
}

fn decode_bytes(bytes: &[u8], block: usize, row: &mut [f32]) {
    let (scales, numbers) = bytes.split_at(4 * row.len().div_ceil(block));
    let blocks = row.chunks_mut(block).zip(scales.chunks_exact(4)).zip(numbers.chunks(block));
    for ((row, scale), numbers) in blocks {
        let scale = f32::from_ne_bytes([scale[0], scale[1], scale[2], scale[3]]);
        for (x, &number) in row.iter_mut().zip(numbers) {
            *x = scale * f32::from(number as i8);
        }
    }
}

/// The form of the numbers that travel without the others.
trait Kept {
    /// Bytes before the numbers.
    const HEADER: usize;
    /// Bytes of a number.
    const BYTES: usize;

    /// Writes what a row's numbers are read by.
    fn write_header(&self, out: &mut [u8]);
    /// Reads what a row's numbers are read by.
    fn read_header(bytes: &[u8]) -> Self;
    fn write(&self, x: f32, out: &mut [u8]);
    fn read(&self, bytes: &[u8]) -> f32;
}

/// Numbers in IEEE half precision.
struct Halves;

impl Kept for Halves {
    const HEADER: usize = 0;
    const BYTES: usize = 2;

    fn write_header(&self, _out: &mut [u8]) {}

    fn read_header(_bytes: &[u8]) -> Self {
        Self
    }

    fn write(&self, x: f32, out: &mut [u8]) {
        out.copy_from_slice(&f16::from_f32(x).to_ne_bytes());
    }

    fn read(&self, bytes: &[u8]) -> f32 {
        f16::from_ne_bytes([bytes[0], bytes[1]]).to_f32()
    }
}

/// Numbers as multiples of a scale from -127 to 127. The scale of a row with a number that is not finite is NaN.
struct Scaled {
    scale: f32,
}

impl Scaled {
    fn new(row: &[f32]) -> Self {
        let is_finite = row.iter().all(|x| x.is_finite());
        let greatest = row.iter().fold(0.0_f32, |greatest, x| greatest.max(x.abs()));
        Self { scale: if is_finite { greatest / 127.0 } else { f32::NAN } }
    }
}

impl Kept for Scaled {
    const HEADER: usize = 4;
    const BYTES: usize = 1;

    fn write_header(&self, out: &mut [u8]) {
        out.copy_from_slice(&self.scale.to_ne_bytes());
    }

    fn read_header(bytes: &[u8]) -> Self {
        Self { scale: f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) }
    }

    fn write(&self, x: f32, out: &mut [u8]) {
        let inverse = if self.scale > 0.0 { 1.0 / self.scale } else { 0.0 };
        out[0] = (x * inverse).round().clamp(-127.0, 127.0) as i8 as u8;
    }

    fn read(&self, bytes: &[u8]) -> f32 {
        self.scale * f32::from(bytes[0] as i8)
    }
}

/// Writes the `kept` numbers of the largest magnitude, in the order of the row, then their places. Of equal
/// magnitudes the first are kept. NaN is larger than all numbers, so that a fault stays visible.
fn encode_largest<K: Kept>(row: &[f32], kept: usize, form: &K, out: &mut [u8]) {
    let magnitude = |x: f32| x.to_bits() & 0x7fff_ffff;
    let mut magnitudes: Vec<u32> = row.iter().map(|&x| magnitude(x)).collect();
    if kept == 0 {
        return;
    }
    let (above, &mut least, _) = magnitudes.select_nth_unstable_by(kept - 1, |a, b| b.cmp(a));
    let mut num_least = kept - above.iter().filter(|&&other| other > least).count();
    let (header, out) = out.split_at_mut(K::HEADER);
    form.write_header(header);
    let (numbers, places) = out.split_at_mut(K::BYTES * kept);
    let is_listed = Wire::lists_places(kept, row.len());
    places.fill(0);
    let mut next = 0;
    for (place, &x) in row.iter().enumerate() {
        let is_least = magnitude(x) == least;
        if magnitude(x) < least || is_least && num_least == 0 {
            continue;
        }
        num_least -= usize::from(is_least);
        form.write(x, &mut numbers[K::BYTES * next..K::BYTES * (next + 1)]);
        if is_listed {
            places[2 * next..2 * next + 2].copy_from_slice(&(place as u16).to_ne_bytes());
        } else {
            places[place / 8] |= 1 << (place % 8);
        }
        next += 1;
    }
}

fn decode_largest<K: Kept>(bytes: &[u8], kept: usize, row: &mut [f32]) {
    row.fill(0.0);
    if kept == 0 {
        return;
    }
    let (header, bytes) = bytes.split_at(K::HEADER);
    let form = K::read_header(header);
    let (numbers, places) = bytes.split_at(K::BYTES * kept);
    let numbers = numbers.chunks_exact(K::BYTES).map(|bytes| form.read(bytes));
    if Wire::lists_places(kept, row.len()) {
        for (x, place) in numbers.zip(places.chunks_exact(2)) {
            let place = usize::from(u16::from_ne_bytes([place[0], place[1]]));
            // A place beyond the row cannot come from `encode_largest`.
            if let Some(slot) = row.get_mut(place) {
                *slot = x;
            }
        }
        return;
    }
    let set = (0..row.len()).filter(|place| places[place / 8] >> (place % 8) & 1 == 1);
    for (place, x) in set.zip(numbers) {
        row[place] = x;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends a row of which `per_mille` thousandths travel.
    fn sent(row: &[f32], per_mille: u16) -> Vec<f32> {
        let wire = Wire::TopK { per_mille };
        let mut bytes = vec![0xff; wire.row_bytes(row.len())];
        encode(wire, row, &mut bytes);
        let mut back = vec![7.0; row.len()];
        decode(wire, &bytes, &mut back);
        back
    }

    #[test]
    fn the_largest_numbers_arrive_in_half_precision_and_the_others_are_zeros() {
        let row = [0.5, -3.0, 1.0, 0.25, 2.0, -1.0, 0.0, 1.0];
        assert_eq!(sent(&row, 500), [0.0, -3.0, 1.0, 0.0, 2.0, -1.0, 0.0, 0.0], "of equal ones the first");
        assert_eq!(sent(&row, 1), [0.0, -3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], "at least one");
        assert_eq!(sent(&row, 1000), row);
        assert_eq!(sent(&[], 250), [0.0; 0]);
    }

    #[test]
    fn places_are_a_list_where_that_is_shorter_than_a_bit_for_each() {
        let row: Vec<f32> = (0..300).map(|i| ((i * 37) % 301) as f32 - 150.0).collect();
        for (per_mille, bytes) in [(30, 4 * 9), (250, 2 * 75 + 38)] {
            assert_eq!(Wire::TopK { per_mille }.row_bytes(row.len()), bytes);
            let kept = Wire::num_kept(per_mille, row.len());
            let mut order: Vec<usize> = (0..row.len()).collect();
            order.sort_by(|&a, &b| row[b].abs().total_cmp(&row[a].abs()));
            let mut expected = vec![0.0; row.len()];
            order[..kept].iter().for_each(|&place| expected[place] = row[place]);
            assert_eq!(sent(&row, per_mille), expected);
        }
    }

    #[test]
    fn the_largest_numbers_arrive_as_bytes_with_the_scale_of_their_row() {
        let row: Vec<f32> = (0..64).map(|i| ((i * 37) % 65) as f32 - 32.0).collect();
        let wire = Wire::TopKByte { per_mille: 500 };
        assert_eq!(wire.row_bytes(64), 4 + 32 + 8);
        assert_eq!(Wire::TopKByte { per_mille: 10 }.row_bytes(64), 4 + 1 + 2, "one number, whose place is listed");
        let mut bytes = vec![0xff; wire.row_bytes(64)];
        encode(wire, &row, &mut bytes);
        let mut back = vec![7.0; 64];
        decode(wire, &bytes, &mut back);
        for (exact, (x, back)) in sent(&row, 500).iter().zip(row.iter().zip(&back)) {
            assert!((back - exact).abs() <= 32.0 / 254.0 + 1e-4, "{x} comes as {back}");
        }
    }

    #[test]
    fn a_number_that_is_none_travels_first() {
        let back = sent(&[1e30, 4.0, f32::NAN, 1.0], 500);
        assert!(back[0] == f32::INFINITY && back[1] == 0.0 && back[2].is_nan() && back[3] == 0.0, "{back:?}");
    }
}
