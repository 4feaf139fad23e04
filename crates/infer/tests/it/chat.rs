//! Chat templates agree with `transformers` (`tests/fixtures/chat/make.py`), keep their bounds, and keep messages as
//! text.

use std::fs;
use std::path::Path;

use moeworks_infer::chat::{ChatError, ChatTemplate, Message, RenderOptions, final_message};
use moeworks_model::Tokenizer;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::fixture;

/// Makes a tokenizer of bytes with further keys in its configuration.
fn tokenizer(keys: &Value) -> (TempDir, Tokenizer) {
    let dir = tempfile::tempdir().unwrap();
    Tokenizer::bytes().save(dir.path()).unwrap();
    let path = dir.path().join("tokenizer_config.json");
    let mut config: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
    fs::write(path, config.to_string()).unwrap();
    let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();
    (dir, tokenizer)
}

fn messages(value: &Value) -> Vec<Message> {
    let text = |message: &Value, key: &str| message[key].as_str().unwrap().to_owned();
    value.as_array().unwrap().iter().map(|m| Message::new(&text(m, "role"), text(m, "content"))).collect()
}

/// Compares every template of a file of `make.py` with ours, and returns the number of texts that agree.
fn check(path: &Path) -> usize {
    let file: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let (_dir, tokenizer) = tokenizer(&file["tokens"]);
    let mut agreed = 0;
    for template in file["templates"].as_array().unwrap() {
        let ours = ChatTemplate::new(template["source"].as_str().unwrap().to_owned(), &tokenizer);
        for case in template["cases"].as_array().unwrap() {
            let conversation = case["conversation"].as_str().unwrap();
            let place = format!("{}, {conversation}", template["name"]);
            let add_generation_prompt = case["add_generation_prompt"].as_bool().unwrap();
            let options = RenderOptions { add_generation_prompt, ..RenderOptions::default() };
            let found = ours.render(&messages(&file["conversations"][conversation]), &options);
            match (case["text"].as_str(), found) {
                (Some(text), Ok(found)) => assert_eq!(found, text, "{place}"),
                (None, Err(error)) => {
                    let reason = case["error"].as_str().unwrap();
                    // A template's own message is compared; those of the engine differ.
                    let is_own = template["source"].as_str().unwrap().contains("raise_exception");
                    assert!(!is_own || error.to_string().contains(reason), "{place}: {error}, expected {reason}");
                }
                (expected, found) => panic!("{place}: {found:?}, expected {expected:?}"),
            }
            agreed += 1;
        }
    }
    agreed
}

#[test]
fn conversations_are_written_as_transformers_writes_them() {
    assert_eq!(check(&fixture("chat").join("templates.json")), 117);
}

/// The templates of published models are not kept in this repository.
#[test]
fn real_templates_are_written_as_transformers_writes_them() {
    match std::env::var_os("MOEWORKS_CHAT_TEMPLATES") {
        Some(path) => eprintln!("{} texts agree", check(Path::new(&path))),
        None => eprintln!("skipped: MOEWORKS_CHAT_TEMPLATES names no file of tests/fixtures/chat/make.py DIR OUT.json"),
    }
}

fn render(source: &str) -> Result<String, ChatError> {
    let (_dir, tokenizer) = tokenizer(&json!({}));
    ChatTemplate::new(source.to_owned(), &tokenizer).render(&[Message::new("user", "hi")], &RenderOptions::default())
}

#[test]
fn variables_reach_a_template_and_replace_none_of_its_own() {
    let (_dir, tokenizer) = tokenizer(&json!({}));
    let source = "{{ effort }} {{ messages[0].content }} {{ messages[0].name }} {{ eos_token }}";
    let template = ChatTemplate::new(source.to_owned(), &tokenizer);
    let variables = json!({"effort": "high", "messages": "none", "eos_token": "none"});
    let options = RenderOptions { variables: variables.as_object().unwrap().clone(), ..RenderOptions::default() };
    let message = Message { name: Some("Ada".to_owned()), ..Message::new("user", "hi") };
    assert_eq!(template.render(&[message], &options).unwrap(), "high hi Ada <|endoftext|>");
}

