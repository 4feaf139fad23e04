use serde_json::{Value, json};

use super::{Engine, Spelling};
use crate::tokenizer::Tokenizer;

/// The fast path must cut and merge as the library does.
#[test]
fn the_short_way_gives_what_the_library_gives() {
    let corpus = "The experts of the model are the experts that the router chooses, 1234567 times.\r\n\r\n".repeat(30);
    let trained = Tokenizer::train_bpe(&[&corpus, "Grüße an die Experten, 世界!"], 400).unwrap();
    let mut value: Value = serde_json::from_str(trained.json()).unwrap();
    let byte_level =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false });
    let split = |source: &str| json!({ "type": "Split", "pattern": { "Regex": source }, "behavior": "Isolated", "invert": false });
    let sequence = |steps: &[Value]| json!({ "type": "Sequence", "pretokenizers": steps });
    let digits = json!({ "type": "Digits", "individual_digits": true });
    for pre_tokenizer in [
        value["pre_tokenizer"].clone(),
        sequence(&[split(r"\p{N}{1,3}"), split(r"\s+|\S+"), byte_level.clone()]),
        sequence(&[digits, value["pre_tokenizer"].clone()]),
        byte_level,
    ] {
        for ignores_merges in [false, true] {
            value["pre_tokenizer"] = pre_tokenizer.clone();
            value["model"]["ignore_merges"] = ignores_merges.into();
            let engine = Engine::new(&value).unwrap();
            assert!(engine.alphabet.is_some());
            for text in
                ["", "a", &corpus[..], "  don't 12345\n\n\u{1f980} 世界\u{0}<|endoftext|>\t ", "\u{feff}e\u{301}"]
            {
                let ids = engine.encode(text, Spelling::Text).unwrap();
                assert_eq!(ids, engine.encode_by_library(text).unwrap(), "{pre_tokenizer} {text:?}");
            }
        }
    }
}
