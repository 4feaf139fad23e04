//! Extreme values for every option of every command: each gives a one-line error and exit code 2, or works; nothing
//! panics or hangs.
//!
//! Options are read from the help, so that new ones are tried, too. Each gets some of the values, another selection
//! for each option; with `MOEWORKS_ALL_EXTREMES=1` all of them, which takes minutes.

use std::ffi::OsString;
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::bad_input::refused;
use crate::program::{TINY, Workplace, assert_success, stdout};

const VALUES: [&str; 18] = [
    "0",
    "-1",
    "1e30",
    "nan",
    "",
    "18446744073709551615",
    "20000",
    "99999999999999999999",
    "-inf",
    "4294967296",
    "9223372036854775807",
    "-0",
    " ",
    "\n",
    "1000000000",
    "0.0000001",
    "cuda:99999999999",
    "\u{fffd}",
];

/// The number of values tried for each option, unless all are requested.
const TRIED: usize = 3;

/// The time limit of a command on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// The commands with their required arguments. Commands that measure the machine get arguments that fail early.
const COMMANDS: [(&str, &[&str]); 10] = [
    ("train", &["--data", "text.txt", "--set", "train.steps=1"]),
    ("generate", &["run", "--prompt", "Line", "--max-tokens", "2"]),
    ("chat", &["run"]),
    ("evaluate", &["run", "--data", "text.txt", "--max-sequences", "2"]),
    ("inspect", &["run"]),
    ("routing", &["run", "--data", "text.txt", "--max-tokens", "20"]),
    ("study", &["--data", "text.txt", "--only", "dense", "--set", "train.steps=1"]),
    ("upcycle", &["dense", "made", "--force"]),
    ("convert", &["run", "made", "--force"]),
    ("plan", &["--scaling", "--ranks", "8"]),
];

/// The options for which a large value is valid and takes as long as it says.
const LONG: [&str; 1] = ["--steps"];

/// Lists the long options of a command that take a value.
fn options(work: &Workplace, command: &str) -> Vec<String> {
    let help = stdout(&work.run(&[command, "--help"]));
    let option = |line: &str| {
        let (name, rest) = line.trim_start().strip_prefix("--")?.split_once([' ', '='])?;
        rest.trim_start().starts_with(['<', '[']).then(|| format!("--{name}"))
    };
    help.lines().filter_map(option).filter(|option| !LONG.contains(&&**option)).collect()
}

/// Returns the arguments of `command` with `option` set to `value` instead of its previous value.
fn with(command: &str, needed: &[&str], option: &str, value: &OsString) -> Vec<OsString> {
    let mut args: Vec<OsString> = vec![command.into()];
    let mut rest = needed.iter();
    while let Some(&arg) = rest.next() {
        if arg == option {
            rest.next();
        } else {
            args.push(arg.into());
        }
    }
    if ["train", "study"].contains(&command) {
        TINY.iter().for_each(|setting| args.extend(["--set".into(), (*setting).into()]));
    }
    let mut last = OsString::from(option);
    last.push("=");
    last.push(value);
    args.push(last);
    args
}

fn run(mut command: Command) -> Output {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts");
    let start = Instant::now();
    while child.try_wait().expect("asked").is_none() {
        if start.elapsed() > PATIENCE {
            child.kill().expect("killed");
            panic!("{command:?} hangs");
        }
        thread::sleep(Duration::from_millis(2));
    }
    child.wait_with_output().expect("ended")
}

fn check(work: &Workplace, args: &[OsString]) {
    let mut command = work.command(&[]);
    command.args(args);
    let output = run(command);
    let shown = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(matches!(output.status.code(), Some(0 | 2)), "{args:?}: {:?} {shown}", output.status);
    assert!(!shown.contains("panicked"), "{args:?}: {shown}");
    let is_refused = output.status.code() == Some(2);
    assert!(!is_refused || shown.lines().any(|line| line.starts_with("error: ")), "{args:?}: {shown}");
}

