//! Tools: what the template sees of them, and the calls of answers.

use serde_json::{Value, json};

use crate::http::{Answer, Setup, TestServer};

const TEMPLATE: &str = "{{ tools }}<tool_call>";

fn server() -> TestServer {
    TestServer::start(Setup { sandbox: "cat > /dev/null; printf hello", template: TEMPLATE, ..Setup::default() })
}

fn tools() -> Value {
    let number = json!({"type": "integer", "minimum": 0, "maximum": 9});
    let add = json!({"type": "object", "properties": {"b": number, "a": number}, "required": ["b", "a"]});
    json!([
        {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": add}},
        {"type": "function", "function": {"name": "now"}},
    ])
}

fn ask(server: &TestServer, fields: Value) -> Answer {
    let mut body =
        json!({"messages": [{"role": "user", "content": "x"}], "tools": tools(), "max_tokens": 200, "temperature": 0});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    server.post("/v1/chat/completions", &body)
}

/// Makes an answer of this text: the engine of tests says what its form asks for.
fn saying(text: &str) -> Value {
    json!({"grammar": format!("root ::= {}", json!(text))})
}

fn calls(message: &Value) -> Vec<(&str, Value)> {
    let one = |call: &'_ Value| serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
    let calls = message["tool_calls"].as_array().unwrap();
    calls.iter().map(|call| (call["function"]["name"].as_str().unwrap(), one(call))).collect()
}

#[test]
fn calls_are_read_from_an_answer() {
    let server = server();
    let text = "Hm.<tool_call>{\"name\": \"add\", \"arguments\": {\"b\": 1, \"a\": 2}}</tool_call>";
    let choice = ask(&server, saying(text)).json()["choices"][0].clone();
    assert_eq!(choice["finish_reason"], "tool_calls");
    let message = &choice["message"];
    assert_eq!((message["content"].as_str(), &message["role"]), (Some("Hm."), &json!("assistant")));
    assert_eq!(message["tool_calls"][0]["function"], json!({"name": "add", "arguments": "{\"b\":1,\"a\":2}"}));
    assert_eq!(message["tool_calls"][0]["type"], "function");
    assert_eq!(message["tool_calls"][0]["id"].as_str().unwrap().len(), 9);
    let plain = ask(&server, saying("just text")).json()["choices"][0].clone();
    assert_eq!(
        (plain["finish_reason"].as_str(), plain["message"]["content"].as_str()),
        (Some("stop"), Some("just text"))
    );
    assert!(plain["message"].get("tool_calls").is_none());
}

#[test]
fn one_call_is_enough_where_calls_are_not_parallel() {
    let server = server();
    let call = "<tool_call>{\"name\": \"now\"}</tool_call>";
    let mut fields = saying(&call.repeat(2));
    let num_calls = |fields: &Value| {
        ask(&server, fields.clone()).json()["choices"][0]["message"]["tool_calls"].as_array().unwrap().len()
    };
    assert_eq!(num_calls(&fields), 2);
    fields["parallel_tool_calls"] = json!(false);
    assert_eq!(num_calls(&fields), 1);
}

#[test]
fn the_pieces_of_a_stream_have_the_calls() {
    let server = server();
    let text = "Hm. <tool_call>{\"name\": \"add\", \"arguments\": {\"b\": 1, \"a\": 2}}</tool_call><tool_call>{\"name\": \"now\"}</tool_call>";
    let mut fields = saying(text);
    let whole = ask(&server, fields.clone()).json()["choices"][0].clone();
    fields["stream"] = json!(true);
    let events = ask(&server, fields).events();
    let deltas: Vec<&Value> = events.iter().map(|event| &event["choices"][0]["delta"]).collect();
    let text: String = deltas.iter().filter_map(|delta| delta["content"].as_str()).collect();
    assert_eq!(Some(text.as_str()), whole["message"]["content"].as_str());
    let mut found: Vec<(Value, String)> = Vec::new();
    for calls in deltas.iter().filter_map(|delta| delta["tool_calls"].as_array()) {
        let [call] = &calls[..] else { panic!("{calls:?}: one piece of a call at a time") };
        let arguments = call["function"]["arguments"].as_str().unwrap();
        if call["id"].is_null() {
            assert_eq!((&call["index"], call.get("type")), (&json!(found.len() - 1), None), "{call}");
            found.last_mut().unwrap().1 += arguments;
        } else {
            assert_eq!((&call["index"], &call["type"], arguments), (&json!(found.len()), &json!("function"), ""));
            found.push((call["function"]["name"].clone(), String::new()));
        }
    }
    // The engine of tests writes a byte at a time.
    let num_pieces = deltas.iter().filter(|delta| !delta["tool_calls"].is_null()).count();
    assert_eq!(num_pieces, 2 + "{\"b\":1,\"a\":2}".len() + 1);
    assert_eq!(deltas[0]["role"], "assistant");
    let expected = whole["message"]["tool_calls"].as_array().unwrap().iter();
    let expected: Vec<(Value, String)> = expected
        .map(|call| (call["function"]["name"].clone(), call["function"]["arguments"].as_str().unwrap().to_owned()))
        .collect();
    assert_eq!(found, expected);
    let ends: Vec<&Value> =
        events.iter().map(|event| &event["choices"][0]["finish_reason"]).filter(|end| !end.is_null()).collect();
    assert_eq!(ends, [&json!("tool_calls")]);
}

#[test]
fn a_required_call_keeps_to_the_schema_of_its_tool() {
    let server = server();
    let choice =
        ask(&server, json!({"tool_choice": "required", "parallel_tool_calls": false})).json()["choices"][0].clone();
    assert_eq!((&choice["finish_reason"], &choice["message"]["content"]), (&json!("tool_calls"), &Value::Null));
    let found = calls(&choice["message"]);
    assert!(found.len() == 1 && ["add", "now"].contains(&found[0].0), "{found:?}");
    let named = json!({"type": "function", "function": {"name": "add"}});
    for n in [1, 2] {
        let json = ask(&server, json!({"tool_choice": named, "n": n})).json();
        for choice in json["choices"].as_array().unwrap() {
            let found = calls(&choice["message"]);
            assert_eq!((found.len(), found[0].0, &choice["finish_reason"]), (1, "add", &json!("tool_calls")));
            assert!(found[0].1["a"].is_i64() && found[0].1["b"].is_i64(), "{found:?}");
        }
    }
    let events = ask(&server, json!({"tool_choice": named, "stream": true})).events();
    let pieces = events.iter().filter_map(|event| event["choices"][0]["delta"]["tool_calls"].as_array()).flatten();
    let arguments: String = pieces.filter_map(|call| call["function"]["arguments"].as_str()).collect();
    assert!(serde_json::from_str::<Value>(&arguments).unwrap()["a"].is_i64(), "{arguments}");
    let now = json!({"tool_choice": {"type": "function", "function": {"name": "now"}}});
    assert_eq!(calls(&ask(&server, now).json()["choices"][0]["message"]), [("now", json!({}))]);
}

#[test]
fn templates_see_the_tools_and_the_messages_of_tools() {
    // The process for templates gives back the request itself.
    let server = TestServer::start(Setup { template: TEMPLATE, ..Setup::default() });
    let messages = json!([
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": null, "tool_calls": [
            {"id": "call12345", "type": "function", "function": {"name": "add", "arguments": "{\"b\": 1, \"a\": 2}"}}]},
        {"role": "tool", "tool_call_id": "call12345", "content": "3"},
    ]);
    let seen = |fields: Value| {
        let mut body = json!({"messages": messages});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let tokens = server.post("/tokenize", &body).json()["tokens"].as_array().unwrap().clone();
        let bytes: Vec<u8> = tokens.iter().map(|token| token.as_u64().unwrap() as u8).collect();
        String::from_utf8(bytes).unwrap()
    };
    let text = seen(json!({"tools": tools()}));
    for part in [r#""arguments":{"b":1,"a":2}"#, r#""tool_call_id":"call12345""#, r#""name":"now""#, r#""role":"tool""#]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(seen(json!({"tools": tools(), "tool_choice": "none"})).contains(r#""tools":null"#));
}

