//! Folders written by us load in `transformers` and compute the same there.
//!
//! This needs a Python with torch and transformers: `MOEWORKS_PYTHON`, or `.venv-test/bin/python` in the workspace's
//! root. Without one the test prints so and is skipped.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use moeworks_model::hf::{SaveOptions, save_model};
use moeworks_model::{ModelConfig, QkNorm, Tokenizer};
use moeworks_moe::ScoreOrder;
use moeworks_ops::Context;
use moeworks_tensor::DType;
use serde_json::{Value, json};

use crate::common::{assert_close, fixture, model, random_ids, small_config};
use crate::families_on_gpu::compare_on_gpus;
use crate::fixtures::compare_with_transformers;
use crate::switch::Case;

/// Loads each folder, and prints its logits and its tokenizer's ids as JSON.
const SCRIPT: &str = r#"
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
for line in sys.stdin:
    case = json.loads(line)
    model, info = AutoModelForCausalLM.from_pretrained(case["dir"], output_loading_info=True)
    tokenizer = AutoTokenizer.from_pretrained(case["dir"])
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([case["ids"]])).logits[0].float()
    print(json.dumps({
        "type": model.config.model_type,
        "dtype": str(model.dtype),
        "problems": [str(value) for value in info.values() if value],
        "logits": logits.flatten().tolist(),
        "text_ids": [tokenizer(text)["input_ids"] for text in case["texts"]],
        "texts": [tokenizer.decode(tokenizer(text)["input_ids"]) for text in case["texts"]],
        "eos": tokenizer.eos_token_id,
    }), flush=True)
"#;

const TEXTS: [&str; 4] = ["Hello, world!", "  indented\n\n\ttext  ", "Grüße, 世界 \u{1f980}", "fn main() {}\r\n"];

/// Returns the interpreter, or advice to get one.
fn python() -> Result<PathBuf, String> {
    let path = match std::env::var_os("MOEWORKS_PYTHON") {
        Some(path) => PathBuf::from(path),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv-test/bin/python"),
    };
    if !path.exists() {
        return Err(format!("{} is not there (./test sets it up, or set MOEWORKS_PYTHON)", path.display()));
    }
    let found = Command::new(&path).args(["-c", "import torch, transformers"]).output();
    match found {
        Ok(output) if output.status.success() => Ok(path),
        _ => Err(format!("{} has no torch and transformers", path.display())),
    }
}

/// Returns the interpreter; without one prints so and returns none. Not with `eprintln!`, which the test harness
/// hides when a test passes.
fn python_or_skip() -> Option<PathBuf> {
    python().map_err(|reason| writeln!(std::io::stderr(), "SKIPPED: the comparison with transformers: {reason}")).ok()
}

