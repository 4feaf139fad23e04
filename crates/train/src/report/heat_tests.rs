use super::*;

/// Splits a PNG into its chunks (kind and data), and compares their checksums with a CRC computed without a table.
fn chunks(mut png: &[u8]) -> Vec<(String, Vec<u8>)> {
    assert_eq!(&png[..8], b"\x89PNG\r\n\x1a\n");
    png = &png[8..];
    let mut chunks = Vec::new();
    while !png.is_empty() {
        let len = u32::from_be_bytes(png[..4].try_into().unwrap()) as usize;
        let kind = String::from_utf8(png[4..8].to_vec()).unwrap();
        chunks.push((kind, png[8..8 + len].to_vec()));
        png = &png[12 + len..];
    }
    chunks
}

#[test]
fn checksums_and_base64_give_their_published_values() {
    assert_eq!(crc32(b"IEND"), 0xae42_6082);
    assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
    for (plain, encoded) in [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foobar", "Zm9vYmFy")] {
        assert_eq!(base64(plain.as_bytes()), encoded);
    }
    // The Adler-32 of "Wikipedia" is known.
    assert_eq!(zlib_stored(b"Wikipedia")[16..], [0x11, 0xe6, 0x03, 0x98]);
}

#[test]
fn a_png_holds_the_pixels_it_was_given() {
    for (width, height) in [(1, 1), (160, 128), (3, 30_000)] {
        let pixels: Vec<u8> = (0..width * height).map(|index| (index % 201) as u8).collect();
        let chunks = chunks(&png(width, &pixels));
        assert_eq!(
            chunks.iter().map(|chunk| chunk.0.as_str()).collect::<Vec<_>>(),
            ["IHDR", "PLTE", "tRNS", "IDAT", "IEND"]
        );
        assert_eq!(chunks[0].1[..8], [(width as u32).to_be_bytes(), (height as u32).to_be_bytes()].concat());
        let (mut stream, mut data) = (&chunks[3].1[2..], Vec::new());
        loop {
            let len = u16::from_le_bytes([stream[1], stream[2]]);
            assert_eq!(!len, u16::from_le_bytes([stream[3], stream[4]]));
            data.extend(&stream[5..5 + len as usize]);
            let is_last = stream[0] == 1;
            stream = &stream[5 + len as usize..];
            if is_last {
                break;
            }
        }
        assert_eq!(stream.len(), 4);
        let unfiltered: Vec<u8> = data.chunks(width + 1).flat_map(|row| row[1..].to_vec()).collect();
        assert!(unfiltered == pixels && data.chunks(width + 1).all(|row| row[0] == 0));
    }
}

#[test]
fn the_even_share_is_transparent_and_the_ends_are_opaque() {
    let maps = HeatMaps { layers: Vec::new(), full_at: 2.0, experts_per_row: 1 };
    assert_eq!([1.0, 2.0, 9.0, 0.5, 0.0, f64::NAN].map(|ratio| maps.shade(ratio)), [100, 200, 200, 0, 0, 0]);
    assert_eq!((colour(100).1, colour(0).1, colour(200).1), (0, 255, 255));
}
