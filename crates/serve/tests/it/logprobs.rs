//! Log-probabilities over HTTP: those of prompts and answers, whole and in streams.

use serde_json::{Value, json};

use crate::http::{Setup, TestServer};

#[test]
fn a_completion_has_lists_of_its_tokens() {
    let server = TestServer::start(Setup::default());
    let body = json!({"prompt": "hi", "max_tokens": 2, "logprobs": 1});
    let choice = server.post("/v1/completions", &body).json()["choices"][0].clone();
    let expected = json!({
        "tokens": ["a", "b"], "token_logprobs": [-97.0, -98.0], "text_offset": [0, 1],
        "top_logprobs": [{"x": -120.0, "a": -97.0}, {"x": -120.0, "b": -98.0}],
    });
    assert_eq!(choice["logprobs"], expected);
    let plain = server.post("/v1/completions", &json!({"prompt": "hi", "max_tokens": 2})).json();
    assert_eq!(plain["choices"][0]["logprobs"], Value::Null);
}

#[test]
fn an_echoed_prompt_has_its_log_probabilities_and_the_first_token_none() {
    let server = TestServer::start(Setup::default());
    for (max_tokens, text, answer) in [(0, "hi", vec![]), (1, "hia", vec![-97.0])] {
        let body = json!({"prompt": [[104, 105]], "max_tokens": max_tokens, "logprobs": 1, "echo": true});
        let json = server.post("/v1/completions", &body).json();
        let choice = &json["choices"][0];
        assert_eq!((choice["text"].as_str(), choice["finish_reason"].as_str()), (Some(text), Some("length")));
        assert_eq!(choice["logprobs"]["tokens"].as_array().unwrap().len(), text.len());
        let expected: Vec<Value> =
            [Value::Null, json!(-105.0)].into_iter().chain(answer.iter().map(|x| json!(x))).collect();
        assert_eq!(choice["logprobs"]["token_logprobs"], json!(expected));
        assert_eq!(choice["logprobs"]["top_logprobs"][0], Value::Null);
        assert_eq!(choice["logprobs"]["top_logprobs"][1], json!({"x": -120.0, "i": -105.0}));
        assert_eq!(json["usage"]["completion_tokens"], max_tokens);
    }
    let body = json!({"prompt": ["hi", "you"], "n": 2, "max_tokens": 1, "echo": true});
    let json = server.post("/v1/completions", &body).json();
    let texts: Vec<&str> = (0..4).map(|choice| json["choices"][choice]["text"].as_str().unwrap()).collect();
    assert_eq!((texts, &json["choices"][0]["logprobs"]), (vec!["hia", "hia", "youa", "youa"], &Value::Null));
}

#[test]
fn a_chat_has_an_object_for_each_token() {
    let server = TestServer::start(Setup { sandbox: "cat > /dev/null; printf hello", ..Setup::default() });
    let body =
        json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "logprobs": true, "top_logprobs": 2});
    let choice = server.post("/v1/chat/completions", &body).json()["choices"][0].clone();
    let top =
        json!([{"token": "x", "logprob": -120.0, "bytes": [120]}, {"token": "y", "logprob": -121.0, "bytes": [121]}]);
    let content = json!([{"token": "a", "logprob": -97.0, "bytes": [97], "top_logprobs": top}]);
    assert_eq!(choice["logprobs"], json!({"content": content, "refusal": null}));
}

#[test]
fn the_log_probabilities_of_a_stream_are_those_of_the_whole_answer() {
    let server = TestServer::start(Setup { sandbox: "cat > /dev/null; printf hello", ..Setup::default() });
    let mut body = json!({"prompt": "hi", "max_tokens": 5, "logprobs": 2, "echo": true, "stop": "zz"});
    let whole = server.post("/v1/completions", &body).json()["choices"][0]["logprobs"].clone();
    body["stream"] = json!(true);
    let events = server.post("/v1/completions", &body).events();
    for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        let of_piece = |event: &Value| event["choices"][0]["logprobs"][list].as_array().unwrap().clone();
        let pieces: Vec<Value> = events.iter().flat_map(of_piece).collect();
        assert_eq!(json!(pieces), whole[list], "{list}");
    }
    let mut body = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "logprobs": true});
    let whole = server.post("/v1/chat/completions", &body).json()["choices"][0]["logprobs"]["content"].clone();
    body["stream"] = json!(true);
    let events = server.post("/v1/chat/completions", &body).events();
    let of_piece = |event: &Value| event["choices"][0]["logprobs"]["content"].as_array().unwrap().clone();
    assert_eq!(json!(events.iter().flat_map(of_piece).collect::<Vec<_>>()), whole);
}

#[test]
fn a_result_that_is_no_number_fails_its_own_request_alone() {
    let server = TestServer::start(Setup::default());
    let long = server.send("/v1/completions", &json!({"prompt": "x", "max_tokens": 100}));
    let answer = server.post("/v1/completions", &json!({"prompt": "~", "max_tokens": 9}));
    assert_eq!((answer.status, answer.code().as_str()), (500, "internal_error"));
    let answer = crate::http::Answer::read(&mut std::io::BufReader::new(long));
    assert_eq!((answer.status, &answer.json()["usage"]["completion_tokens"]), (200, &json!(100)));
    assert_eq!(server.idle_counts().free_blocks, 256);
}
