//! Calls of tools, as families of models write them, whole and piece by piece.

use moeworks_infer::chat::{ToolCall, ToolEvent, ToolFormat, ToolParser};
use proptest::prelude::*;

/// Reads an answer in pieces of some length; returns its text and its calls.
fn read(format: &ToolFormat, answer: &str, piece_len: usize) -> (String, Vec<ToolCall>) {
    let mut parser = ToolParser::new(format.clone(), vec!["add".to_owned(), "get_weather".to_owned()]);
    let chars: Vec<char> = answer.chars().collect();
    let pieces = chars.chunks(piece_len).map(|piece| parser.push(&piece.iter().collect::<String>()));
    let mut events: Vec<ToolEvent> = pieces.flatten().collect();
    events.extend(parser.finish());
    joined(events)
}

/// The text and the calls of events.
fn joined(events: Vec<ToolEvent>) -> (String, Vec<ToolCall>) {
    let (mut text, mut calls) = (String::new(), Vec::<ToolCall>::new());
    for event in events {
        match event {
            ToolEvent::Text(piece) => text += &piece,
            ToolEvent::Call(name) => calls.push(ToolCall { name, arguments: String::new() }),
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

/// Checks the events of an answer that comes in `pieces`, one list for each.
fn check_events(format: ToolFormat, pieces: &[&str], expected: &[&[ToolEvent]]) {
    let mut parser = ToolParser::new(format, vec!["add".to_owned(), "get_weather".to_owned()]);
    let mut events: Vec<Vec<ToolEvent>> = pieces.iter().map(|piece| parser.push(piece)).collect();
    events.push(parser.finish());
    assert_eq!(events, expected);
}

#[test]
fn arguments_are_given_out_as_they_come() {
    let call = |name: &str| ToolEvent::Call(name.to_owned());
    let text = |text: &str| ToolEvent::Text(text.to_owned());
    let arguments = |text: &str| ToolEvent::Arguments(text.to_owned());
    let pieces =
        ["Hm. <tool", "_call>{\"name\": \"add\", ", "\"arguments\": {\"a\"", ": \"x", " y\"", "}}", "</tool_call>"];
    let expected: &[&[ToolEvent]] = &[
        &[text("Hm.")],
        &[],
        &[call("add"), arguments("{\"a\"")],
        &[arguments(":\"x")],
        &[arguments(" y\"")],
        &[arguments("}")],
        &[],
        &[],
    ];
    check_events(ToolFormat::Hermes, &pieces, expected);
    let pieces = ["[TOOL_CALLS]add[ARGS]", "{\"a\": ", "1}", "[TOOL_CALLS]get_weather[CALL_ID]abc[ARGS]{}"];
    let expected: &[&[ToolEvent]] =
        &[&[], &[call("add"), arguments("{\"a\":")], &[arguments("1}")], &[call("get_weather"), arguments("{}")], &[]];
    check_events(ToolFormat::Mistral, &pieces, expected);
    let pieces =
        ["{\"parameters\": {\"a\": 1}", ", \"name\": \"add\"", "}; {\"name\": \"add\", \"parameters\": {", "}}"];
    let expected: &[&[ToolEvent]] =
        &[&[], &[], &[call("add"), arguments("{\"a\":1}"), call("add"), arguments("{")], &[arguments("}")], &[]];
    check_events(ToolFormat::Llama, &pieces, expected);
    let pieces = ["<｜tool▁call▁begin｜>add<｜tool▁sep｜>", "{\"a\"", ":[]}", "<｜tool▁call▁end｜>\n"];
    let expected: &[&[ToolEvent]] = &[&[], &[call("add"), arguments("{\"a\"")], &[arguments(":[]}")], &[], &[]];
    check_events(ToolFormat::DeepSeek, &pieces, expected);
}

#[test]
fn a_call_that_breaks_off_keeps_its_arguments_and_what_follows_is_text() {
    let format = ToolFormat::Hermes;
    check(&format, "<tool_call>{\"name\": \"add\", \"arguments\": {\"a\": \"x", "", &[("add", "{\"a\":\"x")]);
    check(&format, "<tool_call>{\"name\": \"add\", \"arguments\": {\"a\": no}} x", "}} x", &[("add", "{\"a\":no")]);
    let marked = "<tool_call>{\"name\": \"add\", \"arguments\": {\"a\": \"</tool_call>\n\"}}</tool_call>\n";
    check(&format, marked, "", &[("add", "{\"a\":\"</tool_call>\\n\"}")]);
    let text = r#"<tool_call>{"name": "add", "arguments": "{\"a\": 1}"}</tool_call>"#;
    check(&format, text, "", &[("add", "{\"a\":1}")]);
}

/// An answer of a format with calls of these arguments.
fn answer_of(format: &ToolFormat, arguments: &[String]) -> String {
    let named =
        |key: &'static str| arguments.iter().map(move |text| format!("{{\"name\": \"add\", \"{key}\": {text}}}"));
    let join = |calls: Vec<String>, separator: &str| calls.join(separator);
    match format {
        ToolFormat::Hermes => {
            let one = |call: String| format!("<tool_call>\n{call}\n</tool_call>");
            "So. ".to_owned() + &join(named("arguments").map(one).collect(), "\n")
        }
        ToolFormat::Mistral => format!("So. [TOOL_CALLS] [{}]", join(named("arguments").collect(), ", ")),
        ToolFormat::Llama => join(named("parameters").collect(), "; "),
        _ => {
            let one = |text: &String| {
                format!("<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{text}\n```<｜tool▁call▁end｜>")
            };
            let calls = join(arguments.iter().map(one).collect(), "\n");
            format!("So.<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>")
        }
    }
}

/// Reads an answer in pieces of these lengths, in turn.
fn read_by(format: &ToolFormat, answer: &str, lens: &[usize]) -> (String, Vec<ToolCall>) {
    let mut parser = ToolParser::new(format.clone(), vec!["add".to_owned()]);
    let (mut chars, mut lens, mut events) = (answer.chars().peekable(), lens.iter().cycle(), Vec::new());
    while chars.peek().is_some() {
        let piece: String = chars.by_ref().take(*lens.next().unwrap()).collect();
        events.extend(parser.push(&piece));
    }
    events.extend(parser.finish());
    joined(events)
}

fn arguments() -> impl Strategy<Value = serde_json::Value> {
    let leaf = prop_oneof![
        Just(serde_json::Value::Null),
        any::<bool>().prop_map(Into::into),
        any::<i32>().prop_map(Into::into),
        ".{0,12}|[<>\\[\\]{}\"\\\\a]{0,8}|</tool_call>".prop_map(Into::into),
    ];
    let value = leaf.prop_recursive(3, 12, 4, |inner| {
        let members = prop::collection::btree_map("[a-z\"{ ]{1,4}", inner.clone(), 0..4);
        let object = members.prop_map(|members| members.into_iter().collect::<serde_json::Value>());
        prop_oneof![prop::collection::vec(inner, 0..4).prop_map(Into::into), object]
    });
    prop::collection::btree_map("[a-z]{1,3}", value, 0..4).prop_map(|members| members.into_iter().collect())
}

const FAMILIES: [ToolFormat; 4] = [ToolFormat::Hermes, ToolFormat::Mistral, ToolFormat::Llama, ToolFormat::DeepSeek];

proptest! {
    #[test]
    fn the_calls_of_an_answer_are_its_calls_however_it_is_cut(
        calls in prop::collection::vec(arguments(), 1..4), lens in prop::collection::vec(1_usize..9, 1..6), is_wide in any::<bool>()
    ) {
        let text = |value| if is_wide { serde_json::to_string_pretty(value) } else { serde_json::to_string(value) };
        let written: Vec<String> = calls.iter().map(|call| text(call).unwrap()).collect();
        for format in FAMILIES {
            let (text, found) = read_by(&format, &answer_of(&format, &written), &lens);
            let found: Vec<String> = found.into_iter().map(|call| call.arguments).collect();
            let expected: Vec<String> = calls.iter().map(ToString::to_string).collect();
            let expected_text = if format == ToolFormat::Llama { "" } else { "So." };
            prop_assert_eq!((text.as_str(), found), (expected_text, expected), "{:?}", format);
        }
    }

    #[test]
    fn a_spoiled_answer_is_read_alike_however_it_is_cut(
        calls in prop::collection::vec(arguments(), 1..3), lens in prop::collection::vec(1_usize..9, 1..6),
        at in any::<prop::sample::Index>(), piece in "[ -~]{0,3}|<tool_call>|\\[TOOL_CALLS\\]|<｜tool▁call▁end｜>", num_lost in 0_usize..9
    ) {
        for format in FAMILIES {
            let written: Vec<String> = calls.iter().map(ToString::to_string).collect();
            let mut chars: Vec<char> = answer_of(&format, &written).chars().collect();
            let at = at.index(chars.len());
            chars.splice(at..(at + num_lost).min(chars.len()), piece.chars());
            let answer: String = chars.into_iter().collect();
            prop_assert_eq!(read_by(&format, &answer, &lens), read_by(&format, &answer, &[usize::MAX]), "{:?}", answer);
        }
    }

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
