//! Eight-bit floats as published checkpoints have them.

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
}
