//! Training on several ranks: threads of one process, and processes of `mpirun` if it is installed.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::{env, fs};

use crate::bad_input::refused;
use crate::program::{Workplace, assert_success, losses, routing_records, stderr};

/// The relative tolerance of a loss.
const TOLERANCE: f64 = 1e-5;

/// Settings with which a step does not depend on the total number of steps.
pub(crate) const CONSTANT: [&str; 4] = ["--set", "train.schedule=constant", "--set", "model.jitter=0.01"];

fn numbers(work: &Workplace, run: &str) -> Vec<(u64, f64)> {
    losses(&work.path(run)).into_iter().map(|(step, loss)| (step, loss.parse().expect("a number"))).collect()
}

pub(crate) fn assert_same_losses(work: &Workplace, run: &str, expected: &str) {
    let (losses, expected) = (numbers(work, run), numbers(work, expected));
    assert_eq!(losses.len(), expected.len());
    for ((step, loss), (_, expected)) in losses.into_iter().zip(expected) {
        assert!((loss - expected).abs() <= TOLERANCE * expected, "{run}, step {step}: {loss}, not {expected}");
    }
}

#[test]
fn ranks_make_the_losses_of_one() {
    let work = Workplace::new();
    let settings = [&CONSTANT[..], &["--set", "train.eval_every=3", "--set", "train.sample_every=4"]].concat();
    let file = work.file("some.placement", "placement experts=4 ranks=3\n0: 2\n1: 0 2\n2: *\n3: 0\n");
    let placement = format!("parallel.placement={file}");
    let text = "placement experts=4 ranks=2\nlayer 0:\n0: 1\n1: 0\n2: 0\n3: 1\nlayer 1:\n0: 0\n1: 1\n2: 1\n3: 1\n";
    let of_layers = format!("parallel.placement={}", work.file("layers.placement", text));
    let train = |run: &str, more: &[&str]| assert_success(&work.train(run, 6, &[&settings, more].concat()));
    train("one", &[]);
    for (run, more) in [
        ("ep4", &["--ep", "4"][..]),
        ("ep3", &["--ep", "3", "--set", "train.batch_size=2"]),
        ("dp2-ep2", &["--dp", "2", "--ep", "2", "--set", "parallel.apart=true"]),
        ("dp3", &["--dp", "3"]),
        ("everywhere", &["--ep", "3", "--set", "parallel.placement=everywhere"]),
        ("placed", &["--ep", "3", "--dp", "2", "--set", &placement]),
        ("placed-layers", &["--ep", "2", "--set", &of_layers]),
        ("placed-zero", &["--dp", "2", "--ep", "2", "--set", &of_layers, "--set", "parallel.zero=3"]),
        ("zero-1", &["--dp", "2", "--ep", "2", "--set", "parallel.zero=1"]),
        ("zero-2", &["--dp", "2", "--ep", "2", "--set", "parallel.zero=2"]),
        ("zero-3", &["--dp", "2", "--ep", "2", "--set", "parallel.zero=3", "--set", "parallel.moving=auto"]),
        ("hops", &["--ep", "4", "--no-pin", "--set", "parallel.all_to_all=two_hop", "--set", "parallel.chunks=3"]),
        ("weights", &["--ep", "2", "--dp", "2", "--set", "parallel.moving=weights"]),
        ("tp2", &["--tp", "2", "--ep", "2", "--trace", "tp2.json"]),
        ("tp2-zero", &["--tp", "2", "--dp", "3", "--set", "parallel.zero=1"]),
        (
            "tp2-zero-3",
            &["--tp", "2", "--dp", "3", "--set", "parallel.zero=3", "--set", "train.checkpoint_layers=true"],
        ),
        ("cheapest", &["--ep", "4", "--set", "parallel.moving=auto", "--set", "parallel.chunks=0"]),
    ] {
        train(run, more);
        assert_same_losses(&work, run, "one");
        let (records, one) = (routing_records(&work.path(run)), routing_records(&work.path("one")));
        for (record, one) in records.iter().zip(&one) {
            assert_eq!(record["moe/layer_1/max_over_mean"], one["moe/layer_1/max_over_mean"], "{run}");
        }
        for file in ["config.toml", "metrics.csv", "report.html"] {
            assert!(work.path(run).join(file).exists(), "{run}: {file}");
        }
        for file in ["samples.jsonl", "checkpoints/step-00000006/routing.safetensors"] {
            let read = |run: &str| fs::read(work.path(run).join(file)).expect("what ranks found together");
            assert_eq!(read(run), read("one"), "{run}: {file}");
        }
    }
}

