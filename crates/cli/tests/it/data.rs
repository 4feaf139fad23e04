//! Messages about the data, and its sources and formats.

use std::fs;
use std::io::Write;
use std::process::{Output, Stdio};

use crate::bad_input::refused;
use crate::program::{TINY, Workplace, assert_success, losses, stderr, stdout};

/// Runs `train` with the tiny model on `data` into the folder `out`.
fn train(work: &Workplace, out: &str, data: &[&str], more: &[&str]) -> Output {
    command(work, out, data, more).output().expect("the program starts")
}

fn command(work: &Workplace, out: &str, data: &[&str], more: &[&str]) -> std::process::Command {
    let mut args = vec!["train", "--out", out, "--set", "train.steps=4"];
    args.extend(TINY.iter().flat_map(|setting| ["--set", setting]));
    args.extend(more);
    args.push("--data");
    args.extend(data);
    work.command(&args)
}

/// Runs `command` with `content` on its standard input.
fn piped(mut command: std::process::Command, content: &[u8]) -> Output {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    child.stdin.take().expect("a pipe").write_all(content).expect("written");
    child.wait_with_output().expect("the program ends")
}

fn lines(output: &Output, part: &str) -> Vec<String> {
    stderr(output).lines().filter(|line| line.contains(part)).map(str::to_owned).collect()
}

#[test]
fn what_is_passed_over_is_told_in_one_line_for_files_and_one_for_rows() {
    let work = Workplace::new();
    fs::create_dir_all(work.path("d/.hidden")).expect("made");
    fs::copy(work.path("text.txt"), work.path("d/text.txt")).expect("copied");
    work.file("d/latin1.txt", [b'a', 0xe9, b'c']);
    work.file("d/rows.jsonl", "{\"text\": \"a row\"}\n{\"text\": null}\n");
    let output = train(&work, "run", &["d"], &[]);
    assert_success(&output);
    let told = lines(&output, "skipped");
    assert_eq!(told.len(), 2, "{told:?}");
    let parts = ["1 file skipped: not UTF-8 (", "d/latin1.txt); 1 hidden file or folder skipped (", "d/.hidden)"];
    assert!(parts.iter().all(|part| told[0].contains(part)), "{told:?}");
    assert!(told[1].contains("1 row skipped: its text is null (") && told[1].contains("d/rows.jsonl:2)"), "{told:?}");
    let data = lines(&output, "2 files, 2 documents, ");
    assert!(data.len() == 1 && data[0].ends_with(" tokens"), "{data:?}");
}

#[test]
fn sources_with_weights_are_told_at_the_start_and_at_the_end_and_resume_exactly() {
    let work = Workplace::new();
    work.file("small.txt", "A small text, which is passed many times. ".repeat(4));
    let output = train(&work, "whole", &["text.txt=0.75", "small.txt=0.25"], &[]);
    assert_success(&output);
    let small = lines(&output, "small.txt 25.0%: 169 tokens, passed ");
    assert!(small.len() == 1 && small[0].ends_with(" times"), "{}", stderr(&output));
    let shares = lines(&output, "Shares: ");
    assert!(shares.len() == 1 && shares[0].contains("text.txt 75.00%, ") && shares[0].contains("small.txt 25.00%"));
    assert_success(&train(&work, "parts", &["text.txt=3", "small.txt=1"], &["--steps", "2"]));
    assert_success(&work.run(&["train", "--resume", "parts", "--steps", "4"]));
    // The first half had the schedule of a shorter run, but the same text.
    assert_eq!(losses(&work.path("whole"))[0], losses(&work.path("parts"))[0]);
    assert_eq!(losses(&work.path("parts")).len(), 4);
}

#[test]
fn standard_input_is_a_source() {
    let work = Workplace::new();
    let text = fs::read(work.path("text.txt")).expect("read");
    assert_success(&train(&work, "file", &["text.txt"], &[]));
    assert_success(&piped(command(&work, "pipe", &["-"], &[]), &text));
    assert_eq!(losses(&work.path("file")), losses(&work.path("pipe")));
    let rows = serde_json::json!({ "text": String::from_utf8_lossy(&text) }).to_string();
    let output = piped(work.command(&["evaluate", "file", "--json", "--data", "-"]), rows.as_bytes());
    assert_success(&output);
    let from_file = work.run(&["evaluate", "file", "--json", "--data", "text.txt"]);
    assert_eq!(stdout(&output), stdout(&from_file));
    refused(&work, &["train", "--data", "-"], &["standard input: is empty; must hold text"]);
    refused(&work, &["train", "--data", "-", "--ep", "2"], &["data.paths", "no pipe", "name a file"]);
    refused(&work, &["study", "--data", "-"], &["--data -: a study reads its text again for each run"]);
}

#[test]
fn a_field_and_a_format_can_be_named() {
    let work = Workplace::new();
    assert_success(&train(&work, "run", &["text.txt"], &[]));
    let table = work.file("table", "id,body\n1,\"a text, quoted\"\n2,another\n");
    let args = ["evaluate", "run", "--json", "--data-format", "csv", "--text-field", "body", "--data", &table];
    let output = work.run(&args);
    assert_success(&output);
    assert!(stderr(&output).contains("1 file, 2 documents, 21 bytes, 23 tokens"), "{}", stderr(&output));
    refused(
        &work,
        &["evaluate", "run", "--data-format", "xml", "--data", "text.txt"],
        &["auto, text, json, csv or parquet"],
    );
    refused(
        &work,
        &["evaluate", "run", "--data", "text.txt=0.5"],
        &["text.txt=0.5: has a weight, which only training"],
    );
    refused(&work, &["train", "--data", "text.txt=2", "text.txt=0"], &["text.txt=0: its weight", "above 0"]);
}

#[test]
fn other_text_than_a_run_began_with_is_told_when_it_goes_on() {
    let work = Workplace::new();
    assert_success(&train(&work, "run", &["text.txt"], &["--steps", "2"]));
    let output = work.run(&["train", "--resume", "run", "--set", "train.steps=3"]);
    assert_success(&output);
    assert!(lines(&output, "the data is not what this run began with").is_empty());
    work.file("text.txt", "Other text altogether. ".repeat(300));
    let output = work.run(&["train", "--resume", "run", "--set", "train.steps=4"]);
    assert_success(&output);
    assert_eq!(lines(&output, "the data is not what this run began with").len(), 1, "{}", stderr(&output));
}
