//! Text as its ids come, with tokenizers of every kind.

use moeworks_infer::generation::TextStream;
use moeworks_model::Tokenizer;
use serde_json::Value;

use crate::common::model_fixture;
use crate::odd_tokenizers::{fixture, ids, load, outline, whole};

/// The pieces of a stream after a prompt are the text of all ids without that of the prompt.
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
