//! `generate`, `chat`, `evaluate` and `serve` with the layers of a model spread over stages, as threads and as
//! processes: the answers are those of one rank.
#![cfg(target_os = "linux")]

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::bad_input::refused;
use crate::expert_ranks::{DRAWN, GREEDY, said, with_small_model};
use crate::program::{Workplace, assert_success, stderr, stdout};
use crate::rank_failures::{process_of, signal, wait_for};
use crate::ranks::{launchers, process_command};
use crate::serve::Server;
use crate::serve_on_ranks::greedy_texts;

/// The time in which requests end with errors once a rank is lost.
const PROMPTLY: Duration = Duration::from_secs(30);
/// The time limit for what a busy machine may delay.
const PATIENCE: Duration = Duration::from_secs(120);

/// A workplace with a small trained model of four layers with four experts each.
fn with_model() -> Workplace {
    with_small_model("model.num_layers=4")
}

#[test]
fn any_number_of_stages_answers_as_one_rank_greedy_and_drawn() {
    let work = with_model();
    for args in [&GREEDY[..], &DRAWN] {
        let one = said(&work, args);
        assert!(one.len() > 20, "{one}");
        for layout in [&["--pp", "2"][..], &["--pp", "3"], &["--pp", "4"], &["--pp", "2", "--ep", "2"]] {
            assert_eq!(said(&work, &[args, layout].concat()), one, "{layout:?}");
        }
    }
    assert_success(&work.train("dense", 2, &["--set", "model.num_experts=0"]));
    let dense = ["generate", "dense", "--prompt", "Line 3", "--max-tokens", "9"];
    assert_eq!(said(&work, &[&dense[..], &["--pp", "2"]].concat()), said(&work, &dense), "a dense model");
}

#[test]
fn evaluations_chats_records_and_files_of_prompts_over_stages_are_those_of_one_rank() {
    let work = with_model();
    let evaluate = ["evaluate", "run", "--data", "text.txt", "--max-sequences", "8", "--json"];
    assert_eq!(said(&work, &[&evaluate[..], &["--pp", "3"]].concat()), said(&work, &evaluate));
    let prompts: String = (0..12).map(|i| format!("{{\"prompt\": \"Line {i}\", \"max_tokens\": 12}}\n")).collect();
    work.file("prompts.jsonl", prompts);
    let many = ["generate", "run", "--data", "prompts.jsonl", "--temperature", "0", "--batch-invariant", "--out"];
    said(&work, &[&many[..], &["one.jsonl"]].concat());
    said(&work, &[&many[..], &["ranks.jsonl", "--pp", "3"]].concat());
    let read = |name: &str| std::fs::read(work.path(name)).expect("a file");
    assert_eq!(read("ranks.jsonl"), read("one.jsonl"));
    let recorded = |name: &str, layout: &[&str]| {
        said(&work, &[&GREEDY[..], &["--record-routing", name], layout].concat());
        let stats: Value = serde_json::from_str(&said(&work, &["routing", "stats", name, "--json"])).expect("JSON");
        stats["layers"].clone()
    };
    assert_eq!(recorded("ranks.records", &["--pp", "4"]), recorded("one.records", &[]));
    work.file("chat.jinja", "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}");
    let chat = |more: &[&str]| {
        let args = ["chat", "run", "--template", "chat.jinja", "--max-tokens", "12", "--temperature", "0"];
        let mut command = work.command(&[&args[..], more].concat());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the program starts");
        child.stdin.take().expect("standard input").write_all(b"Line 1\nLine 2\n/undo\nLine 3\n").expect("written");
        let output = child.wait_with_output().expect("ended");
        assert_success(&output);
        stdout(&output)
    };
    assert_eq!(chat(&["--pp", "2"]), chat(&[]));
}

#[test]
fn each_rank_of_a_stage_says_which_layers_it_has_read() {
    let work = with_model();
    let output = work.run(&[&GREEDY[..], &["--pp", "2", "--ep", "2", "--verbose"]].concat());
    assert_success(&output);
    let shown = stderr(&output);
    for line in [
        "rank 0 holds layers 0 to 0 of 4 with 2 of 4 experts, the embedding and the output projection: ",
        "rank 1 holds 2 of 4 experts of layers 0 to 0 of 4: ",
        "rank 2 holds layers 1 to 3 of 4 with 2 of 4 experts: ",
        "rank 3 holds 2 of 4 experts of layers 1 to 3 of 4: ",
    ] {
        assert!(shown.contains(line), "{line:?} in {shown}");
    }
}