#[test]
fn extreme_values_of_every_option_are_refused_or_work() {
    let work = Workplace::new();
    assert_success(&work.train("run", 1, &[]));
    assert_success(&work.train("dense", 1, &["--set", "model.num_experts=0", "--set", "model.dense_width=48"]));
    let takes_all = std::env::var_os("MOEWORKS_ALL_EXTREMES").is_some();
    let mut number = 0;
    for (command, needed) in COMMANDS {
        let options = options(&work, command);
        assert!(!options.is_empty() || command == "inspect", "{command} has no options");
        for option in options {
            let chosen = (0..VALUES.len())
                .filter(|i| takes_all || (i + VALUES.len() - number % VALUES.len()) % VALUES.len() < TRIED);
            chosen.for_each(|i| check(&work, &with(command, needed, &option, &VALUES[i].into())));
            number += TRIED;
        }
    }
}

#[cfg(unix)]
#[test]
fn arguments_that_are_not_text_are_refused_or_work() {
    use std::os::unix::ffi::OsStringExt as _;
    let work = Workplace::new();
    assert_success(&work.train("run", 1, &[]));
    let name = || OsString::from_vec(b"a\xff".to_vec());
    for args in [
        &["generate"][..],
        &["generate", "run", "--prompt"],
        &["train", "--data"],
        &["inspect"],
        &["convert", "run"],
        &["train", "--set"],
        &["report"],
        &["evaluate", "run", "--data"],
    ] {
        let mut args: Vec<OsString> = args.iter().map(OsString::from).collect();
        args.push(name());
        check(&work, &args);
    }
    let out = with("train", &["--data", "text.txt", "--set", "train.steps=1"], "--out", &name());
    check(&work, &out);
}

#[test]
fn numbers_of_threads_and_ranks_are_checked_before_anything_starts() {
    let work = Workplace::new();
    assert_success(&work.train("run", 1, &[]));
    let threads = ["--threads", "20000"];
    for args in [
        &["generate", "run"][..],
        &["chat", "run"],
        &["evaluate", "run", "--data", "text.txt"],
        &["routing", "run", "--data", "text.txt"],
        &["bench"],
        &["bench", "decode"],
    ] {
        refused(&work, &[args, &threads].concat(), &["--threads 20000", "at most 1024"]);
    }
    let train =
        |setting: &str, parts: &[&str]| refused(&work, &["train", "--data", "text.txt", "--set", setting], parts);
    train("train.threads=20000", &["train.threads", "1024"]);
    train("parallel.dp=4096", &["4096 ranks", "at most"]);
    train("parallel.ep=9223372036854775807", &["parallel"]);
    refused(&work, &["train", "--data", "text.txt", "--dp", "0"], &["parallel.dp", "from 1 to 4096"]);
    for ranks in ["0", "1000000000"] {
        refused(&work, &["plan", "--ranks", ranks], &["--ranks"]);
    }
    for mode in ["comm", "overlap"] {
        refused(&work, &["bench", mode, "--ranks", "1000000000"], &["--ranks 1000000000", "at most 1024"]);
    }
    assert!(!work.path("runs").exists() && !work.path("topology.toml").exists());
}

#[test]
fn options_that_would_be_ignored_are_refused() {
    let work = Workplace::new();
    let cases: [(&[&str], &str); 7] = [
        (&["bench", "--ranks", "2"], "--ranks"),
        (&["bench", "decode", "--link", "1,1"], "--link"),
        (&["bench", "overlap", "--max-bytes", "64"], "--max-bytes"),
        (&["bench", "layers", "--topology", "x.toml"], "--topology"),
        (&["bench", "comm", "--threads", "2"], "--threads"),
        (&["bench", "comm", "--max-bytes", "1"], "--max-bytes 1"),
        (&["convert", "run", "model", "--only", "experts"], "--quantize"),
    ];
    for (args, part) in cases {
        let output = work.run(args);
        let shown = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && shown.contains(part), "{args:?}: {shown}");
    }
}
