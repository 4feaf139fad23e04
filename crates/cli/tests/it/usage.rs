//! The command-line interface: usage lines, help, errors, notes and escape codes.

use std::process::Command;

use crate::bad_input::refused;
use crate::program::{Workplace, assert_success, stderr, stdout};

fn with_run() -> Workplace {
    let work = Workplace::new();
    assert_success(&work.train("run", 2, &[]));
    work
}

#[test]
fn usage_lines_of_commands_on_a_model_and_files_work_in_either_order() {
    let work = with_run();
    for command in ["evaluate", "routing"] {
        let usage = stdout(&work.run(&[command, "--help"]));
        let line = usage.lines().find_map(|line| line.strip_prefix("Usage: moeworks ")).expect("a usage line");
        let line = line.replace("[OPTIONS]", "").replace("<MODEL>", "run").replace("...", "");
        let line = line.replace("<PATH>", "text.txt").replace("<FILE>", "text.txt");
        let first = work.run(&line.split_whitespace().collect::<Vec<_>>());
        assert_success(&first);
        let other = work.run(&[command, "--data", "text.txt", "run"]);
        assert_success(&other);
        assert_eq!(stdout(&first), stdout(&other), "{command}");
    }
    refused(&work, &["evaluate", "--data", "text.txt"], &["<MODEL>"]);
}

#[test]
fn an_error_stands_alone_and_says_what_would_be_right() {
    let work = with_run();
    let long = "x".repeat(64);
    for (args, parts) in [
        (
            vec!["generate", "run", "--prompt", "Once upon", "--max-tokens", "1000"],
            vec!["1000", "64", "at most 55", "-1"],
        ),
        (vec!["generate", "run", "--prompt", &long], vec!["64 tokens", "context is 64", "at most 63"]),
        (vec!["generate", "run", "--stop", ""], vec!["--stop is empty"]),
        (vec!["generate", "run", "--prompt-file", "nowhere.txt"], vec!["--prompt-file nowhere.txt"]),
        (vec!["plan", "--scaling", "--ranks", "3"], vec!["--ranks 3", "8 ranks", "--scaling"]),
        (vec!["generate", "run", "--max-tokens", "-2"], vec!["'-2'", "-1 for as many as fit"]),
        (vec!["trian"], vec!["'trian'", "'train'"]),
    ] {
        let output = work.run(&args);
        assert_eq!(stdout(&output), "", "{args:?}");
        refused(&work, &args, &parts);
    }
}

#[test]
fn no_escape_codes_come_where_the_output_is_no_terminal() {
    let work = Workplace::new();
    let output = work.train_command("run", 2, &["--verbose"]).env("TERM", "xterm-256color").output().expect("a run");
    assert_success(&output);
    let more = ["train", "--resume", "run", "--set", "train.steps=3"];
    let resumed = work.command(&more).env("RUST_LOG", "info").env("TERM", "xterm-256color").output().expect("a run");
    for output in [output, resumed, work.run(&["--help"]), work.run(&["trian"])] {
        let shown = stderr(&output) + &stdout(&output);
        assert!(!shown.is_empty() && !shown.contains('\u{1b}'), "{shown:?}");
    }
}

#[test]
fn quiet_leaves_results_and_errors_alone() {
    let work = Workplace::new();
    let trained = work.train("run", 2, &["--quiet"]);
    assert_success(&trained);
    assert_eq!((stdout(&trained).as_str(), stderr(&trained).as_str()), ("", ""));
    let args = ["generate", "run", "--prompt", "Line", "--max-tokens", "4", "--temperature", "0"];
    let told = work.run(&[&["-v"], &args[..]].concat());
    let quiet = work.run(&[&["-q"], &args[..]].concat());
    assert_eq!(stdout(&told), stdout(&quiet));
    assert!(stderr(&told).contains("temperature 0 (given)") && stderr(&told).contains("seed 0"), "{}", stderr(&told));
    assert_eq!(stderr(&quiet), "");
    refused(&work, &["-q", "generate", "nowhere"], &["nowhere"]);
}

#[test]
fn help_lists_commands_in_groups_and_each_kind_of_bench_has_a_page_of_its_own() {
    let work = Workplace::new();
    let help = stdout(&work.run(&["--help"]));
    let place = |text: &str| help.find(text).unwrap_or_else(|| panic!("{text:?} in {help}"));
    assert!(place("Train:") < place("  train ") && place("  train ") < place("Run:"));
    assert!(place("Measure:") < place("  bench ") && place("Other:") < place("  completions "));
    assert_eq!(help, stdout(&work.run(&["help"])));
    let bench = stdout(&work.run(&["bench", "--help"]));
    for kind in ["kernels", "layers", "routing", "decode", "overlap", "comm", "moe"] {
        assert!(bench.contains(&format!("\n  {kind} ")), "{bench}");
        assert_success(&work.run(&["bench", kind, "--help"]));
    }
    assert!(stdout(&work.run(&["bench", "decode", "--help"])).contains("--shape"));
    assert!(!bench.contains("--shape"), "{bench}");
}

#[test]
fn shells_get_scripts_that_know_commands_options_and_values() {
    let work = Workplace::new();
    for shell in ["bash", "zsh", "fish"] {
        let output = work.run(&["completions", shell]);
        assert_success(&output);
        let script = stdout(&output);
        for part in ["evaluate", "max-tokens", "deepseek-like", "overlap"] {
            assert!(script.contains(part), "{part} for {shell}");
        }
        // If the shell is installed, it parses the script.
        let file = work.file(shell, &script);
        if let Ok(read) = Command::new(shell).args(["-n", &file]).output() {
            assert!(read.status.success(), "{shell}: {}", String::from_utf8_lossy(&read.stderr));
        }
    }
    refused(&work, &["completions", "csh"], &["'csh'", "bash"]);
}
