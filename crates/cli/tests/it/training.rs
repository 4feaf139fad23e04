//! A run from start to end, and its interruptions.

use std::fs;
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::program::{Workplace, assert_success, losses, routing_records, state, stderr, stdout};

#[test]
fn a_run_learns_and_leaves_a_model_a_report_and_records() {
    let work = Workplace::new();
    let output = work.train("run", 60, &["--set", "train.lr=1e-2", "--set", "train.sample_every=20"]);
    assert_success(&output);
    assert!(stdout(&output).is_empty(), "training prints nothing to standard output");
    let losses: Vec<f64> = losses(&work.path("run")).iter().map(|(_, loss)| loss.parse().expect("a number")).collect();
    assert!(losses[59] < 0.6 * losses[0], "{losses:?}");
    for file in ["config.toml", "metrics.jsonl", "metrics.csv", "report.html", "checkpoints"] {
        assert!(work.path("run").join(file).exists(), "{file}");
    }
    let shown = stderr(&output);
    for part in ["step 60/60", "Checkpoint:", "Report:", "moeworks generate run"] {
        assert!(shown.contains(part), "{part} in\n{shown}");
    }
}

#[test]
fn a_resumed_run_makes_the_same_losses_and_weights() {
    for precision in ["f32", "bf16"] {
        let work = Workplace::new();
        let precision = format!("train.precision={precision}");
        let settings = ["--set", &precision, "--set", "model.jitter=0.01", "--set", "train.grad_accumulation=2"];
        assert_success(&work.train("whole", 8, &settings));
        assert_success(&work.train("cut", 8, &settings));
        // The copy is in the state of a run killed in step 8, whose newest checkpoint is that of step 6.
        fs::remove_dir_all(work.path("cut/checkpoints/step-00000008")).expect("removed");
        assert_success(&work.run(&["train", "--resume", "cut"]));
        assert_eq!(losses(&work.path("whole")), losses(&work.path("cut")));
        assert_eq!(state(&work.path("whole"), 8), state(&work.path("cut"), 8));
        assert_eq!(routing_records(&work.path("whole")), routing_records(&work.path("cut")));
    }
}

#[test]
fn what_routers_do_is_recorded() {
    let work = Workplace::new();
    let settings = ["--set", "train.checkpoint_every=4", "--set", "train.eval_every=3"];
    assert_success(&work.train("whole", 12, &settings));
    let records = routing_records(&work.path("whole"));
    let recorded = |name: &str| -> Vec<u64> {
        let has = |record: &&serde_json::Value| record.get(format!("moe/layer_1/{name}")).is_some();
        records.iter().filter(has).map(|record| record["step"].as_u64().expect("a step")).collect()
    };
    let every_step: Vec<u64> = (1..=12).collect();
    for name in ["max_over_mean", "reroute_rate", "mean_prob_entropy", "router_logit_rms", "num_rerouted"] {
        assert_eq!(recorded(name), every_step, "{name}");
    }
    assert_eq!(recorded("specialization"), [3, 6, 9, 12]);
    assert_eq!(recorded("checkpoint_agreement"), [8, 12], "the first checkpoint has none before it");
    let agreement = records[11]["moe/layer_1/checkpoint_agreement"].as_f64().expect("a number");
    assert!((0.0..=1.0).contains(&agreement), "{agreement}");
}

#[cfg(unix)]
#[test]
fn a_checkpoint_that_nobody_planned_changes_no_record_of_what_routers_do() {
    let work = Workplace::new();
    let settings = ["--set", "train.checkpoint_every=20", "--set", "train.eval_every=7"];
    assert_success(&work.train("whole", 120, &settings));
    let output = interrupt(&work, work.train_command("run", 120, &settings), "INT");
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    assert_success(&work.run(&["train", "--resume", "run"]));
    assert_eq!(routing_records(&work.path("whole")), routing_records(&work.path("run")));
}

#[test]
fn the_number_of_threads_does_not_change_a_bit() {
    let work = Workplace::new();
    for threads in ["1", "2", "3"] {
        assert_success(&work.train(threads, 4, &["--set", &format!("train.threads={threads}")]));
    }
    assert_eq!(state(&work.path("1"), 4), state(&work.path("2"), 4));
    assert_eq!(state(&work.path("1"), 4), state(&work.path("3"), 4));
}

#[test]
fn a_run_killed_at_any_moment_goes_on_as_if_it_had_not_been() {
    let work = Workplace::new();
    assert_success(&work.train("whole", 40, &["--set", "train.checkpoint_every=1"]));
    let mut child = work
        .train_command("cut", 40, &["--set", "train.checkpoint_every=1"])
        .stderr(std::process::Stdio::null())
        .spawn()
        .expect("the program starts");
    for kill in 0..8 {
        wait_for_checkpoint(&work);
        // The kill comes at a different moment each time, spread over the length of a step and a save.
        std::thread::sleep(Duration::from_millis(7 + 13 * kill % 60));
        child.kill().expect("killed");
        child.wait().expect("ended");
        child = work
            .command(&["train", "--resume", "cut"])
            .stderr(std::process::Stdio::null())
            .spawn()
            .expect("the program starts");
    }
    assert!(child.wait().expect("ended").success());
    assert_eq!(losses(&work.path("whole")), losses(&work.path("cut")));
    assert_eq!(state(&work.path("whole"), 40), state(&work.path("cut"), 40));
    let leftovers = fs::read_dir(work.path("cut/checkpoints")).expect("checkpoints");
    for entry in leftovers {
        let name = entry.expect("an entry").file_name().to_string_lossy().into_owned();
        assert!(name.starts_with("step-"), "{name} is left over");
    }
}

