use std::fs;
use std::sync::Arc;

use ::parquet::basic::{Compression, ZstdLevel};
use ::parquet::file::properties::WriterProperties;
use ::parquet::file::writer::SerializedFileWriter;
use ::parquet::schema::parser::parse_message_type;
use proptest::prelude::*;

use super::super::input::with_input;
use super::*;

/// Makes a file with a column of numbers and one of texts, in row groups of three.
fn file_of(texts: &[Option<&[u8]>], compression: Compression) -> Vec<u8> {
    let schema = "message m { required int64 id; optional binary text (utf8); }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let properties = Arc::new(WriterProperties::builder().set_compression(compression).build());
    let mut writer = SerializedFileWriter::new(Vec::new(), schema, properties).unwrap();
    for group in texts.chunks(3) {
        let mut rows = writer.next_row_group().unwrap();
        let mut ids = rows.next_column().unwrap().unwrap();
        let numbers: Vec<i64> = (0..group.len() as i64).collect();
        ids.typed::<::parquet::data_type::Int64Type>().write_batch(&numbers, None, None).unwrap();
        ids.close().unwrap();
        let mut column = rows.next_column().unwrap().unwrap();
        let values: Vec<ByteArray> = group.iter().flatten().map(|text| ByteArray::from(text.to_vec())).collect();
        let levels: Vec<i16> = group.iter().map(|text| i16::from(text.is_some())).collect();
        column.typed::<ByteArrayType>().write_batch(&values, Some(&levels), None).unwrap();
        column.close().unwrap();
        rows.close().unwrap();
    }
    writer.into_inner().unwrap()
}

fn read_file(content: &[u8], column: &str) -> Result<Vec<String>, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.parquet");
    fs::write(&path, content).unwrap();
    let mut texts = Vec::new();
    let (flow, _) = with_input(&path, column, |input| {
        read(input, &mut |piece| {
            texts.push(piece.text.to_string());
            Ok(ControlFlow::Continue(()))
        })
    });
    let message = |error: DataError| error.to_string().replace(&folder.path().display().to_string(), "");
    flow.map(|_| texts).map_err(message)
}

const ROWS_OF_TEXT: [Option<&[u8]>; 5] = [Some(b"one"), None, Some("zwei €".as_bytes()), Some(b""), Some(b"three")];

#[test]
fn each_row_with_text_is_a_document_whatever_the_compression() {
    for compression in [
        Compression::UNCOMPRESSED,
        Compression::SNAPPY,
        Compression::GZIP(Default::default()),
        Compression::LZ4_RAW,
        Compression::ZSTD(ZstdLevel::default()),
    ] {
        let content = file_of(&ROWS_OF_TEXT, compression);
        assert_eq!(read_file(&content, "text").unwrap(), ["one", "zwei €", "three"], "{compression:?}");
    }
    let compressed = zstd::encode_all(&file_of(&ROWS_OF_TEXT, Compression::SNAPPY)[..], 3).unwrap();
    assert_eq!(read_file(&compressed, "text").unwrap(), ["one", "zwei €", "three"]);
}

#[test]
fn wrong_columns_and_files_are_named() {
    let content = file_of(&ROWS_OF_TEXT, Compression::SNAPPY);
    for (content, column, expected) in [
        (
            &content[..],
            "body",
            "/a.parquet: no column \"body\" (columns: id, text); data.text_field names the one to use",
        ),
        (&content[..], "id", "/a.parquet: column \"id\" is INT64; must be text (columns: id, text)"),
        (&content[..content.len() / 2], "text", "/a.parquet: not a readable Parquet file: "),
        (b"", "text", "/a.parquet: not a readable Parquet file: "),
        (b"no Parquet", "text", "/a.parquet: not a readable Parquet file: "),
    ] {
        let message = read_file(content, column).unwrap_err();
        assert!(message.starts_with(expected), "{message}");
        assert!(!message.contains('\n'), "{message}");
    }
    let wrong = file_of(&[Some(b"a"), Some(b"b\xff")], Compression::SNAPPY);
    let message = read_file(&wrong, "text").unwrap_err();
    assert!(message.contains("/a.parquet row 2: column \"text\" is not UTF-8 at byte 1 of the text"), "{message}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn damaged_files_give_an_error_or_texts(at in 0.0f64..1.0, byte: u8, keep in 0.0f64..2.0) {
        let mut content = file_of(&ROWS_OF_TEXT, Compression::SNAPPY);
        let at = (at * content.len() as f64) as usize;
        content[at] = byte;
        content.truncate((keep * content.len() as f64) as usize);
        let _ = read_file(&content, "text");
    }
}
