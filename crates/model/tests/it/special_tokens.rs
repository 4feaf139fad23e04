//! Special tokens around a text: what `transformers` adds for a folder, and llama.cpp for a GGUF file.

use std::fs;

use moeworks_model::Tokenizer;
use serde_json::{Value, json};

/// Bytes, `<s>` as 256 and `</s>` as 257, with a post-processor and a configuration.
fn folder(post_processor: &Value, config: &Value) -> tempfile::TempDir {
    let mut json: Value = serde_json::from_str(Tokenizer::bytes().json()).unwrap();
    let token = |id: u32, content: &str| {
        let mut token = json["added_tokens"][0].clone();
        (token["id"], token["content"]) = (id.into(), content.into());
        token
    };
    json["added_tokens"] = [token(256, "<s>"), token(257, "</s>")].into_iter().collect();
    json["post_processor"] = post_processor.clone();
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("tokenizer.json"), json.to_string()).unwrap();
    fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    dir
}

fn bos_template() -> Value {
    json!({
        "type": "TemplateProcessing", "pair": [],
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [256], "tokens": ["<s>"]}},
    })
}

/// Release 5 of `transformers` uses the post-processor, in most classes. Release 4 used the flags in some; where
/// these ask for a token that the post-processor does not add, as in DeepSeek's files, they are followed.
#[test]
fn a_folder_adds_what_transformers_adds() {
    let fixture: Value = serde_json::from_str(include_str!("../fixtures/special_tokens.json")).unwrap();
    let mut num_of_flags = 0;
    for case in fixture["cases"].as_array().unwrap() {
        let config = &case["config"];
        let dir = folder(&fixture["post_processors"][case["post"].as_u64().unwrap() as usize], config);
        let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();
        let found =
            json!([tokenizer.text_start(), tokenizer.encode_source("").unwrap()[tokenizer.text_start().len()..]]);
        let has_flags = config["tokenizer_class"]
            .as_str()
            .is_some_and(|class| class.starts_with("Llama") || class.starts_with("GPTNeoX"));
        let goes_by_flags = has_flags && case["release 5"] == json!([[], []]) && config["add_bos_token"] == true;
        num_of_flags += usize::from(goes_by_flags);
        let release = if goes_by_flags { "release 4" } else { "release 5" };
        assert_eq!(found, case[release], "{case}");
        // A saved folder says the same, to us and to release 5, which reads no flags.
        let (saved, plain) = (tempfile::tempdir().unwrap(), json!({"bos_token": "<s>", "eos_token": "</s>"}));
        tokenizer.save(saved.path()).unwrap();
        assert_eq!(Tokenizer::from_dir(saved.path()).unwrap().text_start(), tokenizer.text_start());
        fs::write(saved.path().join("tokenizer_config.json"), plain.to_string()).unwrap();
        assert_eq!(Tokenizer::from_dir(saved.path()).unwrap().text_start(), tokenizer.text_start(), "{case}");
    }
    assert!(num_of_flags > 10);
}

#[test]
fn a_prompt_begins_as_texts_do_and_never_twice() {
    let dir = folder(&bos_template(), &json!({"bos_token": "<s>", "eos_token": "</s>"}));
    let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();
    let prompt = |text: &str, reads_special| tokenizer.encode_prompt(text, reads_special).unwrap();
    assert_eq!(prompt("hi", false), [256, 104, 105]);
    assert_eq!(prompt("", false), [256]);
    assert_eq!(prompt("<s>", false), [256, 60, 115, 62]);
    assert_eq!(prompt("<s>hi</s>", true), [256, 104, 105, 257]);
    assert_eq!(prompt("hi<s>", true), [256, 104, 105, 256]);
    assert_eq!(tokenizer.encode("hi").unwrap(), [104, 105]);
    // A conversation begins as its template says.
    assert_eq!(tokenizer.encode_rendered("hi").unwrap(), [104, 105]);
    assert_eq!(tokenizer.encode_rendered("<s>hi").unwrap(), [256, 104, 105]);
}

