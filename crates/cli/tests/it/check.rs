//! `moeworks check`: a configuration is the same in all layouts, a fault is found, and wrong configurations are
//! refused.

use serde_json::Value;

use crate::bad_input::refused;
use crate::program::{Workplace, assert_success, stdout};

/// A small model, so that a check takes seconds.
const SMALL: [&str; 16] = [
    "--set",
    "model.width=32",
    "--set",
    "model.num_layers=4",
    "--set",
    "model.num_heads=2",
    "--set",
    "model.num_kv_heads=2",
    "--set",
    "model.head_dim=16",
    "--set",
    "model.expert_width=16",
    "--set",
    "train.seq_len=8",
    "--set",
    "train.batch_size=4",
];

fn check(work: &Workplace, more: &[&str]) -> std::process::Output {
    work.run(&[&["check"], &SMALL[..], more].concat())
}

#[test]
fn a_right_configuration_is_equal_in_all_layouts() {
    let work = Workplace::new();
    let output = check(&work, &["--ranks", "2", "--json"]);
    assert_success(&output);
    let json: Value = serde_json::from_str(&stdout(&output)).expect("JSON");
    assert_eq!(json["are_equal"], true);
    let layouts = json["layouts"].as_array().expect("layouts");
    for wanted in ["dp 2", "ep 2", "tp 2", "dp 2, zero 3", "pp 2, dualpipe_v"] {
        assert!(layouts.iter().any(|layout| layout["layout"] == wanted), "{wanted}: {json}");
    }
}

#[test]
fn a_fault_is_found_and_named() {
    let work = Workplace::new();
    let output = check(&work, &["--ranks", "2", "--fault", "model.norm.weight"]);
    assert_eq!(output.status.code(), Some(1), "{}", stdout(&output));
    let said = stdout(&output);
    assert!(said.contains("differs: model.norm.weight["), "{said}");
}

#[test]
fn wrong_configurations_are_refused_in_one_line() {
    let work = Workplace::new();
    let refuse = |args: &[&str], parts: &[&str]| refused(&work, &[&["check"], &SMALL[..], args].concat(), parts);
    refuse(&["--set", "model.top_k=99"], &["model.top_k", "99"]);
    refuse(&["--set", "model.nothing=1"], &["model.nothing"]);
    refuse(&["--config", "missing.toml"], &["missing.toml"]);
    refuse(&["--fault", "model.nothing"], &["model.nothing", "must be the name of a tensor"]);
    refuse(&["--tolerance", "nan"], &["--tolerance", "must be a number of at least 0"]);
    refuse(&["--set", "parallel.pp=2", "--set", "parallel.schedule=missing.txt"], &["missing.txt", "cannot be read"]);
    refuse(&["--ranks", "1"], &["--ranks"]);
}