#[test]
fn a_checkpoint_of_any_layout_goes_on_in_any_other() {
    let work = Workplace::new();
    assert_success(&work.train("whole", 8, &CONSTANT));
    assert_success(&work.train("moved", 2, &[&CONSTANT[..], &["--ep", "4"]].concat()));
    let sharded = ["--steps", "3", "--tp", "2", "--dp", "2", "--ep", "1", "--set", "parallel.zero=2"];
    assert_success(&work.run(&[&["train", "--resume", "moved"][..], &sharded].concat()));
    for (steps, more) in [
        ("4", ["--tp", "2", "--ep", "3", "--set", "parallel.zero=3"]),
        ("6", ["--tp", "1", "--dp", "1", "--set", "parallel.zero=0"]),
        ("7", ["--ep", "1", "--dp", "5", "--set", "parallel.zero=3"]),
        ("8", ["--ep", "4", "--dp", "1", "--set", "parallel.zero=0"]),
    ] {
        let output = work.run(&[&["train", "--resume", "moved", "--steps", steps][..], &more].concat());
        assert_success(&output);
    }
    assert_same_losses(&work, "moved", "whole");
    // The model folder that ranks wrote can be used like any other.
    assert_success(&work.run(&["generate", "moved", "--max-tokens", "3"]));
}

#[test]
fn gradients_that_ranks_share_add_up_over_micro_batches() {
    let work = Workplace::new();
    let settings = [&CONSTANT[..], &["--set", "train.grad_accumulation=3"]].concat();
    assert_success(&work.train("one", 4, &settings));
    for zero in ["2", "3"] {
        let sharded = ["--dp", "3", "--set", &format!("parallel.zero={zero}")];
        assert_success(&work.train(zero, 4, &[&settings[..], &sharded].concat()));
        assert_same_losses(&work, zero, "one");
    }
}

/// Trains two steps on four ranks with a model whose parameters are nearly all in layers. Returns the peak memory of
/// rank 0 in bytes up to the end of each step.
fn peaks(work: &Workplace, run: &str, more: &[&str]) -> Vec<f64> {
    let model = ["--set", "model.num_layers=12", "--set", "model.expert_width=96", "--dp", "4"];
    assert_success(&work.train(run, 2, &[&model[..], more].concat()));
    let records = fs::read_to_string(work.path(run).join("metrics.jsonl")).expect("records");
    let peak = |line: &str| {
        let record: serde_json::Value = serde_json::from_str(line).expect("JSON");
        record["perf/memory_peak_bytes"].as_f64().expect("a number")
    };
    records.lines().map(peak).collect()
}

#[test]
fn what_ranks_share_out_is_memory_saved() {
    let work = Workplace::new();
    let peaks = [0, 1, 2, 3].map(|zero| {
        let setting = format!("parallel.zero={zero}");
        peaks(&work, &format!("zero-{zero}"), &["--set", &setting])[0]
    });
    assert!(peaks.windows(2).all(|pair| pair[1] < 0.9 * pair[0]), "{peaks:?}");
}

#[test]
fn a_checkpoint_needs_no_more_memory_on_the_root_than_a_step() {
    let work = Workplace::new();
    let settings = ["--set", "parallel.zero=3", "--set", "train.checkpoint_every=1"];
    let peaks = peaks(&work, "run", &settings);
    assert!(peaks[1] < 1.05 * peaks[0], "the first checkpoint lies between these: {peaks:?}");
}

#[test]
fn bf16_and_accumulated_batches_train_on_ranks() {
    let work = Workplace::new();
    let settings = ["--set", "train.precision=bf16", "--set", "train.grad_accumulation=2", "--set", "train.lr=1e-2"];
    assert_success(&work.train("run", 30, &[&settings[..], &["--ep", "2", "--tp", "2"]].concat()));
    let losses = numbers(&work, "run");
    assert!(losses[29].1 < 0.8 * losses[0].1, "{losses:?}");
}

