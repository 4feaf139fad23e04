//! Requests as clients send them, and as nobody should. Tests of a row of the catalogue of bad input have its number in their names.

use moeworks_infer::generation::TokenBias;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn completion(body: Value) -> Result<CompletionRequest, ApiError> {
    CompletionRequest::parse(body.to_string().as_bytes())
}

fn chat(body: Value) -> Result<ChatRequest, ApiError> {
    ChatRequest::parse(body.to_string().as_bytes())
}

/// A completion of "x" with one more field.
fn with(name: &str, value: Value) -> Result<CompletionRequest, ApiError> {
    let mut body = json!({"prompt": "x"});
    body[name] = value;
    completion(body)
}

/// A chat of one message with one more field.
fn chat_with(name: &str, value: Value) -> Result<ChatRequest, ApiError> {
    let mut body = json!({"messages": [{"role": "user", "content": "x"}]});
    body[name] = value;
    chat(body)
}

/// Checks that an error is of a field and of a kind, and is one line.
fn assert_refused<T: std::fmt::Debug>(result: Result<T, ApiError>, kind: ErrorKind, param: &str) {
    let error = result.expect_err(param);
    assert_eq!((error.kind, error.param.as_deref()), (kind, Some(param)), "{error}");
    assert!(!error.message.contains('\n') && error.message.len() < 400, "{error}");
    assert_eq!(error.kind.status(), 400);
}

#[test]
fn a_request_with_everything_that_clients_send_is_read() {
    let body = json!({
        "model": "m", "prompt": "Once", "max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "n": 2,
        "best_of": 2, "stop": ["###", "\n\n"], "seed": 1234, "presence_penalty": 0.1, "frequency_penalty": -0.2,
        "repetition_penalty": 1.1, "logit_bias": {"5": -100, "7": 2.5}, "stream": true,
        "stream_options": {"include_usage": true}, "ignore_eos": true, "stop_token_ids": [3, 4], "min_tokens": 2, "priority": -1,
        "cache_salt": "s", "return_token_ids": true, "user": "u", "metadata": {"a": 1}, "store": false, "echo": false,
        "logprobs": null, "suffix": null, "add_special_tokens": false, "response_format": {"type": "text"},
    });
    let request = completion(body).unwrap();
    assert_eq!((request.prompts, request.max_tokens), (vec![Prompt::Text("Once".into())], 7));
    let Common { sampling, num_choices, is_stream, includes_usage, priority, returns_token_ids, .. } = request.common;
    assert_eq!((num_choices, is_stream, includes_usage, priority, returns_token_ids), (2, true, true, -1, true));
    let biases = vec![TokenBias { id: 5, bias: -100.0 }, TokenBias { id: 7, bias: 2.5 }];
    assert_eq!((sampling.logit_bias, sampling.stop_ids, sampling.seed), (biases, vec![3, 4], Some(1234)));
    assert_eq!((sampling.settings.temperature, sampling.settings.top_k, sampling.min_tokens), (Some(0.5), Some(40), 2));
    assert_eq!((sampling.stops, sampling.ignores_stop_ids), (vec!["###".to_owned(), "\n\n".to_owned()], true));
}

#[test]
fn prompts_come_as_texts_and_as_tokens() {
    let prompts = |value: Value| completion(json!({"prompt": value})).unwrap().prompts;
    let text = |text: &str| Prompt::Text(text.to_owned());
    assert_eq!(prompts(json!("a")), [text("a")]);
    assert_eq!(prompts(json!(["a", "b"])), [text("a"), text("b")]);
    assert_eq!(prompts(json!([1, 2.0])), [Prompt::Tokens(vec![1, 2])]);
    assert_eq!(prompts(json!([[1], [2, 3]])), [Prompt::Tokens(vec![1]), Prompt::Tokens(vec![2, 3])]);
}

#[test]
fn defaults_are_those_of_openai() {
    let request = completion(json!({"prompt": "x"})).unwrap();
    assert_eq!((request.max_tokens, request.common.num_choices, request.common.is_stream), (16, 1, false));
    let request = chat_with("max_completion_tokens", json!(5)).unwrap();
    assert_eq!(request.common.sampling.max_tokens, Some(5));
    assert!(request.prompt.add_generation_prompt && !request.prompt.continue_final_message);
    assert_eq!(chat_with("max_tokens", Value::Null).unwrap().common.sampling.max_tokens, None);
    assert_refused(
        chat(json!({"messages": [{"role": "user", "content": ""}], "max_tokens": 1, "max_completion_tokens": 2})),
        ErrorKind::Invalid,
        "max_completion_tokens",
    );
}

