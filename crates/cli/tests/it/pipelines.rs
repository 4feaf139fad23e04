//! Training over the stages of a pipeline, as a user does it: threads of one process, and processes of `mpirun` where
//! there is one.

use std::fs;

use crate::bad_input::refused;
use crate::program::{Workplace, assert_success, routing_records, stderr, stdout};
use crate::rank_failures::{end_by, under_way};
use crate::ranks::{CONSTANT, assert_same_losses, launchers, process_command};

/// Four layers, and microbatches enough for every schedule.
const DEEP: [&str; 4] = ["--set", "model.num_layers=4", "--set", "train.grad_accumulation=4"];

#[test]
fn stages_make_the_losses_of_one_rank() {
    let work = Workplace::new();
    let settings = [&CONSTANT[..], &DEEP, &["--set", "train.eval_every=3", "--set", "train.sample_every=4"]].concat();
    let train = |run: &str, more: &[&str]| assert_success(&work.train(run, 6, &[&settings, more].concat()));
    train("one", &[]);
    for (run, more) in [
        ("pp2", &["--pp", "2"][..]),
        ("dualpipe", &["--pp", "2", "--set", "parallel.schedule=dualpipe"]),
        ("zb-v", &["--pp", "2", "--set", "parallel.schedule=zb_v"]),
        ("pp4", &["--pp", "4", "--set", "parallel.schedule=zb_h1"]),
        ("by-hand", &["--pp", "2", "--set", "parallel.stages=1,3", "--set", "train.checkpoint_layers=true"]),
        ("dp2", &["--pp", "2", "--dp", "2", "--set", "parallel.schedule=dualpipe_v", "--set", "parallel.zero=1"]),
        ("ep2", &["--pp", "2", "--ep", "2", "--set", "parallel.schedule=interleaved_overlap"]),
        ("tp2", &["--pp", "2", "--tp", "2"]),
        ("zero-2", &["--pp", "2", "--dp", "2", "--set", "parallel.schedule=zb_h1", "--set", "parallel.zero=2"]),
        ("stage-ep", &["--pp", "2", "--dp", "2", "--set", "parallel.stages=3,1", "--set", "parallel.stage_ep=1,2"]),
        ("zero-3", &["--pp", "2", "--ep", "2", "--set", "parallel.schedule=zb_v", "--set", "parallel.zero=3"]),
    ] {
        train(run, more);
        assert_same_losses(&work, run, "one");
        let (records, one) = (routing_records(&work.path(run)), routing_records(&work.path("one")));
        for (record, one) in records.iter().zip(&one) {
            assert_eq!(record["moe/layer_1/max_over_mean"], one["moe/layer_1/max_over_mean"], "{run}");
        }
        for file in ["samples.jsonl", "checkpoints/step-00000006/routing.safetensors"] {
            let read = |run: &str| fs::read(work.path(run).join(file)).expect("what ranks found together");
            assert_eq!(read(run), read("one"), "{run}: {file}");
        }
    }
}

#[test]
fn a_checkpoint_goes_from_stages_to_one_rank_and_back() {
    let work = Workplace::new();
    let settings = [&CONSTANT[..], &DEEP].concat();
    assert_success(&work.train("whole", 8, &settings));
    assert_success(&work.train("moved", 2, &[&settings[..], &["--pp", "2"]].concat()));
    for (steps, more) in [
        ("4", &["--pp", "1"][..]),
        ("5", &["--pp", "4", "--set", "parallel.schedule=zb_h2"]),
        ("6", &["--pp", "2", "--dp", "2", "--set", "parallel.schedule=dualpipe", "--set", "parallel.zero=1"]),
        (
            "7",
            &[
                "--pp",
                "2",
                "--set",
                "parallel.schedule=1f1b",
                "--set",
                "parallel.stage_ep=2,1",
                "--set",
                "parallel.zero=0",
            ],
        ),
        ("8", &["--dp", "1", "--ep", "2", "--set", "parallel.stage_ep=", "--set", "parallel.zero=3"]),
    ] {
        assert_success(&work.run(&[&["train", "--resume", "moved", "--steps", steps][..], more].concat()));
    }
    assert_same_losses(&work, "moved", "whole");
    assert_success(&work.run(&["generate", "moved", "--max-tokens", "3"]));
}

