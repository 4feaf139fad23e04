//! `moeworks serve` with OpenAI's own client.
//!
//! Needs a Python with the package `openai`: `MOEWORKS_PYTHON`, or `.venv-test/bin/python` in the workspace's root.
//! Without one the test says so and is skipped.
#![cfg(unix)]

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::program::assert_success;
use crate::serve::{Server, with_model};

/// A script that uses every function of the client that the server supports, and prints the results as JSON.
const SCRIPT: &str = r#"
import json, sys
import openai

def client(key):
    return openai.OpenAI(base_url=f"http://{sys.argv[1]}/v1", api_key=key, max_retries=0, timeout=60)

def error_of(call):
    try:
        call()
    except openai.APIStatusError as error:
        return [type(error).__name__, error.code, error.param]

ours = client("secret")
completion = dict(model="run", prompt="Line 3", max_tokens=12, temperature=0)
chat = dict(model="run", messages=[{"role": "user", "content": "Line 3"}], max_tokens=12, temperature=0)
whole = ours.completions.create(**completion)
message = ours.chat.completions.create(**chat)
chunks = list(ours.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True}))
long = ours.completions.create(**{**completion, "max_tokens": 200}, stream=True, extra_body={"ignore_eos": True})
next(iter(long))
long.close()
print(json.dumps({
    "models": [model.id for model in ours.models.list()],
    "model": ours.models.retrieve("run").id,
    "text": whole.choices[0].text,
    "finish_reason": whole.choices[0].finish_reason,
    "usage": whole.usage.total_tokens,
    "streamed": "".join(part.choices[0].text for part in ours.completions.create(**completion, stream=True)),
    "message": message.choices[0].message.content,
    "role": message.choices[0].message.role,
    "chat_streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
    "chat_usage": [chunks[-1].usage.total_tokens, message.usage.total_tokens],
    "choices": len(ours.completions.create(**completion, n=3).choices),
    "errors": [
        error_of(lambda: ours.completions.create(**{**completion, "model": "gpt-4"})),
        error_of(lambda: ours.completions.create(**{**completion, "max_tokens": 100000})),
        error_of(lambda: ours.chat.completions.create(**chat, tools=[{"type": "function", "function": {"name": "f"}}])),
        error_of(lambda: client("wrong").models.list()),
    ],
}))
"#;

/// The interpreter; without one says so and returns none. Not by `eprintln!`, which the test harness keeps to itself
/// when a test passes.
fn python_or_skip() -> Option<PathBuf> {
    let usual = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv-test/bin/python");
    let path = std::env::var_os("MOEWORKS_PYTHON").map_or_else(usual, PathBuf::from);
    let found = Command::new(&path).args(["-c", "import openai"]).output();
    if found.is_ok_and(|output| output.status.success()) {
        return Some(path);
    }
    let _ = writeln!(std::io::stderr(), "SKIPPED: OpenAI's client: {} has no openai", path.display());
    None
}

#[test]
fn openais_client_gets_models_answers_streams_and_errors() {
    let Some(python) = python_or_skip() else { return };
    let work = with_model();
    work.file("chat.jinja", "{% for m in messages %}{{ m.content }}{% endfor %}");
    let server = Server::start(&work, &["--api-key", "secret", "--chat-template", "chat.jinja", "--batch-invariant"]);
    let output = Command::new(python).args(["-c", SCRIPT, &server.address]).output().expect("Python starts");
    assert_success(&output);
    let found: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(
        (&found["models"], &found["model"], &found["role"]),
        (&json!(["run"]), &json!("run"), &json!("assistant"))
    );
    assert_eq!((&found["text"], &found["finish_reason"]), (&found["streamed"], &json!("length")));
    assert_eq!((&found["message"], &found["message"]), (&found["chat_streamed"], &found["text"]));
    assert_eq!((&found["usage"], &found["choices"], &found["chat_usage"]), (&json!(18), &json!(3), &json!([18, 18])));
    let errors = json!([
        ["NotFoundError", "model_not_found", "model"],
        ["BadRequestError", "context_length_exceeded", "max_tokens"],
        ["BadRequestError", "unsupported_parameter", "tools"],
        ["AuthenticationError", "invalid_api_key", null],
    ]);
    assert_eq!(found["errors"], errors);
}