#[test]
fn an_end_behind_texts_is_left_off_a_prompt() {
    let mut template = bos_template();
    template["single"].as_array_mut().unwrap().push(json!({"SpecialToken": {"id": "</s>", "type_id": 0}}));
    template["special_tokens"]["</s>"] = json!({"id": "</s>", "ids": [257], "tokens": ["</s>"]});
    let tokenizer = Tokenizer::from_dir(folder(&template, &json!({})).path()).unwrap();
    assert_eq!(tokenizer.encode_prompt("hi", false).unwrap(), [256, 104, 105]);
    assert_eq!(tokenizer.encode_source("hi").unwrap(), [256, 104, 105, 257]);
}

#[test]
fn an_empty_prompt_is_what_the_model_has_where_nothing_begins_texts() {
    let start = |config: Value| {
        let tokenizer = Tokenizer::from_dir(folder(&Value::Null, &config).path()).unwrap();
        assert_eq!(tokenizer.encode_prompt("hi", false).unwrap(), [104, 105]);
        tokenizer.encode_prompt("", false).unwrap()
    };
    assert_eq!(start(json!({"bos_token": "<s>", "eos_token": "</s>"})), [256]);
    assert_eq!(start(json!({"bos_token": null, "eos_token": "</s>"})), [257]);
    assert_eq!(Tokenizer::bytes().encode_prompt("", false).unwrap(), [256]);
}

#[test]
fn older_files_go_by_their_flags() {
    let json: Value = serde_json::from_str(Tokenizer::train_bpe(&["a a a a"], 257).unwrap().json()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("vocab.json"), json["model"]["vocab"].to_string()).unwrap();
    fs::write(dir.path().join("merges.txt"), "#version: 0.2\n").unwrap();
    for (flags, start) in
        [(json!({}), &[][..]), (json!({"add_bos_token": true}), &[0]), (json!({"add_bos_token": false}), &[])]
    {
        fs::write(dir.path().join("tokenizer_config.json"), flags.to_string()).unwrap();
        assert_eq!(Tokenizer::from_dir(dir.path()).unwrap().text_start(), start, "{flags}");
    }
}

#[test]
fn a_post_processor_without_ids_is_refused() {
    let mut template = bos_template();
    template["special_tokens"] = json!({});
    let error = Tokenizer::from_dir(folder(&template, &json!({})).path()).err().unwrap().to_string();
    assert!(error.contains("\"<s>\" has no ids"), "{error}");
}

/// All readers of a tokenizer stop at the same ids: the named end, the configured ones, and those known by name.
#[test]
fn tokens_known_by_name_stop_an_answer() {
    let stops = |names: &[&str], configured: &[u32]| {
        let mut json: Value = serde_json::from_str(Tokenizer::bytes().json()).unwrap();
        let token = json["added_tokens"][0].clone();
        let named = (256..).zip(names).map(|(id, name)| {
            let mut token = token.clone();
            (token["id"], token["content"]) = (id.into(), (*name).into());
            token
        });
        json["added_tokens"] = named.collect();
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("tokenizer.json"), json.to_string()).unwrap();
        Tokenizer::from_dir(dir.path()).unwrap().stop_ids(configured)
    };
    assert_eq!(stops(&["<|endoftext|>", "<|im_start|>", "<|im_end|>"], &[]), [256, 258]);
    assert_eq!(stops(&["<eos>", "<end_of_turn>"], &[7]), [256, 7, 257]);
    for name in [
        "<|eot_id|>",
        "<|end|>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOS]",
        "<｜end▁of▁sentence｜>",
        "<|end_of_text|>",
        "</s>",
    ] {
        assert_eq!(stops(&["<s>", name], &[]), [257], "{name}");
    }
    // GPT-OSS ends messages by <|end|>, of which an answer has several.
    let harmony = ["<|start|>", "<|end|>", "<|return|>", "<|call|>"];
    let mut found = stops(&harmony, &[]);
    found.sort_unstable();
    assert_eq!(found, [258, 259]);
    assert_eq!(stops(&["<s>", "</s>", "<|tool_response>"], &[])[1..], [258]);
    assert_eq!(stops(&["<s>"], &[]), [0_u32; 0]);
}
