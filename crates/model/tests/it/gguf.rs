//! GGUF files: small ones made by llama.cpp's own package, with the logits that `transformers` computes from their
//! numbers (`tests/fixtures/gguf/make.py`), and invalid ones.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use moeworks_model::KvCache;
use moeworks_model::gguf::{GgufError, GgufFile, is_gguf};
use moeworks_model::hf::{SaveOptions, load_model, save_model};
use moeworks_model::{Decoder, ModelConfig};
use moeworks_ops::Context;
use moeworks_tensor::DType;
use proptest::prelude::*;
use serde_json::Value;

use crate::common::{assert_close, fixture};

const MODELS: [&str; 11] = [
    "mixtral",
    "mixtral_q4_k_m",
    "llama",
    "qwen3moe",
    "qwen2moe",
    "olmoe",
    "gptoss",
    "granitemoe",
    "phimoe",
    "deepseek3",
    "deepseek2",
];

pub(crate) fn path(name: &str) -> PathBuf {
    fixture("gguf").join(format!("{name}.gguf"))
}

fn expected(name: &str) -> (Vec<u32>, Vec<f32>, Vec<u32>) {
    let text = std::fs::read_to_string(fixture("gguf").join(format!("{name}.json"))).unwrap();
    let value: Value = serde_json::from_str(&text).unwrap();
    let ids = |key: &str| value[key].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
    let logits = value["logits"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect();
    (ids("prompt"), logits, ids("greedy"))
}

#[test]
fn logits_and_greedy_tokens_are_those_of_transformers() {
    let ctx = Context::cpu(2);
    for name in MODELS {
        let (prompt, logits, greedy) = expected(name);
        let (config, weights) = GgufFile::open(&path(name)).unwrap().load_model(&ctx).unwrap();
        let weights = weights.compute_copy(&ctx, DType::F32);
        let decoder = Decoder::new(config).unwrap();
        let found = decoder.logits(&ctx, &weights, &prompt, 1, None).unwrap().to_f32_vec();
        assert_close(name, &found[found.len() - logits.len()..], &logits, 1e-4);
        let mut cache = KvCache::new(decoder.config());
        let mut next = decoder.forward_cached(&ctx, &weights, &mut cache, &prompt, None).unwrap().to_f32_vec();
        for &id in &greedy {
            let best = (0..next.len()).max_by(|&a, &b| next[a].total_cmp(&next[b]).then(b.cmp(&a))).unwrap();
            assert_eq!(best as u32, id, "{name}");
            next = decoder.forward_cached(&ctx, &weights, &mut cache, &[id], None).unwrap().to_f32_vec();
        }
    }
}

/// Products read blocks as they are: nothing is unpacked, and only rows whose order changes are copied.
#[test]
fn matrices_in_blocks_stay_in_blocks() {
    let ctx = Context::cpu(2);
    let cases: [(&str, &[DType]); 4] = [
        ("qwen3moe", &[DType::Q8]),
        ("qwen2moe", &[DType::Q4]),
        ("olmoe", &[DType::Q5_1]),
        ("mixtral_q4_k_m", &[DType::Q4K, DType::Q6K]),
    ];
    for (name, dtypes) in cases {
        let (prompt, logits, _) = expected(name);
        let (config, weights) = GgufFile::open(&path(name)).unwrap().load_model(&ctx).unwrap();
        for (name, tensor) in weights.tensors() {
            let is_exact = name.contains("norm") || name.contains("bias") || name.contains("gate.weight");
            let expected: &[DType] = if is_exact { &[DType::F32] } else { dtypes };
            assert!(expected.contains(&tensor.dtype()), "{name}: {:?}", tensor.dtype());
            assert_eq!(tensor.pieces().is_some(), name.contains("gate_up"), "{name}: gate and up are two in the file");
        }
        let decoder = Decoder::new(config).unwrap();
        let found = decoder.logits(&ctx, &weights, &prompt, 1, None).unwrap().to_f32_vec();
        // Activations are in blocks of eight bits, too.
        let found = &found[found.len() - logits.len()..];
        let largest = logits.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
        let mean = found.iter().zip(&logits).map(|(a, b)| (a - b).abs()).sum::<f32>() / logits.len() as f32;
        assert!(mean < 0.05 * largest, "{name}: {mean} of {largest}");
    }
}

/// Products read f16 in the file: experts take no memory, and sums are those of f32.
#[test]
fn matrices_in_f16_stay_where_the_file_has_them() {
    for name in ["mixtral", "deepseek2"] {
        let (prompt, _, _) = expected(name);
        let ctx = Context::cpu(2);
        let (config, weights) = GgufFile::open(&path(name)).unwrap().load_model(&ctx).unwrap();
        let held = ctx.pool().stats().used_bytes;
        let tensors = weights.tensors();
        let experts: Vec<_> = tensors.iter().filter(|(name, _)| name.contains(".mlp.experts.")).collect();
        assert!(experts.iter().all(|(_, tensor)| tensor.dtype() == DType::F16), "{name}");
        let expert_bytes: usize = experts.iter().map(|(_, tensor)| tensor.num_bytes()).sum();
        assert!(held < expert_bytes, "{name}: {held} bytes, {expert_bytes} of experts");
        let decoder = Decoder::new(config).unwrap();
        let logits = |weights| decoder.logits(&ctx, weights, &prompt, 1, None).unwrap().to_f32_vec();
        let found = logits(&weights);
        assert_eq!(ctx.pool().stats().used_bytes, held, "{name}: something was gathered");
        assert_eq!(found, logits(&weights.compute_copy(&ctx, DType::F32)), "{name}");
    }
}

#[test]
fn a_file_in_blocks_becomes_a_folder_with_the_same_blocks() {
    let ctx = Context::cpu(2);
    let (config, weights) = GgufFile::open(&path("mixtral_q4_k_m")).unwrap().load_model(&ctx).unwrap();
    let dir = tempfile::tempdir().unwrap();
    save_model(dir.path(), &config, &weights, &SaveOptions::default()).unwrap();
    let (_, loaded) = load_model(&ctx, dir.path()).unwrap();
    for ((name, a), (_, b)) in weights.tensors().into_iter().zip(loaded.tensors()) {
        assert_eq!((a.dtype(), a.shape()), (b.dtype(), b.shape()), "{name}");
        assert!(a.parts().iter().flat_map(|part| part.bytes()).eq(b.bytes()), "{name}");
    }
}

#[test]
fn the_configuration_is_that_of_the_family_it_came_from() {
    let config = |name: &str| GgufFile::open(&path(name)).unwrap().config().unwrap();
    let mixtral = config("mixtral");
    let sizes = |c: &ModelConfig| (c.width, c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim, c.vocab_size);
    assert_eq!(sizes(&mixtral), (32, 2, 4, 2, 8, 259));
    assert_eq!((mixtral.num_experts, mixtral.top_k, mixtral.expert_width), (3, 2, 32));
    assert!(mixtral.tie_embeddings && mixtral.normalize_weights);
    assert_eq!(config("llama").num_experts, 0);
    assert_eq!(config("qwen3moe").head_dim, 16);
    let qwen2 = config("qwen2moe");
    assert_eq!((qwen2.shared_width, qwen2.normalize_weights, qwen2.variant.qkv_bias), (64, false, true));
}

#[test]
fn the_tokenizer_of_a_file_divides_text_by_its_merges() {
    let tokenizer = GgufFile::open(&path("llama")).unwrap().tokenizer().unwrap();
    // "h", "e", then the merges "ll" and "llo"; a special token's spelling is text.
    assert_eq!(tokenizer.encode("hello").unwrap(), [104, 101, 258]);
    assert_eq!(tokenizer.decode(&[104, 101, 258, 256]).unwrap(), "hello");
    assert_eq!(tokenizer.eos_id(), Some(256));
}

/// llama.cpp's own vocabularies with texts and the ids that llama.cpp makes of them.
#[test]
fn tokenizers_of_real_files_give_the_ids_that_llama_cpp_gives() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data/tokenizers/gguf-vocab");
    if !folder.is_dir() {
        eprintln!("skipped: no vocabularies in ../shared/data/tokenizers/gguf-vocab");
        return;
    }
    for name in ["gpt-2", "phi-3"] {
        let path = folder.join(format!("ggml-vocab-{name}.gguf"));
        let tokenizer = GgufFile::open(&path).unwrap().tokenizer().unwrap();
        let read = |ending: &str| std::fs::read_to_string(format!("{}{ending}", path.display())).unwrap();
        let (texts, ids) = (read(".inp"), read(".out"));
        let texts: Vec<&str> = texts.split("\n__ggml_vocab_test__\n").collect();
        let ids: Vec<&str> = ids.lines().collect();
        assert!(texts.len() >= ids.len() && ids.len() > 30, "{name}: {} texts, {} lines", texts.len(), ids.len());
        for (text, ids) in texts.iter().zip(ids) {
            let ids: Vec<u32> = ids.split_whitespace().map(|id| id.parse().unwrap()).collect();
            assert_eq!(tokenizer.encode(text).unwrap(), ids, "{name}: {text:?}");
        }
    }
}

