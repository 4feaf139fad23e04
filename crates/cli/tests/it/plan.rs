//! `moeworks plan`: layouts on ranks.

use crate::bad_input::refused;
use crate::program::{Workplace, assert_success};

const CLUSTER: &str = "num_nodes = 2\nranks_per_node = 4\n\
    rank = { flops = 1e12, memory_bytes = 16e9, memory_bytes_per_s = 50e9 }\n\
    node_link = { latency_s = 2e-6, bytes_per_s = 10e9 }\n\
    cluster_link = { latency_s = 1e-3, bytes_per_s = 125e6 }\n";

#[test]
fn a_layout_is_proposed_for_a_described_cluster() {
    let work = Workplace::new();
    let cluster = work.file("cluster.toml", CLUSTER);
    let output = work.run(&["plan", "--topology", &cluster]);
    assert_success(&output);
    let text = String::from_utf8(output.stdout).expect("text");
    assert!(text.contains("8 ranks on 2 nodes") && text.contains("Proposed: --dp"), "{text}");

    let output = work.run(&["plan", "--topology", &cluster, "--top", "1"]);
    let short = String::from_utf8(output.stdout).expect("text");
    assert_eq!(short.lines().filter(|line| line.trim_start().starts_with("dp ")).count(), 1, "{short}");

    let output = work.run(&["plan", "--topology", &cluster, "--ranks", "4", "--json"]);
    assert_success(&output);
    let value: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let proposals = value["proposals"].as_array().expect("proposals");
    assert_eq!(proposals.len(), 6, "1, 2 and 4 ranks for the experts, matrices whole or cut");
    for proposal in proposals {
        let size = |name: &str| proposal[name].as_u64().unwrap();
        assert_eq!(size("dp") * size("ep") * size("tp"), 4);
        assert_eq!(proposal["seconds"]["tensor_parallel"].as_f64() > Some(0.0), size("tp") > 1);
        assert_eq!(proposal["sent_bytes"]["cluster"], 0.0, "one node is enough");
    }
}

#[test]
fn the_weak_scaling_table_goes_to_two_thousand_ranks() {
    let work = Workplace::new();
    let output = work.run(&["plan", "--simulate", "--json"]);
    assert_success(&output);
    let value: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let rows = value["rows"].as_array().expect("rows");
    assert_eq!(rows.iter().map(|row| row["ranks"].as_u64().unwrap()).max(), Some(2048));
    let seconds = |row: &serde_json::Value, with: &str| row[with]["seconds"]["total"].as_f64().unwrap();
    assert!(rows.iter().all(|row| seconds(row, "compressed") <= seconds(row, "linear")));
}

#[test]
fn a_plan_without_ranks_and_a_broken_topology_are_refused() {
    let work = Workplace::new();
    let broken = work.file("broken.toml", CLUSTER.replace("125e6", "0"));
    refused(&work, &["plan"], &["--ranks"]);
    refused(&work, &["plan", "--ranks", "0"], &["--ranks", "1"]);
    refused(&work, &["plan", "--topology", "missing.toml"], &["missing.toml"]);
    refused(&work, &["plan", "--topology", &broken], &["broken.toml", "cluster_link.bytes_per_s"]);
}

fn json_of(work: &Workplace, args: &[&str]) -> serde_json::Value {
    let output = work.run(&[&["plan", "--json"], args].concat());
    assert_success(&output);
    serde_json::from_slice(&output.stdout).expect("JSON")
}

const MIXTRAL: [&str; 6] = ["--model", "mixtral-8x22b", "--cluster", "h100", "--global-batch", "256"];

