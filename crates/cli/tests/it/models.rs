//! Model folders derived from others: upcycled, converted, trained further.

use std::fs;
use std::path::Path;

use crate::bad_input::refused;
use crate::program::{Workplace, assert_success, stderr, stdout};

/// Evaluates the mean loss of a model on the text.
fn loss(work: &Workplace, model: &str) -> f64 {
    let output = work.run(&["evaluate", model, "--data", "text.txt", "--max-sequences", "20", "--json"]);
    assert_success(&output);
    let value: serde_json::Value = serde_json::from_str(&stdout(&output)).expect("JSON");
    value["loss"].as_f64().expect("a loss")
}

fn model_type(dir: &Path) -> String {
    let text = fs::read_to_string(dir.join("config.json")).expect("config.json");
    let value: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    value["model_type"].as_str().expect("text").to_owned()
}

#[test]
fn an_upcycled_model_begins_where_the_dense_one_ended_and_trains_on() {
    let work = Workplace::new();
    assert_success(&work.train("dense", 20, &["--set", "model.num_experts=0", "--set", "train.lr=1e-2"]));
    let output = work.run(&["upcycle", "dense", "moe", "--experts", "4", "--top-k", "2", "--every", "2"]);
    assert_success(&output);
    assert!(stdout(&output).contains("qwen3_moe"), "{}", stdout(&output));
    let (dense, upcycled) = (loss(&work, "dense"), loss(&work, "moe"));
    assert!((dense - upcycled).abs() < 1e-4, "{dense} became {upcycled}");
    let output = work.run(&[
        "train",
        "--from",
        "moe",
        "--data",
        "text.txt",
        "--out",
        "tuned",
        "--steps",
        "10",
        "--set",
        "train.seq_len=32",
        "--set",
        "train.batch_size=2",
        "--set",
        "train.sample_every=0",
        "--set",
        "train.precision=f32",
        "--set",
        "train.lr=3e-3",
        "--set",
        "train.eval_batches=2",
        "--set",
        "model.jitter=0.01",
    ]);
    assert_success(&output);
    let tuned = loss(&work, "tuned");
    assert!(tuned < upcycled, "{upcycled} became {tuned}");
    assert_success(&work.run(&["train", "--resume", "tuned", "--steps", "12"]));
}

#[test]
fn a_converted_folder_is_the_same_model_in_another_type() {
    let work = Workplace::new();
    assert_success(&work.train("run", 6, &[]));
    let f32_loss = loss(&work, "run");
    for dtype in ["bf16", "f16", "f32"] {
        assert_success(&work.run(&["convert", "run", dtype, "--dtype", dtype]));
        assert_eq!(model_type(&work.path(dtype)), "qwen3_moe");
        let converted = loss(&work, dtype);
        assert!((f32_loss - converted).abs() < 0.01, "{dtype}: {f32_loss} became {converted}");
    }
    assert_eq!(loss(&work, "f32"), f32_loss);
    let size = |name: &str| fs::metadata(work.path(name).join("model.safetensors")).expect("weights").len();
    // Headers and the f32 norms keep their size.
    assert!(size("bf16") < size("f32") * 8 / 10 && size("f16") < size("f32") * 8 / 10);
    // Converting again without a type gives the same bytes.
    assert_success(&work.run(&["convert", "bf16", "again"]));
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        let read = |name: &str| fs::read(work.path(name).join(file)).expect(file);
        assert_eq!(read("bf16"), read("again"), "{file}");
    }
}

#[test]
fn a_quantized_folder_is_smaller_and_nearly_the_same_model() {
    let work = Workplace::new();
    assert_success(&work.train("run", 40, &["--set", "train.lr=1e-2", "--set", "model.expert_width=32"]));
    let f32_loss = loss(&work, "run");
    let size = |name: &str| fs::metadata(work.path(name).join("model.safetensors")).expect("weights").len();
    assert_success(&work.run(&["convert", "run", "f32"]));
    for (name, tolerance) in [("int8", 0.005), ("int4", 0.1)] {
        let output = work.run(&["convert", "run", name, "--quantize", name]);
        assert_success(&output);
        assert!(stdout(&output).contains("matrices in blocks"), "{}", stdout(&output));
        let quantized = loss(&work, name);
        assert!((f32_loss - quantized).abs() < tolerance, "{name}: {f32_loss} became {quantized}");
        assert_success(&work.run(&["generate", name, "--prompt", "Line 3", "--max-tokens", "8"]));
        let inspected = work.run(&["inspect", name]);
        assert!(stdout(&inspected).contains(&format!("in {name}")), "{}", stdout(&inspected));
    }
    assert_success(&work.run(&["convert", "run", "experts", "--quantize", "int4", "--only", "experts"]));
    assert!(size("int4") < size("experts") && size("experts") < size("f32"));
    // Converting back to floats gives the values of the blocks.
    assert_success(&work.run(&["convert", "int4", "back", "--dtype", "f32"]));
    assert!((loss(&work, "back") - loss(&work, "int4")).abs() < 0.02);
    refused(&work, &["convert", "run", "out", "--quantize", "int3"], &["int3", "--quantize", "int8"]);
    refused(
        &work,
        &["convert", "run", "out", "--quantize", "int8", "--only", "norms"],
        &["norms", "--only", "experts"],
    );
}

#[test]
fn folders_that_cannot_be_made_are_refused() {
    let work = Workplace::new();
    assert_success(&work.train("run", 2, &[]));
    refused(&work, &["convert", "run", "out", "--dtype", "int3"], &["int3", "--dtype", "bf16"]);
    refused(&work, &["convert", "nowhere", "out"], &["nowhere"]);
    assert_success(&work.run(&["convert", "run", "model"]));
    refused(&work, &["convert", "model", "model"], &["model", "another"]);
    refused(&work, &["upcycle", "model", "out"], &["num_experts = 4", "dense"]);
    let wider = ["train", "--from", "model", "--data", "text.txt", "--set", "model.expert_width=20", "--out", "wide"];
    refused(&work, &wider, &["model", "model.*"]);
    assert!(!work.path("wide").exists() && !work.path("out").exists());
    let both = work.run(&["train", "--from", "model", "--resume", "run"]);
    assert_eq!(both.status.code(), Some(2), "{}", stderr(&both));
}