#[test]
fn tools_that_cannot_be_used_are_refused_with_their_field() {
    let server = server();
    let tool = |function: Value| json!([{"type": "function", "function": function}]);
    for (fields, param) in [
        (json!({"tools": "x"}), "tools"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        (json!({"tools": [{"type": "function"}]}), "tools[0].function"),
        (json!({"tools": tool(json!({}))}), "tools[0].function.name"),
        (json!({"tools": tool(json!({"name": "a b"}))}), "tools[0].function.name"),
        (json!({"tools": tool(json!({"name": "a", "parameters": 5}))}), "tools[0].function.parameters"),
        (json!({"tools": tool(json!({"name": "a", "paramters": {}}))}), "tools[0].function.paramters"),
        (json!({"tools": [tools()[0], tools()[0]]}), "tools"),
        (json!({"tools": [], "tool_choice": "required"}), "tool_choice"),
        (json!({"tool_choice": {"type": "function", "function": {"name": "none"}}}), "tool_choice"),
        (json!({"tool_choice": "maybe"}), "tool_choice"),
        (json!({"tools": tool(json!({"name": "a", "parameters": {"not": {}}})), "tool_choice": "required"}), "tools"),
        (json!({"tool_choice": "required", "regex": "a"}), "tool_choice"),
    ] {
        let answer = ask(&server, fields.clone());
        let error = answer.json()["error"].clone();
        assert_eq!((answer.status, error["param"].as_str()), (400, Some(param)), "{fields}: {error}");
    }
    let without = TestServer::start(Setup { sandbox: "cat > /dev/null; printf hello", ..Setup::default() });
    let answer = ask(&without, json!({}));
    assert_eq!((answer.status, answer.code().as_str()), (400, "unsupported_parameter"));
}
