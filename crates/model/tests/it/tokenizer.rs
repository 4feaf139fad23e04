//! Tokenizers: bytes, trained BPE, and valid and invalid `tokenizer.json` files.

use std::fs;

use moeworks_model::{Tokenizer, TokenizerError};
use proptest::prelude::*;
use serde_json::{Value, json};

const TEXT: &str =
    "The experts of the model are the experts that the router chooses.\n\tfn main() { println!(\"hello\"); }\n";

fn trained() -> Tokenizer {
    Tokenizer::train_bpe(&[&TEXT.repeat(20), "Grüße an die Experten, 世界!"], 400).unwrap()
}

/// Texts that exercise divisions of words, bytes and special tokens.
const TEXTS: [&str; 8] = [
    "",
    " ",
    TEXT,
    "Grüße, 世界 \u{1f980}\u{0}\u{7f}",
    "  two  spaces\n\n\n and lines \r\n\t",
    "<|endoftext|> is text here",
    "don't they'll I'M 12345 __x__",
    "\u{feff}e\u{301}\u{200d}",
];

#[test]
fn an_id_of_the_byte_tokenizer_is_a_byte() {
    let tokenizer = Tokenizer::bytes();
    assert_eq!((tokenizer.vocab_size(), tokenizer.eos_id(), tokenizer.is_bytes()), (257, Some(256), true));
    assert_eq!(tokenizer.encode("a\n\u{e9}").unwrap(), [0x61, 0x0a, 0xc3, 0xa9]);
    assert_eq!(tokenizer.decode(&[0x61, 256, 0xc3, 0xa9]).unwrap(), "a\u{e9}");
    assert_eq!(tokenizer.decode(&[0x61, 0xc3, 1000]).unwrap(), "a\u{fffd}");
}

#[test]
fn the_way_around_the_library_gives_what_the_library_gives() {
    // The same file with one more token, which is never used, goes through the library.
    let mut json: Value = serde_json::from_str(Tokenizer::bytes().json()).unwrap();
    json["model"]["vocab"]["never"] = 257.into();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokenizer.json");
    fs::write(&path, json.to_string()).unwrap();
    let slow = Tokenizer::from_file(&path).unwrap();
    assert!(!slow.is_bytes());
    for text in TEXTS {
        let ids = Tokenizer::bytes().encode(text).unwrap();
        assert_eq!(slow.encode(text).unwrap(), ids, "{text:?}");
        assert_eq!(slow.decode(&ids).unwrap(), text);
    }
}

#[test]
fn texts_survive_encoding_and_decoding() {
    for tokenizer in [Tokenizer::bytes(), trained()] {
        for text in TEXTS {
            let ids = tokenizer.encode(text).unwrap();
            assert_eq!(tokenizer.decode(&ids).unwrap(), text);
            assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab_size() && Some(id) != tokenizer.eos_id()));
        }
        let batch = tokenizer.encode_batch(&TEXTS).unwrap();
        assert!(TEXTS.iter().zip(batch).all(|(text, ids)| tokenizer.encode(text).unwrap() == ids));
    }
}

#[test]
fn training_is_deterministic_and_merges_what_is_frequent() {
    let tokenizer = trained();
    assert_eq!(tokenizer.json(), trained().json());
    assert_eq!((tokenizer.vocab_size() <= 400, tokenizer.eos_id(), tokenizer.is_bytes()), (true, Some(0), false));
    assert_eq!(tokenizer.encode(" experts").unwrap().len(), 1);
    assert!(tokenizer.encode(TEXT).unwrap().len() * 3 < TEXT.len());
}

#[test]
fn training_stops_at_the_size_and_takes_any_texts() {
    let words: String = (0..5000).map(|i| format!("word{} ", i % 977)).collect();
    assert_eq!(Tokenizer::train_bpe(&[&words], 300).unwrap().vocab_size(), 300);
    for texts in [&[][..], &[""], &["a"], &["\u{0}\u{1f980}"]] {
        let tokenizer = Tokenizer::train_bpe(texts, 1000).unwrap();
        assert_eq!(tokenizer.vocab_size(), 257);
        assert_eq!(tokenizer.decode(&tokenizer.encode(TEXT).unwrap()).unwrap(), TEXT);
    }
    let error = Tokenizer::train_bpe(&[TEXT], 256).err().unwrap();
    assert!(matches!(error, TokenizerError::VocabularyTooSmall { vocab_size: 256 }), "{error}");
}

