use std::fs;

use super::*;

fn texts(content: &[u8]) -> Result<Vec<String>, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.jsonl");
    fs::write(&path, content).unwrap();
    let mut texts = Vec::new();
    let flow = read(&path, "text", &mut |piece| {
        assert!(piece.ends_document);
        texts.push(piece.text.to_string());
        Ok(ControlFlow::Continue(()))
    });
    let message = |error: DataError| error.to_string().replace(&folder.path().display().to_string(), "");
    flow.map(|_| texts).map_err(message)
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
        (&b"{\"text\": \"a\"}\n{\"body\": 1}"[..], "/a.jsonl:2: no field \"text\" (fields: body); data.text_field"),
        (b"{}", "/a.jsonl:1: no field \"text\" (fields: none)"),
        (b"{\"text\": 3}", "/a.jsonl:1: invalid type: integer `3`, expected text in field \"text\""),
        (b"{\"text\": null}", "/a.jsonl:1: invalid type: null, expected text in field"),
        (b"\n[1]", "/a.jsonl:2: invalid type: sequence, expected an object with the text in field \"text\""),
        (b"{\"text\": \"a\"", "/a.jsonl:1: not JSON: EOF while parsing an object at column 12; each line must be one"),
        (b"{\"text\": \"a\"} x", "/a.jsonl:1: not JSON: trailing characters"),
        (b"{\"text\": \"\\ud800\"}", "/a.jsonl:1: not JSON: "),
        (b"{\"text\": \"a\"}\n{\"text\": \"\xff\"}", "/a.jsonl: not UTF-8 at byte 24"),
    ] {
        let message = texts(content).unwrap_err();
        assert!(message.starts_with(expected), "{message}");
        assert!(!message.contains('\n'), "{message}");
    }
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
