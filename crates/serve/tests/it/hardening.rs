//! Classes of bad input that other servers have fallen to, beside those in the tests of what they concern.

use std::net::TcpListener;
use std::time::Duration;

use serde_json::json;

use crate::http::{Answer, Setup, TestServer};

fn server(template: &'static str) -> TestServer {
    TestServer::start(Setup { sandbox: "cat > /dev/null; printf hello", template, ..Setup::default() })
}

/// Checks an error and returns its message.
fn refused(answer: &Answer, status: u16, param: Option<&str>) -> String {
    let error = answer.json()["error"].clone();
    assert_eq!((answer.status, error["param"].as_str()), (status, param), "{error}");
    error["message"].as_str().unwrap().to_owned()
}

#[test]
fn h7_code_in_the_place_of_arguments_is_text() {
    let server = server("{{ tools }}<tool_call>");
    let tools = json!([{"type": "function", "function": {"name": "add"}}]);
    for arguments in ["__import__('os').system('id')", "{'a': 1}", "{\"a\": os.getpid()}", "exec(\"1\")"] {
        let text = format!("<tool_call>{{\"name\": \"add\", \"arguments\": {arguments}}}</tool_call>");
        let body = json!({"messages": [{"role": "user", "content": "x"}], "tools": tools, "max_tokens": 200,
                          "temperature": 0, "grammar": format!("root ::= {}", json!(text))});
        let message = server.post("/v1/chat/completions", &body).json()["choices"][0]["message"].clone();
        // What looks like arguments up to some place is handed on up to there, and no further.
        let calls = message["tool_calls"].as_array().cloned().unwrap_or_default();
        let found: String = calls.iter().filter_map(|call| call["function"]["arguments"].as_str()).collect();
        assert!(["", "{", "{\"a\":os.getpid"].contains(&found.as_str()), "{message}");
        let content = message["content"].as_str().unwrap();
        assert!(text.ends_with(content) && content.ends_with("}</tool_call>"), "{message}");
    }
}

#[test]
fn h10_penalties_go_with_every_other_option() {
    let server = server("{{ messages }}");
    let penalties = [("presence_penalty", 2.0), ("frequency_penalty", -2.0), ("repetition_penalty", 1.5)];
    let others = [
        json!({"logprobs": 2}),
        json!({"logprobs": 1, "echo": true}),
        json!({"n": 3, "seed": 1}),
        json!({"regex": "[a-z]{3}"}),
        json!({"response_format": {"type": "json_object"}}),
        json!({"logit_bias": {"98": 100}, "min_tokens": 2, "stop": ["zz"]}),
        json!({"top_k": 1, "min_p": 0.5, "top_p": 0.1, "ignore_eos": true}),
        json!({"temperature": 0, "stream": true}),
    ];
    for (penalty, value) in penalties {
        for other in &others {
            let mut body = json!({"prompt": "x", "max_tokens": 4});
            body[penalty] = json!(value);
            body.as_object_mut().unwrap().extend(other.as_object().unwrap().clone());
            assert_eq!(server.post("/v1/completions", &body).status, 200, "{body}");
        }
    }
    assert_eq!(server.idle_counts().running, 0);
}

#[test]
fn h12_images_and_embeddings_are_refused_and_no_address_is_asked() {
    let server = server("{{ messages }}");
    let asked = TcpListener::bind("127.0.0.1:0").unwrap();
    asked.set_nonblocking(true).unwrap();
    let url = format!("http://{}/secret.png", asked.local_addr().unwrap());
    for part in [
        json!({"type": "image_url", "image_url": {"url": url}}),
        json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}),
        json!({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}),
        json!({"type": "file", "file": {"file_data": url}}),
    ] {
        let body = json!({"messages": [{"role": "user", "content": [part]}]});
        let answer = server.post("/v1/chat/completions", &body);
        let message = refused(&answer, 400, Some("messages[0].content[0].type"));
        assert!(!message.contains("0x") && !message.contains("secret"), "{message}");
    }
    for field in ["prompt_embeds", "multi_modal_data"] {
        let answer = server.post("/v1/completions", &json!({"prompt": "x", field: "AAAA"}));
        refused(&answer, 400, Some(field));
    }
    assert_eq!(server.post("/v1/embeddings", &json!({"input": "x"})).status, 404);
    std::thread::sleep(Duration::from_millis(50));
    assert!(asked.accept().is_err(), "an address of a request was asked");
}

#[test]
fn h17_no_request_names_a_path() {
    let server = server("{{ messages }}");
    for model in ["../../etc/passwd", "/etc/passwd", "file:///etc/passwd", "tiny/../tiny", "tiny\u{0}"] {
        let answer = server.post("/v1/completions", &json!({"prompt": "x", "model": model}));
        let message = refused(&answer, 404, Some("model"));
        assert!(!message.contains("root:"), "{message}");
    }
    for (field, value) in [
        ("lora", json!([{"path": "/etc/passwd"}])),
        ("lora_path", json!("/etc/passwd")),
        ("id_slot", json!(0)),
        ("filename", json!("../../x")),
        ("chat_template", json!("/etc/passwd")),
    ] {
        let mut body = json!({"prompt": "x"});
        body[field] = value;
        refused(&server.post("/v1/completions", &body), 400, Some(field));
    }
    for path in ["/slots/0?action=save", "/v1/load_lora_adapter", "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd"] {
        let answer = server.raw(format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n"));
        assert_eq!(answer.status, 404, "{path}: {answer:?}");
    }
    let answer = server.raw("GET /v1/models/..%2f..%2fetc%2fpasswd HTTP/1.1\r\nHost: localhost\r\n\r\n");
    assert_eq!(answer.status, 404, "{answer:?}");
}
