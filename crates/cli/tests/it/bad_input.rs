//! Bad input gets one clear line and exit code 2, and nothing is left half-written.

use std::fs;
use std::path::Path;

use crate::program::{Workplace, assert_success, stderr};

/// Runs `args`, which must fail with exit code 2 and one line that has all of `parts`.
pub(crate) fn refused(work: &Workplace, args: &[&str], parts: &[&str]) {
    let output = work.run(args);
    let shown = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{args:?}\n{shown}");
    let errors: Vec<&str> = shown.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!(errors.len(), 1, "{args:?}\n{shown}");
    for part in parts {
        assert!(errors[0].contains(part), "{part:?} in {:?}", errors[0]);
    }
    assert!(!shown.contains("panicked"), "{shown}");
}

#[test]
fn data_that_cannot_be_used_is_named() {
    let work = Workplace::new();
    let empty = work.file("empty.txt", "");
    let short = work.file("short.txt", "too short");
    let latin1 = work.file("latin1.txt", [b'a', b'b', 0xe9, b'c']);
    refused(&work, &["train", "--data", "missing.txt"], &["missing.txt"]);
    refused(&work, &["train", "--data", &empty], &["empty.txt"]);
    refused(&work, &["train", "--data", &short], &["short.txt", "10 tokens", "257"]);
    refused(&work, &["train", "--data", &latin1], &["latin1.txt", "UTF-8"]);
    refused(&work, &["train", "--data", "nothing/*.txt"], &["nothing/*.txt"]);
    assert!(!work.path("runs").exists() || fs::read_dir(work.path("runs")).expect("runs").count() == 0);
}

#[test]
fn settings_that_cannot_be_are_named() {
    let work = Workplace::new();
    let set = |setting: &str, parts: &[&str]| refused(&work, &["train", "--data", "text.txt", "--set", setting], parts);
    set("model.top_k=9", &["top_k = 9", "8"]);
    set("model.num_kv_heads=3", &["num_kv_heads", "4"]);
    set("model.width=-1", &["model.width = -1"]);
    set("model.widht=64", &["model.widht", "width"]);
    set("train.lr=fast", &["train.lr", "fast"]);
    set("train.steps", &["train.steps"]);
    set("model.num_experts=1000000", &["memory", "model.num_experts", "MB"]);
    let broken = work.file("broken.toml", "[train]\nsteps = = 3\n");
    refused(&work, &["train", "--config", &broken], &["broken.toml:2"]);
    let unknown = work.file("unknown.toml", "[train]\nstep = 3\n");
    refused(&work, &["train", "--config", &unknown], &["unknown.toml:2", "train.step"]);
    refused(&work, &["train", "--preset", "huge"], &["huge", "tiny"]);
    refused(&work, &["train", "--config", "missing.toml"], &["missing.toml"]);
}

#[test]
fn a_damaged_checkpoint_is_named() {
    let work = Workplace::new();
    assert_success(&work.train("run", 2, &[]));
    let model = work.path("run/checkpoints/step-00000002/model.safetensors");
    let whole = fs::read(&model).expect("read");
    let dir = "run/checkpoints/step-00000002";
    fs::write(&model, &whole[..whole.len() - 100]).expect("written");
    refused(&work, &["generate", dir], &["model.safetensors"]);
    let mut hostile = whole.clone();
    hostile[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    fs::write(&model, &hostile).expect("written");
    refused(&work, &["inspect", dir], &["model.safetensors"]);
    let mut flipped = whole.clone();
    let last = flipped.len() - 5;
    flipped[last] ^= 1;
    fs::write(&model, &flipped).expect("written");
    refused(&work, &["train", "--resume", "run"], &["run"]);
    fs::write(&model, &whole).expect("written");
    assert_success(&work.run(&["generate", dir, "--max-tokens", "3"]));
}

#[test]
fn a_run_is_not_resumed_with_another_model() {
    let work = Workplace::new();
    assert_success(&work.train("run", 2, &[]));
    refused(&work, &["train", "--resume", "run", "--set", "model.width=64"], &["model.width", "32", "64"]);
    refused(&work, &["train", "--resume", "nowhere"], &["nowhere"]);
    refused(&work, &["train", "--resume", "auto"], &["auto", "runs"]);
}

#[test]
fn a_run_folder_is_not_written_over() {
    let work = Workplace::new();
    assert_success(&work.train("run", 2, &[]));
    let before = fs::read(work.path("run/metrics.jsonl")).expect("read");
    let output = work.train("run", 2, &[]);
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert!(stderr(&output).contains("--resume"), "{}", stderr(&output));
    assert_eq!(before, fs::read(work.path("run/metrics.jsonl")).expect("read"));
}

#[test]
fn a_path_that_is_no_model_is_named() {
    let work = Workplace::new();
    fs::create_dir(work.path("empty")).expect("made");
    refused(&work, &["generate", "empty"], &["empty"]);
    refused(&work, &["generate", "text.txt"], &["text.txt"]);
    refused(&work, &["inspect", "missing"], &["missing"]);
    assert_success(&work.train("run", 2, &[]));
    refused(&work, &["generate", "run", "--temperature", "-1"], &["temperature"]);
    refused(&work, &["generate", "run", "--max-tokens", "1000"], &["64"]);
    refused(&work, &["evaluate", "run", "--data", "text.txt", "--seq-len", "65"], &["64"]);
}

#[test]
fn a_gguf_file_is_a_model_and_a_damaged_one_is_named() {
    let work = Workplace::new();
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures/gguf/qwen3moe.gguf");
    let bytes = fs::read(fixture).expect("the fixture");
    let model = work.file("model.gguf", &bytes);
    for args in [
        vec!["inspect"],
        vec!["evaluate", "--data", "text.txt"],
        vec!["generate", "--prompt", "hello", "--max-tokens", "5"],
    ] {
        let mut args = args;
        args.insert(1, &model);
        assert_success(&work.run(&args));
    }
    let short = work.file("short.gguf", &bytes[..bytes.len() - 100]);
    refused(&work, &["generate", &short], &["short.gguf", "truncated inside"]);
    let other = work.file("other.gguf", b"GGUF\x09\0\0\0");
    refused(&work, &["inspect", &other], &["other.gguf", "version is 9"]);
}

#[test]
#[cfg(unix)]
fn h18_devices_pipes_and_empty_files_are_no_models() {
    let work = Workplace::new();
    let pipe = work.path("pipe.gguf");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo runs").success());
    fs::create_dir(work.path("empty")).expect("a folder");
    let empty = [work.file("empty.gguf", ""), work.file("empty.safetensors", "")];
    for path in ["/dev/zero", "/dev/null", "pipe.gguf", "empty", &empty[0], &empty[1]] {
        let name = path.rsplit('/').next().expect("a name");
        refused(&work, &["serve", path, "--port", "0"], &[name]);
        refused(&work, &["generate", path, "--prompt", "x"], &[name]);
        refused(&work, &["inspect", path], &[name]);
    }
}
