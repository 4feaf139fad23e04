//! Answers over HTTP: their text, their form, whole and in streams.

use serde_json::{Value, json};

use crate::http::{CONTEXT, Setup, TestServer};

fn texts(events: &[Value], choice: usize) -> String {
    let choices = events.iter().filter_map(|event| event["choices"].get(0)).filter(|one| one["index"] == choice);
    let text = |one: &Value| one["text"].as_str().or(one["delta"]["content"].as_str()).unwrap_or("").to_owned();
    choices.map(text).collect()
}

#[test]
fn a_completion_has_a_text_for_each_prompt_and_choice() {
    let server = TestServer::start(Setup::default());
    let body = json!({"model": "tiny", "prompt": ["one", "four"], "n": 2, "max_tokens": 5});
    let answer = server.post("/v1/completions", &body);
    assert_eq!((answer.status, answer.field("content-type")), (200, Some("application/json")));
    let json = answer.json();
    let choices = json["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 4);
    for (index, choice) in choices.iter().enumerate() {
        assert_eq!((choice["index"].as_u64(), &choice["text"]), (Some(index as u64), &json!("abcde")));
        assert_eq!(choice["finish_reason"], "length");
    }
    assert_eq!(
        json["usage"],
        json!({"prompt_tokens": 7, "completion_tokens": 20, "total_tokens": 27, "prompt_tokens_details": {"cached_tokens": 0}})
    );
    assert_eq!((&json["object"], &json["model"]), (&json!("text_completion"), &json!("tiny")));
    assert!(json["id"].as_str().unwrap().starts_with("cmpl-"));
}

#[test]
fn the_pieces_of_a_stream_are_the_whole_answer() {
    let server = TestServer::start(Setup::default());
    for (path, mut body) in [
        ("/v1/completions", json!({"prompt": "x"})),
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "x"}]})),
    ] {
        body["max_tokens"] = json!(30);
        body["cache_prompt"] = json!(false);
        body["n"] = json!(2);
        let whole = server.post(path, &body).json();
        body["stream"] = json!(true);
        body["stream_options"] = json!({"include_usage": true});
        let answer = server.post(path, &body);
        assert_eq!(answer.field("content-type"), Some("text/event-stream; charset=utf-8"));
        let mut events = answer.events();
        let last = events.pop().unwrap();
        assert_eq!((&last["choices"], &last["usage"]), (&json!([]), &whole["usage"]));
        assert!(events.iter().all(|event| event["usage"].is_null() && event["id"] == last["id"]));
        for choice in 0..2 {
            let whole = &whole["choices"][choice];
            let whole = whole["text"].as_str().or(whole["message"]["content"].as_str()).unwrap();
            assert_eq!(texts(&events, choice), whole, "{path}");
            let ends = events.iter().filter(|event| {
                event["choices"][0]["index"] == choice && event["choices"][0]["finish_reason"] == "length"
            });
            assert_eq!(ends.count(), 1);
        }
    }
}

#[test]
fn the_first_piece_of_a_chat_has_the_role() {
    let server = TestServer::start(Setup::default());
    let body = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "stream": true});
    let events = server.post("/v1/chat/completions", &body).events();
    assert_eq!(events[0]["object"], "chat.completion.chunk");
    assert_eq!(events[0]["choices"][0]["delta"], json!({"role": "assistant", "content": "a"}));
    assert_eq!(
        events[1]["choices"][0],
        json!({"index": 0, "delta": {"content": "b"}, "logprobs": null, "finish_reason": "length"})
    );
    assert!(events.iter().all(|event| event.get("usage").is_none()));
}

#[test]
fn an_answer_ends_before_a_stop_text_and_at_a_stop_token() {
    let server = TestServer::start(Setup::default());
    let ended = |name: &str, value: Value| {
        let mut body = json!({"prompt": "x", "max_tokens": 20});
        body[name] = value;
        let choice = server.post("/v1/completions", &body).json()["choices"][0].clone();
        (choice["text"].as_str().unwrap().to_owned(), choice["finish_reason"].as_str().unwrap().to_owned())
    };
    let stopped = |text: &str| (text.to_owned(), "stop".to_owned());
    assert_eq!(ended("stop", json!(["zz", "def"])), stopped("abc"));
    assert_eq!(ended("stop_token_ids", json!([b'e'])), stopped("abcd"));
}

