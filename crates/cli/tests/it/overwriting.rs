//! Commands overwrite files of other origin only with `--force`, and write their own files atomically.

use std::fs;
use std::path::Path;
use std::process::{Child, Stdio};

use crate::bad_input::refused;
use crate::program::{TINY, Workplace, assert_success, stderr};

/// Reads every file below a folder: its name and its content.
fn files(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            found.extend(files(&path));
        } else {
            found.push((path.display().to_string(), fs::read(&path).expect("a file")));
        }
    }
    found.sort();
    found
}

fn names(folder: &Path) -> Vec<String> {
    let name =
        |entry: std::io::Result<fs::DirEntry>| entry.expect("an entry").file_name().to_string_lossy().into_owned();
    let mut names: Vec<String> = fs::read_dir(folder).expect("a folder").map(name).collect();
    names.sort();
    names
}

#[test]
fn a_model_is_not_converted_over_another() {
    let work = Workplace::new();
    assert_success(&work.train("run", 2, &[]));
    assert_success(&work.run(&["convert", "run", "model", "--dtype", "bf16"]));
    let before = files(&work.path("model"));
    refused(&work, &["convert", "run", "model"], &["model: holds a model already", "--force"]);
    refused(&work, &["convert", "run", "model", "--force", "--dtype", "f8"], &["--dtype"]);
    refused(&work, &["convert", "model", "model", "--force"], &["the output folder is the input folder"]);
    refused(&work, &["convert", "model", "run", "--force"], &["run: holds a run already"]);
    refused(&work, &["convert", "run", "text.txt", "--force"], &["text.txt: is a file"]);
    assert_eq!(files(&work.path("model")), before);
    work.file("model/README.md", "mine");
    assert_success(&work.run(&["convert", "run", "model", "--force"]));
    assert_ne!(files(&work.path("model")), before);
    assert_eq!(fs::read(work.path("model/README.md")).expect("kept"), b"mine");
    fs::create_dir(work.path("notes")).expect("made");
    work.file("notes/notes.txt", "mine");
    refused(&work, &["convert", "run", "notes"], &["notes.txt", "--force"]);
    assert_success(&work.run(&["convert", "run", "notes", "--force"]));
    assert_success(&work.run(&["inspect", "notes"]));
    fs::create_dir(work.path("empty")).expect("made");
    assert_success(&work.run(&["convert", "run", "empty"]));
    assert_eq!(names(&work.path("")).iter().filter(|name| name.contains("tmp")).count(), 0);
}

#[test]
fn an_upcycled_model_is_not_written_over_another() {
    let work = Workplace::new();
    let dense = ["--set", "model.num_experts=0", "--set", "model.dense_width=48"];
    assert_success(&work.train("dense", 2, &dense));
    assert_success(&work.run(&["convert", "dense", "model"]));
    let before = files(&work.path("model"));
    refused(&work, &["upcycle", "dense", "model"], &["model: holds a model already", "--force"]);
    assert_eq!(files(&work.path("model")), before);
    assert_success(&work.run(&["upcycle", "dense", "model", "--force"]));
    assert_ne!(files(&work.path("model")), before);
}

#[test]
fn a_run_is_not_trained_over_what_others_made() {
    let work = Workplace::new();
    let refuse = |out: &str, more: &[&str], parts: &[&str]| {
        let output = work.train(out, 2, more);
        let shown = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{shown}");
        assert!(parts.iter().all(|part| shown.contains(part)), "{parts:?} in {shown}");
    };
    fs::create_dir(work.path("notes")).expect("made");
    work.file("notes/notes.txt", "mine");
    refuse("notes", &[], &["notes.txt", "--force"]);
    refuse("text.txt", &["--force"], &["is a file"]);
    assert_success(&work.train("notes", 2, &["--force"]));
    assert_eq!(fs::read(work.path("notes/notes.txt")).expect("kept"), b"mine");
    assert_success(&work.run(&["convert", "notes", "model"]));
    refuse("model", &[], &["holds a model already"]);
    // A replaced run leaves no files behind.
    refuse("notes", &[], &["--resume", "--force"]);
    let before = fs::read(work.path("notes/metrics.jsonl")).expect("records");
    assert_success(&work.train("notes", 1, &["--force", "--set", "train.seed=7"]));
    assert_eq!(names(&work.path("notes/checkpoints")), ["step-00000001"]);
    assert_ne!(fs::read(work.path("notes/metrics.jsonl")).expect("records"), before);
}

