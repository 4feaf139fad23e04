//! Memory and files stay within bounds for any data.

use std::fs;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::*;

fn find(folder: &Path, name: &str) -> Result<Sources, DataError> {
    let paths = vec![folder.join(name).display().to_string()];
    Sources::find(&TextOptions { paths, ..TextOptions::default() }, &Watch::default())
}

/// Each piece with a flag for the end of its document.
fn pieces(sources: &Sources) -> Result<Vec<(String, bool)>, DataError> {
    let mut pieces = Vec::new();
    sources.for_each(|piece| {
        pieces.push((piece.text.to_owned(), piece.ends_document));
        Ok(ControlFlow::Continue(()))
    })?;
    Ok(pieces)
}

fn write_parquet(path: &Path, text: &str) {
    use ::parquet::data_type::{ByteArray, ByteArrayType};
    use ::parquet::file::{properties::WriterProperties, writer::SerializedFileWriter};
    let schema = ::parquet::schema::parser::parse_message_type("message m { required binary text (UTF8); }").unwrap();
    let properties = Arc::new(WriterProperties::builder().build());
    let mut writer = SerializedFileWriter::new(fs::File::create(path).unwrap(), Arc::new(schema), properties).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<ByteArrayType>().write_batch(&[ByteArray::from(text)], None, None).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    writer.close().unwrap();
}

#[test]
fn long_documents_of_every_format_come_in_pieces() {
    let folder = tempfile::tempdir().unwrap();
    let text = "é words and more words\n".repeat(150_000);
    fs::write(folder.path().join("a.txt"), &text).unwrap();
    fs::write(folder.path().join("a.jsonl"), serde_json::json!({ "text": text }).to_string()).unwrap();
    write_parquet(&folder.path().join("a.parquet"), &text);
    for name in ["a.txt", "a.jsonl", "a.parquet"] {
        let pieces = pieces(&find(folder.path(), name).unwrap()).unwrap();
        assert!(pieces.len() > 3 && pieces.iter().all(|(text, _)| text.len() <= 1 << 20), "{name}");
        assert_eq!(pieces.iter().map(|(text, _)| text.as_str()).collect::<String>(), text, "{name}");
        assert!(pieces.iter().rev().map(|(_, ends)| *ends).eq((0..pieces.len()).map(|i| i == 0)), "{name}");
    }
}

#[test]
fn a_checkout_is_what_people_wrote() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, content: &str| {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    };
    fs::create_dir(folder.path().join(".git")).unwrap();
    write("a.md", "written");
    write("large.txt", &"x".repeat(1_000_001));
    write("pnpm-lock.yaml", "made");
    write("build/CACHEDIR.TAG", "Signature: 8a477f597d28d172789f06886806bc55");
    write("build/made.rs", "made");
    write("results/first/metrics.jsonl", "{}");
    write("results/first/report.html", "made");
    let sources = Sources::from_checkout(folder.path(), &TextOptions::default(), &Watch::default()).unwrap();
    assert_eq!(pieces(&sources).unwrap(), [("written".to_owned(), true)]);
}

#[test]
fn patterns_leave_out_hidden_files_unless_they_name_them() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["a.txt", ".b.txt", ".hidden/c.txt"] {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, name).unwrap();
    }
    let texts = |pattern| {
        let pieces = pieces(&find(folder.path(), pattern).unwrap()).unwrap();
        pieces.into_iter().map(|(text, _)| text).collect::<Vec<_>>()
    };
    assert_eq!(texts("*.txt"), ["a.txt"]);
    assert_eq!(texts("**/*.txt"), ["a.txt"]);
    assert_eq!(texts(".*.txt"), [".b.txt"]);
    assert_eq!(texts(".hid*/*.txt"), [".hidden/c.txt"]);
    assert!(matches!(find(folder.path(), "?b.txt"), Err(DataError::Glob { .. })));
}

/// A tokenizer of bytes.
struct Bytes;

impl Encode for Bytes {
    fn encode(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), String> {
        ids.extend(text.bytes().map(u32::from));
        Ok(())
    }

    fn eos(&self) -> Option<u32> {
        None
    }

    fn vocab_size(&self) -> usize {
        256
    }

    fn fingerprint(&self) -> u128 {
        0
    }
}

#[test]
fn what_killed_programs_left_in_the_cache_goes_after_a_day() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("a.txt"), "some text").unwrap();
    let cache = folder.path().join("cache");
    fs::create_dir(&cache).unwrap();
    let old = SystemTime::now() - Duration::from_secs(25 * 60 * 60);
    for (name, time) in [
        ("tokens-old.tmp", old),
        ("tokens-new.tmp", SystemTime::now()),
        ("of-others.tmp", old),
        ("tokens-of-others.bin", old),
    ] {
        fs::File::create(cache.join(name)).unwrap().set_modified(time).unwrap();
    }
    let store =
        TokenStore::open(&find(folder.path(), "a.txt").unwrap(), &Bytes, &CachePlace::from_folder(&cache)).unwrap();
    assert_eq!(store.len(), 9);
    let mut names: Vec<_> = fs::read_dir(&cache).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.retain(|name| !name.to_string_lossy().ends_with(".tokens"));
    names.sort();
    assert_eq!(names, ["of-others.tmp", "tokens-new.tmp", "tokens-of-others.bin"]);
}
