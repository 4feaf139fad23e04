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