#[test]
fn ranks_tell_what_they_did() {
    let work = Workplace::new();
    assert_success(&work.train("run", 3, &["--ep", "2", "--trace", "trace.json"]));
    let text = fs::read_to_string(work.path("trace.json")).expect("the trace");
    let trace: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let events = trace["traceEvents"].as_array().expect("events");
    let phases = ["data", "router", "dispatch", "experts", "combine", "all-to-all", "all-reduce", "optimizer"];
    for (rank, name) in [0, 1].into_iter().flat_map(|rank| phases.map(|name| (rank, name))) {
        let is_it = |event: &&serde_json::Value| event["pid"] == rank && event["name"] == name;
        let spans = events.iter().filter(is_it).count();
        assert!(spans >= 3, "{spans} spans of rank {rank}: {name}");
    }
    let records = fs::read_to_string(work.path("run").join("metrics.jsonl")).expect("records");
    for line in records.lines() {
        let record: serde_json::Value = serde_json::from_str(line).expect("JSON");
        let of_ranks = |name: &str| record[format!("ranks/{name}")].as_array().map(Vec::len);
        assert_eq!((of_ranks("work_ms"), of_ranks("node_bytes")), (Some(2), Some(2)), "{line}");
        assert!(record["ranks/node_mb"].as_f64() > Some(0.0) && record["ranks/cluster_mb"] == 0, "{line}");
        assert!(record["ranks/imbalance"].as_f64() >= Some(1.0), "{line}");
    }
    refused(&work, &["train", "--data", "text.txt", "--trace", "trace.json"], &["--trace", "--ep"]);
    let of_tp2 = fs::read_to_string(work.path("run").join("metrics.jsonl")).expect("records");
    assert!(of_tp2.contains("\"ranks/tensor_bytes\":[0,0]"), "no matrix is cut");
}

#[test]
fn tokens_train_in_every_form_on_the_wire() {
    let work = Workplace::new();
    assert_success(&work.train("f32", 8, &CONSTANT));
    for wire in ["bf16", "f16", "int8", "topk:0.5"] {
        let setting = format!("parallel.wire={wire}");
        let wire = wire.replace(':', "-");
        assert_success(&work.train(&wire, 8, &[&CONSTANT[..], &["--ep", "2", "--set", &setting]].concat()));
        for ((step, loss), (_, expected)) in numbers(&work, &wire).into_iter().zip(numbers(&work, "f32")) {
            assert!((loss - expected).abs() < 0.02 * expected, "{wire}, step {step}: {loss}, not {expected}");
        }
    }
}

/// Builds a placement file of eight experts on two ranks, with a section for each of `layers`.
fn layers(layers: &[usize]) -> String {
    let experts: String = (0..8).map(|expert| format!("{expert}: {}\n", expert % 2)).collect();
    let sections = layers.iter().map(|layer| format!("layer {layer}:\n{experts}"));
    format!("placement experts=8 ranks=2\n{}", sections.collect::<String>()).replace("3: 1", "3: 0")
}

#[test]
fn layouts_that_cannot_be_are_named() {
    let work = Workplace::new();
    let train = |more: &[&str], parts: &[&str]| {
        refused(&work, &[&["train", "--data", "text.txt"][..], more].concat(), parts);
    };
    train(&["--ep", "0"], &["parallel.ep = 0", "from 1 to 4096"]);
    train(&["--ep", "100", "--dp", "100"], &["parallel.dp = 100", "4096"]);
    train(&["--ep", "2", "--set", "model.num_experts=0"], &["parallel.ep = 2", "no experts"]);
    train(&["--ep", "2", "--data", "missing.txt"], &["missing.txt"]);
    let file = work.file("two.placement", "placement experts=2 ranks=2\n0: 0\n1: 1\n");
    let placement = format!("parallel.placement={file}");
    train(&["--ep", "2", "--set", &placement], &["two.placement", "2 experts", "num_experts is 8"]);
    let broken = work.file("broken.placement", "placement experts=8 ranks=2\n0: 2\n");
    let placement = format!("parallel.placement={broken}");
    train(&["--ep", "2", "--set", &placement], &["broken.placement", "line 2"]);
    train(&["--tp", "0"], &["parallel.tp = 0", "from 1 to 4096"]);
    train(&["--tp", "100"], &["model.num_heads", "at least parallel.tp, 100"]);
    train(&["--ep", "2", "--set", "parallel.chunks=65"], &["parallel.chunks = 65", "from 0 to 64"]);
    train(&["--ep", "2", "--set", "parallel.wire=int4"], &["parallel.wire", "int4"]);
    train(&["--ep", "2", "--set", "parallel.wire=topk:2"], &["parallel.wire", "topk:2", "topk:0.25"]);
    let measured = work.file("topology.toml", "num_nodes = 1\nranks_per_node = 0\n");
    train(&["--ep", "2", "--set", &format!("parallel.topology={measured}")], &["topology.toml"]);
    fs::remove_file(measured).expect("it is there");
    for (name, text, parts) in [
        ("replicas", "placement experts=8 ranks=2\nlayer 0:\n0: *\n", ["line 3", "ends after 1 of 8 experts"]),
        ("missing", &layers(&[0]), ["layer 1:", "each layer with experts must have one"]),
        ("more", &layers(&[0, 1, 2, 3, 4]), ["layer 4", "which has none"]),
    ] {
        let file = work.file(&format!("{name}.placement"), text);
        let placement = format!("parallel.placement={file}");
        train(&["--ep", "2", "--set", "parallel.zero=2", "--set", &placement], &[&[name][..], &parts].concat());
    }
    train(&["--ep", "2", "--set", "parallel.zero=4"], &["parallel.zero = 4", "from 0 to 3"]);
    assert!(!work.path("runs").exists());
}

