//! Text as its ids come, with tokenizers of every kind.

use std::path::PathBuf;

use moeworks_infer::generation::TextStream;
use moeworks_model::Tokenizer;
use serde_json::{Map, Value};

use crate::common::model_fixture;

/// The odd tokenizers that the crate of models is tested with, or those of the file that `MOEWORKS_TOKENIZERS` names.
fn fixture() -> Value {
    let path = std::env::var_os("MOEWORKS_TOKENIZERS").map(PathBuf::from);
    let path = path.unwrap_or_else(|| model_fixture("tokenizers.json"));
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

/// The pieces of a stream behind a prompt are the text of all ids without that of the prompt.
#[test]
fn the_pieces_of_a_stream_are_the_text_behind_the_prompt() {
    let mut num_compared = 0;
    for case in fixture()["cases"].as_array().unwrap() {
        let json = whole(case["tokenizer"].clone());
        let tokenizer = load(&json);
        for i in 0..case["texts"].as_array().unwrap().len() {
            let all = ids(&case["ids"][i]);
            let whole = tokenizer.decode(&all).unwrap();
            for cut in 0..=all.len() {
                let (prompt, rest) = all.split_at(cut);
                let before = tokenizer.decode(prompt).unwrap();
                // A cut inside a character belongs to neither side.
                let Some(wanted) = whole.strip_prefix(&before[..]).filter(|_| !before.ends_with('\u{fffd}')) else {
                    continue;
                };
                let mut stream = TextStream::new(&tokenizer).after(prompt);
                let mut text: String = rest.iter().map(|&id| stream.push(id).unwrap()).collect();
                text += &stream.finish().unwrap();
                assert_eq!(text, wanted, "{} {prompt:?} {rest:?}", outline(&json));
                num_compared += 1;
            }
        }
    }
    assert!(num_compared > 1000, "{num_compared}");
}

#[test]
fn special_tokens_are_shown_where_they_say_which_span_follows() {
    let dir = model_fixture("switch");
    let text = std::fs::read_to_string(dir.join("expected.json")).unwrap();
    let expected: Value = serde_json::from_str(&text).unwrap();
    let tokenizer = Tokenizer::from_dir(&dir).unwrap();
    let mut stream = TextStream::with_special(&tokenizer);
    let text: String = ids(&expected["answer"]).iter().map(|&id| stream.push(id).unwrap()).collect();
    assert_eq!(text + &stream.finish().unwrap(), expected["answer_text"]);
}