#[test]
fn long_texts_give_the_same_ids_on_many_threads() {
    let tokenizer = trained();
    let line = tokenizer.encode(TEXT).unwrap();
    let long = TEXT.repeat(20_000);
    // The last line feed of a line is not merged, as letters follow it.
    let ids = tokenizer.encode(&long).unwrap();
    assert_eq!(ids.len(), 20_000 * line.len());
    assert!(ids.chunks(line.len()).all(|chunk| chunk == line));
}

#[test]
fn a_saved_tokenizer_is_the_same() {
    for tokenizer in [Tokenizer::bytes(), trained()] {
        let dir = tempfile::tempdir().unwrap();
        tokenizer.save(dir.path()).unwrap();
        let loaded = Tokenizer::from_dir(dir.path()).unwrap();
        assert_eq!((loaded.json(), loaded.is_bytes()), (tokenizer.json(), tokenizer.is_bytes()));
        assert_eq!((loaded.vocab_size(), loaded.eos_id()), (tokenizer.vocab_size(), tokenizer.eos_id()));
        assert_eq!(loaded.encode(TEXT).unwrap(), tokenizer.encode(TEXT).unwrap());
        let again = tempfile::tempdir().unwrap();
        loaded.save(again.path()).unwrap();
        for file in ["tokenizer.json", "tokenizer_config.json"] {
            assert_eq!(fs::read(dir.path().join(file)).unwrap(), fs::read(again.path().join(file)).unwrap());
        }
    }
}

fn load(json: &str, config: Option<&str>) -> Result<Tokenizer, TokenizerError> {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("tokenizer.json"), json).unwrap();
    if let Some(config) = config {
        fs::write(dir.path().join("tokenizer_config.json"), config).unwrap();
    }
    Tokenizer::from_dir(dir.path())
}