fn wait_for_checkpoint(work: &Workplace) {
    let start = Instant::now();
    let has_one = || {
        fs::read_dir(work.path("cut/checkpoints")).is_ok_and(|mut entries| {
            entries.any(|entry| entry.is_ok_and(|entry| entry.file_name().to_string_lossy().starts_with("step-")))
        })
    };
    while !has_one() {
        assert!(start.elapsed() < Duration::from_secs(60), "no checkpoint appears");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_a_run_after_its_step_with_a_checkpoint() {
    let work = Workplace::new();
    let child = work.train_command("run", 100_000, &["--set", "train.checkpoint_every=0"]);
    let output = interrupt(&work, child, "INT");
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
    assert!(stderr(&output).contains("moeworks train --resume run"), "{}", stderr(&output));
    let last = losses(&work.path("run")).last().expect("steps").0;
    assert!(!state(&work.path("run"), last).0.is_empty());
}

#[cfg(unix)]
#[test]
fn sigusr1_asks_for_a_checkpoint_and_the_run_goes_on() {
    let work = Workplace::new();
    let mut child = work
        .train_command("run", 100_000, &["--set", "train.checkpoint_every=0"])
        .stderr(std::process::Stdio::null())
        .spawn()
        .expect("the program starts");
    wait_for_steps(&work, 3);
    signal(child.id(), "USR1");
    let start = Instant::now();
    let count = || fs::read_dir(work.path("run/checkpoints")).map_or(0, Iterator::count);
    while count() == 0 {
        assert!(start.elapsed() < Duration::from_secs(60), "no checkpoint appears");
        std::thread::sleep(Duration::from_millis(5));
    }
    let steps = losses(&work.path("run")).len();
    wait_for_steps(&work, steps + 3);
    child.kill().expect("killed");
    child.wait().expect("ended");
}

#[cfg(unix)]
fn interrupt(work: &Workplace, mut command: std::process::Command, name: &str) -> std::process::Output {
    let child = command.stderr(std::process::Stdio::piped()).spawn().expect("the program starts");
    wait_for_steps(work, 3);
    signal(child.id(), name);
    child.wait_with_output().expect("ended")
}

#[cfg(unix)]
fn signal(process: u32, name: &str) {
    let status = std::process::Command::new("kill").args(["-s", name, &process.to_string()]).status();
    assert!(status.expect("kill runs").success());
}

#[cfg(unix)]
fn wait_for_steps(work: &Workplace, steps: usize) {
    let start = Instant::now();
    let count = || fs::read_to_string(work.path("run/metrics.jsonl")).map_or(0, |text| text.lines().count());
    while count() < steps {
        assert!(start.elapsed() < Duration::from_secs(60), "no step is made");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn generation_is_the_same_for_the_same_seed_and_greedy_needs_none() {
    let work = Workplace::new();
    assert_success(&work.train("run", 30, &["--set", "train.lr=1e-2"]));
    let generate = |more: &[&str]| {
        let mut args = vec!["generate", "run", "--prompt", "Line 1", "--max-tokens", "20"];
        args.extend(more);
        let output = work.run(&args);
        assert_success(&output);
        stdout(&output)
    };
    let first = generate(&["--seed", "5"]);
    assert!(first.starts_with("Line 1"), "{first}");
    assert_eq!(first, generate(&["--seed", "5"]));
    assert_eq!(generate(&["--temperature", "0"]), generate(&["--temperature", "0", "--seed", "9"]));
}

#[test]
fn evaluation_inspection_and_estimation_print_their_figures() {
    let work = Workplace::new();
    assert_success(&work.train("run", 4, &[]));
    let evaluation = work.run(&["evaluate", "run", "--data", "text.txt", "--json"]);
    assert_success(&evaluation);
    let value: serde_json::Value = serde_json::from_str(&stdout(&evaluation)).expect("JSON");
    let (loss, bits) = (value["loss"].as_f64().expect("loss"), value["bits_per_byte"].as_f64().expect("bits"));
    assert!((value["perplexity"].as_f64().expect("perplexity") - loss.exp()).abs() < 1e-6);
    // Tokens are bytes here, so that bits per byte equal nats per token over ln 2, except at the end of the text.
    assert!((bits - loss / std::f64::consts::LN_2).abs() < 0.01 * bits, "{value}");
    for args in [&["inspect", "run"][..], &["inspect", "run/checkpoints/step-00000004"]] {
        let output = work.run(args);
        assert_success(&output);
        assert!(stdout(&output).contains("experts") && stdout(&output).contains("int4"), "{}", stdout(&output));
    }
    let estimate = work.run(&["estimate", "--set", "train.seq_len=64", "--set", "model.width=64"]);
    assert_success(&estimate);
    assert!(stdout(&estimate).contains("tokens/s"), "{}", stdout(&estimate));
}

#[test]
fn the_printed_configuration_is_the_configuration() {
    let work = Workplace::new();
    let printed = work.run(&["train", "--print-config", "--preset", "switch-like", "--set", "train.lr=3e-4"]);
    assert_success(&printed);
    let file = work.file("run.toml", printed.stdout.clone());
    let again = work.run(&["train", "--print-config", "--config", &file]);
    assert_eq!(stdout(&printed), stdout(&again));
    assert!(stdout(&printed).contains("lr = 0.0003"));
}

#[test]
fn output_that_nobody_reads_to_its_end_stops_no_command() {
    let work = Workplace::new();
    let mut command = work.command(&["train", "--print-config"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("the program ends");
    assert_eq!(stderr(&output), "");
    assert_success(&output);
}