fn run(python: &Path, cases: &[Value]) -> Vec<Value> {
    let dir = tempfile::tempdir().unwrap();
    let (script, input) = (dir.path().join("load.py"), dir.path().join("cases.jsonl"));
    fs::write(&script, SCRIPT).unwrap();
    fs::write(&input, cases.iter().map(|case| format!("{case}\n")).collect::<String>()).unwrap();
    let output = Command::new(python).arg(&script).stdin(fs::File::open(&input).unwrap()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn folders_written_here_load_in_transformers_with_the_same_logits_and_ids() {
    let Some(python) = python_or_skip() else { return };
    let all_moe = ModelConfig { moe_every: 1, ..small_config() };
    let configs = [
        ("qwen3_moe", small_config()),
        (
            "qwen3_moe",
            ModelConfig {
                tie_embeddings: true,
                score_order: ScoreOrder::TopKThenSoftmax,
                head_dim: 6,
                ..small_config()
            },
        ),
        ("olmoe", ModelConfig { qk_norm: QkNorm::Whole, normalize_weights: false, ..all_moe.clone() }),
        ("mixtral", ModelConfig { qk_norm: QkNorm::None, rope_theta: 500.0, ..all_moe }),
        ("qwen3", ModelConfig { num_experts: 0, ..small_config() }),
        ("llama", ModelConfig { num_experts: 0, qk_norm: QkNorm::None, head_dim: 4, ..small_config() }),
    ];
    let ctx = Context::cpu(2);
    let bpe =
        Tokenizer::train_bpe(&["some words, some more words, and the same words again\n\n  and so on"], 300).unwrap();
    let tokenizers = [Tokenizer::bytes(), bpe];
    let dir = tempfile::tempdir().unwrap();
    let (mut cases, mut expected) = (Vec::new(), Vec::new());
    for (i, (model_type, config)) in configs.into_iter().enumerate() {
        let tokenizer = &tokenizers[i % 2];
        let (decoder, weights) = model(&ctx, ModelConfig { vocab_size: tokenizer.vocab_size(), ..config });
        let ids = random_ids(tokenizer.vocab_size(), 20, 5);
        for dtype in [DType::F32, DType::BF16] {
            let weights = weights.compute_copy(&ctx, dtype);
            let path = dir.path().join(format!("{i}-{dtype:?}"));
            // In bf16 in shards too.
            let max_shard_bytes = if dtype == DType::F32 { usize::MAX } else { 30_000 };
            let options = SaveOptions { tokenizer: Some(tokenizer), max_shard_bytes, ..SaveOptions::default() };
            assert_eq!(save_model(&path, decoder.config(), &weights, &options).unwrap().model_type, model_type);
            let logits = decoder.logits(&ctx, &weights, &ids, 1, None).unwrap().to_f32_vec();
            cases.push(json!({"dir": path, "ids": ids, "texts": TEXTS}));
            expected.push((model_type, dtype, logits, tokenizer));
        }
    }
    let results = run(&python, &cases);
    assert_eq!(results.len(), expected.len());
    for (result, (model_type, dtype, logits, tokenizer)) in results.iter().zip(expected) {
        let what = format!("{model_type} {dtype:?}");
        assert_eq!((result["type"].as_str(), &result["problems"]), (Some(model_type), &json!([])), "{what}");
        let is_bf16 = dtype == DType::BF16;
        assert_eq!(result["dtype"], if is_bf16 { "torch.bfloat16" } else { "torch.float32" }, "{what}");
        let found: Vec<f32> = serde_json::from_value(result["logits"].clone()).unwrap();
        // In bf16 a router's choice may turn over by rounding: only the text of the folder is compared then.
        if !is_bf16 {
            assert_close(&what, &found, &logits, 1e-4);
        }
        let ids: Vec<Vec<u32>> = TEXTS.iter().map(|text| tokenizer.encode(text).unwrap()).collect();
        assert_eq!(result["text_ids"], json!(ids), "{what}");
        assert_eq!(result["texts"], json!(TEXTS), "{what}");
        assert_eq!(result["eos"], json!(tokenizer.eos_id()), "{what}");
    }
}

/// One model of each family, or as many as `MOEWORKS_SWEEP` says, drawn with the seed `MOEWORKS_SWEEP_SEED`. All that
/// differ are named.
#[test]
fn random_checkpoints_of_every_family_compute_as_in_transformers() {
    let Some(python) = python_or_skip() else { return };
    let setting = |name: &str, default: &str| std::env::var(name).unwrap_or_else(|_| default.to_owned());
    let dir = tempfile::tempdir().unwrap();
    let made = Command::new(&python)
        .arg(fixture("sweep.py"))
        .arg(dir.path())
        .args([setting("MOEWORKS_SWEEP_SEED", "1"), setting("MOEWORKS_SWEEP", "1")])
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let folders: Vec<PathBuf> = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    let differs = |folder: &&PathBuf| std::panic::catch_unwind(|| compare_one(folder)).is_err();
    let differing: Vec<&PathBuf> = folders.iter().filter(differs).collect();
    if !differing.is_empty() {
        panic!("{differing:?} of {} folders, kept in {:?}", folders.len(), dir.keep());
    }
    assert!(folders.len() >= 13);
}

fn compare_one(folder: &Path) {
    let name = folder.file_name().unwrap().to_str().unwrap();
    match name.rsplit_once('-').unwrap().0 {
        "switch_transformers" => {
            let case = Case::of(folder.to_owned());
            case.compare();
            case.compare_step();
        }
        model_type => compare_with_transformers(folder, model_type),
    }
    compare_on_gpus(folder);
}