/// Finds an MPI launcher, with a flag for Open MPI: MPICH's in `.venv-mpi`, where `./test` installs it (tests of
/// `comm` use Open MPI's), or else another. With `MOEWORKS_FULL` it finds the newest of each family, and the one on
/// the path.
pub(crate) fn launchers() -> Vec<(PathBuf, bool)> {
    let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv-mpi");
    let kept = ["mpich", "openmpi"].map(|name| kept.join(name).join("bin/mpirun")).into_iter();
    let path = env::var_os("PATH").unwrap_or_default();
    let on_path = env::split_paths(&path).map(|folder| folder.join("mpirun"));
    let mut found: Vec<PathBuf> = kept.chain(on_path).filter(|program| program.exists()).collect();
    if env::var_os("MOEWORKS_FULL").is_none() {
        found.truncate(1);
    }
    if found.is_empty() {
        println!("SKIPPED: there is no mpirun, neither in .venv-mpi nor on the path");
    }
    let is_open_mpi = |mpirun: &Path| {
        let version = Command::new(mpirun).arg("--version").output().expect("mpirun runs");
        String::from_utf8_lossy(&version.stdout).contains("Open MPI")
    };
    found.into_iter().map(|mpirun| (mpirun.clone(), is_open_mpi(&mpirun))).collect()
}

/// Builds the command that runs `train` with the launcher `mpirun` on `num_ranks` ranks.
pub(crate) fn process_command(mpirun: &Path, num_ranks: usize, train: &Command) -> Command {
    let version = Command::new(mpirun).arg("--version").output().expect("mpirun runs");
    let mut command = Command::new(mpirun);
    if String::from_utf8_lossy(&version.stdout).contains("Open MPI") {
        command.args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]);
    }
    let folders = [mpirun.parent().expect("a folder").to_path_buf()];
    let path = env::var_os("PATH").unwrap_or_default();
    let path = env::join_paths(folders.into_iter().chain(env::split_paths(&path))).expect("folders without colons");
    command.args(["-n", &num_ranks.to_string()]).arg(train.get_program()).args(train.get_args());
    command.envs(train.get_envs().filter_map(|(name, value)| Some((name, value?)))).env("PATH", path);
    command.current_dir(train.get_current_dir().expect("a folder"));
    command
}

/// Runs `train` on four ranks.
fn train_processes(mpirun: &Path, train: &Command) -> Output {
    process_command(mpirun, 4, train).output().expect("mpirun runs")
}

#[test]
fn processes_make_the_losses_of_one() {
    let settings = [&CONSTANT[..], &["--set", "train.threads=1"]].concat();
    for (mpirun, _) in launchers() {
        let work = Workplace::new();
        assert_success(&work.train("one", 4, &settings));
        for (run, more) in [
            ("mpi", &["--ep", "2", "--dp", "2"][..]),
            ("chunks", &["--ep", "4", "--set", "parallel.chunks=2", "--set", "parallel.moving=auto"]),
            ("slices", &["--tp", "2", "--ep", "2"]),
        ] {
            let output = train_processes(&mpirun, &work.train_command(run, 4, &[&settings[..], more].concat()));
            assert_success(&output);
            assert_same_losses(&work, run, "one");
            assert_eq!(stderr(&output).matches("Done:").count(), 1, "one rank speaks");
        }
        // The number of ranks differs from the settings.
        let output =
            train_processes(&mpirun, &work.train_command("three", 4, &[&settings[..], &["--ep", "3"]].concat()));
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        assert!(stderr(&output).contains("is 3 ranks, but there are 4"), "{}", stderr(&output));
    }
}
