//! Base64 (RFC 4648, section 4).

/// The digits.
const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// Writes whole numbers of 32 bits, the lowest byte first, as base64.
pub(crate) fn of_i32s(numbers: &[i32]) -> String {
    let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let word = group.iter().fold(0_u32, |word, &byte| word << 8 | u32::from(byte)) << (8 * (3 - group.len()));
        for place in 0..4 {
            let digit = DIGITS[(word >> (18 - 6 * place)) as usize & 63] as char;
            text.push(if place <= group.len() { digit } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_as_other_programs_read_them() {
        assert_eq!(of_i32s(&[]), "");
        assert_eq!(of_i32s(&[1]), "AQAAAA==");
        assert_eq!(of_i32s(&[1, -1]), "AQAAAP////8=");
        assert_eq!(of_i32s(&[63, 7, 0x0403_0201]), "PwAAAAcAAAABAgME");
    }
}
