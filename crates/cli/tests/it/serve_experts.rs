//! The part of the server that is MoE's own: the load of experts, and the experts of an answer's tokens.
#![cfg(unix)]

use serde_json::{Value, json};

use crate::serve::{Server, read, with_model};

/// Reads what base64 stands for: whole numbers of 32 bits.
fn numbers(text: &str) -> Vec<i32> {
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => byte - b'A',
        b'a'..=b'z' => byte - b'a' + 26,
        b'0'..=b'9' => byte - b'0' + 52,
        b'+' => 62,
        _ => 63,
    };
    let digits: Vec<u32> = text.bytes().filter(|&byte| byte != b'=').map(|byte| u32::from(digit(byte))).collect();
    let bits = digits.chunks(4).flat_map(|four| {
        let word = four.iter().fold(0, |word, digit| word << 6 | digit) << (6 * (4 - four.len()));
        [16, 8, 0].map(|shift| (word >> shift) as u8).into_iter().take(four.len() * 3 / 4)
    });
    let bytes: Vec<u8> = bits.collect();
    bytes.chunks_exact(4).map(|four| i32::from_le_bytes(four.try_into().expect("four bytes"))).collect()
}

fn experts_of(part: &Value) -> Vec<i32> {
    numbers(part["sglext"]["routed_experts"].as_str().expect("base64"))
}

#[test]
fn the_experts_of_a_stream_are_those_of_the_whole_answer_and_are_counted() {
    let work = with_model();
    let server = Server::start(&work, &["--batch-invariant", "--no-prefix-cache"]);
    let mut body = json!({"prompt": "Line 3", "temperature": 0, "max_tokens": 9, "return_routed_experts": true});
    let whole = server.post("/v1/completions", &body);
    let tokens = whole["usage"]["total_tokens"].as_u64().expect("a number") - 1;
    assert_eq!(whole["sglext"]["routed_experts_shape"], json!([tokens, 2, 2]));
    let experts = experts_of(&whole);
    assert_eq!(experts.len() as u64, tokens * 2 * 2);
    assert!(experts.iter().all(|&id| (0..4).contains(&id)));
    let load: Value = serde_json::from_str(&server.get("/moe/load")).expect("JSON");
    for (place, layer) in load["layers"].as_array().expect("layers").iter().enumerate() {
        let count = |expert| {
            let of_layer = experts.chunks(2).skip(place).step_by(2).flatten();
            of_layer.filter(|&&id| id == expert).count()
        };
        assert_eq!((&layer["layer"], &layer["tokens"]), (&json!(place), &json!(tokens)));
        assert_eq!(layer["tokens_per_expert"], json!((0..4).map(count).collect::<Vec<_>>()));
    }
    body["stream"] = json!(true);
    let stream = read(server.send("/v1/completions", &body));
    let events = stream.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).filter(|data| *data != "[DONE]");
    let events: Vec<Value> = events.map(|data| serde_json::from_str(data).expect("JSON")).collect();
    assert_eq!(events.iter().flat_map(experts_of).collect::<Vec<_>>(), experts);
    body["routed_experts_start_len"] = json!(-1);
    body["stream"] = json!(false);
    let prompt_tokens = whole["usage"]["prompt_tokens"].as_u64().expect("a number") as usize;
    assert_eq!(experts_of(&server.post("/v1/completions", &body)), experts[prompt_tokens * 4..]);
    body["routed_experts_start_len"] = json!(prompt_tokens + 1);
    let error = server.post("/v1/completions", &body)["error"].clone();
    assert_eq!(error["param"], "routed_experts_start_len");
}

#[test]
fn metrics_have_the_load_of_each_expert_under_the_prefix() {
    let work = with_model();
    let server = Server::start(&work, &["--metrics-prefix", "vllm:"]);
    server.post("/v1/completions", &json!({"prompt": "Line 3", "max_tokens": 5, "ignore_eos": true}));
    let text = server.get("/metrics");
    let values = |name: &str| -> Vec<f64> {
        let lines = text.lines().filter(|line| line.starts_with(&format!("vllm:{name}{{model_name=\"run\"")));
        lines.map(|line| line.rsplit(' ').next().expect("a value").parse().expect("a number")).collect()
    };
    let counts = values("expert_tokens_total");
    assert_eq!((counts.len(), values("expert_load_cv").len()), (2 * 4, 2));
    // 6 tokens of the prompt and 4 that were passed, 2 experts each, in 2 layers.
    assert_eq!(counts.iter().sum::<f64>(), 10.0 * 2.0 * 2.0);
    assert!(text.contains("vllm:expert_tokens_total{model_name=\"run\",layer=\"1\",expert=\"3\"}"), "{text}");
    let balancedness = values("expert_balancedness");
    assert!(balancedness.len() == 1 && balancedness[0] > 0.25 && balancedness[0] <= 1.0, "{balancedness:?}");
}
