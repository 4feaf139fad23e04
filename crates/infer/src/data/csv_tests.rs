use std::fs;

use super::super::input::with_input;
use super::*;

fn texts(content: &str) -> Result<(Vec<String>, Option<String>), String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.csv");
    fs::write(&path, content).unwrap();
    let mut texts = Vec::new();
    let (flow, notes) = with_input(&path, "text", |input| {
        read(input, &mut |piece| {
            texts.push(piece.text.to_string());
            Ok(ControlFlow::Continue(()))
        })
    });
    let relative = |text: String| text.replace(&folder.path().display().to_string(), "");
    flow.map(|_| (texts, notes.line().map(relative))).map_err(|error| relative(error.to_string()))
}

#[test]
fn short_rows_are_counted_and_long_ones_named() {
    let (found, line) = texts("id,text\r\n1,one\r\n2\r\n\r\n3,\"two\nlines\"\r\n4,\r\n").unwrap();
    assert_eq!(found, ["one", "two\nlines"]);
    let line = line.unwrap();
    assert!(line.contains("1 row skipped: has no text field (/a.csv row 2)"), "{line}");
    assert!(line.contains("1 row skipped: its text is empty"), "{line}");
    let message = texts("id,text\n1,a, b\n").unwrap_err();
    assert_eq!(message, "/a.csv row 1: 3 fields, but the first row names 2; quote texts that hold the delimiter");
}

#[test]
fn a_mark_of_byte_order_is_no_part_of_the_first_name() {
    assert_eq!(texts("\u{feff}text\na\n").unwrap().0, ["a"]);
    assert_eq!(texts("\u{feff}\"text\",n\na,1\n").unwrap().0, ["a"]);
}

#[test]
fn long_fields_are_read_whole() {
    let long = "y".repeat(300_000);
    assert_eq!(texts(&format!("n,text\n1,\"{long}\"\n2,b")).unwrap().0, [&long, "b"]);
}
