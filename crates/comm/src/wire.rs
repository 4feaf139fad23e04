//! Encoding of rows for the wire: f32, bf16, f16 or scaled bytes.

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
