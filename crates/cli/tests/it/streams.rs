//! Standard output that is full, closed, or no longer read; standard error that is full.
#![cfg(unix)]

use std::path::Path;

use crate::program::{Workplace, assert_success, stderr, stdout};

/// The arguments of commands that print, one line for each.
const PRINTING: [&str; 14] = [
    "evaluate run --data text.txt --json",
    "evaluate run --data text.txt",
    "generate run --prompt Line --max-tokens 3",
    "inspect run",
    "inspect run --json",
    "estimate --preset tiny --json",
    "plan --scaling --ranks 8",
    "convert run model --force",
    "routing run --data text.txt --max-tokens 20",
    "report run",
    "doctor",
    "train --print-config",
    "train --help",
    "--version",
];

#[test]
fn a_full_or_closed_standard_output_is_an_error_of_every_command() {
    let work = Workplace::new();
    assert_success(&work.train("run", 2, &[]));
    let places = if Path::new("/dev/full").exists() { &[">/dev/full", ">&-"][..] } else { &[">&-"] };
    for arguments in PRINTING {
        for place in places {
            let output = work.shell(&format!("exec \"$M\" {arguments} {place}"));
            let shown = stderr(&output);
            assert_eq!(output.status.code(), Some(2), "{arguments} {place}: {shown}");
            let errors: Vec<&str> = shown.lines().filter(|line| line.starts_with("error: ")).collect();
            assert!(errors.len() == 1 && errors[0].contains("standard output"), "{arguments} {place}: {shown}");
            assert!(!shown.contains("panicked"), "{shown}");
        }
    }
}

#[test]
fn a_reader_that_goes_away_ends_the_program_quietly() {
    let work = Workplace::new();
    assert_success(&work.train("run", 2, &[]));
    for arguments in PRINTING {
        // The reader is gone before anything is printed.
        let output = work.shell(&format!("{{ sleep 0.05; \"$M\" {arguments}; echo \"exit $?\" >&2; }} | true"));
        let shown = stderr(&output);
        assert!(shown.ends_with("exit 0\n"), "{arguments}: {shown}");
        assert!(!shown.contains("error") && !shown.contains("panicked"), "{arguments}: {shown}");
    }
}

#[test]
fn standard_error_that_takes_nothing_harms_nobody() {
    let work = Workplace::new();
    let place = if Path::new("/dev/full").exists() { "2>/dev/full" } else { "2>&-" };
    assert_success(&work.train("run", 2, &[]));
    let output = work.shell(&format!("RUST_LOG=info exec \"$M\" train --resume run --steps 4 {place}"));
    assert_success(&output);
    let output = work.shell(&format!("exec \"$M\" generate missing {place}"));
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn an_error_begins_a_line_of_its_own() {
    let work = Workplace::new();
    assert_success(&work.train("run", 2, &[]));
    // The prompt is printed first, without a newline.
    let output = work.shell("exec \"$M\" generate run --prompt Line --max-tokens 1000 2>&1");
    let shown = stdout(&output);
    assert_eq!(output.status.code(), Some(2), "{shown}");
    assert!(shown.lines().any(|line| line.starts_with("error: ")), "{shown}");
}
