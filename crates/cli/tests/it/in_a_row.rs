//! The library's commands, called one after the other in one process, give the same output as separate processes.

use std::env;
use std::io::{Write as _, stderr, stdout};
use std::process::{Command, Output, Stdio};

use moeworks::Host;
use moeworks_infer::chat::Sandbox;

use crate::program::{TINY, Workplace, assert_success, losses};

/// The variable with the command lines of [`calls_of_the_environment`], as JSON.
const CALLS: &str = "MOEWORKS_CALLS_IN_A_ROW";
/// The mark before the output of each call.
const BEGIN: &str = "\n<<<begin>>>\n";
/// The mark after it; the exit code is on the next line.
const END: &str = "<<<end>>>\n";
/// A conversation with one message.
const TYPED: &str = "Line 1\n";

const PROGRAM: &str = env!("CARGO_BIN_EXE_moeworks");

/// The output of a call: standard output, and standard error without digits, some of which are times.
#[derive(Debug, PartialEq, Eq)]
struct Shown {
    code: i32,
    stdout: String,
    stderr: String,
}

/// Lists calls that could affect the next one: quiet ones, failing ones, and ones with another number of threads.
fn calls(threads: &str) -> Vec<Vec<String>> {
    let train = |flag: &str, out: &str| {
        let line = format!("train {flag} --data text.txt --steps 4 --out {out}");
        let mut words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        TINY.iter().for_each(|setting| words.extend(["--set".to_owned(), (*setting).to_owned()]));
        words.extend(["--set".to_owned(), format!("train.threads={threads}")]);
        words
    };
    let line = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
    vec![
        train("--quiet", "quiet"),
        line("generate missing"),
        line("generate quiet --prompt Line --max-tokens 8 --threads 1"),
        line("generate quiet --prompt Line --max-tokens 8 --threads 2 --verbose"),
        line("evaluate quiet --data text.txt --max-sequences 2 --quiet"),
        line("evaluate quiet --data text.txt --max-sequences 2 --threads 2"),
        line("evaluate --no-such-option"),
        line("chat quiet --template template.jinja --max-tokens 5 --temperature 0"),
        train("--verbose", "told"),
        line("--version"),
        line("train --resume missing"),
        line("inspect told"),
    ]
}

fn workplace() -> Workplace {
    let work = Workplace::new();
    work.file("template.jinja", "{% for message in messages %}{{ message.content }}\n{% endfor %}");
    work
}

/// Runs the calls one after the other in one process.
fn in_a_row(work: &Workplace, calls: &[Vec<String>]) -> Vec<Shown> {
    let mut process = Command::new(env::current_exe().expect("this program"));
    let envs = work.command(&[]);
    for (name, value) in envs.get_envs() {
        match value {
            Some(value) => process.env(name, value),
            None => process.env_remove(name),
        };
    }
    process
        .args(["--exact", "in_a_row::calls_of_the_environment", "--ignored", "--nocapture", "--test-threads=1"])
        .env(CALLS, serde_json::to_string(calls).expect("JSON"))
        .current_dir(work.path("."));
    let output = typing(process);
    assert_success(&output);
    let parts = |bytes: &[u8]| -> Vec<String> {
        String::from_utf8_lossy(bytes).split(BEGIN).skip(1).map(str::to_owned).collect()
    };
    let (stdouts, stderrs) = (parts(&output.stdout), parts(&output.stderr));
    assert_eq!((stdouts.len(), stderrs.len()), (calls.len(), calls.len()));
    let shown = |(stdout, stderr): (String, String)| {
        let (stdout, rest) = stdout.split_once(END).expect("a call that ended");
        let code = rest.lines().next().and_then(|code| code.parse().ok()).expect("an exit code");
        let stderr = stderr.split(END).next().unwrap_or_default();
        Shown { code, stdout: stdout.to_owned(), stderr: without_digits(stderr) }
    };
    stdouts.into_iter().zip(stderrs).map(shown).collect()
}

/// Runs a call as a separate process.
fn alone(work: &Workplace, call: &[String]) -> Shown {
    let words: Vec<&str> = call.iter().map(String::as_str).collect();
    let output = typing(work.command(&words));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Shown {
        code: output.status.code().expect("a code"),
        stdout: text(&output.stdout),
        stderr: without_digits(&text(&output.stderr)),
    }
}

/// Runs a process with a conversation as its input.
fn typing(mut process: Command) -> Output {
    process.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = process.spawn().expect("it starts");
    child.stdin.take().expect("its input").write_all(TYPED.as_bytes()).ok();
    child.wait_with_output().expect("it ended")
}

fn without_digits(text: &str) -> String {
    text.chars().filter(|c| !c.is_ascii_digit()).collect()
}

#[test]
fn calls_in_one_process_show_what_the_program_shows() {
    let (row, by_itself) = (workplace(), workplace());
    let calls: Vec<_> = calls("1");
    let found = in_a_row(&row, &calls);
    for (call, found) in calls.iter().zip(found) {
        assert_eq!(found, alone(&by_itself, call), "{call:?}");
    }
    for run in ["quiet", "told"] {
        assert_eq!(losses(&row.path(run)), losses(&by_itself.path(run)), "{run}");
    }
}

/// Runs, in this process, the calls that another test passes in the environment.
#[test]
#[ignore = "a part of calls_in_one_process_show_what_the_program_shows"]
fn calls_of_the_environment() {
    let calls = env::var(CALLS).expect("calls");
    let calls: Vec<Vec<String>> = serde_json::from_str(&calls).expect("lists of words");
    let host = Host::default().with_sandbox(Sandbox::new(PROGRAM, ["render-template"]));
    for call in calls {
        say(BEGIN);
        let code = host.run([PROGRAM.to_owned()].into_iter().chain(call));
        say(&format!("{END}{code}\n"));
    }
}

/// Writes a mark to both streams.
fn say(mark: &str) {
    stdout().write_all(mark.as_bytes()).expect("written");
    stdout().flush().expect("written");
    stderr().write_all(mark.as_bytes()).expect("written");
}
