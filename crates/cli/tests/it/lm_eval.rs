//! The log-probabilities that lm-evaluation-harness gets from a server are those of `evaluate`.
//!
//! `./test` makes the calls of its model `local-completions`; `./test full` runs the harness itself, whose packages
//! take 700 MB, in an environment of its own.
#![cfg(unix)]

use std::process::Command;

use serde_json::{Value, json};

use crate::program::{Workplace, assert_success, stdout};
use crate::python::python_with_lm_eval;
use crate::serve::{Server, with_model};

const TEXTS: [&str; 3] = [
    "Line 3 of a text that is easy to learn, number 21.",
    "Quite another text, of which nothing was seen: 12 + 30 = 42?",
    "Of both: Line 399 of a text, and then Grüße an alle, number 7.",
];

/// The nats that the answers of lm-evaluation-harness and of `evaluate` may differ by for each token.
const TOLERANCE: f64 = 1e-4;

/// A local task: how likely a text is behind its first letter.
const TASK: &str = r#"
task: texts
dataset_path: json
dataset_kwargs:
  data_files:
    test: TEXTS
test_split: test
output_type: loglikelihood
doc_to_text: "{{head}}"
doc_to_target: "{{rest}}"
target_delimiter: ""
metric_list:
  - metric: perplexity
    aggregation: perplexity
    higher_is_better: false
metadata:
  version: 1
"#;

/// Runs the task and prints the log-likelihood of each text.
const SCRIPT: &str = r#"
import json, sys
import lm_eval
from lm_eval.tasks import TaskManager

address = f"model=run,base_url=http://{sys.argv[1]}/v1/completions,tokenizer_backend=remote,max_length=250,num_concurrent=1,max_retries=1"
found = lm_eval.simple_evaluate(model="local-completions", model_args=address, tasks=["texts"], log_samples=True,
                                task_manager=TaskManager(include_path="tasks"), batch_size=2, bootstrap_iters=0)
samples = sorted(found["samples"]["texts"], key=lambda sample: sample["doc_id"])
print(json.dumps([float(sample["resps"][0][0][0]) for sample in samples]))
"#;

/// The log-likelihood of all tokens of a text but the first, by `evaluate`, and their number.
struct Evaluated {
    log_likelihood: f64,
    num_tokens: usize,
}

fn evaluated(work: &Workplace, text: &str) -> Evaluated {
    let num_tokens = text.len() - 1;
    work.file("one.txt", text);
    // One window, without the token that ends a text.
    let seq_len = num_tokens.to_string();
    let args = ["evaluate", "run", "--data", "one.txt", "--json", "--max-sequences", "1", "--seq-len", &seq_len];
    let output = work.run(&args);
    assert_success(&output);
    let found: Value = serde_json::from_str(&stdout(&output)).expect("JSON");
    assert_eq!(found["tokens"], num_tokens);
    Evaluated { log_likelihood: -found["loss"].as_f64().expect("a loss") * num_tokens as f64, num_tokens }
}

fn assert_same(found: &[f64], expected: &[Evaluated]) {
    assert_eq!(found.len(), expected.len());
    for (found, Evaluated { log_likelihood, num_tokens }) in found.iter().zip(expected) {
        let difference = (found - log_likelihood).abs() / *num_tokens as f64;
        assert!(difference < TOLERANCE, "{found} instead of {log_likelihood} over {num_tokens} tokens");
    }
}

#[test]
fn the_calls_of_lm_eval_give_the_log_likelihood_of_evaluate() {
    let work = with_model();
    let expected: Vec<Evaluated> = TEXTS.iter().map(|text| evaluated(&work, text)).collect();
    let server = Server::start(&work, &[]);
    // It takes the tokenizer of the server where this has a name for the end of a text.
    let tokenizer: Value = serde_json::from_str(&server.get("/tokenizer_info")).expect("JSON");
    assert!(tokenizer["eos_token"].is_string(), "{tokenizer}");
    let ids = |text: &str| {
        let body = json!({"prompt": text, "add_special_tokens": false});
        server.post("/tokenize", &body)["tokens"].clone()
    };
    let prompt: Vec<Value> = TEXTS.iter().map(|text| ids(text)).collect();
    let body = json!({"model": "run", "prompt": prompt, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": true});
    let answer = server.post("/v1/completions", &body);
    let choices = answer["choices"].as_array().expect("choices");
    assert!(choices.iter().enumerate().all(|(i, choice)| choice["index"] == i));
    // The first token has none, and the last one is the answer.
    let log_likelihood = |choice: &Value| {
        let of_tokens = choice["logprobs"]["token_logprobs"].as_array().expect("log-probabilities");
        let of_text = &of_tokens[1..of_tokens.len() - 1];
        of_text.iter().map(|one| one.as_f64().expect("a number")).sum()
    };
    assert_same(&choices.iter().map(log_likelihood).collect::<Vec<f64>>(), &expected);
}

#[test]
fn lm_eval_measures_what_evaluate_does() {
    let Some(python) = python_with_lm_eval() else { return };
    let work = with_model();
    let expected: Vec<Evaluated> = TEXTS.iter().map(|text| evaluated(&work, text)).collect();
    let line = |text: &&str| format!("{}\n", json!({"head": &text[..1], "rest": &text[1..]}));
    let texts = work.file("texts.jsonl", TEXTS.iter().map(line).collect::<String>());
    std::fs::create_dir(work.path("tasks")).expect("a folder");
    work.file("tasks/texts.yaml", TASK.replace("TEXTS", &texts));
    let server = Server::start(&work, &[]);
    let mut harness = Command::new(python);
    harness.args(["-c", SCRIPT, &server.address]).current_dir(work.path("."));
    harness.envs(["HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"].map(|name| (name, "1"))).env("HF_HOME", work.path("cache"));
    let output = harness.output().expect("Python starts");
    assert_success(&output);
    let last = stdout(&output);
    let found: Vec<f64> = serde_json::from_str(last.lines().last().expect("a line")).expect("JSON");
    assert_same(&found, &expected);
}
