//! `train --rebalance`: experts that move between ranks, as threads and as processes of `mpirun`.

use std::collections::BTreeSet;
use std::fs;

use serde_json::Value;

use crate::bad_input::refused;
use crate::program::{Workplace, assert_success, stderr};
use crate::ranks::{CONSTANT, assert_same_losses, launchers, process_command};

/// Four experts of each layer, each on another rank than at the start.
const ROTATED: &str = "placement experts=4 ranks=2\n0: 1\n1: 1\n2: 0\n3: 0\n";

/// Returns the layers and experts that moved in a run.
fn moved(work: &Workplace, run: &str) -> BTreeSet<(u64, u64)> {
    let text = fs::read_to_string(work.path(run).join("rebalance.jsonl")).expect("a record of moves");
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let moves: Vec<Value> = lines.filter(|line| line["event"] == "move").collect();
    let experts = |line: &Value| {
        let (layer, copies) = (line["layer"].as_u64().unwrap(), line["copies"].as_array().unwrap().clone());
        copies.into_iter().map(move |copy| (layer, copy["expert"].as_u64().unwrap()))
    };
    moves.iter().flat_map(experts).collect()
}

#[test]
fn threads_whose_experts_move_make_the_losses_of_one() {
    let work = Workplace::new();
    let file = work.file("rotated.placement", ROTATED);
    assert_success(&work.train("one", 6, &CONSTANT));
    for (run, when, more) in [
        ("file", file.as_str(), &["--set", "rebalance.bytes_per_step=1"][..]),
        ("online", "online", &["--set", "rebalance.every=2", "--set", "rebalance.min_gain=0", "--dp", "2"]),
        ("off", "off", &[]),
    ] {
        let settings = [&CONSTANT[..], &["--ep", "2", "--rebalance", when], more].concat();
        assert_success(&work.train(run, 6, &settings));
        assert_same_losses(&work, run, "one");
    }
    assert_eq!(moved(&work, "file").len(), 8, "each expert of both layers moved");
    let metrics = fs::read_to_string(work.path("online").join("metrics.jsonl")).expect("records");
    assert_eq!(metrics.matches("\"rebalance/imbalance\":").count(), 6);
    assert!(!work.path("off").join("rebalance.jsonl").exists());
}

#[test]
fn processes_whose_experts_move_make_the_losses_of_one() {
    let settings = [&CONSTANT[..], &["--set", "train.threads=1"]].concat();
    for (mpirun, _) in launchers() {
        let work = Workplace::new();
        let file = work.file("rotated.placement", ROTATED);
        assert_success(&work.train("one", 5, &settings));
        let moving = [&settings[..], &["--ep", "2", "--rebalance", &file]].concat();
        let output = process_command(&mpirun, 2, &work.train_command("mpi", 5, &moving)).output();
        assert_success(&output.expect("mpirun runs"));
        assert_same_losses(&work, "mpi", "one");
        assert_eq!(moved(&work, "mpi").len(), 8, "each expert of both layers moved");
    }
}

#[test]
fn placements_and_settings_that_cannot_be_are_refused() {
    let work = Workplace::new();
    let train = |more: &[&str], parts: &[&str]| {
        refused(&work, &[&["train", "--data", "text.txt", "--ep", "2"][..], more].concat(), parts);
    };
    let of_four = work.file("four.placement", ROTATED);
    train(&["--rebalance", &of_four], &["four.placement", "places 4 experts", "model.num_experts is 8"]);
    let broken = work.file("broken.placement", "placement experts=8 ranks=2\n0: 7\n");
    train(&["--rebalance", &broken], &["broken.placement", "line 2"]);
    train(&["--rebalance", "missing.placement"], &["missing.placement"]);
    train(&["--rebalance", ""], &["rebalance.mode", "off, online or the path of a placement"]);
    train(&["--rebalance", "online", "--set", "rebalance.every=0"], &["rebalance.every = 0", "at least 1"]);
    train(&["--rebalance", "online", "--set", "rebalance.policy=best"], &["rebalance.policy", "best"]);
    let dense = ["--rebalance", "online", "--ep", "1", "--set", "model.num_experts=0"];
    let output = work.run(&[&["train", "--data", "text.txt"][..], &dense].concat());
    assert!(stderr(&output).contains("the model has no experts"), "{}", stderr(&output));
    assert!(!work.path("runs").exists());
}
