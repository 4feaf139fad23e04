//! A model with an encoder in every command: the Switch Transformers fixture of the tests of `model`.

use std::fs;

use serde_json::Value;

use crate::bad_input::refused;
use crate::program::{Workplace, assert_success, losses, state, stdout};

/// Copies the fixture to `switch` in a new workplace.
fn workplace() -> Workplace {
    let work = Workplace::new();
    let from = concat!(env!("CARGO_MANIFEST_DIR"), "/../model/tests/fixtures/switch");
    fs::create_dir(work.path("switch")).expect("made");
    let paths = fs::read_dir(from).expect("the fixture").map(|entry| entry.expect("an entry").path());
    for path in paths.filter(|path| path.is_file()) {
        fs::copy(&path, work.path("switch").join(path.file_name().expect("a name"))).expect("copied");
    }
    work
}

fn evaluate(work: &Workplace, model: &str) -> Value {
    let output = work.run(&["evaluate", model, "--data", "text.txt", "--seq-len", "64", "--json"]);
    assert_success(&output);
    serde_json::from_str(&stdout(&output)).expect("JSON")
}

#[test]
fn a_model_with_an_encoder_answers_its_prompt() {
    let work = workplace();
    let prompt = "The <extra_id_0> walks in <extra_id_1> park.";
    let run = |more: &[&str]| {
        let args = ["generate", "switch", "--prompt", prompt, "--max-tokens", "8", "--temperature", "0"];
        let output = work.run(&[&args, more].concat());
        assert_success(&output);
        stdout(&output)
    };
    let answer = run(&[]);
    assert!(!answer.trim().is_empty() && !answer.contains(prompt), "{answer}");
    assert_eq!(answer, run(&["--threads", "1"]));
}

#[test]
fn a_model_with_an_encoder_is_evaluated_on_what_is_left_out_of_a_text() {
    let work = workplace();
    let value = evaluate(&work, "switch");
    assert_eq!(value["task"], "spans");
    assert!(value["loss"].as_f64().expect("a loss") > 0.0 && value["bits_per_byte"].is_null());
    let stacks: Vec<&str> =
        value["layers"].as_array().expect("layers").iter().filter_map(|l| l["stack"].as_str()).collect();
    assert_eq!(stacks, ["encoder", "decoder", "decoder"]);
    let output = work.run(&["evaluate", "switch", "--data", "text.txt"]);
    assert_success(&output);
    assert!(stdout(&output).contains("left out") && stdout(&output).contains("encoder layer 1"), "{}", stdout(&output));
}

#[test]
fn a_model_with_an_encoder_is_inspected_and_converted() {
    let work = workplace();
    let output = work.run(&["inspect", "switch"]);
    assert_success(&output);
    assert!(stdout(&output).contains("an encoder of 5 layers, a decoder of 4"), "{}", stdout(&output));
    assert_success(&work.run(&["convert", "switch", "same"]));
    assert_success(&work.run(&["convert", "same", "again"]));
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        let read = |name: &str| fs::read(work.path(name).join(file)).expect(file);
        assert_eq!(read("same"), read("again"), "{file}");
    }
    assert_success(&work.run(&["convert", "switch", "bf16", "--dtype", "bf16"]));
    let loss = |model: &str| evaluate(&work, model)["loss"].as_f64().expect("a loss");
    assert_eq!(loss("switch"), loss("same"));
    assert!((loss("switch") - loss("bf16")).abs() < 0.1);
}

#[test]
fn a_model_with_an_encoder_learns_to_find_what_is_left_out_and_a_resumed_run_makes_the_same_steps() {
    let work = workplace();
    let settings = ["lr=0.01", "seq_len=24", "batch_size=4", "steps=40", "checkpoint_every=20", "balance=layer"];
    let settings: Vec<String> = settings.iter().map(|setting| format!("--set=train.{setting}")).collect();
    for out in ["whole", "cut"] {
        let args = ["train", "--from", "switch", "--data", "text.txt", "--out", out];
        let args = args.into_iter().chain(settings.iter().map(String::as_str));
        assert_success(&work.run(&args.collect::<Vec<_>>()));
    }
    // The copy is in the state of a run killed before the end.
    fs::remove_dir_all(work.path("cut/checkpoints/step-00000040")).expect("removed");
    assert_success(&work.run(&["train", "--resume", "cut"]));
    assert_eq!(losses(&work.path("whole")), losses(&work.path("cut")));
    assert_eq!(state(&work.path("whole"), 40), state(&work.path("cut"), 40));
    let loss = |model: &str| evaluate(&work, model)["loss"].as_f64().expect("a loss");
    assert!(loss("whole") < loss("switch") - 0.3, "{} from {}", loss("whole"), loss("switch"));
    refused(&work, &["train", "--resume", "cut", "--steps", "50", "--ep", "2"], &["encoder", "one rank"]);
}

#[test]
fn what_a_model_with_an_encoder_cannot_do_is_said_in_one_line() {
    let work = workplace();
    let train = |more: &[&'static str]| {
        [&["train", "--from", "switch", "--data", "text.txt", "--out", "run", "--set", "train.seq_len=16"], more]
            .concat()
    };
    refused(&work, &train(&["--ep", "2"]), &["encoder", "one rank"]);
    refused(&work, &train(&["--set", "train.seq_len=1"]), &["train.seq_len", "at least 2"]);
    assert!(!work.path("run").exists());
    refused(&work, &["routing", "switch", "--data", "text.txt"], &["encoder"]);
    refused(&work, &["upcycle", "switch", "out"], &["dense"]);
    refused(&work, &["evaluate", "switch", "--data", "text.txt", "--seq-len", "1"], &["--seq-len 1", "2"]);
    fs::remove_file(work.path("switch/tokenizer_config.json")).expect("removed");
    let text = fs::read_to_string(work.path("switch/tokenizer.json")).expect("text");
    fs::write(work.path("switch/tokenizer.json"), text.replace("<extra_id_", "<other_")).expect("written");
    refused(&work, &["evaluate", "switch", "--data", "text.txt"], &["<extra_id_0>"]);
    refused(&work, &train(&[]), &["<extra_id_0>"]);
    assert!(!work.path("run").exists());
}