/// A header written by hand, and 64 bytes of data.
#[derive(Clone)]
struct Header {
    keys: Vec<u8>,
    num_keys: u64,
    tensors: Vec<u8>,
    num_tensors: u64,
}

impl Header {
    fn new() -> Self {
        Self { keys: Vec::new(), num_keys: 0, tensors: Vec::new(), num_tensors: 0 }
    }

    fn string(text: &str) -> Vec<u8> {
        [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
    }

    fn key(mut self, name: &str, ty: u32, value: &[u8]) -> Self {
        self.keys.extend([&Self::string(name)[..], &ty.to_le_bytes(), value].concat());
        self.num_keys += 1;
        self
    }

    fn tensor(mut self, name: &str, dims: &[u64], ty: u32, offset: u64) -> Self {
        self.tensors.extend(Self::string(name));
        self.tensors.extend((dims.len() as u32).to_le_bytes());
        dims.iter().for_each(|dim| self.tensors.extend(dim.to_le_bytes()));
        self.tensors.extend(ty.to_le_bytes());
        self.tensors.extend(offset.to_le_bytes());
        self.num_tensors += 1;
        self
    }

    fn bytes(&self) -> Vec<u8> {
        let counts = [self.num_tensors.to_le_bytes(), self.num_keys.to_le_bytes()].concat();
        let mut bytes = [b"GGUF", &3_u32.to_le_bytes()[..], &counts, &self.keys, &self.tensors].concat();
        bytes.resize(bytes.len().next_multiple_of(32) + 64, 0);
        bytes
    }
}

fn open(bytes: &[u8]) -> Result<GgufFile, GgufError> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    GgufFile::open(file.path())
}

