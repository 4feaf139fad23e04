//! Event files are read back by a reader that shares nothing with the writer.

use super::*;

/// Computes CRC-32C bit by bit, from its definition.
fn crc32c_by_definition(data: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in data {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0x82f6_3b78 * (crc & 1));
        }
    }
    !crc
}

fn unmasked(masked: u32) -> u32 {
    masked.wrapping_sub(0xa282_ead8).rotate_left(15)
}

/// Returns the payloads of all records; panics on a wrong checksum.
fn records(mut bytes: &[u8]) -> Vec<Vec<u8>> {
    let u32_at = |bytes: &[u8], at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let mut records = Vec::new();
    while !bytes.is_empty() {
        let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        assert_eq!(unmasked(u32_at(bytes, 8)), crc32c_by_definition(&bytes[..8]));
        let data = &bytes[12..12 + len];
        assert_eq!(unmasked(u32_at(bytes, 12 + len)), crc32c_by_definition(data));
        records.push(data.to_vec());
        bytes = &bytes[16 + len..];
    }
    records
}

#[derive(Clone, Debug, PartialEq)]
enum Value {
    Int(u64),
    Bytes(Vec<u8>),
}

impl Value {
    fn fields(&self) -> Vec<(u64, Value)> {
        let Value::Bytes(bytes) = self else { panic!("not a message: {self:?}") };
        fields(bytes)
    }

    fn text(&self) -> String {
        let Value::Bytes(bytes) = self else { panic!("not text: {self:?}") };
        String::from_utf8(bytes.clone()).unwrap()
    }

    fn doubles(&self) -> Vec<f64> {
        let Value::Bytes(bytes) = self else { panic!("not packed: {self:?}") };
        bytes.chunks(8).map(|chunk| f64::from_le_bytes(chunk.try_into().unwrap())).collect()
    }
}

/// Decodes the fields of a message; fixed-size numbers are returned as their bytes.
fn fields(mut bytes: &[u8]) -> Vec<(u64, Value)> {
    fn varint(bytes: &mut &[u8]) -> u64 {
        let mut value = 0;
        for shift in (0..).step_by(7) {
            let byte = bytes[0];
            *bytes = &bytes[1..];
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                break;
            }
        }
        value
    }
    let mut fields = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let size = match key & 7 {
            0 => {
                fields.push((key >> 3, Value::Int(varint(&mut bytes))));
                continue;
            }
            1 => 8,
            2 => varint(&mut bytes) as usize,
            5 => 4,
            other => panic!("wire type {other}"),
        };
        fields.push((key >> 3, Value::Bytes(bytes[..size].to_vec())));
        bytes = &bytes[size..];
    }
    fields
}

fn field(message: &[(u64, Value)], number: u64) -> Value {
    message.iter().find(|(of, _)| *of == number).unwrap_or_else(|| panic!("no field {number} in {message:?}")).1.clone()
}

#[test]
fn crc32c_gives_the_published_check_values() {
    // RFC 3720, B.4, and the check value of the Castagnoli polynomial.
    assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
    assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
    assert_eq!(crc32c(&(0..32).collect::<Vec<u8>>()), 0x46dd_794e);
}

#[test]
fn events_read_back_as_they_were_written() {
    let dir = tempfile::tempdir().unwrap();
    let mut events = EventFile::create(dir.path(), None).unwrap();
    events.scalars(300, &[("train/loss".to_owned(), 1.5), ("train/lr".to_owned(), f64::NAN)]).unwrap();
    events.histograms(300, &[("moe/layer_0/tokens_per_expert".to_owned(), &[3, 0, 5])]).unwrap();
    events.text(301, "sample", "fn main() {} äö").unwrap();
    let records = records(&fs::read(events.path()).unwrap());
    assert_eq!(records.len(), 4);
    assert_eq!(field(&fields(&records[0]), 3).text(), "brain.Event:2");

    let event = fields(&records[1]);
    assert_eq!(field(&event, 2), Value::Int(300));
    let summary = field(&event, 5).fields();
    assert_eq!(summary.len(), 2);
    assert_eq!(field(&summary[0].1.fields(), 1).text(), "train/loss");
    assert_eq!(field(&summary[0].1.fields(), 2), Value::Bytes(1.5f32.to_le_bytes().to_vec()));

    let entry = field(&field(&fields(&records[2]), 5).fields(), 1).fields();
    let histogram = field(&entry, 5).fields();
    assert_eq!(field(&histogram, 3).doubles(), [8.0]);
    assert_eq!(field(&histogram, 4).doubles(), [0.5 * 3.0 + 2.5 * 5.0]);
    assert_eq!(field(&histogram, 6).doubles(), [1.0, 2.0, 3.0]);
    assert_eq!(field(&histogram, 7).doubles(), [3.0, 0.0, 5.0]);

    let entry = field(&field(&fields(&records[3]), 5).fields(), 1).fields();
    assert_eq!(field(&field(&entry, 8).fields(), 8).text(), "fn main() {} äö");
    assert_eq!(field(&field(&field(&entry, 9).fields(), 1).fields(), 1).text(), "text");
}

#[test]
fn a_new_file_sorts_after_older_ones_and_says_what_to_forget() {
    let dir = tempfile::tempdir().unwrap();
    let names: Vec<String> = (0..3)
        .map(|_| EventFile::create(dir.path(), Some(41)).unwrap().path().file_name().unwrap().display().to_string())
        .collect();
    assert!(names.is_sorted_by(|a, b| a < b), "{names:?}");
    let records = records(&fs::read(dir.path().join(&names[2])).unwrap());
    let event = fields(&records[1]);
    assert_eq!(field(&event, 2), Value::Int(41));
    // SessionLog.status = START
    assert_eq!(field(&field(&event, 7).fields(), 1), Value::Int(1));
}