#[test]
fn messages_may_have_parts_and_names() {
    let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
    let body = json!({"messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": parts, "name": "Ada"},
        {"role": "assistant", "content": null, "tool_calls": null, "refusal": null, "annotations": []},
    ]});
    let messages = chat(body).unwrap().prompt.messages;
    assert_eq!((messages[1].content.as_str(), messages[1].name.as_deref()), ("a\nb", Some("Ada")));
    assert_eq!(messages[2].content, "");
    let image = json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]);
    assert_refused(chat(json!({"messages": image})), ErrorKind::Unsupported, "messages[0].content[0].type");
    let tool = json!([{"role": "tool", "content": "x", "tool_call_id": "1"}]);
    assert_refused(chat(json!({"messages": tool})), ErrorKind::Invalid, "messages[0].role");
}

#[test]
fn what_the_server_cannot_do_is_refused_with_its_name() {
    for name in ["echo", "regex", "grammar", "guided_json", "top_logprobs", "suffix"] {
        let value = if name == "echo" { json!(true) } else { json!("[a-z]") };
        assert_refused(with(name, value), ErrorKind::Unsupported, name);
    }
    // 0 asks for the log-probabilities of the answer's tokens.
    assert_refused(with("logprobs", json!(0)), ErrorKind::Unsupported, "logprobs");
    assert_refused(with("best_of", json!(3)), ErrorKind::Unsupported, "best_of");
    assert_refused(with("skip_special_tokens", json!(false)), ErrorKind::Unsupported, "skip_special_tokens");
    let format = json!({"type": "json_object"});
    assert_refused(chat_with("response_format", format), ErrorKind::Unsupported, "response_format.type");
    assert_refused(chat_with("tools", json!([{"type": "function"}])), ErrorKind::Unsupported, "tools");
    assert_refused(chat_with("tool_choice", json!("required")), ErrorKind::Unsupported, "tool_choice");
    assert_refused(chat_with("logprobs", json!(true)), ErrorKind::Unsupported, "logprobs");
    assert!(chat_with("logprobs", json!(false)).is_ok() && chat_with("tools", json!([])).is_ok());
}

#[test]
fn fields_that_are_not_known_are_refused_with_their_name() {
    assert_refused(with("temprature", json!(1)), ErrorKind::UnknownField, "temprature");
    assert_refused(with("use_magic", json!(null)), ErrorKind::UnknownField, "use_magic");
    assert_refused(chat_with("prompt", json!("x")), ErrorKind::UnknownField, "prompt");
    let body = json!({"messages": [{"role": "user", "content": "x", "colour": 1}]});
    assert_refused(chat(body), ErrorKind::UnknownField, "messages[0].colour");
    let options = json!({"prompt": "x", "stream": true, "stream_options": {"include_use": true}});
    assert_refused(completion(options), ErrorKind::UnknownField, "stream_options.include_use");
    assert_refused(with("stream_options", json!({"include_usage": true})), ErrorKind::Invalid, "stream_options");
}

#[test]
fn h1_prompts_and_conversations_without_anything_are_refused() {
    assert_refused(completion(json!({})), ErrorKind::Invalid, "prompt");
    for prompt in [json!(null), json!([]), json!([[]]), json!([[1], []]), json!(5), json!({}), json!([null])] {
        assert_refused(completion(json!({"prompt": prompt})), ErrorKind::Invalid, "prompt");
    }
    assert_refused(chat(json!({})), ErrorKind::Invalid, "messages");
    for messages in [json!([]), json!("x"), json!({})] {
        assert_refused(chat(json!({"messages": messages})), ErrorKind::Invalid, "messages");
    }
    assert_refused(chat(json!({"messages": [{}]})), ErrorKind::Invalid, "messages[0].role");
    assert_refused(chat(json!({"messages": [{"role": "user"}]})), ErrorKind::Invalid, "messages[0].content");
    assert_refused(chat(json!({"messages": [null]})), ErrorKind::Invalid, "messages[0]");
}

#[test]
fn h2_huge_numbers_and_lists_are_refused() {
    let huge = json!(1_000_000_000);
    assert_refused(with("n", huge.clone()), ErrorKind::Invalid, "n");
    assert_refused(with("best_of", json!(u64::MAX)), ErrorKind::Unsupported, "best_of");
    assert_refused(with("top_k", huge), ErrorKind::Invalid, "top_k");
    assert_refused(with("max_tokens", json!(1e300)), ErrorKind::Invalid, "max_tokens");
    assert_refused(with("stop", json!(vec!["x"; 17])), ErrorKind::Invalid, "stop");
    assert_refused(with("stop", json!("x".repeat(257))), ErrorKind::Invalid, "stop");
    assert_refused(with("stop_token_ids", json!(vec![1; 65])), ErrorKind::Invalid, "stop_token_ids");
    let biases: Value = (0..1025).map(|id: i32| (id.to_string(), json!(1))).collect::<serde_json::Map<_, _>>().into();
    assert_refused(with("logit_bias", biases), ErrorKind::Invalid, "logit_bias");
    assert_refused(completion(json!({"prompt": vec!["x"; 2049]})), ErrorKind::Invalid, "prompt");
    let messages = vec![json!({"role": "user", "content": "x"}); 2049];
    assert_refused(chat(json!({"messages": messages})), ErrorKind::Invalid, "messages");
    // A limit on tokens is held against the context later.
    assert_eq!(with("max_tokens", json!(u64::from(u32::MAX))).unwrap().max_tokens, u32::MAX as usize);
}

