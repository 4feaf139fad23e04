//! Keys and values of `serve` and `generate --data` in 8 bits.
#![cfg(unix)]

use serde_json::{Value, json};

use crate::bad_input::refused;
use crate::program::{Workplace, assert_success};
use crate::serve::Server;

/// A run whose keys and values of a token are whole blocks of 32 numbers.
fn with_model() -> Workplace {
    let work = Workplace::new();
    let more = ["--set", "model.max_seq_len=256", "--set", "train.lr=1e-2", "--set", "model.num_kv_heads=2"];
    assert_success(&work.train("run", 8, &more));
    work
}

#[test]
fn a_server_says_the_type_and_the_bytes_of_keys_and_values() {
    let work = with_model();
    let body = json!({"prompt": "Line 3", "max_tokens": 9, "temperature": 0});
    let mut texts = Vec::new();
    // Two layers, each with a key and a value of 32 numbers.
    for (kv_type, bytes) in [("f32", 2 * 2 * 32 * 4), ("bf16", 2 * 2 * 32 * 2), ("q8", 2 * 2 * 34)] {
        let server = Server::start(&work, &["--kv-type", kv_type, "--batch-invariant"]);
        let answer = server.post("/v1/completions", &body);
        assert_eq!(answer["usage"]["completion_tokens"], 9, "{answer}");
        assert_eq!(server.figure("kv_cache_bytes_per_token"), f64::from(bytes));
        let metrics = server.get("/metrics");
        assert!(metrics.contains(&format!("cache_dtype=\"{kv_type}\"")), "{metrics}");
        texts.push(answer["choices"][0]["text"].clone());
    }
    work.file("prompts.jsonl", body.to_string() + "\n");
    let args = ["generate", "run", "--data", "prompts.jsonl", "--out", "answers.jsonl", "--kv-type", "q8"];
    assert_success(&work.run(&[&args[..], &["--batch-invariant"]].concat()));
    let answer = std::fs::read_to_string(work.path("answers.jsonl")).expect("answers");
    let answer: Value = serde_json::from_str(&answer).expect("JSON");
    assert_eq!(answer["text"], texts[2], "with and without a server");
}

#[test]
fn a_type_that_does_not_fit_is_one_line() {
    let work = Workplace::new();
    assert_success(&work.train("run", 2, &[]));
    let parts = ["--kv-type q8", "16 numbers", "whole blocks of 32"];
    refused(&work, &["serve", "run", "--port", "0", "--kv-type", "q8"], &parts);
    refused(&work, &["serve", "run", "--kv-type", "q4"], &["'q4'", "f32, bf16, q8"]);
    refused(&work, &["generate", "run", "--kv-type", "q8"], &["--data"]);
}
