//! Bad input that other servers have fallen to and that has no better place: calls of tools that are code, penalties
//! with every other option, images, and paths that clients name. Files that are no model are in the program's tests.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use moeworks_infer::generation::{Penalties, Sampler, SamplingOptions};
use moeworks_serve::{Engine, Request, WantedLogprobs};
use serde_json::json;

use crate::engine::{limits, model, request};
use crate::http::{Setup, TestServer};

#[test]
fn h7_a_call_that_is_code_is_text_and_nothing_runs_it() {
    let setup =
        Setup { sandbox: "cat > /dev/null; printf hello", template: "{{ tools }}<tool_call>", ..Setup::default() };
    let server = TestServer::start(setup);
    let folder = tempfile::tempdir().unwrap();
    let trace = folder.path().join("trace");
    let name = trace.display();
    for code in [
        format!("__import__('os').system('touch {name}')"),
        format!("{{\"name\": \"now\", \"arguments\": open('{name}', 'w')}}"),
        format!("{{\"name\": \"$(touch {name})\", \"arguments\": {{}}}}"),
    ] {
        let text = format!("<tool_call>{code}</tool_call>");
        let body = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 300, "temperature": 0,
                          "tools": [{"type": "function", "function": {"name": "now"}}], "grammar": format!("root ::= {}", json!(text))});
        let choice = server.post("/v1/chat/completions", &body).json()["choices"][0].clone();
        assert_eq!(
            (choice["message"]["content"].as_str(), &choice["finish_reason"]),
            (Some(text.as_str()), &json!("stop"))
        );
        assert!(choice["message"].get("tool_calls").is_none(), "{choice}");
    }
    assert!(!trace.exists());
}

#[test]
fn h10_penalties_go_with_every_other_option() {
    let model = model("olmoe");
    let mut engine = Engine::new(&model, limits()).unwrap();
    let penalties = Penalties { repetition: 1.3, presence: -2.0, frequency: 2.0, last: None };
    let mut num_answers = 0;
    for options in 0..1 << 6 {
        let is_on = |bit: usize| options >> bit & 1 == 1;
        let sampling = SamplingOptions {
            temperature: if is_on(0) { 2.0 } else { 0.0 },
            top_k: if is_on(1) { 3 } else { 0 },
            top_p: if is_on(2) { 0.5 } else { 1.0 },
            min_p: if is_on(3) { 0.2 } else { 0.0 },
            penalties,
            seed: options as u64,
        };
        let logprobs = is_on(4).then_some(WantedLogprobs { num_top: 3, of_prompt: is_on(5) });
        let sampler = Sampler::new(sampling).unwrap();
        engine.add(Request { sampler, logprobs, experts_from: is_on(5).then_some(0), ..request(options) }).unwrap();
        // Some come one by one, others together.
        while engine.has_requests() && options % 3 == 0 {
            let outputs = engine.turn().unwrap();
            assert!(outputs.iter().all(|output| output.failure.is_none()), "{options}");
            num_answers += outputs.iter().filter(|output| output.end.is_some()).count();
        }
    }
    while engine.has_requests() {
        num_answers += engine.turn().unwrap().iter().filter(|output| output.end.is_some()).count();
    }
    assert_eq!((num_answers, engine.counts().free_blocks), (64, 64));
}

#[test]
fn h12_images_and_other_parts_are_refused_and_no_address_is_asked() {
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/x.png", other.local_addr().unwrap());
    let num_visits = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&num_visits);
    std::thread::spawn(move || {
        for mut visitor in other.incoming().flatten() {
            counted.fetch_add(1, Ordering::SeqCst);
            let _ = visitor.read(&mut [0; 64]).and_then(|_| visitor.write(b"HTTP/1.1 200 OK\r\n\r\n"));
        }
    });
    let server = TestServer::start(Setup::default());
    for part in [
        json!({"type": "image_url", "image_url": {"url": url}}),
        json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}),
        json!({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}),
        json!({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}),
        json!({"type": "video_url", "video_url": {"url": url}}),
        json!({"type": "image_embeds", "image_embeds": "gASVAAAAAAAAAAA="}),
        json!({"type": "file", "file": {"file_id": "../../etc/passwd"}}),
    ] {
        let body = json!({"messages": [{"role": "user", "content": [part]}]});
        let answer = server.post("/v1/chat/completions", &body);
        assert_eq!((answer.status, answer.code().as_str()), (400, "unsupported_parameter"), "{part}");
        assert!(answer.json()["error"]["param"].as_str().unwrap().starts_with("messages[0].content[0]"), "{answer:?}");
    }
    let embeds = server.post("/v1/completions", &json!({"prompt": "x", "prompt_embeds": "gASVAAAA"}));
    assert_eq!((embeds.status, embeds.json()["error"]["param"].as_str()), (400, Some("prompt_embeds")));
    assert_eq!(num_visits.load(Ordering::SeqCst), 0);
}

#[test]
fn h17_no_path_that_a_client_names_is_opened() {
    let server = TestServer::start(Setup::default());
    for name in
        ["../../etc/passwd", "/etc/passwd", "file:///etc/passwd", "..%2f..%2fetc%2fpasswd", "tiny/../tiny", "C:\\x"]
    {
        let answer = server.post("/v1/completions", &json!({"model": name, "prompt": "x"}));
        assert_eq!((answer.status, answer.code().as_str()), (404, "model_not_found"), "{name}");
        let path = name.replace('\\', "%5c");
        assert_eq!(server.get(&format!("/v1/models/{path}")).status, 404, "{name}");
    }
    for path in [
        "/slots/0?action=save",
        "/lora-adapters",
        "/v1/load_lora_adapter",
        "/../etc/passwd",
        "/%2e%2e/etc/passwd",
        "//etc/passwd",
    ] {
        let answer = server.get(path);
        assert!(matches!(answer.status, 400 | 404), "{path}: {answer:?}");
        assert!(!answer.body.contains("root:"), "{answer:?}");
    }
    for field in ["chat_template", "lora_path", "filename", "adapter"] {
        let mut body = json!({"messages": [{"role": "user", "content": "x"}]});
        body[field] = json!("/etc/passwd");
        let answer = server.post("/v1/chat/completions", &body);
        assert_eq!((answer.status, answer.json()["error"]["param"].as_str()), (400, Some(field)), "{answer:?}");
    }
}