/// Fails unless the file is refused with a line that has all `parts`.
fn refused(what: &str, bytes: &[u8], parts: &[&str]) {
    let message = open(bytes).err().unwrap_or_else(|| panic!("{what} is taken")).to_string();
    assert!(!message.contains('\n') && parts.iter().all(|part| message.contains(part)), "{what}: {message}");
}

#[test]
fn headers_that_cannot_be_are_refused_with_what_is_wrong() {
    let h = Header::new;
    assert!(open(&h().tensor("a", &[16], 0, 0).bytes()).is_ok());
    refused("another format", b"PK\x03\x04 and so on", &["GGUF"]);
    refused("an empty file", b"", &["GGUF"]);
    let mut bytes = h().bytes();
    bytes[4] = 1;
    refused("an old version", &bytes, &["version is 1"]);
    refused("a key twice", &h().key("a", 0, &[1]).key("a", 0, &[1]).bytes(), &["duplicate key \"a\""]);
    refused("an unknown kind of value", &h().key("a", 99, &[1]).bytes(), &["a", "99"]);
    refused("a truth value of 2", &h().key("a", 7, &[2]).bytes(), &["a", "0 or 1"]);
    refused("a long string", &h().key("a", 8, &u64::MAX.to_le_bytes()).bytes(), &["truncated"]);
    let array = |ty: u32, len: u64| [&ty.to_le_bytes()[..], &len.to_le_bytes()].concat();
    refused("a long array", &h().key("a", 9, &array(4, 1 << 60)).bytes(), &["truncated"]);
    refused("a long array of arrays", &h().key("a", 9, &array(9, 1 << 40)).bytes(), &["truncated"]);
    refused("deep nesting", &h().key("a", 9, &array(9, 1).repeat(50)).bytes(), &["nested"]);
    refused("an odd alignment", &h().key("general.alignment", 4, &[24, 0, 0, 0]).bytes(), &["general.alignment"]);
    refused("no alignment", &h().key("general.alignment", 4, &[0; 4]).bytes(), &["general.alignment"]);
    let twice = h().tensor("a", &[8], 0, 0).tensor("a", &[8], 0, 32);
    refused("a tensor twice", &twice.bytes(), &["duplicate tensor \"a\""]);
    refused("tensors on each other", &h().tensor("a", &[16], 0, 0).tensor("b", &[8], 0, 32).bytes(), &["overlap"]);
    refused("a tensor beyond the end", &h().tensor("a", &[17], 0, 0).bytes(), &["\"a\"", "truncated"]);
    refused("an offset beyond the end", &h().tensor("a", &[1], 0, 1 << 40).bytes(), &["truncated"]);
    refused("an offset that overflows", &h().tensor("a", &[1], 0, u64::MAX - 31).bytes(), &["\"a\""]);
    refused("an offset between", &h().tensor("a", &[1], 0, 4).bytes(), &["\"a\""]);
    refused("a shape that overflows", &h().tensor("a", &[1 << 62, 1 << 62], 0, 0).bytes(), &["\"a\""]);
    refused("no dims", &h().tensor("a", &[], 0, 0).bytes(), &["0 dims"]);
    refused("many dims", &h().tensor("a", &[1; 9], 0, 0).bytes(), &["9 dims"]);
    refused("an unknown type", &h().tensor("a", &[1], 77, 0).bytes(), &["\"a\"", "77", "Q4_K"]);
    refused("half a block", &h().tensor("a", &[16], 8, 0).bytes(), &["not a multiple of Q8_0's block length, 32"]);
    let mut many = h().bytes();
    many[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
    refused("many tensors", &many, &["bad header"]);
    many[16..24].copy_from_slice(&u64::MAX.to_le_bytes());
    refused("many keys", &many, &["bad header"]);
}

#[test]
fn a_file_cut_short_anywhere_is_refused() {
    let bytes = std::fs::read(path("qwen3moe")).unwrap();
    for len in (0..bytes.len()).step_by(97) {
        assert!(open(&bytes[..len]).is_err(), "{len} of {} bytes are taken", bytes.len());
    }
}

#[test]
fn models_that_do_not_fit_their_keys_are_refused() {
    let ctx = Context::cpu(1);
    let load = |bytes: &[u8]| match open(bytes).and_then(|file| file.load_model(&ctx).map(|_| ())) {
        Ok(()) => panic!("the file is taken"),
        Err(error) => error.to_string(),
    };
    let text = |name: &str| [&(name.len() as u64).to_le_bytes()[..], name.as_bytes()].concat();
    let unknown = Header::new().key("general.architecture", 8, &text("rwkv7"));
    assert!(load(&unknown.bytes()).contains("\"rwkv7\" is not supported; supported are: llama, qwen3"));
    assert!(load(&Header::new().bytes()).contains("general.architecture: is missing"));
    let bytes = std::fs::read(path("llama")).unwrap();
    let replaced = |from: &str, to: &str| {
        let at = bytes.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
        [&bytes[..at], to.as_bytes(), &bytes[at + from.len()..]].concat()
    };
    assert!(
        load(&replaced("blk.1.ffn_norm.weight", "blk.1.ffn_nrom.weight"))
            .contains("tensor \"blk.1.ffn_norm.weight\" is missing")
    );
    assert!(load(&replaced("llama.block_count", "llama.block_cnuot")).contains("num_hidden_layers"));
    let mut narrow = bytes.clone();
    let key = "llama.embedding_length";
    let at = bytes.windows(key.len()).position(|window| window == key.as_bytes()).unwrap() + key.len() + 4;
    narrow[at] = 16;
    assert!(load(&narrow).contains("token_embd.weight"), "{}", load(&narrow));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn damaged_files_never_panic(name in 0..MODELS.len(), damage in prop::collection::vec((0_usize..3000, any::<u8>()), 1..6)) {
        let mut bytes = std::fs::read(path(MODELS[name])).unwrap();
        let len = bytes.len();
        damage.iter().for_each(|&(at, byte)| bytes[at % len] = byte);
        if let Ok(file) = open(&bytes) {
            let _ = file.load_model(&Context::cpu(1));
            let _ = file.tokenizer();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// A valid file with flipped bits, inserted or removed bytes, and a truncated end gives an error or a model. It
    /// takes no more memory than its bytes can become (numbers of two bits as f32, and a copy on the way).
    #[test]
    fn damage_is_an_error_and_takes_no_more_memory_than_the_file_justifies(
        name in 0..MODELS.len(),
        bits in prop::collection::vec((any::<prop::sample::Index>(), 0_u8..8), 0..8),
        header_bits in prop::collection::vec((0_usize..4000, 0_u8..8), 0..8),
        moved in prop::option::of((0_usize..4000, any::<u8>(), any::<bool>())),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes = std::fs::read(path(MODELS[name])).unwrap();
        for (at, bit) in bits {
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
        }
        for (at, bit) in header_bits {
            let at = at % bytes.len();
            bytes[at] ^= 1 << bit;
        }
        match moved {
            Some((at, byte, true)) => bytes.insert(at % bytes.len(), byte),
            Some((at, _, false)) => drop(bytes.remove(at % bytes.len())),
            None => {}
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let (ctx, len) = (Context::cpu(1), bytes.len());
        if let Ok(file) = GgufFile::from_bytes(Path::new("damaged"), Arc::new(bytes)) {
            let _ = file.load_model(&ctx);
            let stops = file.tokenizer().map(|tokenizer| file.stop_ids(&tokenizer));
            let _ = (stops, file.chat_template());
        }
        prop_assert!(ctx.pool().stats().peak_bytes <= 32 * len + (64 << 10), "{:?} of {len}", ctx.pool().stats());
    }
}

#[test]
fn more_layers_than_tensors_are_refused_before_their_names_are_made() {
    let mut bytes = std::fs::read(path("llama")).unwrap();
    let key = "llama.block_count";
    let at = bytes.windows(key.len()).position(|window| window == key.as_bytes()).unwrap() + key.len() + 4;
    bytes[at..at + 4].copy_from_slice(&16_000_u32.to_le_bytes());
    let error = open(&bytes).unwrap().load_model(&Context::cpu(1)).err().unwrap().to_string();
    assert!(error.contains("llama.block_count: is 16000"), "{error}");
}

#[test]
fn other_files_are_told_apart() {
    assert!(is_gguf(&path("llama")));
    assert!(!is_gguf(&fixture("gguf").join("llama.json")));
    assert!(!is_gguf(&fixture("gguf")));
}
