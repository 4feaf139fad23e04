//! Calls of tools, as families of models write them, whole and piece by piece.

use moeworks_infer::chat::{ToolCall, ToolEvent, ToolFormat, ToolParser};
use proptest::prelude::*;

/// Reads an answer in pieces of some length; returns its text and its calls.
fn read(format: &ToolFormat, answer: &str, piece_len: usize) -> (String, Vec<ToolCall>) {
    let mut parser = ToolParser::new(format.clone(), vec!["add".to_owned(), "get_weather".to_owned()]);
    let (mut text, mut calls) = (String::new(), Vec::<ToolCall>::new());
    let chars: Vec<char> = answer.chars().collect();
    let pieces = chars.chunks(piece_len).map(|piece| parser.push(&piece.iter().collect::<String>()));
    let mut events: Vec<ToolEvent> = pieces.flatten().collect();
    events.extend(parser.finish());
    for event in events {
        match event {
            ToolEvent::Text(piece) => text += &piece,
            ToolEvent::Call(call) => calls.push(call),
            ToolEvent::Arguments(more) => calls.last_mut().unwrap().arguments += &more,
        }
    }
    (text, calls)
}

/// Checks an answer in pieces of all lengths.
fn check(format: &ToolFormat, answer: &str, text: &str, calls: &[(&str, &str)]) {
    for piece_len in [1, 2, 3, 7, 1000] {
        let (found, found_calls) = read(format, answer, piece_len);
        let found_calls: Vec<(&str, &str)> =
            found_calls.iter().map(|call| (call.name.as_str(), call.arguments.as_str())).collect();
        assert_eq!((found.as_str(), &found_calls[..]), (text, calls), "{answer:?} by {piece_len}");
    }
}

#[test]
fn calls_in_tags_are_read_with_the_text_before_them() {
    let format = ToolFormat::Hermes;
    let one = "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"b\": 1, \"a\": [2]}}\n</tool_call>";
    check(&format, one, "", &[("add", r#"{"b":1,"a":[2]}"#)]);
    let two = format!("I look.\n\n{one}\n<tool_call>{{\"name\":\"get_weather\"}}</tool_call>");
    check(&format, &two, "I look.", &[("add", r#"{"b":1,"a":[2]}"#), ("get_weather", "{}")]);
    check(&format, "no <tool_calls> here\n", "no <tool_calls> here\n", &[]);
    check(&format, &format!("{one} Done."), " Done.", &[("add", r#"{"b":1,"a":[2]}"#)]);
    for broken in [
        "<tool_call>{\"name\": \"rm\"}</tool_call>",
        "<tool_call>nothing</tool_call>",
        "<tool_call>{\"name\": \"add\", \"arguments\": 5}</tool_call>",
        "<tool_call>{\"name\": \"add\"",
    ] {
        check(&format, broken, broken, &[]);
    }
}

#[test]
fn calls_in_lists_are_read() {
    let format = ToolFormat::Mistral;
    let list =
        "[TOOL_CALLS] [{\"name\": \"add\", \"arguments\": {\"a\": 1}}, {\"name\": \"get_weather\", \"arguments\": {}}]";
    check(&format, list, "", &[("add", r#"{"a":1}"#), ("get_weather", "{}")]);
    check(&format, "Well. [TOOL_CALLS]add[ARGS]{\"a\": {\"b\": 2}}", "Well.", &[("add", r#"{"a":{"b":2}}"#)]);
    check(&format, "[TOOL_CALLS]add{\"a\": 1}[TOOL_CALLS]add{}", "", &[("add", r#"{"a":1}"#), ("add", "{}")]);
    check(&format, "[1, 2]", "[1, 2]", &[]);
    let list = r#"[{"name":"add","arguments":{"a":"]"}}]"#;
    check(&ToolFormat::List, list, "", &[("add", r#"{"a":"]"}"#)]);
    let arguments = ToolFormat::Arguments("add".to_owned());
    check(&arguments, r#"{"a": 1}"#, "", &[("add", r#"{"a": 1}"#)]);
}

#[test]
fn calls_that_are_the_whole_answer_are_read() {
    let format = ToolFormat::Llama;
    check(&format, "{\"name\": \"add\", \"parameters\": {\"a\": 1}}", "", &[("add", r#"{"a":1}"#)]);
    let two =
        "<|python_tag|>{\"name\": \"add\", \"parameters\": {}}; {\"name\": \"add\", \"arguments\": {\"x\": \"}\"}}";
    check(&format, two, "", &[("add", "{}"), ("add", r#"{"x":"}"}"#)]);
    check(&format, "Say {\"name\": \"add\"}", "Say {\"name\": \"add\"}", &[]);
    check(&format, "{\"a\": 1}", "{\"a\": 1}", &[]);
    check(&format, "{not json", "{not json", &[]);
}

#[test]
fn calls_between_signs_are_read() {
    let format = ToolFormat::DeepSeek;
    let v3 = "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{\"a\": 1}\n```<｜tool▁call▁end｜>\n\
              <｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    check(&format, v3, "Let me see.", &[("add", r#"{"a":1}"#), ("get_weather", "{}")]);
    let later =
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{\"a\": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    check(&format, later, "", &[("add", r#"{"a":1}"#)]);
}

#[test]
fn the_way_of_calls_is_that_of_the_template() {
    let found = |source: &str| ToolFormat::from_template(source);
    assert_eq!(found("{% if tools %}<tool_call>"), Some(ToolFormat::Hermes));
    assert_eq!(found("{{ tools }}[TOOL_CALLS]"), Some(ToolFormat::Mistral));
    assert_eq!(found("{{ tools }}<｜tool▁call▁begin｜>"), Some(ToolFormat::DeepSeek));
    assert_eq!(found("{{ tools }}<|python_tag|>"), Some(ToolFormat::Llama));
    assert_eq!(found("{{ tools }}<tool_call><function=x>"), None);
    assert_eq!(found("{{ messages }}"), None);
}

proptest! {
    #[test]
    fn no_answer_makes_a_reader_panic_and_text_is_kept(answer in "[a-z{}\\[\\]\"<>/_: ]{0,40}|<tool_call>.{0,20}|\\[TOOL_CALLS\\].{0,20}", len in 1_usize..5) {
        for format in [ToolFormat::Hermes, ToolFormat::Mistral, ToolFormat::Llama, ToolFormat::DeepSeek, ToolFormat::List] {
            let (text, calls) = read(&format, &answer, len);
            prop_assert!(text.len() <= answer.len() && (calls.is_empty() || !answer.is_empty()));
        }
        let (text, _) = read(&ToolFormat::Hermes, &answer, len);
        prop_assert!(answer.contains("<tool_call>") || text == answer);
    }
}
