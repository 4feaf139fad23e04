//! Files of other programs are read as Python reads them: `tests/fixtures/data`, made by the `make.py` there.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use moeworks_infer::data::{DataError, Sources, TextOptions, Watch};
use serde::Deserialize;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Expected {
    texts: Vec<String>,
    #[serde(default = "text")]
    field: String,
    #[serde(default)]
    nulls: u64,
    #[serde(default)]
    empty: u64,
    #[serde(default)]
    surrogates: u64,
    /// Trailing bytes are reported when files are examined, not when their rows are read.
    #[serde(default, rename = "trailing")]
    _trailing: u64,
}

fn text() -> String {
    "text".into()
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/data").join(name)
}

/// Returns the documents of a file, and the line about skipped rows.
fn read(path: &Path, field: &str) -> Result<(Vec<String>, String), DataError> {
    let config =
        TextOptions { paths: vec![path.display().to_string()], text_field: field.into(), ..TextOptions::default() };
    let mut texts = Vec::new();
    let sources = Sources::find(&config, &Watch::default())?;
    let notes = sources.for_each(|piece| {
        assert!(piece.ends_document);
        texts.push(piece.text.to_owned());
        Ok(ControlFlow::Continue(()))
    })?;
    Ok((texts, notes.line().unwrap_or_default()))
}

#[test]
fn files_of_other_programs_are_read_as_python_reads_them() {
    let expected = std::fs::read_to_string(fixture("expected.json")).unwrap();
    let expected: BTreeMap<String, Expected> = serde_json::from_str(&expected).unwrap();
    assert!(expected.len() > 40);
    for (name, expected) in expected {
        let (texts, line) = read(&fixture(&name), &expected.field).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(texts, expected.texts, "{name}");
        for (count, one, many) in [
            (expected.nulls, "row skipped: its text is null", "rows skipped: their text is null"),
            (expected.empty, "row skipped: its text is empty", "rows skipped: their text is empty"),
            (expected.surrogates, "row with a lone surrogate, now U+FFFD", "rows with lone surrogates, now U+FFFD"),
        ] {
            let words = if count == 1 { one } else { many };
            assert_eq!(line.contains(&format!("{count} {words}")), count > 0, "{name}: {line}");
            assert_eq!(line.contains(words), count > 0, "{name}: {line}");
        }
    }
}

#[test]
fn columns_that_are_no_text_and_codecs_that_are_not_read_are_named() {
    for (name, field, expected) in [
        (
            "brotli.parquet",
            "text",
            "its text is compressed by Brotli, which is not supported; write it with zstd, snappy,",
        ),
        ("list.parquet", "text", "column \"text\" is a list; must be text (columns: text.list.element)"),
        ("nested.parquet", "doc", "column \"doc\" is a group of columns; data.text_field = \"doc.role\" names one"),
        ("plain.parquet", "id", "column \"id\" is INT64; must be text (columns: id, text)"),
        ("plain.parquet", "body", "no column \"body\" (columns: id, text); data.text_field names the one to use"),
        ("comma.csv", "body", "no column \"body\" (columns: id, text, score); data.text_field names the one to use"),
        ("array.json", "body", " row 1: no field \"body\" (fields: text, n, m); data.text_field names the one to use"),
        ("array.json", "m", " row 1: field \"m\" is an object; must be text"),
        (
            "array.json",
            "text.x",
            " row 1: no field \"text.x\" (fields: text, n, m); data.text_field names the one to use",
        ),
    ] {
        let message = read(&fixture(name), field).unwrap_err().to_string();
        let (_, problem) = message.split_once(name).unwrap();
        let problem = problem.strip_prefix(": ").unwrap_or(problem);
        assert!(problem.starts_with(expected), "{name}: {message}");
        assert!(!message.contains('\n'), "{message}");
    }
}