#[test]
fn the_end_of_text_is_the_one_that_the_configuration_names() {
    let mut json: Value = serde_json::from_str(trained().json()).unwrap();
    let mut other = json["added_tokens"][0].clone();
    let stop = trained().vocab_size() as u32;
    (other["id"], other["content"]) = (stop.into(), "<stop>".into());
    json["added_tokens"].as_array_mut().unwrap().push(other);
    let eos = |config| load(&json.to_string(), config).unwrap().eos_id();
    assert_eq!(eos(None), Some(0));
    assert_eq!(eos(Some(r#"{"eos_token":"<stop>"}"#)), Some(stop));
    assert_eq!(eos(Some(r#"{"eos_token":{"content":"<stop>","lstrip":false}}"#)), Some(stop));
    assert_eq!(eos(Some("{}")), Some(0));
}

#[test]
fn other_kinds_of_models_are_read() {
    let word_level = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "hello": 1, "world": 2}, "unk_token": "[UNK]"},
    });
    let tokenizer = load(&word_level.to_string(), None).unwrap();
    assert_eq!(tokenizer.encode("Hello big WORLD").unwrap(), [1, 0, 2]);
    assert_eq!((tokenizer.vocab_size(), tokenizer.eos_id()), (3, None));
}

#[test]
fn a_file_that_is_no_tokenizer_is_refused() {
    let good: Value = serde_json::from_str(trained().json()).unwrap();
    let with = |pointer: &str, value: Value| {
        let mut json = good.clone();
        *json.pointer_mut(pointer).unwrap() = value;
        json.to_string()
    };
    for (json, part) in [
        (String::new(), "EOF"),
        ("[]".to_owned(), "vocabulary"),
        ("{}".to_owned(), "vocabulary"),
        ("[".repeat(100_000), "recursion"),
        (with("/model/vocab", json!({"a": -1})), "\"a\""),
        (with("/model/vocab", json!({"a": 4_000_000_000_u64})), "\"a\""),
        (with("/model/vocab", json!(3)), "vocabulary"),
        (with("/added_tokens/0/id", json!(4_000_000_000_u64)), "endoftext"),
        (with("/added_tokens", json!([{"id": 1}])), "added_tokens[0]"),
        (with("/model/merges", json!([["a", "nothing of the kind"]])), ""),
        (with("/model/type", json!("Oracle")), ""),
        (with("/pre_tokenizer", json!({"type": "Oracle"})), ""),
    ] {
        let error = load(&json, None).err().unwrap_or_else(|| panic!("{} was loaded", &json[..json.len().min(200)]));
        let text = error.to_string();
        assert!(matches!(error, TokenizerError::Invalid { .. }) && text.contains(part), "{text}, expected {part:?}");
        assert!(text.contains("tokenizer.json"), "{text}");
    }
    let error = load(&good.to_string(), Some("{")).err().unwrap().to_string();
    assert!(error.contains("tokenizer_config.json"), "{error}");
}

#[test]
fn a_file_that_cannot_be_read_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let error = Tokenizer::from_dir(dir.path()).err().unwrap();
    assert!(matches!(&error, TokenizerError::Io { path, .. } if path.ends_with("tokenizer.json")), "{error}");
    fs::write(dir.path().join("tokenizer.json"), [0xff, 0xfe]).unwrap();
    assert!(matches!(Tokenizer::from_dir(dir.path()).err().unwrap(), TokenizerError::Io { .. }));
    let huge = fs::File::create(dir.path().join("tokenizer.json")).unwrap();
    huge.set_len(1 << 40).unwrap();
    assert!(matches!(Tokenizer::from_dir(dir.path()).err().unwrap(), TokenizerError::TooLarge { .. }));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    #[test]
    fn any_text_survives(text in any::<String>(), corpus in any::<String>()) {
        for tokenizer in [Tokenizer::bytes(), Tokenizer::train_bpe(&[&corpus, &corpus], 280).unwrap()] {
            prop_assert_eq!(tokenizer.decode(&tokenizer.encode(&text).unwrap()).unwrap(), text.clone());
        }
    }
}

#[test]
fn a_vocabulary_and_its_merges_are_a_tokenizer_where_there_is_no_other() {
    let (dir, tokenizer) = (tempfile::tempdir().unwrap(), trained());
    let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
    let error = || Tokenizer::from_dir(dir.path()).err().unwrap().to_string();
    let json: Value = serde_json::from_str(tokenizer.json()).unwrap();
    let merge = |merge: &Value| format!("{} {}\n", merge[0].as_str().unwrap(), merge[1].as_str().unwrap());
    let merges: String = json["model"]["merges"].as_array().unwrap().iter().map(merge).collect();
    write("vocab.json", &json["model"]["vocab"].to_string());
    assert!(error().contains("tokenizer.json"), "{}", error());
    write("merges.txt", &format!("#version: 0.2\n{merges}"));
    assert_eq!(Tokenizer::from_dir(dir.path()).unwrap().json(), tokenizer.json());
    write("tokenizer_config.json", r#"{"tokenizer_class": "Qwen2Tokenizer"}"#);
    assert!(error().contains("a Qwen2Tokenizer needs a tokenizer.json"), "{}", error());
    write("tokenizer_config.json", r#"{"tokenizer_class": "GPT2Tokenizer"}"#);
    for (name, bad) in [
        ("merges.txt", "no_space\n"),
        ("merges.txt", "never seen\n"),
        ("vocab.json", "{}"),
        ("vocab.json", "[1]"),
        ("vocab.json", r#"{"<|endoftext|>": -1}"#),
        ("vocab.json", r#"{"<|endoftext|>": 4294967295}"#),
    ] {
        write(name, bad);
        assert!(matches!(Tokenizer::from_dir(dir.path()), Err(TokenizerError::Invalid { .. })), "{name}: {bad}");
    }
}
