//! Eight- and four-bit floats as published checkpoints have them.

/// Rows and columns that share a scale in DeepSeek-V3's eight-bit weights.
pub(super) const FP8_BLOCK: usize = 128;

/// The value of an E4M3 float without infinities (OCP 8-bit floating point, 1.0): bias 7, NaN is all ones.
pub(super) fn fp8_value(byte: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    let sign = if byte & 0x80 == 0 { 1.0 } else { -1.0 };
    match (exponent, byte & 7) {
        (15, 7) => f32::NAN,
        (0, _) => sign * mantissa * 2.0_f32.powi(-9),
        _ => sign * (1.0 + mantissa / 8.0) * 2.0_f32.powi(exponent - 7),
    }
}

/// The values of E2M1 floats by their low three bits; the fourth is the sign (OCP microscaling formats, 1.0).
const FP4: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// The value of an E2M1 float in the low four bits.
fn fp4_value(bits: u8) -> f32 {
    let value = FP4[usize::from(bits & 7)];
    if bits & 8 == 0 { value } else { -value }
}

/// A row of MXFP4: blocks of 32 values in 16 bytes, the low half of a byte first, each block times `2^(scale - 127)`.
pub(super) fn mxfp4_row(blocks: &[u8], scales: &[u8], out: &mut [f32]) {
    for ((bytes, &scale), out) in blocks.chunks_exact(16).zip(scales).zip(out.chunks_exact_mut(32)) {
        let scale = 2.0_f32.powi(i32::from(scale) - 127);
        for (byte, pair) in bytes.iter().zip(out.chunks_exact_mut(2)) {
            pair[0] = fp4_value(*byte) * scale;
            pair[1] = fp4_value(byte >> 4) * scale;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eight_bit_floats_have_the_values_of_the_standard() {
        for (byte, value) in
            [(0x00, 0.0), (0x38, 1.0), (0xb8, -1.0), (0x7e, 448.0), (0x01, 2.0_f32.powi(-9)), (0x3c, 1.5)]
        {
            assert_eq!(fp8_value(byte), value, "{byte:#x}");
        }
        assert!(fp8_value(0x7f).is_nan() && fp8_value(0xff).is_nan());
    }

    #[test]
    fn four_bit_floats_come_low_half_first_and_times_their_block_s_power_of_two() {
        let mut blocks = [0; 32];
        (blocks[0], blocks[16]) = (0x7a, 0x01);
        let mut out = [9.0; 64];
        mxfp4_row(&blocks, &[128, 126], &mut out);
        assert_eq!((out[0], out[1], out[2]), (-2.0, 12.0, 0.0));
        assert_eq!((out[32], out[33]), (0.25, 0.0));
    }
}
