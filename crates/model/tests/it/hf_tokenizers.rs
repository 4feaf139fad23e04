//! Tokenizers of every kind give the ids and texts that Hugging Face's library gives in Python.
//!
//! `fixtures/make_tokenizers.py` makes small odd ones and asks that library. `MOEWORKS_TOKENIZERS` may name a file with more.

use std::path::{Path, PathBuf};

use moeworks_model::Tokenizer;
use serde_json::{Map, Value, json};

fn fixture() -> Value {
    let path = std::env::var_os("MOEWORKS_TOKENIZERS").map(PathBuf::from);
    let path = path.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizers.json"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// The characters that stand for bytes.
fn alphabet() -> Vec<String> {
    let mut after = (256..).filter_map(char::from_u32);
    let is_itself = |byte: u8| matches!(byte, 33..=126 | 0xa1..=0xac | 0xae..=0xff);
    (0..=255_u8)
        .map(|byte| if is_itself(byte) { char::from(byte) } else { after.next().unwrap() }.to_string())
        .collect()
}

/// The `tokenizer.json` of a case, whose vocabulary is a list in the order of ids.
fn whole(mut tokenizer: Value) -> Value {
    let Some(tokens) = tokenizer["model"]["vocab"]["in order"].as_array().cloned() else { return tokenizer };
    let mut vocab = Map::new();
    for token in tokens {
        let run = match token.as_str().unwrap() {
            "*alphabet*" => alphabet(),
            "*bytes*" => (0..=255_u8).map(|byte| format!("<0x{byte:02X}>")).collect(),
            token => vec![token.to_owned()],
        };
        run.into_iter().for_each(|token| drop(vocab.insert(token, vocab.len().into())));
    }
    tokenizer["model"]["vocab"] = vocab.into();
    tokenizer
}

fn load(tokenizer: &Value) -> Tokenizer {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    Tokenizer::from_dir(dir.path()).unwrap_or_else(|error| panic!("{error}: {tokenizer}"))
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

/// A tokenizer without its vocabulary, for messages.
fn outline(tokenizer: &Value) -> String {
    let mut outline = tokenizer.clone();
    outline["model"]["vocab"] = Value::Null;
    outline["model"]["merges"] = Value::Null;
    outline.to_string()
}

#[test]
fn odd_tokenizers_give_the_ids_and_texts_of_hugging_face() {
    let mut wrong = Vec::new();
    for case in fixture()["cases"].as_array().unwrap() {
        let json = whole(case["tokenizer"].clone());
        let tokenizer = load(&json);
        for (i, text) in case["texts"].as_array().unwrap().iter().enumerate() {
            let text = text.as_str().unwrap();
            let (as_text, spelled) = (ids(&case["as_text"][i]), ids(&case["ids"][i]));
            let found = (tokenizer.encode(text).unwrap(), tokenizer.encode_source(text).unwrap());
            let decoded = tokenizer.decode(&spelled).unwrap();
            if found != (as_text.clone(), spelled.clone()) || decoded != case["decoded"][i].as_str().unwrap() {
                let wanted = json!([as_text, spelled, case["decoded"][i]]);
                let found = json!([found.0, found.1, decoded]);
                wrong.push(format!("{}\n  {text:?}\n  found  {found}\n  wanted {wanted}", outline(&json)));
            }
        }
    }
    let shown: Vec<&str> = wrong.iter().take(8).map(String::as_str).collect();
    assert!(wrong.is_empty(), "{} differ, among them\n{}", wrong.len(), shown.join("\n"));
}
