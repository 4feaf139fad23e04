//! `moeworks train --auto-layout`: the fastest layout is kept, no state is lost, and decisions are recorded.

use std::fs;

use serde_json::Value;

use crate::bad_input::refused;
use crate::program::{Workplace, assert_success, losses, stderr};

fn decisions(work: &Workplace, run: &str) -> Vec<Value> {
    let text = fs::read_to_string(work.path(run).join("layouts.jsonl")).expect("decisions");
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

/// The sizes of a layout, as options.
fn options(decision: &Value) -> Vec<String> {
    let layout = decision["kept"].as_str().expect("a layout").replace("dp_inner", "");
    let words: Vec<&str> = layout.split_whitespace().collect();
    words.chunks_exact(2).flat_map(|pair| [format!("--{}", pair[0]), pair[1].to_owned()]).collect()
}

#[test]
fn a_run_is_that_of_the_kept_layout_and_the_decision_is_recorded() {
    let work = Workplace::new();
    let output = work.train("auto", 6, &["--auto-layout", "2", "--layout-tolerance", "1e9"]);
    assert_success(&output);
    assert!(stderr(&output).contains("Layout:     "), "{}", stderr(&output));
    let decisions = decisions(&work, "auto");
    assert_eq!(decisions.len(), 1);
    let tried = decisions[0]["tried"].as_array().unwrap();
    assert!(tried.len() >= 2, "{decisions:?}");
    for layout in tried {
        let figures = layout["figures"].as_object().unwrap();
        let numbers = figures.values().filter(|value| value.is_number()).count();
        assert!(numbers >= 12, "{layout}");
    }
    let kept: Vec<String> = options(&decisions[0]);
    let kept: Vec<&str> = kept.iter().map(String::as_str).collect();
    assert_success(&work.train("plain", 6, &kept));
    assert_eq!(losses(&work.path("auto")), losses(&work.path("plain")));
    let left: Vec<_> = fs::read_dir(work.path(".")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.iter().all(|name| !name.to_string_lossy().contains("layouts-")), "{left:?}");
}

#[test]
fn steps_that_leave_what_was_measured_start_another_trial_and_the_run_goes_on() {
    let work = Workplace::new();
    assert_success(&work.train("run", 36, &["--auto-layout", "2", "--layout-tolerance", "0"]));
    let decisions = decisions(&work, "run");
    assert!(decisions.len() >= 2, "{decisions:?}");
    assert!(decisions[1]["reason"].as_str().unwrap().contains("the median of ten steps"), "{decisions:?}");
    assert_eq!(decisions[1]["step"], 10);
    let steps: Vec<u64> = losses(&work.path("run")).into_iter().map(|(step, _)| step).collect();
    assert_eq!(steps, (1..=36).collect::<Vec<u64>>(), "no step is missing or made twice");
}

#[test]
fn options_of_layouts_that_cannot_be_are_refused() {
    let work = Workplace::new();
    let train = ["train", "--data", "text.txt", "--auto-layout"];
    refused(&work, &[&train[..], &["2", "--layout-tolerance", "-1"]].concat(), &["--layout-tolerance -1"]);
    refused(&work, &[&train[..], &["100000"]].concat(), &["--auto-layout 100000"]);
    refused(&work, &[&train[..], &["2", "--trace", "t.json"]].concat(), &["--trace"]);
    refused(&work, &["train", "--layout-tolerance", "0.5"], &["--auto-layout"]);
}