#[test]
fn what_stages_cannot_do_is_refused_with_what_would_be_right() {
    let work = with_model();
    refused(&work, &[&GREEDY[..], &["--pp", "0"]].concat(), &["--pp 0", "at least 1"]);
    refused(&work, &[&GREEDY[..], &["--pp", "5"]].concat(), &["--pp 5", "at most 4", "layers"]);
    refused(&work, &[&GREEDY[..], &["--pp", "100", "--ep", "100"]].concat(), &["--pp 100 --ep 100", "mpirun"]);
    refused(&work, &[&GREEDY[..], &["--pp", "2", "--device", "cuda"]].concat(), &["--device cuda", "CPU"]);
    refused(&work, &[&GREEDY[..], &["--pp", "2", "--placement", "none.txt"]].concat(), &["--placement", "--ep"]);
    let switch = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures/switch");
    let switch = switch.display().to_string();
    refused(&work, &["generate", &switch, "--prompt", "x", "--pp", "2"], &["switch", "--pp 2", "encoder"]);
}

/// Sends greedy requests at once, many of which begin alike, and returns their texts.
fn answers(server: &Server) -> Vec<String> {
    let prompt = |i: usize| format!("{} {i} of", "Line 3 of a text that is easy to learn, number. ".repeat(i % 3));
    greedy_texts(server, (0..24).map(prompt))
}

#[test]
fn a_server_over_stages_answers_as_one_with_common_beginnings_and_few_blocks() {
    let work = with_model();
    // 40 blocks of 16 tokens: less than the answers need together.
    let args = ["--batch-invariant", "--kv-memory", "0.00033"];
    let expected = answers(&Server::start(&work, &["--batch-invariant"]));
    assert!(expected.iter().any(|text| *text != expected[0]), "answers differ from prompt to prompt");
    for layout in [&["--pp", "2"][..], &["--pp", "3"], &["--pp", "2", "--ep", "2"]] {
        let mut server = Server::start(&work, &[&args[..], layout].concat());
        assert_eq!(answers(&server), expected, "{layout:?}");
        assert!(server.figure("prefix_cache_hits_total") > 0.0, "{layout:?}");
        let experts = server.get("/metrics").lines().filter(|line| line.contains("expert_tokens_total{")).count();
        assert_eq!(experts, 16, "{layout:?}: four experts in each of four layers");
        server.signal("TERM");
        assert_eq!(server.child.wait().expect("ended").code(), Some(0));
    }
}

#[test]
fn processes_of_mpirun_are_stages_and_a_lost_one_ends_requests_with_errors() {
    for (mpirun, is_open_mpi) in launchers() {
        let work = with_model();
        work.file("prompts.jsonl", "{\"prompt\": \"Line 3\"}\n{\"prompt\": \"x\", \"seed\": 5}\n");
        let args =
            ["generate", "run", "--data", "prompts.jsonl", "--max-tokens", "12", "--temperature", "1.3", "--force"];
        let on_processes = |num_ranks: usize, more: &[&str]| {
            let command = work.command(&[&args[..], more].concat());
            process_command(&mpirun, num_ranks, &command).output().expect("mpirun starts")
        };
        let answers = |name: &str| std::fs::read_to_string(work.path(name)).expect("answers");
        said(&work, &[&args[..], &["--out", "one.jsonl"]].concat());
        assert_success(&on_processes(3, &["--out", "three.jsonl", "--pp", "3"]));
        assert_success(&on_processes(4, &["--out", "four.jsonl", "--pp", "2"]));
        assert_eq!([answers("three.jsonl"), answers("four.jsonl")], [answers("one.jsonl"), answers("one.jsonl")]);
        let shown = stderr(&on_processes(3, &["--out", "none.jsonl", "--pp", "2"]));
        assert!(shown.contains("--pp 2: mpirun started 3 processes; their number must be a multiple"), "{shown}");
        loses_a_stage(&work, |command| process_command(&mpirun, 3, &command), is_open_mpi);
    }
}

/// Kills the last of three stages of a server and checks that requests end.
fn loses_a_stage(
    work: &Workplace,
    on_processes: impl Fn(std::process::Command) -> std::process::Command,
    is_open_mpi: bool,
) {
    let serve = ["serve", "run", "--port", "0", "--threads", "1", "--pp", "3", "--max-running", "1"];
    let mut server = Server::of(on_processes(work.command(&serve)));
    let body = json!({"prompt": "Line", "max_tokens": 250, "stream": true, "ignore_eos": true});
    let mut streams: Vec<TcpStream> = (0..20).map(|_| server.send("/v1/completions", &body)).collect();
    streams[0].read_exact(&mut [0; 64]).expect("a head");
    signal("-KILL", process_of(&work.path(""), 2).expect("a process"));
    let (start, mut num_told) = (Instant::now(), 0);
    for mut stream in streams {
        let mut rest = String::new();
        // A connection may also be cut where the launcher is quicker.
        let _ = stream.read_to_string(&mut rest);
        assert!(start.elapsed() < PROMPTLY, "requests hang");
        num_told += usize::from(rest.contains("\"error\"") || rest.contains("503 Service Unavailable"));
    }
    assert!(!is_open_mpi || num_told > 15, "{num_told} of 20 were told");
    wait_for(PATIENCE, "end of rank 0", || process_of(&work.path(""), 0).is_none().then_some(()));
    assert!(!server.child.wait().expect("ended").success());
}
