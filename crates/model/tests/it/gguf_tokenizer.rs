//! Tokenizers in GGUF files: divisions of text, special tokens, ends of answers.

use std::path::Path;
use std::sync::Arc;

use moeworks_model::Tokenizer;
use moeworks_model::gguf::{GgufError, GgufFile};
use serde_json::Value;

/// A file with keys alone, made one by one.
#[derive(Clone, Default)]
struct Keys {
    bytes: Vec<u8>,
    count: u64,
}

impl Keys {
    fn raw(mut self, name: &str, ty: u32, value: &[u8]) -> Self {
        let name = format!("tokenizer.ggml.{name}");
        self.bytes.extend([&(name.len() as u64).to_le_bytes(), name.as_bytes(), &ty.to_le_bytes()[..], value].concat());
        self.count += 1;
        self
    }

    fn text(self, name: &str, text: &str) -> Self {
        self.raw(name, 8, &string(text))
    }

    fn id(self, name: &str, id: u32) -> Self {
        self.raw(name, 4, &id.to_le_bytes())
    }

    fn truth(self, name: &str, truth: bool) -> Self {
        self.raw(name, 7, &[u8::from(truth)])
    }

    fn texts<T: AsRef<str>>(self, name: &str, texts: &[T]) -> Self {
        let items: Vec<u8> = texts.iter().flat_map(|text| string(text.as_ref())).collect();
        self.array(name, 8, texts.len(), &items)
    }

    fn array(self, name: &str, ty: u32, len: usize, items: &[u8]) -> Self {
        let value = [&ty.to_le_bytes()[..], &(len as u64).to_le_bytes(), items].concat();
        self.raw(name, 9, &value)
    }

    fn file(&self) -> GgufFile {
        let counts = [0_u64.to_le_bytes(), self.count.to_le_bytes()].concat();
        let mut bytes = [b"GGUF", &3_u32.to_le_bytes()[..], &counts, &self.bytes].concat();
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        GgufFile::from_bytes(Path::new("made.gguf"), Arc::new(bytes)).unwrap()
    }

