use std::fs;

use super::super::input::with_input;
use super::*;

fn texts(content: &[u8]) -> Result<Vec<String>, String> {
    texts_and_line(content).map(|(texts, _)| texts)
}

/// Returns the texts, and the line about skipped rows.
fn texts_and_line(content: &[u8]) -> Result<(Vec<String>, String), String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.jsonl");
    fs::write(&path, content).unwrap();
    let mut texts = Vec::new();
    let (flow, notes) = with_input(&path, "text", |input| {
        read(input, &mut |piece| {
            assert!(piece.ends_document);
            texts.push(piece.text.to_string());
            Ok(ControlFlow::Continue(()))
        })
    });
    let relative = |text: String| text.replace(&folder.path().display().to_string(), "");
    let line = relative(notes.line().unwrap_or_default());
    flow.map(|_| (texts, line)).map_err(|error| relative(error.to_string()))
}

#[test]
fn each_line_is_a_document() {
    let content = "\u{feff}{\"id\": 1, \"text\": \"a\\nb\", \"more\": {\"text\": [1, null]}}\r\n\n  \n\
                   {\"text\": \"\"}\n{\"text\": \"\\ud83d\\ude00 é\"}";
    assert_eq!(texts(content.as_bytes()).unwrap(), ["a\nb", "😀 é"]);
    assert_eq!(texts(b"").unwrap(), [""; 0]);
}

#[test]
fn wrong_lines_are_named() {
    for (content, expected) in [
        (&b"{\"body\": 1}"[..], "/a.jsonl:1: no field \"text\" (fields: body); data.text_field names the one to use"),
        (b"{\"data\": \"a\"}\n{\"data\": [1]}", "/a.jsonl row 1: no field \"text\" (fields: data)"),
        (b"{}", "/a.jsonl:1: no field \"text\" (fields: none)"),
        (b"{\"text\": 3}", "/a.jsonl:1: field \"text\" is a number; must be text"),
        (b"{\"text\": [\"a\"]}", "/a.jsonl:1: field \"text\" is a list; must be text"),
        (b"{\"text\": \"a\"}\n{\"text\": {\"a\": 1}}", "/a.jsonl:2: field \"text\" is an object; must be text"),
        (b"\n3", "/a.jsonl:2: is a number; must be an object with the text in field \"text\""),
        (b"\n[1]", "/a.jsonl row 1: is a number; must be an object with the text in field \"text\""),
        (
            b"{\"text\": \"a\"}\n{\"text\": \"a\"",
            "/a.jsonl:2: not JSON: EOF while parsing an object at column 12; each",
        ),
        (b"{\"text\": \"a\"", "/a.jsonl:1: not JSON: EOF while parsing an object at column 12; each line must be one"),
        (b"{\"text\": \"a\"} x", "/a.jsonl:1: not JSON: trailing characters"),
        (b"{\"text\": NULL}", "/a.jsonl:1: not JSON: "),
        (b"{\"text\": \"a\"}\n{\"text\": \"\xff\"}", "/a.jsonl: not UTF-8 at byte 24"),
    ] {
        let message = texts(content).unwrap_err();
        assert!(message.starts_with(expected), "{message}");
        assert!(!message.contains('\n'), "{message}");
    }
    let chat = br#"{"messages": [{"role": "user", "content": "hi"}]}"#;
    let message = texts(chat).unwrap_err();
    assert!(
        message.contains("(fields: messages); conversations are not read, only text: write each as one; "),
        "{message}"
    );
}

#[test]
fn rows_without_text_are_counted_where_others_have_one() {
    let content =
        b"{\"a\": 1}\n{\"text\": \"a\"}\n{\"text\": null}\n{\"text\": \"\"}\n{\"b\": 1}\nnull\n{\"text\": NaN}";
    let (found, line) = texts_and_line(content).unwrap();
    assert_eq!(found, ["a"]);
    assert_eq!(
        line,
        "3 rows skipped: their text is null (first: /a.jsonl:3); \
         2 rows skipped: they have no text field (first: /a.jsonl:1); 1 row skipped: its text is empty (/a.jsonl:4)"
    );
}

#[test]
fn a_file_without_the_field_is_told_before_all_of_it_is_read() {
    let content = "{\"body\": 1}\n".repeat(2000) + "{\"text\": \"a\"}";
    assert!(texts(content.as_bytes()).unwrap_err().starts_with("/a.jsonl:1: no field"));
    let content = "{\"body\": 1}\n".repeat(900) + "{\"text\": \"a\"}";
    assert_eq!(texts(content.as_bytes()).unwrap(), ["a"]);
}

#[test]
fn words_and_escapes_of_python_are_read_wherever_a_reader_cuts_them() {
    let line = r#"{"a": [NaN,-Infinity,Infinity], "NaN \\\" NaN": -1, "text": "\\ud83d NaN \ud83d\ude00 \udc00\\"}"#;
    let (repaired, num_surrogates) = repair::line(line);
    let expected = r#"{"a": [null,null,null], "NaN \\\" NaN": -1, "text": "\\ud83d NaN \ud83d\ude00 \ufffd\\"}"#;
    assert_eq!((&*repaired, num_surrogates), (expected, 1));
    for len in 0..line.len() {
        let (part, _) = repair::line(&line[..len]);
        assert!(part.len() <= line.len() + 12, "{part}");
    }
    let long = format!("[{}]", vec![line; 5000].join(","));
    let (found, line) = texts_and_line(long.as_bytes()).unwrap();
    assert_eq!((found.len(), &*found[4999]), (5000, "\\ud83d NaN 😀 \u{fffd}\\"));
    assert!(line.starts_with("5000 rows with lone surrogates, now U+FFFD (first: /a.jsonl row 1)"), "{line}");
}

#[test]
fn nesting_without_end_is_an_error_and_no_crash() {
    let nested = "[".repeat(1_000_000);
    for content in [format!("{{\"a\": {nested}"), format!("{{\"text\": {nested}"), nested] {
        assert!(texts(content.as_bytes()).unwrap_err().starts_with("/a.jsonl:1: "));
    }
}

#[test]
fn lines_longer_than_the_buffer_are_read_whole() {
    let long = "y".repeat(1 << 20);
    assert_eq!(texts(format!("{{\"text\": \"{long}\"}}\n").as_bytes()).unwrap(), [long]);
}
