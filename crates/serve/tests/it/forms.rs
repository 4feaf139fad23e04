//! Answers that are held to a form, as clients ask for it.

use serde_json::{Value, json};

use crate::http::{Setup, TestServer};

/// A server, and a request with one more field, to which the likeliest answer comes.
fn answer(server: &TestServer, path: &str, field: &str, value: &Value) -> crate::http::Answer {
    let mut body = json!({"max_tokens": 60, "temperature": 0});
    match path {
        "/v1/completions" => body["prompt"] = json!("x"),
        _ => body["messages"] = json!([{"role": "user", "content": "x"}]),
    }
    body[field] = value.clone();
    server.post(path, &body)
}

fn server() -> TestServer {
    TestServer::start(Setup { sandbox: "cat > /dev/null; printf hello", ..Setup::default() })
}

#[test]
fn a_schema_is_followed_with_its_keys_in_their_order() {
    let server = server();
    let schema = json!({"type": "object", "required": ["word", "is"], "properties": {
        "word": {"type": "string", "maxLength": 4}, "is": {"type": "boolean"}}});
    // Keys of this text are not in the order of the alphabet.
    let text = r#"{"type":"object","required":["word","is"],"properties":{"word":{"type":"string","maxLength":4},"is":{"type":"boolean"}}}"#;
    for (field, value) in
        [("guided_json", json!(text)), ("structured_outputs", json!({"json": text})), ("json_schema", json!(text))]
    {
        let json = answer(&server, "/v1/completions", field, &value).json();
        let choice = &json["choices"][0];
        assert_eq!(choice["finish_reason"], "stop", "{field}: {choice}");
        let found = choice["text"].as_str().unwrap();
        assert!(found.starts_with("{\"word\":\""), "{field}: {found}");
        let value: Value = serde_json::from_str(found).unwrap();
        assert!(value["is"].is_boolean() && value["word"].as_str().unwrap().len() <= 4, "{found}");
    }
    let format = json!({"type": "json_schema", "json_schema": {"name": "w", "strict": true, "schema": schema}});
    let json = answer(&server, "/v1/chat/completions", "response_format", &format).json();
    let found = json["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(serde_json::from_str::<Value>(found).unwrap()["is"].is_boolean(), "{found}");
}

#[test]
fn the_order_of_keys_is_that_of_the_body() {
    let server = server();
    let format = r#"{"type":"json_schema","json_schema":{"schema":{"properties":{"z":{"const":1},"a":{"const":2}},"required":["z","a"]}}}"#;
    let body = format!(r#"{{"prompt":"x","max_tokens":60,"temperature":0,"response_format":{format}}}"#);
    let json = server.raw(crate::http::post("/v1/completions", "", &body)).json();
    let text: String = json["choices"][0]["text"].as_str().unwrap().split_whitespace().collect();
    assert_eq!(text, r#"{"z":1,"a":2}"#);
}

#[test]
fn expressions_grammars_and_choices_are_followed() {
    let server = server();
    for (field, value, expected) in [
        ("regex", json!("[b-z]{3}!"), "bbc!"),
        ("guided_regex", json!("q?xyz"), "qxyz"),
        ("structured_outputs", json!({"regex": "[0-9]"}), "0"),
        ("grammar", json!("root ::= \"<\" inner{2} \">\"\ninner ::= [b-d]"), "<bc>"),
        ("ebnf", json!("root ::= \"yes\""), "yes"),
        ("guided_choice", json!(["zeta", "beta"]), "beta"),
        ("structured_outputs", json!({"choice": ["red"]}), "red"),
    ] {
        let json = answer(&server, "/v1/completions", field, &value).json();
        let choice = &json["choices"][0];
        assert_eq!(
            (choice["text"].as_str(), choice["finish_reason"].as_str()),
            (Some(expected), Some("stop")),
            "{field}"
        );
    }
    let object = answer(&server, "/v1/completions", "response_format", &json!({"type": "json_object"})).json();
    assert!(object["choices"][0]["text"].as_str().unwrap().starts_with('{'));
}

#[test]
fn h4_forms_that_cannot_be_followed_are_refused_with_their_field() {
    let server = server();
    for (field, value, param) in [
        ("response_format", json!({"type": "wat"}), "response_format.type"),
        ("response_format", json!({"type": "json_schema"}), "response_format.json_schema"),
        (
            "response_format",
            json!({"type": "json_schema", "json_schema": {"schema": {"type": "wat"}}}),
            "response_format",
        ),
        ("guided_json", json!("{"), "guided_json"),
        ("guided_json", json!({"uniqueItems": true, "type": "array"}), "guided_json"),
        ("guided_regex", json!("(a"), "guided_regex"),
        ("regex", json!("(?=a)"), "regex"),
        ("grammar", json!("root ::= x"), "grammar"),
        ("grammar", json!("(".repeat(30_000)), "grammar"),
        ("guided_choice", json!([]), "guided_choice"),
        ("structured_outputs", json!({"regex": "a", "choice": ["b"]}), "structured_outputs.choice"),
        ("structured_outputs", json!({"structural_tag": "x"}), "structured_outputs.structural_tag"),
    ] {
        let answer = answer(&server, "/v1/completions", field, &value);
        let error = answer.json()["error"].clone();
        assert_eq!((answer.status, error["param"].as_str()), (400, Some(param)), "{field}: {error}");
        assert!(!error["message"].as_str().unwrap().contains('\n'), "{error}");
    }
}
