//! Numbers that are too large for the type of the output, and weights that are NaN or infinite.

use std::fs;
use std::path::Path;

use crate::bad_input::refused;
use crate::program::{Workplace, assert_success, stderr, stdout};

/// Copies the Mixtral fixture to `name` and replaces one f32 of a tensor.
fn damaged(work: &Workplace, name: &str, tensor: &str, value: f32) -> String {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures/mixtral_sliding");
    let to = work.path(name);
    fs::create_dir(&to).expect("made");
    let run = work.path("run/checkpoints/step-00000002");
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(run.join(file), to.join(file)).expect("copied");
    }
    fs::copy(from.join("config.json"), to.join("config.json")).expect("copied");
    let mut bytes = fs::read(from.join("model.safetensors")).expect("read");
    let header_len = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header_len]).expect("JSON");
    // The fifth element, at [0, 4] of a matrix with 16 columns.
    let at = 8 + header_len + header[tensor]["data_offsets"][0].as_u64().expect("an offset") as usize + 16;
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    fs::write(to.join("model.safetensors"), bytes).expect("written");
    to.display().to_string()
}

const EXPERT: &str = "model.layers.1.block_sparse_moe.experts.2.w1.weight";

fn workplace() -> Workplace {
    let work = Workplace::new();
    assert_success(&work.train("run", 2, &[]));
    work
}

#[test]
fn a_number_beyond_a_type_is_named_and_nothing_is_written() {
    let work = workplace();
    let large = damaged(&work, "large", EXPERT, -1e5);
    refused(&work, &["convert", &large, "out", "--dtype", "f16"], &[EXPERT, "-1e5", "[0, 4]", "F16", "--clamp"]);
    let largest = damaged(&work, "largest", EXPERT, 3.4e38);
    refused(&work, &["convert", &largest, "out", "--dtype", "bf16"], &[EXPERT, "3.4e38", "BF16", "--clamp"]);
    assert!(!work.path("out").exists(), "something was written");
    assert_success(&work.run(&["convert", &large, "wide", "--dtype", "bf16"]));
    assert_success(&work.run(&["convert", &large, "cut", "--dtype", "f16", "--clamp"]));
    let output = work.run(&["inspect", "cut"]);
    assert_success(&output);
    assert!(!stderr(&output).contains("infinite"), "{}", stderr(&output));
    // An existing folder is left unchanged.
    let before = fs::read(work.path("cut/model.safetensors")).expect("read");
    let output = work.run(&["convert", &large, "cut", "--dtype", "f16"]);
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(before, fs::read(work.path("cut/model.safetensors")).expect("read"));
}

#[test]
fn what_blocks_cannot_hold_is_named() {
    let work = workplace();
    assert_success(&work.run(&["convert", "run", "plain"]));
    let plain = fs::read(work.path("plain/model.safetensors")).expect("read");
    let header_len = u64::from_le_bytes(plain[..8].try_into().expect("8 bytes")) as usize;
    let header: serde_json::Value = serde_json::from_slice(&plain[8..8 + header_len]).expect("JSON");
    let tensor = "model.layers.0.self_attn.q_proj.weight";
    let at = 8 + header_len + header[tensor]["data_offsets"][0].as_u64().expect("an offset") as usize;
    for (value, parts) in
        [(f32::NAN, [tensor, "NaN at [0, 0]"]), (f32::INFINITY, [tensor, "inf at [0, 0]"]), (1e7, [tensor, "--clamp"])]
    {
        let mut bytes = plain.clone();
        bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        fs::write(work.path("plain/model.safetensors"), bytes).expect("written");
        for kind in ["int8", "int4"] {
            refused(&work, &["convert", "plain", "out", "--quantize", kind], &parts);
        }
        assert!(!work.path("out").exists(), "something was written");
    }
    assert_success(&work.run(&["convert", "plain", "out", "--quantize", "int8", "--clamp"]));
}

#[test]
fn weights_that_are_no_numbers_are_told_by_every_command_that_opens_a_model() {
    let work = workplace();
    let nan = damaged(&work, "nan", EXPERT, f32::NAN);
    let line = format!("tensor {EXPERT:?} holds 1 number that is NaN or infinite, the first (NaN) at [0, 4]");
    let told = |args: &[&str]| {
        let shown = stderr(&work.run(args));
        assert_eq!(shown.lines().filter(|shown| shown.contains(&line)).count(), 1, "{args:?}\n{shown}");
    };
    told(&["inspect", &nan]);
    told(&["convert", &nan, "out"]);
    told(&["generate", &nan, "--prompt", "a", "--max-tokens", "1"]);
    told(&["evaluate", &nan, "--data", "text.txt", "--max-sequences", "1"]);
    told(&["routing", &nan, "--data", "text.txt", "--max-tokens", "8"]);
    told(&["chat", &nan]);
    told(&["upcycle", &nan, "out2"]);
    told(&["train", "--from", &nan, "--data", "text.txt", "--out", "tuned", "--steps", "1"]);
    let shown = stderr(&work.run(&["inspect", &nan, "--check-weights", "none"]));
    assert!(!shown.contains("NaN"), "{shown}");
    let output = work.run(&["inspect", "run"]);
    assert_success(&output);
    assert!(!stderr(&output).contains("NaN") && stdout(&output).contains("weights"), "{}", stderr(&output));
}
