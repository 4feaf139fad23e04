//! Unusual tokenizers with their ids by Hugging Face's library, for the tests of models and of inference.

use std::path::{Path, PathBuf};

use moeworks_model::Tokenizer;
use serde_json::{Map, Value};

/// Returns the unusual tokenizers, or those of the file that `MOEWORKS_TOKENIZERS` names.
pub(crate) fn fixture() -> Value {
    let path = std::env::var_os("MOEWORKS_TOKENIZERS").map(PathBuf::from);
    let path =
        path.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures/tokenizers.json"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Returns the characters that stand for bytes.
fn alphabet() -> Vec<String> {
    let mut after = (256..).filter_map(char::from_u32);
    let is_itself = |byte: u8| matches!(byte, 33..=126 | 0xa1..=0xac | 0xae..=0xff);
    (0..=255_u8)
        .map(|byte| if is_itself(byte) { char::from(byte) } else { after.next().unwrap() }.to_string())
        .collect()
}

/// Returns the `tokenizer.json` of a case, whose vocabulary is a list in the order of ids.
pub(crate) fn whole(mut tokenizer: Value) -> Value {
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

pub(crate) fn load(tokenizer: &Value) -> Tokenizer {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    Tokenizer::from_dir(dir.path()).unwrap_or_else(|error| panic!("{error}: {tokenizer}"))
}

pub(crate) fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

/// Returns a tokenizer without its vocabulary, for messages.
pub(crate) fn outline(tokenizer: &Value) -> String {
    let mut outline = tokenizer.clone();
    outline["model"]["vocab"] = Value::Null;
    outline["model"]["merges"] = Value::Null;
    outline.to_string()
}
