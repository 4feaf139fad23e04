//! `moeworks serve` with OpenAI's own client.
//!
//! Needs a Python with the package `openai`: `MOEWORKS_PYTHON`, or `.venv-test/bin/python` in the workspace's root.
//! Without one the test says so and is skipped.
#![cfg(unix)]

use std::process::Command;

use serde_json::{Value, json};

use crate::program::assert_success;
use crate::python::python_with;
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
logprobs = ours.completions.create(**completion, logprobs=2, echo=True).choices[0].logprobs
chat_logprobs = ours.chat.completions.create(**chat, logprobs=True, top_logprobs=3).choices[0].logprobs.content
schema = {"type": "object", "properties": {"word": {"type": "string", "maxLength": 3}, "count": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["word", "count"], "additionalProperties": False}
response_format = {"type": "json_schema", "json_schema": {"name": "counted", "strict": True, "schema": schema}}
held = ours.chat.completions.create(**{**chat, "max_tokens": 200}, response_format=response_format).choices[0]
tools = [{"type": "function", "function": {"name": "count", "parameters": schema}}]
called = ours.chat.completions.create(**{**chat, "max_tokens": 200}, tools=tools, tool_choice="required").choices[0]
call = called.message.tool_calls[0]
asked = chat["messages"] + [called.message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "3"}]
told = ours.chat.completions.create(**{**chat, "messages": asked}, tools=tools).choices[0]
named = {"type": "function", "function": {"name": "count"}}
pieces = ours.chat.completions.create(**{**chat, "max_tokens": 200}, tools=tools, tool_choice=named, stream=True)
deltas = [chunk.choices[0].delta for chunk in pieces]
arguments = "".join(one.function.arguments for delta in deltas for one in delta.tool_calls or [])
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
    "logprobs": [len(logprobs.tokens), logprobs.token_logprobs[0], max(logprobs.token_logprobs[1:]) <= 0,
                 "".join(logprobs.tokens), min(len(top) for top in logprobs.top_logprobs[1:]) >= 2],
    "chat_logprobs": [len(chat_logprobs), {len(one.top_logprobs) for one in chat_logprobs} == {3},
                      all(one.logprob == one.top_logprobs[0].logprob for one in chat_logprobs),
                      bytes(byte for one in chat_logprobs for byte in one.bytes).decode()],
    "held": [held.finish_reason, sorted(json.loads(held.message.content))],
    "called": [called.finish_reason, called.message.content, call.function.name, sorted(json.loads(call.function.arguments))],
    "told": told.message.role,
    "called_in_pieces": sorted(json.loads(arguments)),
    "errors": [
        error_of(lambda: ours.completions.create(**{**completion, "model": "gpt-4"})),
        error_of(lambda: ours.completions.create(**{**completion, "max_tokens": 100000})),
        error_of(lambda: ours.chat.completions.create(**chat, tools=[{"type": "function", "function": {"name": "a b"}}])),
        error_of(lambda: ours.chat.completions.create(**chat, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "wat"}}})),
        error_of(lambda: client("wrong").models.list()),
    ],
}))
"#;

#[test]
fn openais_client_gets_models_answers_streams_and_errors() {
    let Some(python) = python_with("openai", "OpenAI's client") else { return };
    let work = with_model();
    work.file(
        "chat.jinja",
        "{% for m in messages %}{{ m.content }}{% endfor %}{% for t in tools or [] %}<tool_call>{% endfor %}",
    );
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
    let text = found["text"].as_str().expect("a text");
    assert_eq!(found["logprobs"], json!([18, null, true, format!("Line 3{text}"), true]));
    assert_eq!(found["chat_logprobs"], json!([12, true, true, text]));
    assert_eq!(found["held"], json!(["stop", ["count", "word"]]));
    assert_eq!(found["called"], json!(["tool_calls", null, "count", ["count", "word"]]));
    assert_eq!((&found["told"], &found["called_in_pieces"]), (&json!("assistant"), &json!(["count", "word"])));
    let errors = json!([
        ["NotFoundError", "model_not_found", "model"],
        ["BadRequestError", "context_length_exceeded", "max_tokens"],
        ["BadRequestError", "invalid_value", "tools[0].function.name"],
        ["BadRequestError", "invalid_value", "response_format"],
        ["AuthenticationError", "invalid_api_key", null],
    ]);
    assert_eq!(found["errors"], errors);
}