#[test]
fn h3_numbers_out_of_range_or_not_finite_are_refused() {
    let fields = [
        ("temperature", vec![json!(-0.1), json!(2.1), json!("1"), json!(1e300), json!([])]),
        ("top_p", vec![json!(0), json!(-1), json!(1.01)]),
        ("top_k", vec![json!(-2), json!(1.5), json!("5")]),
        ("min_p", vec![json!(-0.1), json!(1.1)]),
        ("repetition_penalty", vec![json!(0), json!(-1), json!(11)]),
        ("presence_penalty", vec![json!(-3), json!(3)]),
        ("frequency_penalty", vec![json!(-3), json!(true)]),
        ("max_tokens", vec![json!(-1), json!(0), json!(1.5), json!("7")]),
        ("min_tokens", vec![json!(-1)]),
        ("n", vec![json!(0), json!(-1), json!(129)]),
        ("seed", vec![json!(1.5), json!("a"), json!(1e300)]),
        ("priority", vec![json!(1_u64 << 31), json!(0.5)]),
        ("stop_token_ids", vec![json!([-1]), json!(["a"]), json!(7), json!([1e10])]),
        ("logit_bias", vec![json!({"a": 1}), json!({"-1": 1}), json!({"1": 101}), json!({"1": "x"}), json!([1])]),
        ("stream", vec![json!("yes"), json!(1)]),
    ];
    for (name, values) in fields {
        for value in values {
            assert_refused(with(name, value), ErrorKind::Invalid, name);
        }
    }
    for number in ["NaN", "Infinity", "-Infinity", "1e999", "0x10"] {
        let body = format!("{{\"prompt\": \"x\", \"temperature\": {number}}}");
        let error = CompletionRequest::parse(body.as_bytes()).unwrap_err();
        assert!(error.message.contains("is not JSON"), "{error}");
    }
    assert_eq!(with("top_k", json!(-1)).unwrap().common.sampling.settings.top_k, Some(0));
    assert_eq!(with("seed", json!(-1)).unwrap().common.sampling.seed, None);
}

#[test]
fn h3_tokens_outside_of_the_vocabulary_are_refused() {
    let checked = |name, value| with(name, value).unwrap().common.sampling.check_vocabulary(10);
    assert_refused(checked("logit_bias", json!({"10": 1})), ErrorKind::Invalid, "logit_bias");
    assert_refused(checked("stop_token_ids", json!([3, 10])), ErrorKind::Invalid, "stop_token_ids");
    assert!(checked("logit_bias", json!({"9": 1})).is_ok());
    let prompt = &completion(json!({"prompt": [9, 10]})).unwrap().prompts[0];
    assert_refused(prompt.check_vocabulary(10), ErrorKind::Invalid, "prompt");
    assert_refused(DetokenizeRequest::parse(b"{\"tokens\": [10]}", 10), ErrorKind::Invalid, "tokens");
}

#[test]
fn h8_a_request_cannot_replace_the_template_or_its_own_variables() {
    let variables = |value: Value| chat_with("chat_template_kwargs", value);
    let request = variables(json!({"enable_thinking": false})).unwrap();
    assert_eq!(request.prompt.variables["enable_thinking"], false);
    for name in ["messages", "chat_template", "tokenize", "bos_token", "raise_exception", "add_generation_prompt"] {
        assert_refused(variables(json!({name: "x"})), ErrorKind::Invalid, "chat_template_kwargs");
    }
    assert_refused(chat_with("chat_template", json!("{{ x }}")), ErrorKind::Unsupported, "chat_template");
    assert_refused(variables(json!({"x": "y".repeat(20_000)})), ErrorKind::Invalid, "chat_template_kwargs");
    assert_refused(variables(json!({"x": [[[[[1]]]]]})), ErrorKind::Invalid, "chat_template_kwargs");
    assert_refused(variables(json!({"x": vec![1; 200]})), ErrorKind::Invalid, "chat_template_kwargs");
    assert_refused(variables(json!([1])), ErrorKind::Invalid, "chat_template_kwargs");
}