#[test]
fn a_page_replaces_what_the_same_command_made_and_nothing_else() {
    let work = Workplace::new();
    assert_success(&work.train("run", 2, &[]));
    let page = work.file("page.html", "<html>mine</html>");
    let routing = ["routing", "run", "--data", "text.txt", "--max-tokens", "20", "--out", "page.html"];
    refused(&work, &routing, &["page.html", "was not made by this command", "--force"]);
    assert_eq!(fs::read(&page).expect("kept"), b"<html>mine</html>");
    assert_success(&work.run(&[&routing[..], &["--force"]].concat()));
    assert_success(&work.run(&routing));
    work.file("routing-study.md", "# My notes");
    refused(&work, &["study", "--data", "text.txt"], &["routing-study.md", "--force"]);
    work.file("by-hand.toml", "# by hand");
    refused(&work, &["bench", "comm", "--topology", "by-hand.toml"], &["by-hand.toml", "--force"]);
    work.file("trace.json", "{}");
    let output = work.train("ranks", 2, &["--ep", "2", "--trace", "trace.json"]);
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert!(!work.path("ranks").exists());
    for _ in 0..2 {
        fs::remove_dir_all(work.path("ranks")).unwrap_or_default();
        assert_success(&work.train("ranks", 2, &["--ep", "2", "--trace", "new.json"]));
    }
}

#[test]
fn runs_that_start_in_the_same_second_get_folders_of_their_own() {
    let work = Workplace::new();
    let start = |_| {
        let mut args = vec!["train", "--data", "text.txt", "--set", "train.steps=2"];
        TINY.iter().for_each(|setting| args.extend(["--set", setting]));
        work.command(&args).stderr(Stdio::piped()).spawn().expect("the program starts")
    };
    let children: Vec<Child> = (0..4).map(start).collect();
    children.into_iter().for_each(|child| assert_success(&child.wait_with_output().expect("ended")));
    assert_eq!(names(&work.path("runs")).len(), 4);
}

#[cfg(unix)]
mod limited {
    use super::*;

    #[test]
    fn a_disk_that_is_full_is_named_and_leaves_nothing_half_written() {
        let work = Workplace::new();
        assert_success(&work.train("run", 2, &[]));
        let before = names(&work.path(""));
        // The limit is in blocks of 512 or 1024 bytes, less than the size of the weights.
        let limited = |arguments: &str| work.shell(&format!("ulimit -f 12; exec \"$M\" {arguments}"));
        let cases = [
            ("convert run model", "model/model.safetensors"),
            ("routing run --data text.txt --out page.html", "page.html"),
        ];
        for (arguments, file) in cases {
            let output = limited(arguments);
            let shown = stderr(&output);
            assert_eq!(output.status.code(), Some(2), "{arguments}: {shown}");
            let line: Vec<&str> = shown.lines().filter(|line| line.starts_with("error: ")).collect();
            assert!(line.len() == 1 && line[0].contains(file) && line[0].contains("large"), "{file} in {shown}");
            assert_eq!(names(&work.path("")), before, "{arguments}");
        }
    }

    #[test]
    fn a_checkpoint_that_finds_no_room_ends_the_run_and_leaves_the_older_ones() {
        let work = Workplace::new();
        assert_success(&work.train("run", 2, &[]));
        let before = files(&work.path("run/checkpoints"));
        let script = "ulimit -f 60; exec \"$M\" train --resume run --steps 6";
        let output = work.shell(script);
        let shown = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{shown}");
        assert!(shown.contains("error: cannot save the checkpoint of step 4: "), "{shown}");
        assert!(shown.contains("safetensors"), "the file is named: {shown}");
        assert_eq!(files(&work.path("run/checkpoints")), before);
        assert_success(&work.run(&["train", "--resume", "run", "--steps", "6"]));
    }
}
