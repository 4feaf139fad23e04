//! Signals at any time, and the state of a run afterwards.
#![cfg(unix)]

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::program::{TINY, Workplace, assert_success, losses, state, stderr};

/// The time limit for a program to end after a signal, on a busy machine.
const PROMPTLY: Duration = Duration::from_secs(2);

fn send(process: &Child, name: &str) {
    let status = Command::new("kill").args(["-s", name, &process.id().to_string()]).status();
    assert!(status.expect("kill runs").success());
}

/// Writes a text that takes long to read and tokenize.
fn long_text(work: &Workplace) {
    let line = "Some words that take a while to be merged into tokens, over and over again, 1234567890.\n";
    work.file("long.txt", line.repeat(300_000));
}

fn leftovers(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).filter(|name| name.contains("tmp")).collect()
}

#[test]
fn a_signal_while_data_is_read_ends_the_program_at_once_and_leaves_nothing() {
    let work = Workplace::new();
    long_text(&work);
    for (name, code) in [("INT", 130), ("TERM", 143), ("HUP", 129)] {
        let mut args = vec!["train", "--data", "long.txt", "--out", "run", "--set", "data.tokenizer=bpe"];
        TINY.iter().for_each(|setting| args.extend(["--set", setting]));
        let mut child = work.command(&args).stderr(Stdio::piped()).spawn().expect("the program starts");
        std::thread::sleep(Duration::from_millis(300));
        assert!(child.try_wait().expect("asked").is_none(), "it is still reading");
        let start = Instant::now();
        send(&child, name);
        let output = child.wait_with_output().expect("ended");
        assert!(start.elapsed() < PROMPTLY, "{:?}", start.elapsed());
        assert_eq!(output.status.code(), Some(code), "{}", stderr(&output));
        assert!(!work.path("run").exists());
        assert_eq!(leftovers(&work.path("cache/moeworks")), [""; 0]);
    }
}

#[test]
fn a_signal_while_tokens_are_written_leaves_no_part_of_them() {
    let work = Workplace::new();
    long_text(&work);
    let mut args = vec!["train", "--data", "long.txt", "--out", "run"];
    TINY.iter().for_each(|setting| args.extend(["--set", setting]));
    let child = work.command(&args).stderr(Stdio::piped()).spawn().expect("the program starts");
    let start = Instant::now();
    while leftovers(&work.path("cache/moeworks")).is_empty() {
        assert!(start.elapsed() < Duration::from_secs(60), "no tokens are written");
        std::thread::sleep(Duration::from_millis(1));
    }
    send(&child, "TERM");
    let output = child.wait_with_output().expect("ended");
    assert_eq!(output.status.code(), Some(143), "{}", stderr(&output));
    assert_eq!(leftovers(&work.path("cache/moeworks")), [""; 0]);
}

#[test]
fn the_second_signal_does_not_wait_for_the_step() {
    let work = Workplace::new();
    // A step with very many tokens.
    let more = ["--set", "train.grad_accumulation=1000000"];
    let child = work.train_command("run", 10, &more).stderr(Stdio::piped()).spawn().expect("the program starts");
    let start = Instant::now();
    while !work.path("run/config.toml").exists() {
        assert!(start.elapsed() < Duration::from_secs(60), "the run does not begin");
        std::thread::sleep(Duration::from_millis(5));
    }
    std::thread::sleep(Duration::from_millis(500));
    send(&child, "TERM");
    std::thread::sleep(Duration::from_millis(200));
    let second = Instant::now();
    send(&child, "TERM");
    let output = child.wait_with_output().expect("ended");
    assert!(second.elapsed() < PROMPTLY);
    assert_eq!(output.status.code(), Some(143), "{}", stderr(&output));
}

#[test]
fn sigterm_and_sighup_end_a_run_as_ctrl_c_does_also_on_ranks() {
    let work = Workplace::new();
    for (name, code, ranks) in [("TERM", 143, "1"), ("HUP", 129, "2")] {
        let mut command = work.train_command(name, 1_000_000, &["--ep", ranks, "--set", "train.checkpoint_every=0"]);
        let child = command.stderr(Stdio::piped()).spawn().expect("the program starts");
        let start = Instant::now();
        while fs::read_to_string(work.path(name).join("metrics.jsonl")).map_or(0, |text| text.lines().count()) < 3 {
            assert!(start.elapsed() < Duration::from_secs(60), "no steps");
            std::thread::sleep(Duration::from_millis(5));
        }
        send(&child, name);
        let output = child.wait_with_output().expect("ended");
        assert_eq!(output.status.code(), Some(code), "{}", stderr(&output));
        let last = losses(&work.path(name)).last().expect("steps").0;
        assert!(!state(&work.path(name), last).0.is_empty());
    }
}

