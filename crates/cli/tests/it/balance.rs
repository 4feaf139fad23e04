//! `moeworks balance`: a run's loads become a placement that training takes.

use serde_json::Value;

use crate::bad_input::refused;
use crate::program::{Workplace, assert_success, losses, stdout};

/// A run whose router was forced to a skewed load.
fn skewed() -> Workplace {
    let work = Workplace::new();
    let skewed =
        ["--set", "model.num_experts=6", "--set", "model.router.kind=forced", "--set", "model.router.forced_load=zipf"];
    assert_success(&work.train("run", 3, &skewed));
    work
}

#[test]
fn a_placement_with_spare_slots_balances_ranks_and_trains_to_the_same_loss() {
    let work = skewed();
    let output = work.run(&["balance", "run", "--ranks", "2", "--spare", "2", "--json"]);
    assert_success(&output);
    let json: Value = serde_json::from_str(&stdout(&output)).unwrap();
    let of = |name: &str| json[name].as_f64().unwrap();
    assert!(of("imbalance_before") > 0.2, "{json}");
    assert!(of("imbalance_after") < 0.5 * of("imbalance_before"), "{json}");
    let forced = [
        "--set",
        "model.num_experts=6",
        "--set",
        "model.router.kind=forced",
        "--set",
        "model.router.forced_load=zipf",
        "--ep",
        "2",
    ];
    let placed = [&forced[..], &["--set", "parallel.placement=run/placement.txt"]].concat();
    assert_success(&work.train("placed", 3, &placed));
    assert_success(&work.train("sharded", 3, &forced));
    let of = |run: &str| losses(&work.path(run)).into_iter().map(|(_, loss)| loss.parse::<f64>().unwrap());
    for (placed, sharded) in of("placed").zip(of("sharded")) {
        assert!((placed - sharded).abs() < 1e-4, "{placed}, {sharded}");
    }
}

#[test]
fn moves_begin_with_the_placement_that_is_given() {
    let work = skewed();
    let moves = ["balance", "run", "--ranks", "2", "--policy", "moves"];
    let output = work.run(&[&moves[..], &["--moves", "1", "--out", "first.txt"]].concat());
    assert_success(&output);
    assert!(stdout(&output).contains("experts to copy"), "{}", stdout(&output));
    let again = work.run(&[&moves[..], &["--from", "first.txt", "--moves", "0", "--out", "second.txt"]].concat());
    assert_success(&again);
    let read = |name: &str| std::fs::read_to_string(work.path(name)).unwrap();
    assert_eq!(read("first.txt"), read("second.txt"));
}

#[test]
fn sizes_runs_and_files_that_do_not_fit_are_refused() {
    let work = skewed();
    refused(&work, &["balance", "run", "--ranks", "0"], &["--ranks 0: must be from 1 to"]);
    refused(&work, &["balance", "run", "--ranks", "3", "--nodes", "2"], &["nodes = 2: must divide the 3 ranks"]);
    refused(&work, &["balance", "nowhere", "--ranks", "2"], &["nowhere"]);
    refused(&work, &["balance", "run", "--ranks", "2", "--spare", "-1"], &["'-1'", "--spare"]);
    refused(&work, &["balance", "run", "--ranks", "2", "--spare", "99"], &["slots = 106: must be at most 12"]);
    let placed = |text: &str, parts: &[&str]| {
        work.file("bad.txt", text);
        refused(&work, &["balance", "run", "--ranks", "2", "--from", "bad.txt"], parts);
    };
    placed("", &["--from bad.txt: line 1"]);
    placed("placement experts=6 ranks=2\n0: 0\n1: 1\n", &["line 3: ends after 2 of 6 experts"]);
    placed("placement experts=6 ranks=2\n0: 1 1\n", &["line 2: \"0: 1 1\": must be"]);
    work.file("other.txt", "placement experts=2 ranks=2\n0: 0\n1: 1\n");
    let from = ["balance", "run", "--ranks", "2", "--from", "other.txt"];
    refused(&work, &from, &["--from other.txt: is of 2 experts on 2 ranks; must be of 6 on 2"]);
    work.file("mine.txt", "my notes");
    refused(&work, &["balance", "run", "--ranks", "2", "--out", "mine.txt"], &["mine.txt: is there already"]);
}
