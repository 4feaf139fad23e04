//! `generate`, `chat` and `evaluate` with the experts of a model spread over ranks, as threads and as processes: the
//! answers are those of one rank.

use std::io::Write as _;
use std::path::Path;
use std::process::Stdio;

use crate::bad_input::refused;
use crate::program::{Workplace, assert_success, stderr, stdout};
use crate::ranks::{launchers, process_command};

/// A workplace with a small trained model of four experts, whose matrices can be quantized.
fn with_model() -> Workplace {
    with_small_model("model.expert_width=32")
}

/// Makes a workplace with a small trained model with the setting `setting`.
pub(crate) fn with_small_model(setting: &str) -> Workplace {
    let work = Workplace::new();
    let settings = ["model.max_seq_len=256", "train.lr=1e-2", setting];
    let settings: Vec<&str> = settings.iter().flat_map(|setting| ["--set", setting]).collect();
    assert_success(&work.train("run", 8, &settings));
    work
}

/// The arguments of a greedy answer.
pub(crate) const GREEDY: [&str; 8] =
    ["generate", "run", "--prompt", "Line 3", "--max-tokens", "40", "--temperature", "0"];
/// The arguments of an answer whose tokens are drawn.
pub(crate) const DRAWN: [&str; 10] =
    ["generate", "run", "--prompt", "Line 3", "--max-tokens", "40", "--temperature", "1.3", "--seed", "5"];

/// Runs a command that must succeed, and returns what it says.
pub(crate) fn said(work: &Workplace, args: &[&str]) -> String {
    let output = work.run(args);
    assert_success(&output);
    stdout(&output)
}

#[test]
fn any_number_of_ranks_answers_as_one_greedy_and_drawn() {
    let work = with_model();
    for args in [&GREEDY[..], &DRAWN] {
        let one = said(&work, args);
        assert!(one.len() > 20, "{one}");
        for ep in ["1", "2", "3", "4", "6"] {
            assert_eq!(said(&work, &[args, &["--ep", ep]].concat()), one, "--ep {ep}");
        }
    }
}

#[test]
fn a_placement_of_experts_changes_no_answer() {
    let work = with_model();
    let one = said(&work, &GREEDY);
    let file = work.file("placement.txt", "placement experts=4 ranks=3\n0: 1\n1: 0 2\n2: 1\n3: *\n");
    assert_eq!(said(&work, &[&GREEDY[..], &["--ep", "3", "--placement", &file]].concat()), one);
}

#[test]
fn quantized_models_and_gguf_files_answer_as_on_one_rank() {
    let work = with_model();
    assert_success(&work.run(&["convert", "run", "int8", "--quantize", "int8"]));
    let gguf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures/gguf/qwen3moe.gguf");
    for model in ["int8", &gguf.display().to_string()] {
        let args = ["generate", model, "--prompt", "Line 3", "--max-tokens", "20", "--temperature", "0"];
        let one = said(&work, &args);
        for ep in ["2", "3"] {
            assert_eq!(said(&work, &[&args[..], &["--ep", ep]].concat()), one, "{model} --ep {ep}");
        }
    }
}

#[test]
fn evaluations_chats_and_files_of_prompts_are_those_of_one_rank() {
    let work = with_model();
    let evaluate = ["evaluate", "run", "--data", "text.txt", "--max-sequences", "8", "--json"];
    assert_eq!(said(&work, &[&evaluate[..], &["--ep", "2"]].concat()), said(&work, &evaluate));
    let prompts: String = (0..12).map(|i| format!("{{\"prompt\": \"Line {i}\", \"max_tokens\": 12}}\n")).collect();
    work.file("prompts.jsonl", prompts);
    let many = ["generate", "run", "--data", "prompts.jsonl", "--temperature", "0", "--batch-invariant", "--out"];
    said(&work, &[&many[..], &["one.jsonl"]].concat());
    said(&work, &[&many[..], &["ranks.jsonl", "--ep", "3"]].concat());
    let read = |name: &str| std::fs::read_to_string(work.path(name)).expect("answers");
    assert_eq!(read("ranks.jsonl"), read("one.jsonl"));
    work.file("chat.jinja", "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}");
    let chat = |more: &[&str]| {
        let args = ["chat", "run", "--template", "chat.jinja", "--max-tokens", "12", "--temperature", "0"];
        let mut command = work.command(&[&args[..], more].concat());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the program starts");
        child.stdin.take().expect("standard input").write_all(b"Line 1\nLine 2\n").expect("written");
        let output = child.wait_with_output().expect("ended");
        assert_success(&output);
        stdout(&output)
    };
    assert_eq!(chat(&["--ep", "2"]), chat(&[]));
}

