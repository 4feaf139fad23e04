//! Tokenizers of every kind give the ids and texts of Hugging Face's Python library.
//!
//! `fixtures/make_tokenizers.py` makes small unusual ones with that library's results. `MOEWORKS_TOKENIZERS` may name
//! a file with more.

use serde_json::json;

use crate::odd_tokenizers::{fixture, ids, load, outline, whole};

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
