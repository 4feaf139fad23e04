//! `moeworks study`, from the command to the page.

use std::fs;

use crate::program::{TINY, Workplace, assert_success, stderr, stdout};

fn study(work: &Workplace, more: &[&str]) -> std::process::Output {
    let mut args = vec!["study", "--data", "text.txt", "--set", "train.steps=6", "--set", "train.warmup_steps=1"];
    for setting in TINY {
        args.extend(["--set", setting]);
    }
    args.extend(["--set", "train.eval_every=2"]);
    args.extend(more);
    work.run(&args)
}

#[test]
fn a_study_trains_compares_and_goes_on_where_it_was() {
    let work = Workplace::new();
    let output = study(&work, &["--only", "dense", "top-k", "capacity-1.0"]);
    assert_success(&output);
    assert_eq!(stdout(&output).trim(), "routing-study.md");
    let page = fs::read_to_string(work.path("routing-study.md")).expect("the page");
    for part in
        ["| dense | ", "| top-k | ", "| capacity-1.0 | ", "![validation loss](routing-study.svg)", "moeworks study"]
    {
        assert!(page.contains(part), "{part} in\n{page}");
    }
    let plot = fs::read_to_string(work.path("routing-study.svg")).expect("the plot");
    assert_eq!(plot.matches("<circle").count(), 3);
    let records = fs::read(work.path("runs/study/top-k-seed1/metrics.jsonl")).expect("the records");
    // Finished runs are not repeated; another variant is added.
    let output = study(&work, &["--only", "dense", "top-k", "jitter", "--out", "second.md"]);
    assert_success(&output);
    assert_eq!(records, fs::read(work.path("runs/study/top-k-seed1/metrics.jsonl")).expect("the records"));
    assert!(fs::read_to_string(work.path("second.md")).expect("the page").contains("| jitter | "));
    // The clustered hash uses the embeddings of the dense model with the same seed, which is trained first.
    let output = study(&work, &["--only", "hash-clustered", "--seeds", "2", "--runs", "other"]);
    assert_success(&output);
    let page = fs::read_to_string(work.path("routing-study.md")).expect("the page");
    assert!(page.contains("| hash-clustered | ") && page.contains("| dense | "), "{page}");
    let config = fs::read_to_string(work.path("other/hash-clustered-seed2/config.toml")).expect("its configuration");
    assert!(config.contains("other/dense-seed2"), "{config}");
}

#[test]
fn bad_input_is_one_line_and_leaves_no_page() {
    let work = Workplace::new();
    let cases: [(&[&str], &str); 6] = [
        (&["--only", "top-9"], "unknown variant top-9"),
        (&["--seeds", "0"], "--seeds 0"),
        (&["--out", "no/page.md"], "there is no folder no"),
        (&["--out", "page.svg"], "is the name of the plot"),
        (&["--set", "model.num_experts=0"], "model.num_experts = 0"),
        (&["--only", "dense", "--set", "data.text_field="], "data.text_field"),
    ];
    for (args, message) in cases {
        let output = study(&work, args);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", stderr(&output));
        let errors: Vec<String> =
            stderr(&output).lines().filter(|line| line.starts_with("error: ")).map(str::to_owned).collect();
        assert!(errors.len() == 1 && errors[0].contains(message), "{}", stderr(&output));
    }
    assert!(!work.path("routing-study.md").exists() && !work.path("runs").exists());
    // Runs with other settings are not included.
    assert_success(&study(&work, &["--only", "dense"]));
    fs::remove_file(work.path("routing-study.md")).expect("removed");
    let output = study(&work, &["--only", "dense", "--set", "train.lr=1e-4"]);
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert!(stderr(&output).contains("other settings"), "{}", stderr(&output));
    assert!(!work.path("routing-study.md").exists());
}