#[test]
fn each_rank_says_which_part_of_the_model_it_has_read() {
    let work = with_model();
    let output = work.run(&[&GREEDY[..], &["--ep", "3", "--verbose"]].concat());
    assert_success(&output);
    let shown = stderr(&output);
    for line in [
        "rank 0 holds 2 of 4 experts and all other weights",
        "rank 1 holds 1 of 4 experts:",
        "rank 2 holds 1 of 4 experts:",
    ] {
        assert!(shown.contains(line), "{line:?} in {shown}");
    }
}

#[test]
fn what_ranks_cannot_do_is_refused_with_what_would_be_right() {
    let work = with_model();
    assert_success(&work.train("dense", 2, &["--set", "model.num_experts=0"]));
    refused(&work, &[&GREEDY[..], &["--ep", "0"]].concat(), &["--ep 0", "at least 1"]);
    refused(&work, &[&GREEDY[..], &["--ep", "5000"]].concat(), &["--ep 5000", "mpirun"]);
    refused(&work, &["generate", "dense", "--ep", "2"], &["dense", "no experts", "without --ep"]);
    refused(&work, &["serve", "dense", "--port", "0", "--ep", "2"], &["dense", "no experts"]);
    for device in ["cuda", "cuda:1"] {
        refused(&work, &[&GREEDY[..], &["--ep", "2", "--device", device]].concat(), &["--device", "CPU"]);
    }
    refused(&work, &[&GREEDY[..], &["--placement", "none.txt"]].concat(), &["--placement", "--ep above 1"]);
    refused(&work, &[&GREEDY[..], &["--ep", "2", "--placement", "none.txt"]].concat(), &["--placement none.txt"]);
    for (text, problem) in [
        ("placement experts=4 ranks=3\n0: 0\n1: 1\n2: 2\n3: 0\n", "for 3 ranks, but there are 2"),
        ("placement experts=2 ranks=2\n0: 0\n1: 1\n", "for 2 experts, but the model has 4"),
        ("placement experts=4 ranks=2\nlayer 0:\n0: 0\n1: 1\n2: 0\n3: 1\n", "no layer 1"),
        ("nonsense", "line 1"),
    ] {
        let file = work.file("placement.txt", text);
        let args = [&GREEDY[..], &["--ep", "2", "--placement", &file]].concat();
        refused(&work, &args, &["--placement", "placement.txt", problem]);
    }
    refused(&work, &["generate", "nowhere", "--ep", "2"], &["nowhere"]);
    refused(&work, &["generate", "run", "--prompt", &"x".repeat(300), "--ep", "2"], &["300 tokens", "context is 256"]);
}

#[test]
fn processes_of_mpirun_answer_as_one() {
    for (mpirun, _) in launchers() {
        let work = with_model();
        // A launcher may give ranks a terminal, on which control characters are shown otherwise: a file has them all.
        work.file("prompts.jsonl", "{\"prompt\": \"Line 3\"}\n{\"prompt\": \"x\", \"seed\": 5}\n");
        let args =
            ["generate", "run", "--data", "prompts.jsonl", "--max-tokens", "12", "--temperature", "1.3", "--force"];
        let on_processes = |num_ranks: usize, more: &[&str]| {
            let command = work.command(&[&args[..], more].concat());
            let output = process_command(&mpirun, num_ranks, &command).output().expect("mpirun starts");
            assert_success(&output);
        };
        let read = |name: &str| std::fs::read_to_string(work.path(name)).expect("answers");
        said(&work, &[&args[..], &["--out", "one.jsonl"]].concat());
        on_processes(2, &["--out", "two.jsonl"]);
        on_processes(3, &["--out", "three.jsonl", "--ep", "3"]);
        assert_eq!([read("two.jsonl"), read("three.jsonl")], [read("one.jsonl"), read("one.jsonl")]);
        let wrong = work.command(&[&args[..], &["--out", "none.jsonl", "--ep", "3"]].concat());
        let output = process_command(&mpirun, 2, &wrong).output().expect("mpirun starts");
        let shown = stderr(&output);
        assert!(!output.status.success() && shown.contains("--ep 3: mpirun started 2 processes"), "{shown}");
        assert_eq!(shown.lines().filter(|line| line.starts_with("error: ")).count(), 1, "{shown}");
    }
}
