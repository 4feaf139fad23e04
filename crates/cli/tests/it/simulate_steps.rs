//! `moeworks simulate` with a model and a cluster.

use std::fs;

use serde_json::Value;

use crate::bad_input::refused;
use crate::program::{Workplace, assert_success};

const STEP: [&str; 10] =
    ["--schedule", "zb_h1", "--pp", "4", "--microbatches", "8", "--model", "mixtral-8x22b", "--cluster", "h100"];

fn json(work: &Workplace, args: &[&str]) -> Value {
    let output = work.run(&[&["simulate", "--json"], args].concat());
    assert_success(&output);
    serde_json::from_slice(&output.stdout).expect("JSON")
}

fn text(work: &Workplace, args: &[&str]) -> String {
    let output = work.run(&[&["simulate"], args].concat());
    assert_success(&output);
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn text_and_json_of_a_step_say_the_same() {
    let work = Workplace::new();
    let args = [&STEP[..], &["--ep", "8", "--dp", "2", "--skew", "1.5"]].concat();
    let (shown, value) = (text(&work, &args), json(&work, &args));
    let percent = |key: &str| format!("{:.1}%", 100.0 * value[key].as_f64().expect("a number"));
    let parts = [
        "mixtral-8x22b on h100: 64 ranks, dp 2 ep 8 tp 1 pp 4; zb_h1: 4 stages, 8 microbatches of 4,096".to_owned(),
        format!("bubble {}, communication hidden {}", percent("bubble"), percent("communication_hidden")),
        format!("{} of the devices' peak of bf16", percent("mfu")),
        format!("peak memory {:.2} GB a rank", value["peak_memory_bytes"].as_f64().expect("bytes") / 1e9),
        if value["fits"] == true { "fits in 80.00 GB" } else { "does not fit in 80.00 GB" }.to_owned(),
    ];
    for part in parts {
        assert!(shown.contains(&part), "{part}: {shown}");
    }
    assert_eq!(value["tokens"], 64 / 4 * 8 * 4096);
    let rate = value["tokens"].as_f64().unwrap() / value["step_s"].as_f64().unwrap();
    assert!((rate / value["tokens_per_s"].as_f64().unwrap() - 1.0).abs() < 1e-12);
    for level in value["levels"].as_array().expect("levels") {
        let bytes = |key: &str| level[key].as_f64().expect("bytes");
        assert!((bytes("sent_bytes") - bytes("received_bytes")).abs() <= 1e-9 * bytes("sent_bytes"), "{level}");
        assert!(level["busiest_link"]["most"].as_f64() <= Some(1.0 + 1e-9), "{level}");
    }
}

#[test]
fn ranks_of_a_tensor_parallel_group_share_a_sequence() {
    let work = Workplace::new();
    let [whole, cut] = [["--ep", "8", "--tp", "1"], ["--ep", "4", "--tp", "2"]].map(|layout| {
        let value = json(&work, &[&STEP[..], &layout].concat());
        (value["num_ranks"].as_u64().unwrap(), value["tokens"].as_u64().unwrap())
    });
    assert_eq!(whole, (32, 8 * 8 * 4096));
    assert_eq!(cut, (32, 4 * 8 * 4096), "as many sequences as groups");
}

#[test]
fn fp8_is_compared_with_the_peak_of_bf16_as_a_plan_is() {
    let work = Workplace::new();
    let value = json(&work, &[&STEP[..], &["--ep", "8", "--precision", "fp8"]].concat());
    let number = |key: &str| value[key].as_f64().unwrap();
    // 242.18 GFLOP of a token (the planner prints it), and 989.5 TFLOP/s of an H100 in bf16.
    let expected = number("tokens_per_s_per_rank") * 242.18e9 / 989.5e12;
    assert!((number("mfu") / expected - 1.0).abs() < 1e-3, "{} for {expected}", number("mfu"));
}

#[test]
fn a_step_is_drawn_traced_written_and_read_again() {
    let work = Workplace::new();
    let paths = ["step.svg", "step.json", "step.txt"].map(|name| work.path(name).display().to_string());
    let [svg, trace, schedule] = &paths;
    let args = [&STEP[..], &["--ep", "8", "--svg", svg, "--trace", trace, "--text", schedule]].concat();
    text(&work, &args);
    assert!(fs::read_to_string(svg).expect("a picture").contains("dispatch"));
    let events: Value = serde_json::from_str(&fs::read_to_string(trace).expect("a trace")).expect("JSON");
    let events = events["traceEvents"].as_array().expect("events");
    let count = |phase: &str| events.iter().filter(|event| event["ph"] == phase).count();
    assert_eq!((count("M"), count("b")), (4, count("e")));
    // Four all-to-alls of 56 layers and 8 microbatches, and messages between four ranks both ways.
    assert_eq!(count("b"), 4 * 56 * 8 + 2 * 3 * 8);
    let last = events
        .iter()
        .filter(|event| event["name"] != "sum of gradients")
        .filter_map(|event| Some(event["ts"].as_f64()? + event["dur"].as_f64()?))
        .fold(0.0, f64::max);
    let of_file = ["--schedule", schedule, "--model", "mixtral-8x22b", "--cluster", "h100", "--ep", "8"];
    let (named, read) = (json(&work, &[&STEP[..], &["--ep", "8"]].concat()), json(&work, &of_file));
    assert_eq!(named["step_s"], read["step_s"]);
    assert!((last / 1e6 / named["makespan"].as_f64().unwrap() - 1.0).abs() < 1e-9);
    text(&work, &args); // its own files are written again
    let foreign = work.file("foreign.json", "{}");
    refused(
        &work,
        &[&["simulate"], &STEP[..], &["--trace", &foreign]].concat(),
        &["--trace", "foreign.json", "--force"],
    );
}

#[test]
fn given_times_have_a_trace_too() {
    let work = Workplace::new();
    let trace = work.path("trace.json").display().to_string();
    text(&work, &["--schedule", "1f1b", "--pp", "1", "--microbatches", "1", "--trace", &trace]);
    let events: Value = serde_json::from_str(&fs::read_to_string(&trace).expect("a trace")).expect("JSON");
    let durations: Vec<_> =
        events["traceEvents"].as_array().expect("events").iter().filter_map(|of| of["dur"].as_f64()).collect();
    assert_eq!(durations, [1000.0, 2000.0]);
    let held: Vec<f64> =
        events["traceEvents"].as_array().expect("events").iter().filter_map(|of| of["args"]["held"].as_f64()).collect();
    assert_eq!(held, [1.0, 0.0], "memory over time");
}

#[test]
fn bundled_models_and_clusters_are_listed() {
    let shown = text(&Workplace::new(), &["--list"]);
    for name in ["switch-c", "deepseek-v3", "swinv2-moe-3b", "a100-ndm-v4", "gb200", "1000-datacentres", "optical"] {
        assert!(shown.lines().any(|line| line.trim_start().starts_with(name)), "{name}: {shown}");
    }
}

#[test]
fn models_and_clusters_are_read_from_files() {
    let work = Workplace::new();
    let model = work.file(
        "model.toml",
        "width = 64\nvocabulary = 256\nsequence = 128\n[[layers]]\nnum = 2\nattention = { heads = 4, head_dim = 16 }\n\
         experts = { num = 4, top_k = 1, width = 64 }\n",
    );
    let cluster = work.file(
        "cluster.toml",
        "num_nodes = 1\nranks_per_node = 4\nrank = { flops = 1e12, memory_bytes = 16e9, memory_bytes_per_s = 50e9 }\n\
         node_link = { latency_s = 0.0, bytes_per_s = 1e9 }\ncluster_link = { latency_s = 0.0, bytes_per_s = 1e9 }\n",
    );
    let step = ["--schedule", "1f1b", "--pp", "2", "--microbatches", "3", "--model", &model, "--cluster", &cluster];
    let value = json(&work, &[&step[..], &["--ep", "2"]].concat());
    assert_eq!((value["num_ranks"].as_u64(), value["tokens"].as_u64()), (Some(4), Some(2 * 3 * 128)));
    let args = [&["simulate"], &step[..], &["--ep", "4"]].concat();
    refused(&work, &args, &["ranks", "= 8", "cluster topology has 4"]);
    let broken = work.file("broken.toml", "name = 3\n");
    refused(
        &work,
        &[
            "simulate",
            "--schedule",
            "1f1b",
            "--pp",
            "1",
            "--microbatches",
            "1",
            "--model",
            &broken,
            "--cluster",
            &cluster,
        ],
        &["broken.toml", "line 1"],
    );
    refused(
        &work,
        &[
            "simulate",
            "--schedule",
            "1f1b",
            "--pp",
            "1",
            "--microbatches",
            "1",
            "--model",
            &model,
            "--cluster",
            &broken,
        ],
        &["broken.toml", "line 1"],
    );
}

#[test]
fn what_is_wrong_with_a_step_is_said_on_a_line() {
    let work = Workplace::new();
    let refuse = |args: &[&str], parts: &[&str]| refused(&work, &[&["simulate"], args].concat(), parts);
    let with = |more: &[&str], parts: &[&str]| refuse(&[&STEP[..], more].concat(), parts);
    refuse(
        &["--schedule", "1f1b", "--model", "gpt-9", "--cluster", "h100"],
        &["--model", "gpt-9", "deepseek-v3", "or a file"],
    );
    refuse(
        &["--schedule", "1f1b", "--model", "deepseek-v3", "--cluster", "h9"],
        &["--cluster", "h9", "gb200", "or a file"],
    );
    refuse(&["--schedule", "1f1b", "--pp", "2", "--microbatches", "2", "--model", "deepseek-v3"], &["--cluster"]);
    refuse(&["--schedule", "1f1b", "--pp", "2", "--microbatches", "2", "--ep", "2"], &["--model"]);
    refuse(
        &["--schedule", "1f1b", "--microbatches", "2", "--model", "deepseek-v3", "--cluster", "h100"],
        &["needs --pp"],
    );
    refuse(
        &["--schedule", "1f1b", "--pp", "2", "--model", "deepseek-v3", "--cluster", "h100"],
        &["needs --microbatches"],
    );
    refuse(&["--pp", "2"], &["--schedule"]);
    with(&["--times", "1,1,1"], &["--times", "--model"]);
    refuse(
        &["--schedule", "1f1b", "--pp", "0", "--microbatches", "2", "--model", "mixtral-8x22b", "--cluster", "h100"],
        &["pp = 0"],
    );
    with(&["--ep", "16"], &["ep = 16", "8 experts of mixtral-8x22b"]);
    with(&["--ep", "0"], &["ep = 0", "from 1"]);
    with(&["--tp", "16"], &["tp = 16", "at most 8 ranks"]);
    with(&["--zero", "4"], &["zero = 4", "from 0 to 3"]);
    with(&["--skew", "9"], &["--skew 9", "from 1 to 8"]);
    with(&["--skew", "nan"], &["--skew"]);
    with(&["--tokens", "0"], &["tokens = 0"]);
    with(&["--sequence", "0"], &["--sequence = 0"]);
    with(&["--ep", "8", "--domain", "3"], &["domain = 3", "divide"]);
    with(&["--dp", "99999999999"], &["dp"]);
    with(&["--dp", "-1"], &["'-1'", "--dp"]);
    with(&["--skew", "-1"], &["--skew -1", "from 1 to 8"]);
    with(&["--ep", "8", "--chunks", "-2"], &["'-2'", "--chunks"]);
    refuse(
        &["--schedule", "1f1b", "--pp", "57", "--microbatches", "2", "--model", "mixtral-8x22b", "--cluster", "h100"],
        &["stages = 57", "56 layers"],
    );
}