#[test]
fn token_ids_come_where_they_are_wanted() {
    let server = TestServer::start(Setup::default());
    let mut body = json!({"prompt": [[104, 105], [106]], "max_tokens": 2, "return_token_ids": true});
    let choice = server.post("/v1/completions", &body).json()["choices"][1].clone();
    assert_eq!((&choice["prompt_token_ids"], &choice["token_ids"]), (&json!([106]), &json!([97, 98])));
    body["stream"] = json!(true);
    let events = server.post("/v1/completions", &body).events();
    let of_first = |event: &&Value| event["choices"][0]["index"] == 0;
    let ids: Vec<&Value> = events.iter().filter(of_first).map(|event| &event["choices"][0]["token_ids"]).collect();
    assert_eq!(ids, [&json!([97]), &json!([98])]);
}

#[test]
fn a_chat_has_as_many_tokens_as_fit_where_none_are_asked_for() {
    let server = TestServer::start(Setup { sandbox: "cat > /dev/null; printf hello", ..Setup::default() });
    let body = json!({"messages": [{"role": "user", "content": "x"}]});
    let json = server.post("/v1/chat/completions", &body).json();
    let usage = json!({"prompt_tokens": 5, "completion_tokens": CONTEXT - 5, "total_tokens": CONTEXT,
                       "prompt_tokens_details": {"cached_tokens": 0}});
    assert_eq!((&json["usage"], &json["choices"][0]["message"]["role"]), (&usage, &json!("assistant")));
}

#[test]
fn a_prompt_or_answer_that_does_not_fit_says_what_would() {
    let server = TestServer::start(Setup::default());
    let answer = server.post("/v1/completions", &json!({"prompt": "x".repeat(CONTEXT), "max_tokens": 1}));
    assert_eq!((answer.status, answer.code().as_str()), (400, "context_length_exceeded"));
    let answer = server.post("/v1/completions", &json!({"prompt": "xy", "max_tokens": u64::MAX}));
    assert_eq!((answer.status, answer.code().as_str()), (400, "context_length_exceeded"));
    assert!(answer.body.contains("give at most 510"), "{}", answer.body);
    let answer = server.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 5, "min_tokens": 6}));
    assert_eq!((answer.status, answer.json()["error"]["param"].as_str()), (400, Some("min_tokens")));
}

#[test]
fn a_template_that_refuses_a_conversation_says_why() {
    let refuses = "cat > /dev/null; echo 'error: the chat template fails in line 2: no system' >&2; exit 2";
    let server = TestServer::start(Setup { sandbox: refuses, ..Setup::default() });
    let answer = server.post("/v1/chat/completions", &json!({"messages": [{"role": "user", "content": "x"}]}));
    assert_eq!((answer.status, answer.json()["error"]["param"].as_str()), (400, Some("messages")));
    assert!(answer.body.contains("no system"), "{}", answer.body);
}

#[test]
fn h9_special_tokens_that_a_message_spells_stay_text() {
    // The process for templates gives back the request itself, without the template.
    let server = TestServer::start(Setup { sandbox: "sed 's/^.*\"messages\"//'", ..Setup::default() });
    let tokens = |body: Value| server.post("/tokenize", &body).json()["tokens"].as_array().unwrap().clone();
    let end = json!(256);
    let literal = "a<|endoftext|>b";
    assert!(tokens(json!({"prompt": literal, "parse_special": true})).contains(&end));
    assert!(!tokens(json!({"prompt": literal})).contains(&end));
    let message = json!([{"role": "user", "content": literal, "name": literal}]);
    let variables = json!({"x": [literal, {literal: literal}]});
    assert!(!tokens(json!({"messages": message, "chat_template_kwargs": variables})).contains(&end));
}