#[test]
fn a_schedule_that_simulate_writes_is_trained_by() {
    let work = Workplace::new();
    let written =
        work.run(&["simulate", "--schedule", "zb_2p", "--pp", "2", "--microbatches", "4", "--text", "mine.txt"]);
    assert_success(&written);
    let settings = [&CONSTANT[..], &DEEP].concat();
    assert_success(&work.train("one", 3, &settings));
    let more = ["--pp", "2", "--set", "parallel.schedule=mine.txt", "--trace", "trace.json"];
    assert_success(&work.train("mine", 3, &[&settings[..], &more].concat()));
    assert_same_losses(&work, "mine", "one");
    let text = fs::read_to_string(work.path("trace.json")).expect("the trace");
    let trace: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let events = trace["traceEvents"].as_array().expect("events");
    for (rank, name) in [0, 1].into_iter().flat_map(|rank| ["F", "B", "W"].map(|name| (rank, name))) {
        let is_it = |event: &&serde_json::Value| event["pid"] == rank && event["name"] == name;
        assert_eq!(events.iter().filter(is_it).count(), 12, "rank {rank}: {name} of 3 steps of 4 microbatches");
    }
}

#[test]
fn pipelines_that_cannot_be_are_named() {
    let work = Workplace::new();
    let train = |more: &[&str], parts: &[&str]| {
        let deep = [&["train", "--data", "text.txt"][..], &DEEP].concat();
        refused(&work, &[&deep[..], more].concat(), parts);
    };
    let schedule = |name: &str| format!("parallel.schedule={name}");
    train(&["--pp", "0"], &["parallel.pp = 0", "from 1 to 4096"]);
    train(&["--pp", "5"], &["parallel.pp = 5", "model.num_layers, 4"]);
    train(&["--pp", "4", "--set", &schedule("interleaved")], &["parallel.pp = 4", "8 stages", "interleaved"]);
    train(&["--pp", "2", "--set", &schedule("2f2b")], &["parallel.schedule", "2f2b", "1f1b", "path of a file"]);
    train(&["--pp", "2", "--set", &schedule("none.txt")], &["parallel.schedule", "none.txt", "cannot be read"]);
    let few = ["--pp", "4", "--set", &schedule("dualpipe")];
    train(&few, &["dualpipe", "microbatches = 4", "at least 8", "train.grad_accumulation"]);
    for (stages, part) in
        [("1,2", "model.num_layers, 4"), ("4,0", "at least 1"), ("1,1,2", "as many stages"), ("a", "commas")]
    {
        train(&["--pp", "2", "--set", &format!("parallel.stages={stages}")], &["parallel.stages", part]);
    }
    let four = "schedule s\nmicrobatches 0..1: stages on ranks 0 1\nrank 0: 0F0, 0BW0\nrank 1: 1F0, 1BW0\n";
    let file = work.file("one.schedule", four);
    train(
        &["--pp", "2", "--set", &schedule(&file)],
        &["one.schedule", "1 microbatches", "train.grad_accumulation is 4"],
    );
    let stuck = four.replace("1F0, 1BW0", "1BW0, 1F0");
    let file = work.file("stuck.schedule", &stuck);
    let one = ["--pp", "2", "--set", &schedule(&file), "--set", "train.grad_accumulation=1"];
    train(&one, &["stuck.schedule", "rank 1"]);
    let idle = "schedule s\nmicrobatches 0..1: stages on ranks 0 0\nrank 0: 0F0, 1F0, 1BW0, 0BW0\nrank 1:\n";
    let file = work.file("idle.schedule", idle);
    let one = ["--pp", "2", "--set", &schedule(&file), "--set", "train.grad_accumulation=1"];
    train(&one, &["idle.schedule", "rank 1 holds no stage"]);
    for (stage_ep, part) in [("2", "parallel.pp, 2, numbers"), ("1,3", "divide"), ("1,a", "commas"), ("0,1", "divide")]
    {
        let set = format!("parallel.stage_ep={stage_ep}");
        train(&["--pp", "2", "--dp", "2", "--set", &set], &["parallel.stage_ep", part]);
    }
    train(&["--set", "parallel.stage_ep=1"], &["parallel.stage_ep", "parallel.pp above 1"]);
    let copies = ["--pp", "2", "--set", "parallel.schedule=dualpipe", "--set", "parallel.zero=2"];
    train(&copies, &["parallel.zero = 2", "must be 0 or 1", "two copies"]);
    train(&["--pp", "2", "--set", "parallel.moving=auto"], &["parallel.moving", "tokens"]);
    train(&["--pp", "2", "--dp", "9"], &["train.batch_size", "at least 9"]);
    assert!(!work.path("runs").exists());
}