#[test]
fn layouts_in_all_dimensions_use_all_ranks_and_come_with_reasons() {
    let work = Workplace::new();
    let value = json_of(&work, &[&MIXTRAL[..], &["--ranks", "64", "--tokens", "1T", "--price", "2"]].concat());
    let proposals = value["proposals"].as_array().expect("proposals");
    assert_eq!(proposals.len(), 8);
    for proposal in proposals {
        let size = |name: &str| proposal[name].as_u64().expect(name);
        assert_eq!(size("tp") * size("cp") * size("dp") * size("pp"), 64);
        assert_eq!(size("ep") * size("etp") * size("expert_copies") * size("pp"), 64);
        let seconds = proposal["seconds"].as_object().expect("seconds");
        let sum: f64 =
            seconds.iter().filter(|(name, _)| *name != "total").map(|(_, part)| part.as_f64().unwrap()).sum();
        assert!((sum / seconds["total"].as_f64().unwrap() - 1.0).abs() < 1e-9);
    }
    let gains = value["verdict"]["gains"].as_array().expect("gains");
    assert_eq!(gains[0]["resource"], value["verdict"]["binds"]);
    let (days, hours) = (value["bill"]["days"].as_f64().unwrap(), value["bill"]["rank_hours"].as_f64().unwrap());
    assert!((hours / (days * 24.0 * 64.0) - 1.0).abs() < 1e-9);
    assert!((value["bill"]["price"].as_f64().unwrap() / (2.0 * hours) - 1.0).abs() < 1e-9);
}

#[test]
fn the_text_of_a_plan_says_what_the_json_says() {
    let work = Workplace::new();
    let args = [&MIXTRAL[..], &["--ranks", "64", "--tokens", "1T"]].concat();
    let value = json_of(&work, &args);
    let output = work.run(&[&["plan"], &args[..]].concat());
    assert_success(&output);
    let text = String::from_utf8(output.stdout).expect("text");
    for sentence in value["sentences"].as_array().expect("sentences") {
        assert!(text.contains(sentence.as_str().unwrap()), "{sentence} in {text}");
    }
    let first = &value["proposals"][0];
    let layout = ["tp", "cp", "dp", "pp", "ep", "etp"].map(|name| format!("{name} {}", first[name])).join(" ");
    assert!(text.contains(&layout), "{layout} in {text}");
}

#[test]
fn a_proposal_of_the_trainer_is_an_option_of_train() {
    let work = Workplace::new();
    let value = json_of(&work, &[&MIXTRAL[..], &["--ranks", "64", "--trainable"]].concat());
    for proposal in value["proposals"].as_array().expect("proposals") {
        let options = proposal["train_options"].as_str().expect("options");
        assert!(options.starts_with("--dp ") && options.contains("train.grad_accumulation="), "{options}");
        assert_eq!((&proposal["cp"], &proposal["etp"]), (&1.into(), &1.into()));
    }
}

#[test]
fn odd_numbers_of_ranks_and_models_that_fit_nowhere_are_answered() {
    let work = Workplace::new();
    for ranks in ["1", "97", "10240"] {
        let value = json_of(&work, &["--model", "mixtral-8x22b", "--cluster", "h100", "--ranks", ranks]);
        assert_eq!(value["ranks"].to_string(), ranks);
        let fits = value["num_fitting"].as_u64() > Some(0);
        assert_eq!(value["verdict"].is_null(), !fits, "{ranks}");
        assert!(ranks == "97" || fits == (ranks == "10240"), "{ranks}");
    }
    let output = work.run(&["plan", "--model", "switch-c", "--cluster", "h100", "--ranks", "8"]);
    assert_success(&output);
    assert!(String::from_utf8_lossy(&output.stdout).contains("No layout fits"));
}

#[test]
fn serving_is_planned_apart_and_together() {
    let work = Workplace::new();
    let value = json_of(
        &work,
        &["--model", "deepseek-v3", "--cluster", "h800", "--ranks", "128", "--serve", "--precision", "fp8"],
    );
    let plans = value["plans"].as_array().expect("plans");
    assert_eq!(plans.iter().filter(|plan| plan["apart"] == true).count(), 1);
    assert_eq!(plans.iter().filter(|plan| plan["apart"] == false).count(), 1);
    assert!(plans[0]["requests_per_s"].as_f64() >= plans[1]["requests_per_s"].as_f64());
}