#[test]
fn texts_become_tokens_and_texts_again() {
    let server = TestServer::start(Setup::default());
    let json = server.post("/tokenize", &json!({"prompt": "hé", "return_token_strs": true})).json();
    assert_eq!((&json["tokens"], &json["count"]), (&json!([104, 195, 169]), &json!(3)));
    assert_eq!((&json["max_model_len"], json["token_strs"][0].as_str()), (&json!(CONTEXT), Some("h")));
    let json = server.post("/detokenize", &json!({"tokens": [104, 195, 169]})).json();
    assert_eq!((json["prompt"].as_str(), json["content"].as_str()), (Some("hé"), Some("hé")));
    let info = server.get("/tokenizer_info").json();
    assert_eq!((&info["eos_token"], &info["chat_template"]), (&json!("<|endoftext|>"), &json!("{{ messages }}")));
}

#[test]
fn the_model_is_listed_under_its_names_and_others_are_not_found() {
    let server = TestServer::start(Setup::default());
    let models = server.get("/v1/models").json();
    assert_eq!(models["data"].as_array().unwrap().len(), 2);
    assert_eq!((&models["data"][0]["id"], &models["data"][0]["object"]), (&json!("tiny"), &json!("model")));
    assert_eq!(server.get("/v1/models/org/other").json()["id"], "org/other");
    assert_eq!(server.get("/v1/models/none").code(), "model_not_found");
    let answer = server.post("/v1/completions", &json!({"model": "gpt-4\n", "prompt": "x"}));
    assert_eq!((answer.status, answer.code().as_str()), (404, "model_not_found"));
    assert_eq!(server.get("/version").json()["version"], env!("CARGO_PKG_VERSION"));
}

#[test]
fn metrics_count_what_was_answered() {
    let server = TestServer::start(Setup::default());
    server.post("/v1/completions", &json!({"prompt": "abcde", "max_tokens": 3}));
    server.post("/v1/completions", &json!({"prompt": "abcde", "max_tokens": 9, "stop": "b"}));
    server.idle_counts();
    let text = server.get("/metrics").body;
    for line in [
        "moeworks_prompt_tokens_total{model_name=\"tiny\"} 10",
        "moeworks_generation_tokens_total{model_name=\"tiny\"} 5",
        "moeworks_num_requests_running{model_name=\"tiny\"} 0",
        "moeworks_kv_cache_usage_perc{model_name=\"tiny\"} 0",
        "moeworks_request_success_total{model_name=\"tiny\",finished_reason=\"length\"} 1",
        "moeworks_request_success_total{model_name=\"tiny\",finished_reason=\"stop\"} 1",
        "moeworks_time_to_first_token_seconds_count{model_name=\"tiny\"} 2",
    ] {
        assert!(text.lines().any(|found| found == line), "{line}\n{text}");
    }
}

#[test]
fn cached_tokens_of_the_prompt_are_counted() {
    let server = TestServer::start(Setup::default());
    let body = json!({"prompt": "abcdefghij", "max_tokens": 1});
    let cached = || server.post("/v1/completions", &body).json()["usage"]["prompt_tokens_details"].clone();
    assert_eq!(cached(), json!({"cached_tokens": 0}));
    // Two whole blocks of four.
    assert_eq!(cached(), json!({"cached_tokens": 8}));
}

#[test]
fn the_api_describes_itself() {
    let server = TestServer::start(Setup::default());
    let document = server.get("/openapi.json").json();
    assert_eq!(document["openapi"], "3.1.0");
    for (path, description) in document["paths"].as_object().unwrap() {
        let path = path.replace("{id}", "tiny");
        let status = match description.get("get") {
            Some(_) => server.get(&path).status,
            // There is something that takes a body.
            None => server.post(&path, &json!({"no_such_field": 1})).status,
        };
        assert_eq!(status, if description.get("get").is_some() { 200 } else { 400 }, "{path}");
    }
}