#[test]
fn processes_carry_a_pipeline_out() {
    let settings = [&CONSTANT[..], &DEEP, &["--set", "train.threads=1"]].concat();
    for (mpirun, _) in launchers() {
        let work = Workplace::new();
        assert_success(&work.train("one", 3, &settings));
        for (run, num_ranks, more) in [
            ("pp2", 2, &["--pp", "2", "--set", "parallel.schedule=zb_h1"][..]),
            ("dualpipe", 4, &["--pp", "2", "--dp", "2", "--set", "parallel.schedule=dualpipe"]),
            ("overlap", 4, &["--pp", "2", "--ep", "2", "--set", "parallel.schedule=1f1b_overlap"]),
        ] {
            let train = work.train_command(run, 3, &[&settings[..], more].concat());
            let output = process_command(&mpirun, num_ranks, &train).output().expect("mpirun runs");
            assert_success(&output);
            assert_same_losses(&work, run, "one");
            assert_eq!(stderr(&output).matches("Done:").count(), 1, "one rank speaks\n{}", stdout(&output));
        }
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_process_that_is_killed_in_a_schedule_is_named_by_the_others() {
    for (mpirun, _) in launchers() {
        let work = Workplace::new();
        let layout = ["--pp", "3", "--set", "model.num_layers=3", "--set", "train.grad_accumulation=4"];
        let said = end_by(&work, under_way(&work, &mpirun, &layout), "-KILL");
        assert!(said.contains("rank 2"), "{said}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_process_that_is_frozen_in_a_schedule_is_named_by_the_others() {
    for (mpirun, _) in launchers() {
        let work = Workplace::new();
        let layout = ["--pp", "3", "--set", "model.num_layers=3", "--set", "train.grad_accumulation=4"];
        let run = under_way(&work, &mpirun, &[&layout[..], &["--set", "parallel.timeout_s=4"]].concat());
        let said = end_by(&work, run, "-STOP");
        assert!(said.contains("rank 2 hung: nothing from it for"), "{said}");
    }
}

#[test]
fn bf16_trains_over_stages() {
    let work = Workplace::new();
    let settings = [&DEEP[..], &["--set", "train.precision=bf16", "--set", "train.lr=1e-2"]].concat();
    let more = ["--pp", "2", "--set", "parallel.schedule=zb_v", "--dp", "2", "--set", "parallel.zero=1"];
    assert_success(&work.train("run", 20, &[&settings[..], &more].concat()));
    let losses = crate::program::losses(&work.path("run"));
    let loss = |place: usize| losses[place].1.parse::<f64>().expect("a number");
    assert!(loss(19) < 0.8 * loss(0), "{losses:?}");
}
