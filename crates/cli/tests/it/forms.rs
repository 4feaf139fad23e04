//! Answers that `generate` and `chat` hold to a form.
#![cfg(unix)]

use serde_json::{Value, json};

use crate::bad_input::refused;
use crate::chat::piped;
use crate::program::{Workplace, assert_success, stdout};
use crate::serve::with_model;

/// The answer to an empty prompt.
fn answer(work: &Workplace, args: &[&str]) -> String {
    let output = work.run(&[&["generate", "run", "--max-tokens", "60", "--temperature", "1"][..], args].concat());
    assert_success(&output);
    stdout(&output).trim_end_matches('\n').to_owned()
}

#[test]
fn answers_have_the_form_that_is_asked_for() {
    let work = with_model();
    let schema = json!({"type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
                        "required": ["age"], "additionalProperties": false});
    let file = work.file("schema.json", schema.to_string());
    for given in [&schema.to_string(), &file] {
        let found: Value = serde_json::from_str(&answer(&work, &["--json-schema", given])).expect("JSON");
        assert!((0..=99).contains(&found["age"].as_u64().unwrap()), "{found}");
    }
    for seed in ["1", "2", "3"] {
        let found = answer(&work, &["--regex", "-[0-9]{3}", "--seed", seed]);
        assert!(found.len() == 4 && found[1..].parse::<u32>().is_ok(), "{found}");
        let found = answer(&work, &["--choices", "yes,no", "--seed", seed]);
        assert!(["yes", "no"].contains(&found.as_str()), "{found}");
    }
    let grammar = work.file("list.gbnf", "root ::= item (\",\" item){2}\nitem ::= [ab]\n");
    let found = answer(&work, &["--grammar", &grammar]);
    assert!(found.len() == 5 && found.split(',').all(|item| matches!(item, "a" | "b")), "{found}");
    assert!(answer(&work, &["--json"]).trim_start().starts_with('{'));
}

#[test]
fn each_turn_of_a_chat_has_the_form() {
    let work = with_model();
    let template = work.file("chat.jinja", "{% for m in messages %}{{ m.content }}{% endfor %}");
    let args = ["chat", "run", "--template", &template, "--choices", "yes,no", "--no-history"];
    let output = piped(&work, &args, "Is it?\nAnd now?\n");
    assert_success(&output);
    let text = stdout(&output);
    let answers: Vec<&str> = text.lines().filter(|line| !line.is_empty()).collect();
    assert!(answers.len() == 2 && answers.iter().all(|answer| matches!(*answer, "yes" | "no")), "{text:?}");
}

#[test]
fn a_line_of_prompts_has_its_own_form_or_that_of_the_command() {
    let work = with_model();
    let lines = [
        json!({"prompt": "x", "regex": "[0-9]{2}"}),
        json!({"prompt": "x", "json_schema": {"type": "boolean"}}),
        json!({"prompt": "x", "guided_choice": ["left", "right"]}),
        json!({"prompt": "x", "grammar": "root ::= \"so\""}),
        json!({"prompt": "x"}),
    ];
    work.file("prompts.jsonl", lines.map(|line| line.to_string() + "\n").concat());
    let args = ["generate", "run", "--data", "prompts.jsonl", "--out", "answers.jsonl", "--choices", "yes,no"];
    assert_success(&work.run(&args));
    let text = std::fs::read_to_string(work.path("answers.jsonl")).expect("answers");
    let answers: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let texts: Vec<&str> = answers.iter().map(|answer| answer["text"].as_str().unwrap()).collect();
    assert!(texts[0].len() == 2 && texts[0].parse::<u32>().is_ok(), "{texts:?}");
    assert!(matches!(texts[1], "true" | "false") && matches!(texts[2], "left" | "right"), "{texts:?}");
    assert!(texts[3] == "so" && matches!(texts[4], "yes" | "no"), "{texts:?}");
    assert!(answers.iter().all(|answer| answer["finish_reason"] == "stop"), "{answers:?}");
}

#[test]
fn a_bad_form_is_one_line_and_no_model_is_loaded() {
    let work = Workplace::new();
    let bad = work.file("bad.gbnf", "root ::= (\n");
    let broken = work.file("broken.json", "{\"type\": ");
    for (args, parts) in [
        (&["--json-schema", "none.json"][..], &["--json-schema none.json", "No such file"][..]),
        (&["--json-schema", &broken], &["--json-schema", "broken.json: is not JSON"]),
        (&["--json-schema", "{\"type\": \"colour\"}"], &["--json-schema: the schema at #"]),
        (&["--json-schema", "/dev/zero"], &["--json-schema /dev/zero: is larger than"]),
        (&["--regex", "(a"], &["--regex (a: the regular expression"]),
        (&["--grammar", &bad], &["--grammar", "the grammar, line"]),
        (&["--choices", "a,,b"], &["--choices: the texts to choose from"]),
        (&["--json", "--regex", "a"], &["--json", "cannot be used with"]),
    ] {
        refused(&work, &[&["generate", "none"][..], args].concat(), parts);
        refused(&work, &[&["chat", "none"][..], args].concat(), parts);
    }
}
