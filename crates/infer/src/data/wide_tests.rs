use super::*;

/// A reader that returns one byte at a time.
struct Slow<'a>(&'a [u8]);

impl Read for Slow<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.0.len().min(1);
        buffer[..count].copy_from_slice(&self.0[..count]);
        self.0 = &self.0[count..];
        Ok(count)
    }
}

fn narrow(content: &[u8]) -> String {
    let (wide, mark) = Wide::detect(content).expect("a mark");
    let mut texts = ["", ""].map(str::to_owned);
    Narrow::new(&content[mark..], wide).read_to_string(&mut texts[0]).unwrap();
    Narrow::new(Slow(&content[mark..]), wide).read_to_string(&mut texts[1]).unwrap();
    assert_eq!(texts[0], texts[1]);
    texts[0].clone()
}

#[test]
fn characters_of_two_units_are_read_wherever_the_reader_cuts_them() {
    let units: Vec<u16> = "\u{feff}a€😀é".encode_utf16().collect();
    let little: Vec<u8> = units.iter().flat_map(|unit| unit.to_le_bytes()).collect();
    let big: Vec<u8> = units.iter().flat_map(|unit| unit.to_be_bytes()).collect();
    assert_eq!([narrow(&little), narrow(&big)], ["a€😀é", "a€😀é"]);
}

#[test]
fn what_is_no_character_is_replaced() {
    let of = |units: &[u16]| narrow(&units.iter().flat_map(|unit| unit.to_le_bytes()).collect::<Vec<u8>>());
    assert_eq!(of(&[0xfeff, 0xd83d, 0x61, 0xde00, 0xd83d]), "\u{fffd}a\u{fffd}\u{fffd}");
    assert_eq!(narrow(b"\xff\xfea\0b"), "a\u{fffd}");
    assert_eq!(narrow(b"\xff\xfe\0\0\x41\0\0\0\0\0\x11\0"), "A\u{fffd}");
}

#[test]
fn other_starts_are_no_mark() {
    for start in [&b"\xef\xbb\xbf"[..], b"a\0b\0", b"\xff", b""] {
        assert_eq!(Wide::detect(start), None);
    }
}