#[test]
fn h13_deep_nesting_and_keys_that_come_twice_are_refused() {
    let nested = |depth: usize| format!("{{\"prompt\": {}{}}}", "[".repeat(depth), "]".repeat(depth));
    for depth in [MAX_DEPTH, 100_000] {
        let error = CompletionRequest::parse(nested(depth).as_bytes()).unwrap_err();
        assert!(error.message.contains("levels"), "{error}");
    }
    // Brackets in a text are no levels.
    let text = format!("{{\"prompt\": \"\\\"{}\"}}", "[".repeat(1000));
    assert!(CompletionRequest::parse(text.as_bytes()).is_ok());
    for body in ["{\"prompt\": \"a\", \"prompt\": \"b\"}", "{\"prompt\": \"a\", \"metadata\": {\"x\": 1, \"x\": 2}}"] {
        assert!(CompletionRequest::parse(body.as_bytes()).unwrap_err().message.contains("comes twice"), "{body}");
    }
    for body in ["", "  ", "[]", "5", "{", "{}{}", "{\"prompt\": \"x\"} x", "\u{feff}{}", "{\"prompt\": \"\\ud800\"}"] {
        let error = CompletionRequest::parse(body.as_bytes()).unwrap_err();
        assert!(error.message.starts_with("the body"), "{body:?}: {error}");
    }
    assert!(CompletionRequest::parse(b"{\"prompt\": \"\xff\"}").is_err());
}

#[test]
fn h11_a_body_of_megabytes_is_read_in_linear_time() {
    let body = |len: usize| json!({"prompt": "[\\\"<|x|>".repeat(len)}).to_string();
    let time = |len: usize| {
        let body = body(len);
        let start = std::time::Instant::now();
        assert!(CompletionRequest::parse(body.as_bytes()).is_ok());
        start.elapsed().as_secs_f64()
    };
    // 8 MB: a quadratic reader would take minutes.
    assert!(time(1_000_000) < 5.0);
}

#[test]
fn h19_names_of_clients_stay_on_one_line() {
    assert_eq!(quoted("a\nb\u{1b}[31m"), "\"a\\nb\\u{1b}[31m\"");
    assert_eq!(quoted(&"é".repeat(100)).chars().count(), 60 + 2 + 3);
    let error = with("evil\n\u{1b}[2Jname", json!(1)).unwrap_err();
    assert!(!error.message.contains(['\n', '\u{1b}']), "{error}");
}

#[test]
fn errors_have_the_form_that_clients_read() {
    let error = with("temperature", json!(3)).unwrap_err();
    let message = "temperature = 3: must be a number at least 0 and at most 2";
    let expected = json!({"error": {"message": message, "type": "invalid_request_error", "param": "temperature",
                                    "code": "invalid_value"}});
    assert_eq!(error.to_json(), expected);
    assert_eq!(ApiError::new(ErrorKind::QueueFull, "a\nb").to_json()["error"]["message"], "a b");
}

#[test]
fn texts_to_tokenize_come_as_other_servers_take_them() {
    let parsed = |body: Value| TokenizeRequest::parse(body.to_string().as_bytes());
    let text = |body: Value| match parsed(body).unwrap().text {
        TokenizeText::Text(text, options) => (text, options.adds_special_tokens, options.reads_special_tokens),
        TokenizeText::Chat(_) => panic!("a text"),
    };
    assert_eq!(text(json!({"prompt": "a"})), ("a".to_owned(), true, false));
    assert_eq!(
        text(json!({"content": "a", "add_special": false, "parse_special": true})),
        ("a".to_owned(), false, true)
    );
    let chat = parsed(json!({"messages": [{"role": "user", "content": "a"}], "return_token_strs": true})).unwrap();
    assert!(matches!(chat.text, TokenizeText::Chat(_)) && chat.returns_pieces);
    assert_refused(parsed(json!({})), ErrorKind::Invalid, "prompt");
    assert_refused(parsed(json!({"prompt": 5})), ErrorKind::Invalid, "prompt");
    assert_eq!(DetokenizeRequest::parse(b"{\"tokens\": []}", 5).unwrap().tokens, [0_u32; 0]);
}

proptest! {
    #[test]
    fn no_body_makes_the_reader_panic(body in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = CompletionRequest::parse(&body);
        let _ = ChatRequest::parse(&body);
    }

    #[test]
    fn no_value_of_a_field_makes_the_reader_panic(name in "[a-z_]{1,12}|n|top_k|stop|logit_bias|stop_token_ids|seed|prompt",
                                                  number in any::<f64>(), text in ".{0,20}") {
        for value in [json!(number), json!(text), json!([number, text]), json!({text.clone(): number}), json!([[number]])] {
            let _ = with(&name, value.clone());
            let _ = chat_with(&name, value);
        }
    }
}