#[test]
fn a_signal_that_is_to_be_ignored_is_ignored() {
    let work = Workplace::new();
    let script = "trap '' HUP; \"$M\" train --data text.txt --out run --steps 100000 --set train.sample_every=0 2>/dev/null & \
                  while ! [ -s run/metrics.jsonl ]; do sleep 0.05; done; kill -s HUP $!; sleep 0.5; kill -s KILL $! && echo alive; wait";
    let output = work.shell(script);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "alive\n", "{}", stderr(&output));
}

/// Puts a run into the state before its first checkpoint.
fn forget_checkpoints(run: &Path) {
    fs::remove_dir_all(run.join("checkpoints")).expect("removed");
}

#[test]
fn a_run_without_a_checkpoint_begins_again_with_the_same_steps() {
    let work = Workplace::new();
    assert_success(&work.train("whole", 4, &[]));
    assert_success(&work.train("run", 4, &[]));
    forget_checkpoints(&work.path("run"));
    let output = work.run(&["train", "--resume", "run"]);
    assert_success(&output);
    assert!(stderr(&output).contains("begins again"), "{}", stderr(&output));
    assert_eq!(losses(&work.path("run")), losses(&work.path("whole")));
    assert_eq!(state(&work.path("run"), 4), state(&work.path("whole"), 4));
    // The same with another number of ranks.
    forget_checkpoints(&work.path("run"));
    assert_success(&work.run(&["train", "--resume", "run", "--ep", "2"]));
    assert_eq!(losses(&work.path("run")).len(), 4);
}

#[test]
fn a_run_that_began_with_a_model_begins_again_with_it() {
    let work = Workplace::new();
    assert_success(&work.train("first", 4, &[]));
    let from = |out: &str| {
        let settings =
            ["train.steps=2", "train.seq_len=32", "train.batch_size=2", "train.precision=f32", "train.sample_every=0"];
        let mut args = vec!["train", "--from", "first", "--data", "text.txt", "--out", out];
        settings.iter().for_each(|setting| args.extend(["--set", setting]));
        assert_success(&work.run(&args));
    };
    from("whole");
    from("run");
    forget_checkpoints(&work.path("run"));
    assert_success(&work.run(&["train", "--resume", "run"]));
    assert_eq!(losses(&work.path("run")), losses(&work.path("whole")));
    // If that model is gone, the run is not started with another.
    forget_checkpoints(&work.path("run"));
    fs::rename(work.path("first"), work.path("moved")).expect("moved");
    let output = work.run(&["train", "--resume", "run"]);
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
}

#[test]
fn the_newest_run_may_be_one_without_a_checkpoint() {
    let work = Workplace::new();
    assert_success(&work.train("runs/old", 2, &[]));
    assert_success(&work.train("runs/new", 2, &[]));
    forget_checkpoints(&work.path("runs/new"));
    let output = work.run(&["train", "--resume", "auto"]);
    assert_success(&output);
    assert!(stderr(&output).contains("Run:        runs/new"), "{}", stderr(&output));
}

#[test]
fn a_resumed_run_refuses_what_it_would_ignore() {
    let work = Workplace::new();
    assert_success(&work.train("run", 2, &[]));
    work.file("run.toml", "");
    let cases: [&[&str]; 8] = [
        &["--out", "other"],
        &["--preset", "tiny"],
        &["--config", "run.toml"],
        &["--from", "run"],
        &["--force"],
        &["--set", "run.name=x"],
        &["--set", "run.out=x"],
        &["--set", "data.bpe_vocab_size=300"],
    ];
    for more in cases {
        let args = [&["train", "--resume", "run", "--steps", "4"], more].concat();
        let output = work.run(&args);
        let shown = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{more:?}: {shown}");
        assert_eq!(shown.lines().filter(|line| line.starts_with("error: ")).count(), 1, "{more:?}: {shown}");
    }
    assert_eq!(losses(&work.path("run")).len(), 2);
    assert!(!work.path("other").exists());
}

#[test]
fn the_lines_to_paste_work_whatever_a_run_is_called() {
    let work = Workplace::new();
    for name in ["my run", "-dash", "it's $HOME", "two\nlines"] {
        let out = format!("--out={name}");
        let mut args = vec![
            "train",
            "--data",
            "text.txt",
            &out,
            "--set",
            "train.steps=2",
            "--set",
            "train.sample_prompt=Line $1 'x'",
        ];
        TINY.iter().for_each(|setting| args.extend(["--set", setting]));
        let output = work.run(&args);
        assert_success(&output);
        let shown = stderr(&output);
        let line = shown.lines().find_map(|line| line.strip_prefix("Next:       ")).expect("a line to paste");
        let pasted = work.shell_of("bash", &format!("{line} --max-tokens 2"));
        assert_success(&pasted);
        assert!(String::from_utf8_lossy(&pasted.stdout).starts_with("Line $1 'x'"), "{line}");
    }
}
