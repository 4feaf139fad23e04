//! The token at the start of texts, in every command that reads texts.

use std::fs;

use serde_json::{Value, json};

use crate::bad_input::refused;
use crate::program::{Workplace, assert_success, stderr, stdout};

/// Creates a model folder `plain`, and a folder `begun` whose tokenizer starts every text with `<|endoftext|>`.
fn folders() -> Workplace {
    let work = Workplace::new();
    assert_success(&work.train("run", 2, &[]));
    for name in ["plain", "begun"] {
        assert_success(&work.run(&["convert", "run", name]));
    }
    let path = work.path("begun").join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    tokenizer["post_processor"] = json!({
        "type": "TemplateProcessing", "pair": [],
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [256], "tokens": ["<|endoftext|>"]}},
    });
    fs::write(&path, tokenizer.to_string()).unwrap();
    work
}

#[test]
fn a_prompt_begins_as_texts_do_and_may_spell_special_tokens() {
    let work = folders();
    let answer = |folder: &str, prompt: &str, max_tokens: &str, more: &[&str]| {
        let args = [
            "generate",
            folder,
            "--prompt",
            prompt,
            "--temperature",
            "0",
            "--max-tokens",
            max_tokens,
            "--threads",
            "1",
        ];
        let output = work.run(&[&args[..], more].concat());
        assert_success(&output);
        stdout(&output).strip_prefix(prompt).unwrap().to_owned()
    };
    let begun = answer("begun", "hello", "9", &[]);
    assert_eq!(answer("begun", "<|endoftext|>hello", "9", &["--special"]), begun);
    assert_eq!(answer("plain", "<|endoftext|>hello", "9", &["--special"]), begun);
    // The model's context is 64 tokens.
    let long = "x".repeat(60);
    answer("plain", &long, "4", &[]);
    refused(&work, &["generate", "begun", "--prompt", &long, "--max-tokens", "5"], &["64"]);
}

#[test]
fn evaluation_begins_each_document_and_does_not_count_its_beginning() {
    let work = folders();
    let (one, two) = (work.file("one.txt", "hello"), work.file("two.txt", "worlds"));
    let figures = |folder: &str| -> Value {
        let output = work.run(&["evaluate", folder, "--data", &one, "--data", &two, "--json", "--threads", "1"]);
        assert!(output.status.success(), "{}", stderr(&output));
        serde_json::from_str(&stdout(&output)).unwrap()
    };
    let (plain, begun) = (figures("plain"), figures("begun"));
    // Without a start token, the first byte is not predicted.
    assert_eq!((&plain["tokens"], &begun["tokens"]), (&json!(12), &json!(13)));
    assert_eq!(begun["bytes"], json!(11.0));
}
