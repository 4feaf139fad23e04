//! The greedy answers of a server, which OpenAI's client asks for, are those of `generate` of `transformers`.
//!
//! Needs a Python with torch, transformers and openai: `MOEWORKS_PYTHON`, or `.venv-test/bin/python`.
#![cfg(unix)]

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use crate::program::{Workplace, assert_success, stdout};
use crate::python::{is_full, python_with};
use crate::serve::Server;

/// Folders that `transformers` has written, of several families. Without `MOEWORKS_FULL` the first ones do.
const FIXTURES: [&str; 8] =
    ["olmoe", "deepseek_v2", "gpt_oss", "qwen3_moe", "mixtral", "granitemoe", "qwen2_moe", "llama"];
const NUM_QUICK: usize = 3;

/// Entries of the vocabulary of a fixture, and tokens of an answer.
const VOCAB_SIZE: usize = 64;
const NUM_NEW: usize = 16;

/// Asks a server for all prompts at once, and each model of `transformers` for one after the other.
const SCRIPT: &str = r#"
import json, sys
import openai, torch, transformers

torch.set_num_threads(1)
cases = json.load(sys.stdin)
found = []
for case in cases:
    client = openai.OpenAI(base_url=f"http://{case['address']}/v1", api_key="none", max_retries=0, timeout=60)
    answer = client.completions.create(model=case["name"], prompt=case["prompts"], max_tokens=case["count"], temperature=0,
                                       extra_body={"ignore_eos": True, "return_token_ids": True})
    ours = [choice.token_ids for choice in answer.choices]
    model = transformers.AutoModelForCausalLM.from_pretrained(case["name"], dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        theirs = [model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
                                 max_new_tokens=case["count"], pad_token_id=0)[0, len(prompt):].tolist()
                  for prompt in case["prompts"]]
    found.append({"ours": ours, "theirs": theirs})
print(json.dumps(found))
"#;

/// Copies a fixture, which has no tokenizer, beside one with a word for each token.
fn copy_with_tokenizer(work: &Workplace, name: &str) {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures").join(name);
    fs::create_dir(work.path(name)).expect("a folder");
    for file in ["config.json", "model.safetensors"] {
        fs::copy(from.join(file), work.path(name).join(file)).expect("copied");
    }
    let vocabulary: serde_json::Map<String, Value> = (0..VOCAB_SIZE).map(|id| (format!("w{id}"), json!(id))).collect();
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"},
    });
    work.file(&format!("{name}/tokenizer.json"), tokenizer.to_string());
    work.file(&format!("{name}/tokenizer_config.json"), r#"{"tokenizer_class": "PreTrainedTokenizerFast"}"#);
}

#[test]
fn greedy_answers_are_those_of_transformers_token_for_token() {
    let Some(python) = python_with("openai, torch, transformers", "answers of a server beside transformers'") else {
        return;
    };
    let work = Workplace::new();
    let prompt = |i: usize| (0..1 + i * 3 % 14).map(|j| (i * 11 + j * j * 5 + 3) % VOCAB_SIZE).collect::<Vec<_>>();
    let (names, num_prompts) = if is_full() { (&FIXTURES[..], 12) } else { (&FIXTURES[..NUM_QUICK], 5) };
    let prompts: Vec<Vec<usize>> = (0..num_prompts).map(prompt).collect();
    let mut servers = Vec::new();
    for name in names {
        copy_with_tokenizer(&work, name);
        servers.push(Server::of(work.command(&["serve", name, "--port", "0", "--precision", "f32"])));
    }
    let case = |(name, server): (&&str, &Server)| json!({"name": name, "address": server.address, "prompts": prompts, "count": NUM_NEW});
    let cases: Vec<Value> = names.iter().zip(&servers).map(case).collect();
    let input = work.file("cases.json", json!(cases).to_string());
    let mut script = Command::new(python);
    script.args(["-c", SCRIPT]).current_dir(work.path(".")).stdin(fs::File::open(input).expect("a file"));
    let output = script.env("HF_HUB_OFFLINE", "1").output().expect("Python starts");
    assert_success(&output);
    let found: Vec<Value> = serde_json::from_str(stdout(&output).lines().last().expect("a line")).expect("JSON");
    for (name, answers) in names.iter().zip(&found) {
        assert_eq!(answers["ours"], answers["theirs"], "{name}");
        let tokens = answers["ours"].as_array().expect("answers");
        assert!(tokens.len() == prompts.len() && tokens.iter().any(|one| *one != tokens[0]), "{name}: {tokens:?}");
    }
}