#[test]
fn a_template_that_loops_or_writes_without_end_is_stopped() {
    let loops = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}";
    assert!(matches!(render(loops), Err(ChatError::Endless)));
    let macros = "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}";
    assert!(matches!(render(macros), Err(ChatError::Fails { .. } | ChatError::Endless)));
    let writes = "{% for a in range(9999) %}{{ 'x' * 9999 }}{% endfor %}";
    assert!(matches!(render(writes), Err(ChatError::TooLong)));
}

#[test]
fn a_template_reaches_nothing_outside_and_says_where_it_fails() {
    for source in ["{% include '/etc/passwd' %}", "{% import 'os' as os %}", "{{ ''.__class__.__mro__[1] }}"] {
        assert!(matches!(render(source), Err(ChatError::Fails { .. })), "{source}");
    }
    let error = render("a\nb {{ raise_exception('not this') }}").unwrap_err();
    assert_eq!(error.to_string(), "the chat template fails in line 2: not this");
    assert!(render("{% if %}").unwrap_err().to_string().contains("in line 1: syntax error"));
    let today = render("{{ strftime_now('%Y-%m-%d') }}").unwrap();
    assert!(today.len() == 10 && today.starts_with("20"), "{today}");
}

#[test]
fn templates_are_found_where_models_have_them() {
    let source = |dir: &TempDir, tokenizer: &Tokenizer| {
        let template = ChatTemplate::find(Some(dir.path()), tokenizer).unwrap()?;
        Some(template.render(&[], &RenderOptions::default()).unwrap())
    };
    let (dir, none) = tokenizer(&json!({}));
    assert_eq!(source(&dir, &none), None);
    let (dir, one) = tokenizer(&json!({ "chat_template": "one" }));
    assert_eq!(source(&dir, &one).as_deref(), Some("one"));
    fs::write(dir.path().join("chat_template.jinja"), "file {{ eos_token }}").unwrap();
    assert_eq!(source(&dir, &one).as_deref(), Some("file <|endoftext|>"));
    let named = json!([{ "name": "tool_use", "template": "a" }, { "name": "default", "template": "b" }]);
    let (dir, many) = tokenizer(&json!({ "chat_template": named }));
    assert_eq!(source(&dir, &many).as_deref(), Some("b"));
    let (dir, wrong) = tokenizer(&json!({ "chat_template": 7 }));
    assert!(matches!(ChatTemplate::find(Some(dir.path()), &wrong), Err(ChatError::NoTemplate { .. })));
}

#[test]
fn of_an_answer_in_channels_what_was_said_is_kept() {
    let thought = "<|channel|>analysis<|message|>They greet <|x|>.<|end|><|start|>assistant";
    let cases = [
        (format!("{thought}<|channel|>final<|message|>Hello <|x|>!<|return|>"), "Hello <|x|>!"),
        (format!("{thought}<|channel|>final <|constrain|>json<|message|>{{}}"), "{}"),
        (format!("{thought}<|channel|>commentary to=f<|message|>{{}}<|call|>"), ""),
        (format!("<|channel|>final<|message|>One.<|end|>{thought}<|channel|>final<|message|>Two."), "Two."),
        ("no channel".to_owned(), ""),
        ("<|channel|>final".to_owned(), ""),
    ];
    for (answer, said) in cases {
        assert_eq!(final_message(&answer), said, "{answer}");
    }
    assert!(!Tokenizer::bytes().has_channels());
    let (dir, _) = tokenizer(&json!({}));
    let path = dir.path().join("tokenizer.json");
    let text = fs::read_to_string(&path).unwrap().replace("<|endoftext|>", "<|channel|>");
    fs::write(path, text).unwrap();
    assert!(Tokenizer::from_dir(dir.path()).unwrap().has_channels());
}

#[test]
fn what_people_spell_never_becomes_a_special_token() {
    let (_dir, tokenizer) = tokenizer(&json!({}));
    let rendered = format!("{}<|endoftext|>", tokenizer.guard("a<|endoftext|>b\u{FDD0}"));
    let ids = tokenizer.encode_rendered(&rendered).unwrap();
    let spelled: Vec<u32> = "a<|endoftext|>b".bytes().map(u32::from).chain([256]).collect();
    assert_eq!(ids, spelled);
}