    fn tokenizer(&self) -> Result<Tokenizer, GgufError> {
        self.file().tokenizer()
    }
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

/// Byte-level BPE of the bytes and of `more` tokens with their kinds (3: control).
fn byte_level(pre: &str, more: &[(&str, u32)]) -> Keys {
    let json: Value = serde_json::from_str(Tokenizer::bytes().json()).unwrap();
    let mut tokens: Vec<(String, u64)> = Vec::new();
    for (token, id) in json["model"]["vocab"].as_object().unwrap() {
        tokens.push((token.clone(), id.as_u64().unwrap()));
    }
    tokens.sort_by_key(|(_, id)| *id);
    let tokens: Vec<String> =
        tokens.into_iter().map(|(token, _)| token).chain(more.iter().map(|(token, _)| (*token).to_owned())).collect();
    let kinds: Vec<u8> =
        (0..256).map(|_| 1).chain(more.iter().map(|(_, kind)| *kind)).flat_map(u32::to_le_bytes).collect();
    Keys::default()
        .text("model", "gpt2")
        .text("pre", pre)
        .texts("tokens", &tokens)
        .array("token_type", 5, tokens.len(), &kinds)
        .texts::<&str>("merges", &[])
}

/// SentencePiece BPE of `<unk>`, `<s>`, `</s>`, a blank and three letters.
fn sentence_piece() -> Keys {
    let tokens = ["<unk>", "<s>", "</s>", "\u{2581}", "a", "b", "\u{2581}a"];
    let scores: Vec<u8> =
        [0.0_f32, 0.0, 0.0, -4.0, -1.0, -2.0, -3.0].iter().flat_map(|score| score.to_le_bytes()).collect();
    let kinds: Vec<u8> = [2_u32, 3, 3, 1, 1, 1, 1].iter().flat_map(|kind| kind.to_le_bytes()).collect();
    Keys::default().text("model", "llama").texts("tokens", &tokens).array("scores", 6, tokens.len(), &scores).array(
        "token_type",
        5,
        tokens.len(),
        &kinds,
    )
}

/// The ids come from the tokenizers that the names stand for (`fixtures/make_pre_tokenizers.py`).
#[test]
fn each_division_of_text_gives_the_ids_of_the_tokenizer_it_stands_for() {
    let fixture: Value = serde_json::from_str(include_str!("../fixtures/pre_tokenizers.json")).unwrap();
    let list = |name: &str| -> Vec<String> { serde_json::from_value(fixture[name].clone()).unwrap() };
    let keys = Keys::default().text("model", "gpt2").texts("tokens", &list("tokens")).texts("merges", &list("merges"));
    for (name, ids) in fixture["ids"].as_object().unwrap() {
        let tokenizer = keys.clone().text("pre", name).tokenizer().unwrap();
        for (text, ids) in list("texts").iter().zip(ids.as_array().unwrap()) {
            let ids: Vec<u32> = serde_json::from_value(ids.clone()).unwrap();
            assert_eq!(tokenizer.encode(text).unwrap(), ids, "{name}: {text:?}");
        }
    }
}

#[test]
fn a_division_that_nobody_knows_is_refused_with_those_that_are_known() {
    let error = byte_level("from-tomorrow", &[]).tokenizer().err().unwrap().to_string();
    for part in ["tokenizer.ggml.pre", "from-tomorrow", "gpt-4o", "deepseek-v3", "default"] {
        assert!(error.contains(part), "{error}");
    }
    let error = Keys::default().text("model", "bert").tokenizer().err().unwrap().to_string();
    assert!(error.contains("\"bert\"") && error.contains("gpt2"), "{error}");
}

/// llama.cpp adds a BOS token with SentencePiece, with other tokenizers as their division requires, and in any case
/// as the file says.
#[test]
fn a_file_adds_what_llama_cpp_adds() {
    let start = |keys: Keys| keys.tokenizer().unwrap().text_start().to_vec();
    assert_eq!(start(sentence_piece()), [1]);
    assert_eq!(start(sentence_piece().truth("add_bos_token", false)), [0; 0]);
    assert_eq!(start(sentence_piece().id("bos_token_id", 2)), [2]);
    let more = [("<s>", 3), ("</s>", 3)];
    let named = |pre: &str| byte_level(pre, &more).id("bos_token_id", 256).id("eos_token_id", 257);
    for (pre, ids) in
        [("gpt-2", &[][..]), ("qwen2", &[]), ("llama-bpe", &[256]), ("tekken", &[256]), ("deepseek-v3", &[])]
    {
        assert_eq!(start(named(pre)), ids, "{pre}");
    }
    assert_eq!(start(named("deepseek-v3").truth("add_bos_token", true)), [256]);
    assert_eq!(start(named("llama-bpe").truth("add_bos_token", false)), [0; 0]);
    // Without an id there is nothing to add.
    assert_eq!(start(byte_level("llama-bpe", &more)), [0; 0]);
    let both = named("gpt-2").truth("add_bos_token", true).truth("add_eos_token", true).tokenizer().unwrap();
    assert_eq!(both.encode_source("a").unwrap(), [256, 97, 257]);
    assert_eq!(both.encode_prompt("a", false).unwrap(), [256, 97]);
    // A conversation also begins with it, once.
    assert_eq!(both.encode_rendered("a").unwrap(), [256, 97]);
    assert_eq!(both.encode_rendered("<s>a").unwrap(), [256, 97]);
}

#[test]
fn a_folder_made_of_a_file_adds_the_same() {
    let tokenizer = sentence_piece().tokenizer().unwrap();
    let dir = tempfile::tempdir().unwrap();
    tokenizer.save(dir.path()).unwrap();
    let saved = Tokenizer::from_dir(dir.path()).unwrap();
    assert_eq!(saved.encode_prompt("ab a", false).unwrap(), tokenizer.encode_prompt("ab a", false).unwrap());
    assert_eq!(saved.encode_prompt("ab a", false).unwrap(), [1, 6, 5, 6]);
}

#[test]
fn tokens_known_by_name_end_an_answer_whatever_kind_the_file_gives_them() {
    let keys =
        byte_level("gpt-2", &[("<|endoftext|>", 3), ("<|im_end|>", 1), ("<|im_start|>", 3)]).id("eos_token_id", 256);
    let file = keys.file();
    let tokenizer = file.tokenizer().unwrap();
    assert_eq!(file.stop_ids(&tokenizer).unwrap(), [256, 257]);
    let file = keys.id("eot_token_id", 258).file();
    assert_eq!(file.stop_ids(&tokenizer).unwrap(), [256, 258, 257]);
}

#[test]
fn ids_beyond_the_vocabulary_are_passed_over() {
    let keys = byte_level("gpt-2", &[("<s>", 3)]).id("bos_token_id", u32::MAX).truth("add_bos_token", true);
    assert_eq!(keys.tokenizer().unwrap().text_start(), [0; 0]);
    let minus_one = byte_level("gpt-2", &[("<s>", 3)]).raw("eos_token_id", 5, &(-1_i32).to_le_bytes());
    assert_eq!(minus_one.tokenizer().unwrap().eos_id(), None);
}
