//! The page of `moeworks routing`, and its errors.

use std::fs;

use crate::program::{Workplace, assert_success, stderr, stdout};

/// Lists the files of a folder, hidden ones included.
fn files(work: &Workplace, name: &str) -> Vec<String> {
    let entries = fs::read_dir(work.path(name)).expect("a folder");
    let mut names: Vec<String> =
        entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn a_text_becomes_a_page_in_the_runs_folder_or_where_it_is_asked_for() {
    let work = Workplace::new();
    assert_success(&work.train("run", 2, &["--set", "model.capacity_factor=0.5"]));
    let story = work.file("story.txt", "Größe <zählt> & so on. ".repeat(30));
    let output = work.run(&["routing", "run", "--data", &story, "--max-tokens", "100"]);
    assert_success(&output);
    assert_eq!(stdout(&output).trim(), "run/routing.html");
    let page = fs::read_to_string(work.path("run/routing.html")).expect("the page");
    assert!(page.starts_with("<!doctype html>") && page.ends_with("</html>\n"));
    for part in ["the first 100 tokens", "2 MoE layers of 4 experts", "checkpoint of step 2", ">ö</i>", "&lt;"] {
        assert!(page.contains(part), "{part}");
    }
    let checkpoint = "run/checkpoints/step-00000002";
    assert_success(&work.run(&["routing", checkpoint, "--data", &story, "--out", "my page.html"]));
    assert!(fs::read_to_string(work.path("my page.html")).expect("the page").contains("step-00000002"));
    assert!(!files(&work, "run").iter().any(|name| name.ends_with(".tmp")), "{:?}", files(&work, "run"));
}

#[test]
fn bad_input_is_one_line_and_leaves_no_page() {
    let work = Workplace::new();
    assert_success(&work.train("run", 2, &[]));
    assert_success(&work.train("dense", 2, &["--set", "model.num_experts=0", "--set", "model.dense_width=32"]));
    let binary = work.file("binary.txt", [b'a', 0, 0xff, 0xfe]);
    let before = (files(&work, "."), files(&work, "run"), files(&work, "dense"));
    let cases: [(&[&str], &str); 9] = [
        (&["run", "--data", "missing.txt"], "missing.txt"),
        (&["run", "--data", &binary], "binary.txt"),
        (&["run", "--data", "text.txt", "--max-tokens", "0"], "--max-tokens 0: must be from 1 to 100000"),
        (&["run", "--data", "text.txt", "--out", "run"], "is a folder"),
        (&["run", "--data", "text.txt", "--out", "no/such/page.html"], "there is no folder no/such"),
        (&["run", "--data", "text.txt", "--precision", "fp8"], "[possible values: stored, f32, bf16]"),
        (&["dense", "--data", "text.txt"], "dense: is a dense model"),
        (&["nowhere", "--data", "text.txt"], "nowhere"),
        (&["text.txt", "--data", "text.txt"], "text.txt"),
    ];
    for (args, message) in cases {
        let output = work.run(&[&["routing"], args].concat());
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", stderr(&output));
        let shown = stderr(&output);
        assert_eq!(shown.lines().count(), 1, "{shown}");
        assert!(shown.starts_with("error: ") && shown.contains(message), "{shown}");
    }
    assert_eq!(before, (files(&work, "."), files(&work, "run"), files(&work, "dense")));
}
