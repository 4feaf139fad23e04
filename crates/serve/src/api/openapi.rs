//! The description of the API that tools read (OpenAPI 3.1). A test holds its fields against those that the readers
//! of requests take.

use serde_json::{Map, Value, json};

/// A field of a request: its name, its schema as text, and what it does.
struct Field(&'static str, &'static str, &'static str);

/// Fields of completions and of chats.
const COMMON: &[Field] = &[
    Field(
        "model",
        r#"{"type":"string","maxLength":1024}"#,
        "The model's name; without one it is the model that is served.",
    ),
    Field("max_tokens", r#"{"type":"integer","minimum":0}"#, "Tokens of an answer at most."),
    Field("max_completion_tokens", r#"{"type":"integer","minimum":0}"#, "Another name of max_tokens."),
    Field("min_tokens", r#"{"type":"integer","minimum":0,"default":0}"#, "Tokens before which an answer does not end."),
    Field(
        "temperature",
        r#"{"type":"number","minimum":0,"maximum":2}"#,
        "Divides the logits; 0 takes the likeliest token.",
    ),
    Field(
        "top_k",
        r#"{"type":"integer","minimum":-1,"maximum":262144}"#,
        "Only the likeliest tokens; -1 or 0 for all.",
    ),
    Field(
        "top_p",
        r#"{"type":"number","exclusiveMinimum":0,"maximum":1}"#,
        "Only the likeliest tokens of this probability.",
    ),
    Field("min_p", r#"{"type":"number","minimum":0,"maximum":1}"#, "Only tokens of this share of the likeliest one's."),
    Field(
        "repetition_penalty",
        r#"{"type":"number","exclusiveMinimum":0,"maximum":10}"#,
        "On tokens that have occurred.",
    ),
    Field("presence_penalty", r#"{"type":"number","minimum":-2,"maximum":2}"#, "On tokens that were generated."),
    Field(
        "frequency_penalty",
        r#"{"type":"number","minimum":-2,"maximum":2}"#,
        "For each time that a token was generated.",
    ),
    Field(
        "logit_bias",
        r#"{"type":"object","additionalProperties":{"type":"number","minimum":-100,"maximum":100}}"#,
        "Added to the logits of tokens, by their ids.",
    ),
    Field("seed", r#"{"type":"integer"}"#, "Makes an answer reproducible."),
    Field(
        "stop",
        r#"{"anyOf":[{"type":"string","maxLength":256},{"type":"array","maxItems":16,"items":{"type":"string","minLength":1,"maxLength":256}}]}"#,
        "Texts before which an answer ends.",
    ),
    Field(
        "stop_token_ids",
        r#"{"type":"array","maxItems":64,"items":{"type":"integer","minimum":0}}"#,
        "Tokens that end an answer.",
    ),
    Field("ignore_eos", r#"{"type":"boolean"}"#, "Goes on behind the model's own ends."),
    Field("n", r#"{"type":"integer","minimum":1,"maximum":128,"default":1}"#, "Answers to each prompt."),
    Field("best_of", r#"{"type":"integer","minimum":0}"#, "Only as n."),
    Field("stream", r#"{"type":"boolean","default":false}"#, "Sends the answer as it comes, as server-sent events."),
    Field(
        "stream_options",
        r#"{"type":"object","properties":{"include_usage":{"type":"boolean"},"continuous_usage_stats":{"type":"boolean"}}}"#,
        "The number of tokens in a stream.",
    ),
    Field(
        "priority",
        r#"{"type":"integer","minimum":-2147483648,"maximum":2147483647}"#,
        "Lower ones are served first.",
    ),
    Field(
        "cache_salt",
        r#"{"type":"string","maxLength":1024}"#,
        "Requests of different salts share no keys and values.",
    ),
    Field("cache_prompt", r#"{"type":"boolean","default":true}"#, "Uses keys and values of other requests."),
    Field("return_routed_experts", r#"{"type":"boolean","default":false}"#, "Returns the experts of tokens."),
    Field(
        "routed_experts_start_len",
        r#"{"type":"integer","minimum":-1}"#,
        "The first token whose experts are returned.",
    ),
    Field("return_token_ids", r#"{"type":"boolean","default":false}"#, "Returns the ids of tokens."),
    Field("skip_special_tokens", r#"{"const":true}"#, "Only true."),
    Field("spaces_between_special_tokens", r#"{"type":"boolean"}"#, "Changes nothing."),
    Field(
        "response_format",
        r#"{"type":"object","properties":{"type":{"enum":["text","json_object","json_schema"]},"json_schema":{"type":"object"},"schema":{"type":"object"}},"required":["type"]}"#,
        "The form of an answer, as OpenAI has it.",
    ),
    Field(
        "structured_outputs",
        r#"{"type":"object","properties":{"json":{"type":["object","string"]},"json_object":{"type":"boolean"},"regex":{"type":"string"},"grammar":{"type":"string"},"choice":{"type":"array","items":{"type":"string"}}}}"#,
        "The form of an answer, as vLLM has it.",
    ),
    Field("json_schema", r#"{"type":["object","string"]}"#, "A schema of JSON that an answer keeps to."),
    Field("guided_json", r#"{"type":["object","string"]}"#, "Another name of json_schema."),
    Field("regex", r#"{"type":"string","maxLength":16384}"#, "A regular expression that an answer matches as a whole."),
    Field("guided_regex", r#"{"type":"string","maxLength":16384}"#, "Another name of regex."),
    Field("grammar", r#"{"type":"string","maxLength":65536}"#, "A grammar that an answer keeps to (GBNF)."),
    Field("ebnf", r#"{"type":"string","maxLength":65536}"#, "Another name of grammar."),
    Field("guided_grammar", r#"{"type":"string","maxLength":65536}"#, "Another name of grammar."),
    Field(
        "guided_choice",
        r#"{"type":"array","minItems":1,"maxItems":1024,"items":{"type":"string","minLength":1}}"#,
        "Texts of which an answer is one.",
    ),
];

/// Fields that are accepted and change nothing.
const IGNORED: &[&str] =
    &["user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "guided_decoding_backend"];

/// Fields of completions alone.
const COMPLETION: &[Field] = &[
    Field(
        "prompt",
        r#"{"anyOf":[{"type":"string"},{"type":"array","minItems":1,"items":{"type":"string"}},{"type":"array","minItems":1,"items":{"type":"integer","minimum":0}},{"type":"array","minItems":1,"items":{"type":"array","minItems":1,"items":{"type":"integer","minimum":0}}}]}"#,
        "The text to continue, or several, or tokens.",
    ),
    Field("echo", r#"{"type":"boolean","default":false}"#, "Returns the prompt before the answer."),
    Field(
        "logprobs",
        r#"{"type":["integer","boolean"],"minimum":0,"maximum":20}"#,
        "Log-probabilities, with those of so many likely tokens.",
    ),
    Field("add_special_tokens", r#"{"type":"boolean","default":true}"#, "Adds what belongs before a text."),
    Field("parse_special", r#"{"type":"boolean","default":false}"#, "Reads special tokens that the prompt spells."),
];

/// Fields of a conversation.
const CONVERSATION: &[Field] = &[
    Field(
        "messages",
        r##"{"type":"array","minItems":1,"maxItems":2048,"items":{"$ref":"#/components/schemas/Message"}}"##,
        "The conversation.",
    ),
    Field(
        "tools",
        r#"{"type":"array","maxItems":128,"items":{"type":"object","properties":{"type":{"const":"function"},"function":{"type":"object","properties":{"name":{"type":"string","maxLength":64},"description":{"type":"string"},"parameters":{"type":"object"},"strict":{"type":"boolean"}},"required":["name"]}},"required":["function"]}}"#,
        "The tools that the model may call.",
    ),
    Field(
        "tool_choice",
        r#"{"anyOf":[{"enum":["none","auto","required"]},{"type":"object"}]}"#,
        "Whether it calls one.",
    ),
    Field("parallel_tool_calls", r#"{"type":"boolean","default":true}"#, "Whether an answer may have several calls."),
    Field("add_generation_prompt", r#"{"type":"boolean"}"#, "Puts the beginning of an answer behind the messages."),
    Field("continue_final_message", r#"{"type":"boolean","default":false}"#, "Goes on with the last message."),
    Field("chat_template_kwargs", r#"{"type":"object"}"#, "Variables of the template."),
    Field("reasoning_effort", r#"{"type":"string","maxLength":32}"#, "A variable of the template."),
];

/// Fields of chats alone, besides the conversation.
const CHAT: &[Field] = &[
    Field("logprobs", r#"{"type":"boolean","default":false}"#, "Returns log-probabilities of the answer's tokens."),
    Field(
        "top_logprobs",
        r#"{"type":"integer","minimum":0,"maximum":20}"#,
        "Likely tokens that are named beside each token.",
    ),
    Field("modalities", r#"{"const":["text"]}"#, "Only text."),
];

/// Fields of `/tokenize`, besides those of a conversation.
const TOKENIZE: &[Field] = &[
    Field("model", r#"{"type":"string","maxLength":1024}"#, "The model's name."),
    Field("prompt", r#"{"type":"string"}"#, "The text."),
    Field("content", r#"{"type":"string"}"#, "Another name of prompt."),
    Field("return_token_strs", r#"{"type":"boolean"}"#, "Returns the text of each token."),
    Field("with_pieces", r#"{"type":"boolean"}"#, "Another name of return_token_strs."),
    Field("add_special", r#"{"type":"boolean"}"#, "Another name of add_special_tokens."),
    Field("add_special_tokens", r#"{"type":"boolean","default":true}"#, "Adds what belongs before a text."),
    Field("parse_special", r#"{"type":"boolean","default":false}"#, "Reads special tokens that the text spells."),
];

/// Fields of `/detokenize`.
const DETOKENIZE: &[Field] = &[
    Field("model", r#"{"type":"string","maxLength":1024}"#, "The model's name."),
    Field("tokens", r#"{"type":"array","items":{"type":"integer","minimum":0}}"#, "The tokens."),
];

/// The schema of a request with the fields of some tables.
fn request(tables: &[&[Field]], ignored: &[&str], required: &[&str]) -> Value {
    let mut properties = Map::new();
    for Field(name, schema, help) in tables.iter().copied().flatten() {
        let mut schema: Value = serde_json::from_str(schema).unwrap_or_default();
        if !required.contains(name) {
            // Clients write null for what they leave out.
            schema = json!({"anyOf": [schema, {"type": "null"}]});
        }
        schema["description"] = (*help).into();
        properties.insert((*name).to_owned(), schema);
    }
    for name in ignored {
        properties.insert((*name).to_owned(), json!({"description": "Accepted, and changes nothing."}));
    }
    json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
}

/// The whole document.
pub(crate) fn document() -> Value {
    json!({
        "openapi": "3.1.0",
        "info": {"title": "moeworks", "version": env!("CARGO_PKG_VERSION"), "description": "Answers of a model, as OpenAI's API has them."},
        "paths": paths(),
        "security": [{}, {"key": []}],
        "components": {
            "schemas": schemas(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    })
}

fn schemas() -> Value {
    let error = json!({"type": "object", "required": ["message", "type", "code"], "properties": {
        "message": {"type": "string"}, "type": {"type": "string"}, "param": {"type": ["string", "null"]}, "code": {"type": "string"}}});
    let usage = json!({"type": "object", "required": ["prompt_tokens", "completion_tokens", "total_tokens"]});
    let answer = json!({"type": "object", "required": ["id", "object", "created", "model", "choices", "usage"], "properties": {
        "id": {"type": "string"}, "object": {"type": "string"}, "created": {"type": "integer"}, "model": {"type": "string"},
        "choices": {"type": "array", "items": {"type": "object"}}, "usage": usage}});
    let message = json!({"type": "object", "required": ["role"], "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"type": ["string", "array", "null"]},
        "name": {"type": "string", "maxLength": 256},
        "tool_calls": {"type": ["array", "null"], "items": {"type": "object"}},
        "tool_call_id": {"type": "string", "maxLength": 256}}});
    json!({
        "Message": message,
        "CompletionRequest": request(&[COMMON, COMPLETION], IGNORED, &["prompt"]),
        "ChatRequest": request(&[COMMON, CONVERSATION, CHAT], IGNORED, &["messages"]),
        "TokenizeRequest": request(&[TOKENIZE, CONVERSATION], &[], &[]),
        "DetokenizeRequest": request(&[DETOKENIZE], &[], &["tokens"]),
        "Answer": answer,
        "Model": {"type": "object", "required": ["id", "object"], "properties": {"id": {"type": "string"}}},
        "Error": {"type": "object", "required": ["error"], "properties": {"error": error}},
    })
}

fn paths() -> Value {
    let post = |id: &str, summary: &str, request: &str, answer: &str| {
        let body = json!({"required": true, "content": of_json(&reference(request))});
        json!({"post": {"operationId": id, "summary": summary, "requestBody": body, "responses": responses(answer)}})
    };
    let get =
        |id: &str, summary: &str| json!({"get": {"operationId": id, "summary": summary, "responses": responses("")}});
    let mut model = get("model", "A model");
    model["get"]["parameters"] =
        json!([{"name": "id", "in": "path", "required": true, "schema": {"type": "string", "minLength": 1}}]);
    let mut metrics = get("metrics", "Figures for Prometheus");
    metrics["get"]["responses"]["200"]["content"] = json!({"text/plain": {"schema": {"type": "string"}}});
    json!({
        "/v1/models": get("models", "The models"),
        "/v1/models/{id}": model,
        "/v1/completions": post("completions", "Continues a text", "CompletionRequest", "Answer"),
        "/v1/chat/completions": post("chat", "Answers a conversation", "ChatRequest", "Answer"),
        "/tokenize": post("tokenize", "The tokens of a text", "TokenizeRequest", ""),
        "/detokenize": post("detokenize", "The text of tokens", "DetokenizeRequest", ""),
        "/tokenizer_info": get("tokenizer_info", "The tokenizer's configuration"),
        "/health": get("health", "Whether the server is alive"),
        "/ready": get("ready", "Whether requests are taken"),
        "/version": get("version", "The program's version"),
        "/metrics": metrics,
        "/moe/load": get("moe_load", "The load of each expert"),
        "/openapi.json": get("openapi", "This document"),
    })
}

fn reference(name: &str) -> Value {
    match name {
        "" => json!({"type": "object"}),
        name => json!({"$ref": format!("#/components/schemas/{name}")}),
    }
}

fn of_json(schema: &Value) -> Value {
    json!({"application/json": {"schema": schema}})
}

fn responses(answer: &str) -> Value {
    let mut content = of_json(&reference(answer));
    if answer == "Answer" {
        content["text/event-stream"] = json!({"schema": {"type": "string"}});
    }
    let error = json!({"description": "An error", "content": of_json(&reference("Error"))});
    json!({"200": {"description": "The answer", "content": content}, "default": error})
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::fields::recorded;
    use super::super::{ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest};
    use super::*;

    /// Checks that a schema of a request has the fields that its reader takes, and no others.
    fn check(schema: &str, read: impl Fn()) {
        let taken: BTreeSet<String> = recorded(read).into_iter().collect();
        let document = document();
        let properties = document["components"]["schemas"][schema]["properties"].as_object().unwrap();
        let described: BTreeSet<String> = properties.keys().cloned().collect();
        assert_eq!(described, taken, "{schema}");
        assert!(properties.values().all(|property| property["description"].is_string()));
    }

    #[test]
    fn every_field_that_a_reader_takes_is_described() {
        check("CompletionRequest", || drop(CompletionRequest::parse(br#"{"prompt":"x"}"#).unwrap()));
        let chat = br#"{"messages":[{"role":"user","content":"x"}]}"#;
        check("ChatRequest", || drop(ChatRequest::parse(chat).unwrap()));
        check("TokenizeRequest", || {
            TokenizeRequest::parse(chat).unwrap();
            TokenizeRequest::parse(br#"{"prompt":"x"}"#).unwrap();
        });
        check("DetokenizeRequest", || drop(DetokenizeRequest::parse(br#"{"tokens":[1]}"#, 5).unwrap()));
    }

    #[test]
    fn every_schema_is_json_and_every_reference_leads_somewhere() {
        let tables = [COMMON, COMPLETION, CONVERSATION, CHAT, TOKENIZE, DETOKENIZE];
        for Field(name, schema, _) in tables.into_iter().flatten() {
            assert!(serde_json::from_str::<Value>(schema).is_ok(), "{name}");
        }
        let (document, text) = (document(), document().to_string());
        for part in text.split("#/components/schemas/").skip(1) {
            let name = part.split('"').next().unwrap();
            assert!(document["components"]["schemas"][name].is_object(), "{name}");
        }
    }
}