#[test]
fn loads_of_a_run_make_the_hottest_rank() {
    let work = Workplace::new();
    assert_success(&work.train("run", 4, &[]));
    let mut args = vec!["--ranks", "4", "--topology", "c.toml", "--loads", "run", "--ep", "4"];
    work.file("c.toml", CLUSTER);
    for setting in crate::program::TINY {
        args.extend(["--set", setting]);
    }
    args.extend(["--set", "train.batch_size=4"]);
    let value = json_of(&work, &args);
    assert!(value["proposals"][0]["hottest_rank"]["time"].as_f64() > Some(1.0), "{value}");
    refused(&work, &["plan", "--ranks", "4", "--topology", "c.toml", "--loads", "none"], &["--loads", "none"]);
}

#[test]
fn wrong_options_of_a_plan_are_named() {
    let work = Workplace::new();
    let broken = work.file("broken-model.toml", "width = 4\n");
    let with = |more: &[&str], parts: &[&str]| {
        refused(&work, &[&["plan"], &MIXTRAL[..], more].concat(), parts);
    };
    refused(&work, &["plan", "--model", "mixtral"], &["--model", "mixtral-8x22b"]);
    refused(&work, &["plan", "--model", "mixtral-8x22b"], &["--cluster", "h800"]);
    refused(&work, &["plan", "--model", "mixtral-8x22b", "--cluster", "h99"], &["h99", "h800"]);
    refused(&work, &["plan", "--model", &broken, "--cluster", "h100"], &["broken-model.toml"]);
    with(&["--ranks", "64", "--tokens", "many"], &["--tokens many", "14.8T"]);
    with(&["--ranks", "64", "--skew", "101"], &["--skew 101"]);
    with(&["--ranks", "64", "--tokens", "1T", "--price", "nan"], &["--price"]);
    with(&["--ranks", "64", "--price", "2"], &["--tokens"]);
    with(&["--ranks", "-64"], &["'-64'", "--ranks"]);
    with(&["--ranks", "64", "--microbatch", "300"], &["--microbatch 300", "from 1 to 256"]);
    with(&["--ranks", "64", "--top", "0"], &["--top 0"]);
    with(&["--ranks", "64", "--pp", "3"], &["--pp 3", "64"]);
    with(&["--ranks", "64", "--pp", "64"], &["--pp 64", "56"]);
    with(&["--ranks", "64", "--schedule", "fast"], &["--schedule", "1f1b"]);
    with(&["--ranks", "64", "--schedule", "zb_v"], &["--schedule zb_v", "zb_h1"]);
    with(&["--ranks", "64", "--recompute", "some"], &["--recompute some", "selective"]);
    with(&["--ranks", "64", "--zero", "4"], &["--zero"]);
    with(&["--ranks", "521"], &["256 sequences", "521 ranks"]);
    with(&["--ranks", "64", "--precision", "int4"], &["--precision int4", "bf16"]);
    refused(
        &work,
        &["plan", "--model", "mixtral-8x22b", "--cluster", "h100", "--serve", "--input", "0"],
        &["--input 0"],
    );
    let images = ["plan", "--model", "swinv2-moe-3b", "--cluster", "h100", "--ranks", "8", "--serve"];
    refused(&work, &images, &["--serve", "swinv2-moe-3b has no vocabulary"]);
    // Options that would do nothing.
    refused(&work, &["plan", "--scaling", "--tp", "2"], &["--tp", "--scaling"]);
    refused(&work, &["plan", "--scaling", "--top", "2"], &["--top", "--scaling"]);
    let serve = ["plan", "--model", "mixtral-8x22b", "--cluster", "h100", "--ranks", "64", "--serve"];
    refused(&work, &[&serve[..], &["--seq-len", "64"]].concat(), &["--seq-len", "--serve"]);
}
