//! `moeworks generate --data`: many prompts at once, with the answers that each gets alone.
#![cfg(unix)]

use serde_json::{Value, json};

use crate::bad_input::refused;
use crate::program::{Workplace, assert_success, stdout};
use crate::serve::with_model;

fn lines(work: &Workplace, name: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(work.path(name)).expect("answers");
    assert!(text.ends_with('\n'));
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

fn many(work: &Workplace, out: &str, more: &[&str]) -> Vec<Value> {
    let args = [&["generate", "run", "--data", "prompts.jsonl", "--out", out, "--batch-invariant"][..], more].concat();
    assert_success(&work.run(&args));
    lines(work, out)
}

#[test]
fn answers_are_those_of_generate_alone_in_the_order_of_the_prompts() {
    let work = with_model();
    let prompts: Vec<String> = (0..20).map(|i| "Line 3 of a text that"[..1 + i].to_owned()).collect();
    let line = |(i, prompt): (usize, &String)| match i % 3 {
        0 => json!({"prompt": prompt, "id": format!("p{i}"), "max_tokens": 3 + i}).to_string() + "\n",
        _ => json!({"prompt": prompt, "max_tokens": 3 + i}).to_string() + "\r\n\n",
    };
    work.file("prompts.jsonl", prompts.iter().enumerate().map(line).collect::<String>());
    // Few at a time, so that some wait.
    let answers = many(&work, "answers.jsonl", &["--temperature", "0", "--max-running", "6"]);
    assert_eq!(answers.len(), 20);
    for (i, (answer, prompt)) in answers.iter().zip(&prompts).enumerate() {
        let count = (3 + i).to_string();
        let args = ["generate", "run", "--batch-invariant", "-p", prompt, "--temperature", "0", "-n", &count];
        let alone = stdout(&work.run(&args));
        let alone = alone.strip_prefix(prompt.as_str()).and_then(|text| text.strip_suffix('\n')).expect("a text");
        assert_eq!(answer["text"], alone, "{prompt}");
        assert_eq!(answer["usage"]["prompt_tokens"], prompt.len());
        if i.is_multiple_of(3) {
            assert_eq!(answer["id"], format!("p{i}"));
        }
    }
    // Two lines for each prompt that has no id, of which one is empty.
    assert_eq!((&answers[1]["id"], &answers[2]["id"], &answers[4]["id"]), (&json!(2), &json!(4), &json!(7)));
}

#[test]
fn a_seed_gives_the_same_answers_and_prompts_have_others() {
    let work = with_model();
    let prompts = "{\"prompt\": \"Line\"}\n{\"prompt\": \"Line\"}\n{\"prompt\": \"Line\", \"seed\": 5}\n{\"prompt\": \"Line\", \"temperature\": 0}\n";
    work.file("prompts.jsonl", prompts);
    let args = ["--temperature", "1.5", "--max-tokens", "20", "--seed", "5"];
    let first = many(&work, "one.jsonl", &args);
    assert_eq!(first, many(&work, "two.jsonl", &args));
    assert!(first[0]["text"] == first[2]["text"] && first[0]["text"] != first[1]["text"], "{first:?}");
    let none = many(&work, "none.jsonl", &["--max-tokens", "0"]);
    assert_eq!(
        none[0],
        json!({"id": 1, "text": "", "finish_reason": "length", "usage": {"prompt_tokens": 4, "completion_tokens": 0}})
    );
}

#[test]
fn messages_are_answered_by_the_template() {
    let work = with_model();
    work.file("chat.jinja", "{% for m in messages %}{{ m.content }}{% endfor %}");
    work.file(
        "prompts.jsonl",
        "{\"messages\": [{\"role\": \"user\", \"content\": \"Line 3\"}]}\n{\"prompt\": \"Line 3\"}\n",
    );
    let args = ["--chat-template", "chat.jinja", "--temperature", "0", "--max-tokens", "9"];
    let answers = many(&work, "answers.jsonl", &args);
    assert_eq!(answers[0]["text"], answers[1]["text"]);
}

#[test]
fn a_bad_line_is_one_error_with_its_number_and_nothing_is_written() {
    let work = with_model();
    let args = ["generate", "run", "--data", "prompts.jsonl", "--out", "answers.jsonl"];
    let wrong = [
        ("{\"prompt\": 3}", "prompt = 3"),
        ("{\"prompt\": \"x\", \"stream\": true}", "\"stream\" is not known"),
        ("{\"prompt\": \"x\", \"regex\": \"(\"}", "regex: the regular expression"),
        ("{\"prompt\": \"x\", \"json_schema\": 5}", "json_schema = 5"),
        ("{\"prompt\": \"x\", \"temperature\": -1}", "temperature = -1"),
        ("{\"prompt\": \"x\", \"max_tokens\": 100000}", "give at most 255"),
        ("{\"prompt\": [100000]}", "100000"),
        ("{\"prompt\": \"\", \"add_special_tokens\": false}", "no tokens"),
        ("{\"id\": [], \"prompt\": \"x\"}", "id"),
        ("{\"messages\": []}", "messages"),
        ("{\"max_tokens\": 3}", "prompt or messages is missing"),
        ("prompt", "is not JSON"),
        ("[1]", "must be a JSON object"),
    ];
    for (line, expected) in wrong {
        work.file("prompts.jsonl", format!("{{\"prompt\": \"x\"}}\n\n{line}\n"));
        refused(&work, &args, &["prompts.jsonl", "line 3", expected]);
        assert!(!work.path("answers.jsonl").exists(), "{line}");
    }
    work.file("prompts.jsonl", "\n");
    refused(&work, &args, &["has no prompt"]);
    refused(&work, &["generate", "run", "--data", "prompts.jsonl"], &["--out"]);
    refused(&work, &["generate", "run", "--data", "prompts.jsonl", "--out", "run"], &["--out run", "is a folder"]);
    refused(
        &work,
        &["generate", "run", "--data", "prompts.jsonl", "--out", "text.txt"],
        &["--out text.txt", "--force"],
    );
    refused(&work, &["generate", "run", "--data", "none.jsonl", "--out", "a.jsonl"], &["--data none.jsonl"]);
}
