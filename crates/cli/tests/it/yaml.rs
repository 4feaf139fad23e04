//! The part of YAML that the manifests in `deploy/` use: maps and lists by indentation, lists and texts as in JSON,
//! whole-line comments.

use serde_json::{Map, Value};

struct Line<'a> {
    indent: usize,
    text: &'a str,
}

/// The documents of a file.
pub(crate) fn documents(text: &str) -> Vec<Value> {
    text.split("\n---\n").map(document).collect()
}

fn document(text: &str) -> Value {
    let lines = text.lines().filter(|line| !line.trim().is_empty() && !line.trim_start().starts_with('#'));
    let line = |line| Line { indent: str::len(line) - line.trim_start().len(), text: line.trim() };
    let lines: Vec<Line<'_>> = lines.map(line).collect();
    let mut next = 0;
    let value = block(&lines, &mut next);
    assert_eq!(next, lines.len(), "{}", lines.get(next).map_or("", |line| line.text));
    value
}

/// The map or list that begins with a line.
fn block(lines: &[Line<'_>], next: &mut usize) -> Value {
    let indent = lines[*next].indent;
    if !lines[*next].text.starts_with("- ") {
        return map(lines, next, indent);
    }
    let mut items = Vec::new();
    while *next < lines.len() && lines[*next].indent == indent && lines[*next].text.starts_with("- ") {
        // What stands behind the dash is the first line of the item.
        let item = Line { indent: indent + 2, text: &lines[*next].text[2..] };
        let rest = lines[*next + 1..].iter().take_while(|line| line.indent > indent);
        let inner: Vec<Line<'_>> =
            std::iter::once(item).chain(rest.map(|line| Line { indent: line.indent, text: line.text })).collect();
        let mut place = 0;
        items.push(if inner[0].text.contains(": ") || inner[0].text.ends_with(':') {
            map(&inner, &mut place, indent + 2)
        } else {
            place = 1;
            scalar(inner[0].text)
        });
        assert_eq!(place, inner.len(), "{}", inner[0].text);
        *next += inner.len();
    }
    Value::Array(items)
}

fn map(lines: &[Line<'_>], next: &mut usize, indent: usize) -> Value {
    let mut entries = Map::new();
    while *next < lines.len() && lines[*next].indent == indent {
        let text = lines[*next].text;
        let (key, value) = text.split_once(':').unwrap_or_else(|| panic!("no key: {text}"));
        *next += 1;
        let value = match value.trim() {
            "" => block(lines, next),
            value => scalar(value),
        };
        assert!(entries.insert(key.to_owned(), value).is_none(), "{key} is there twice");
    }
    Value::Object(entries)
}

fn scalar(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| text.into())
}

#[test]
fn maps_lists_and_texts_are_read() {
    let text = "# comment\na: 1\nb:\n  - c: x:y\n    d: [\"e\", \"f\"]\n  - g\nh: \"8\"\n---\ni: {}\n";
    let first = serde_json::json!({"a": 1, "b": [{"c": "x:y", "d": ["e", "f"]}, "g"], "h": "8"});
    assert_eq!(documents(text), [first, serde_json::json!({"i": {}})]);
}
