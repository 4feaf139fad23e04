//! `moeworks train --auto-layout`: the fastest layout is kept, no state is lost, and decisions are recorded.

use std::fs;

use serde_json::Value;

use crate::bad_input::refused;
use crate::program::{Workplace, assert_success, losses, stderr};
use crate::ranks::{CONSTANT, assert_same_losses, launchers, process_command};

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

/// Asserts that at least two layouts were measured, each with twelve figures or more.
fn assert_names_its_figures(decision: &Value) {
    let tried = decision["tried"].as_array().unwrap();
    assert!(tried.len() >= 2, "{decision}");
    for layout in tried {
        let figures = layout["figures"].as_object().unwrap();
        let numbers = figures.values().filter(|value| value.is_number()).count();
        assert!(numbers >= 12, "{layout}");
    }
}

fn assert_no_trials_are_left(work: &Workplace) {
    let left: Vec<_> = fs::read_dir(work.path(".")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.iter().all(|name| !name.to_string_lossy().contains("layouts-")), "{left:?}");
}

#[test]
fn a_run_is_that_of_the_kept_layout_and_the_decision_is_recorded() {
    let work = Workplace::new();
    let output = work.train("auto", 6, &["--auto-layout", "2", "--layout-tolerance", "1e9"]);
    assert_success(&output);
    assert!(stderr(&output).contains("Layout:     "), "{}", stderr(&output));
    let decisions = decisions(&work, "auto");
    assert_eq!(decisions.len(), 1);
    assert_names_its_figures(&decisions[0]);
    let kept: Vec<String> = options(&decisions[0]);
    let kept: Vec<&str> = kept.iter().map(String::as_str).collect();
    assert_success(&work.train("plain", 6, &kept));
    assert_eq!(losses(&work.path("auto")), losses(&work.path("plain")));
    assert_no_trials_are_left(&work);
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

#[test]
fn processes_agree_on_a_layout_and_make_the_losses_of_one_rank() {
    let settings = [&CONSTANT[..], &["--set", "train.threads=1"]].concat();
    for (mpirun, _) in launchers() {
        let work = Workplace::new();
        assert_success(&work.train("one", 6, &settings));
        let auto = ["--auto-layout", "--layout-tolerance", "1e9"];
        let train = work.train_command("auto", 6, &[&settings[..], &auto].concat());
        let output = process_command(&mpirun, 2, &train).output().expect("mpirun runs");
        assert_success(&output);
        assert_same_losses(&work, "auto", "one");
        assert_eq!(stderr(&output).matches("Layout: ").count(), 1, "one rank speaks: {}", stderr(&output));
        let decisions = decisions(&work, "auto");
        assert_eq!(decisions.len(), 1, "{decisions:?}");
        assert_names_its_figures(&decisions[0]);
        assert_no_trials_are_left(&work);
    }
}

#[test]
fn processes_choose_again_when_steps_leave_what_was_measured_and_lose_no_state() {
    let settings = [&CONSTANT[..], &["--set", "train.threads=1"]].concat();
    for (mpirun, _) in launchers() {
        let work = Workplace::new();
        assert_success(&work.train("one", 31, &settings));
        let auto = ["--auto-layout", "2", "--layout-tolerance", "0"];
        let train = work.train_command("auto", 31, &[&settings[..], &auto].concat());
        assert_success(&process_command(&mpirun, 2, &train).output().expect("mpirun runs"));
        assert_same_losses(&work, "auto", "one");
        let decisions = decisions(&work, "auto");
        assert!(decisions.len() >= 2, "{decisions:?}");
        assert_eq!(decisions[1]["step"], 10);
        decisions.iter().for_each(assert_names_its_figures);
        assert_no_trials_are_left(&work);
    }
}

#[test]
fn another_number_of_ranks_than_processes_is_refused() {
    for (mpirun, _) in launchers() {
        let work = Workplace::new();
        for (more, part) in [
            (&["--auto-layout", "3"][..], "--auto-layout 3: mpirun started 2 processes"),
            (&["--auto-layout", "--ep", "4"], "dp 1 ep 4 tp 1: mpirun started 2 processes"),
            (&["--auto-layout", "--layout-tolerance", "nan"], "--layout-tolerance NaN"),
        ] {
            let output = process_command(&mpirun, 2, &work.train_command("run", 1, more)).output().expect("it runs");
            assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
            assert_eq!(stderr(&output).matches(part).count(), 1, "{}", stderr(&output));
        }
        assert!(!work.path("run").exists());
    }
}
