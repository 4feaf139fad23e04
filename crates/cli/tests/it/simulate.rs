//! `moeworks simulate`: pipeline schedules.

use std::fs;

use crate::bad_input::refused;
use crate::program::{Workplace, assert_success};

fn json(work: &Workplace, args: &[&str]) -> serde_json::Value {
    let output = work.run(&[&["simulate", "--json"], args].concat());
    assert_success(&output);
    serde_json::from_slice(&output.stdout).expect("JSON")
}

#[test]
fn a_schedule_is_timed_drawn_and_written_and_read_again() {
    let work = Workplace::new();
    let (svg, text) = (work.path("dual.svg"), work.path("dual.txt"));
    let (svg_arg, text_arg) = (svg.display().to_string(), text.display().to_string());
    let sizes = ["--schedule", "dualpipe", "--pp", "8", "--microbatches", "20"];
    let output = work.run(&[&["simulate"], &sizes[..], &["--svg", &svg_arg, "--text", &text_arg]].concat());
    assert_success(&output);
    let shown = String::from_utf8(output.stdout).expect("text");
    for part in ["8 ranks, 8 stages, 20 microbatches", "makespan 66, bubble 9.1%", "no communication"] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    assert!(fs::read_to_string(svg).expect("a picture").starts_with("<svg"));

    let named = json(&work, &sizes);
    assert_eq!(named["makespan"], 66.0);
    assert_eq!(named["ranks"][7]["peak_held"], 9);
    assert_eq!(json(&work, &["--schedule", &text_arg]), named, "by the file that was written");
}

#[test]
fn times_memory_and_all_to_alls_are_taken_into_account() {
    let work = Workplace::new();
    let of =
        |args: &[&str]| json(&work, &[&["--schedule", "zb_2p", "--pp", "8", "--microbatches", "24"], args].concat());
    let table_5 = of(&["--times", "18.522,18.086,9.337,0.601", "--memory", "87.3,32"]);
    let rate = table_5["span_bubble"].as_f64().expect("a number");
    assert!((rate - 0.0433).abs() < 0.51e-4, "the zero-bubble paper's: {rate}");
    let limited = of(&["--memory-limit", "3"]);
    assert_eq!(limited["ranks"][0]["peak_memory"], 3.0);

    let overlap = ["--schedule", "1f1b_overlap", "--pp", "2", "--microbatches", "32", "--times", "4,4,4"];
    let whole = json(&work, &overlap);
    assert_eq!(whole["communication_hidden"], serde_json::Value::Null);
    let expanded = json(&work, &[&overlap[..], &["--all-to-all", "1,1", "--moe-layers", "2"]].concat());
    assert!(expanded["communication_hidden"].as_f64() > Some(0.85), "{expanded}");
}

#[test]
fn what_is_wrong_with_a_schedule_is_said_on_a_line() {
    let work = Workplace::new();
    let refuse = |args: &[&str], parts: &[&str]| refused(&work, &[&["simulate", "--schedule"], args].concat(), parts);
    let head = "schedule s\nmicrobatches 0..1: stages on ranks 0 1\n";
    let unread = work.file("unread.txt", format!("{head}rank 0: 0F0, 0G0"));
    let deadlock = work.file("deadlock.txt", format!("{head}rank 0: 0F0, 0BW0\nrank 1: 1BW0, 1F0"));
    let latin1 = work.file("latin1.txt", [b's', 0xe9]);
    refuse(&["2f2b"], &["unknown schedule", "zb_h1", "or a file"]);
    refuse(&["1f1b"], &["1f1b", "--pp"]);
    refuse(&["1f1b", "--pp", "4"], &["--microbatches"]);
    refuse(&["dualpipe", "--pp", "3", "--microbatches", "8"], &["ranks = 3", "even"]);
    refuse(&["1f1b", "--pp", "4", "--microbatches", "99999999999"], &["microbatches", "at most"]);
    refuse(&["1f1b", "--pp", "4", "--microbatches", "8", "--times", "1,1"], &["--times", "F,B,W"]);
    refuse(&["1f1b", "--pp", "4", "--microbatches", "8", "--times", "1,nan,1"], &["input_grad", "NaN"]);
    refuse(&["1f1b", "--pp", "4", "--microbatches", "8", "--memory", "1,2"], &["--memory"]);
    refuse(&["1f1b", "--pp", "4", "--microbatches", "8", "--memory-limit", "2"], &["memory limit", "zb_1p"]);
    refuse(&["1f1b", "--pp", "4", "--microbatches", "8", "--svg", "no/where.svg"], &["--svg", "no folder"]);
    refuse(&["1f1b", "--pp", "-4", "--microbatches", "8"], &["'-4'", "--pp"]);
    refuse(&["1f1b", "--pp", "99999999999", "--microbatches", "1"], &["ranks = 99999999999", "at most"]);
    refuse(&["1f1b", "--pp", "4", "--microbatches", "8", "--times", "-1,1,1"], &["forward = -1"]);
    refuse(&["1f1b", "--pp", "4", "--microbatches", "8", "--times", "1"], &["--times: has 1 number:"]);
    refuse(&["1f1b", "--pp", "4", "--microbatches", "8", "--pair", "2"], &["--pair", "1f1b has no overlapped pairs"]);
    refuse(&["1f1b", "--pp", "4", "--microbatches", "8", "--moe-layers", "2"], &["--all-to-all"]);
    refuse(&[&unread], &["unread.txt", "line 3", "rank 0, position 1", "0G0"]);
    refuse(&[&deadlock], &["deadlock.txt", "rank 1, position 0: 1BW0", "1F0", "must come before"]);
    refuse(&[&deadlock, "--pp", "2"], &["--pp", "by name"]);
    refuse(&[&latin1], &["latin1.txt", "UTF-8"]);
}
