//! `moeworks bench comm`: times between ranks, and the topology that they make.

use moeworks_plan::Topology;

use crate::bad_input::refused;
use crate::program::{Workplace, assert_success, stdout};

#[test]
fn bench_comm_times_collectives_and_writes_a_topology_that_plan_reads() {
    let workplace = Workplace::new();
    let path = workplace.path("topology.toml");
    let topology = path.to_str().expect("a path in UTF-8");
    let output =
        workplace.run(&["bench", "comm", "--ranks", "3", "--max-bytes", "1024", "--json", "--topology", topology]);
    assert_success(&output);
    let value: serde_json::Value = serde_json::from_str(&stdout(&output)).expect("JSON");
    assert_eq!((value["ranks"].as_u64(), value["kind"].as_str()), (Some(3), Some("threads")));
    let cases = value["cases"].as_array().expect("cases");
    assert_eq!(cases.len(), 1 + 6 * 2, "the barrier, and two sizes of each other");
    assert!(cases.iter().all(|case| case["seconds"].as_f64().is_some_and(|seconds| seconds > 0.0)));
    let text = std::fs::read_to_string(&path).expect("the topology");
    assert!(text.contains("cluster_link is a copy of node_link"), "what was not measured is said: {text}");
    let topology = Topology::parse(&text).expect("a topology");
    assert_eq!(topology.node_sizes, [3]);
    let latency_s = value["node_link"][0].as_f64().expect("a latency");
    assert!((topology.node_link.latency_s / latency_s - 1.0).abs() < 1e-9);
}

#[test]
fn bench_overlap_states_what_chunks_hide() {
    let workplace = Workplace::new();
    let output = workplace.run(&["bench", "overlap", "--ranks", "2", "--link", "2000,500", "--json"]);
    assert_success(&output);
    let value: serde_json::Value = serde_json::from_str(&stdout(&output)).expect("JSON");
    let rows = value["rows"].as_array().expect("rows");
    let number = |row: &serde_json::Value, name: &str| row[name].as_f64().expect("a number");
    assert_eq!(rows.iter().map(|row| number(row, "chunks")).collect::<Vec<_>>(), [1.0, 2.0, 4.0, 8.0]);
    assert_eq!(number(&rows[0], "hidden"), 0.0, "in one piece nothing is hidden");
    // A pass without chunks takes at least eight messages of 2 ms: dispatch and combine, forward and backward.
    let communication = |row: &serde_json::Value| number(row, "communication_s");
    assert!(rows.iter().all(|row| number(row, "seconds") > 8e-3 && communication(row) < number(row, "seconds")));
    assert!(communication(&rows[0]) > 8e-3 && rows.iter().all(|row| number(row, "waiting_s") >= 0.0), "{rows:?}");
    let gradients = &value["gradients"];
    assert!(number(gradients, "hidden") > 0.1 && communication(&gradients["behind"]) > 8e-3, "{gradients}");
}

#[test]
fn bench_overlap_of_a_rank_alone_has_no_negative_shares() {
    let workplace = Workplace::new();
    let output = workplace.run(&["bench", "overlap", "--ranks", "1"]);
    assert_success(&output);
    let said = stdout(&output);
    let is_negative = |rest: &str| rest.starts_with(|c: char| c.is_ascii_digit());
    assert!(!said.split('-').skip(1).any(is_negative), "no share is negative: {said}");
}

#[test]
fn bench_options_that_mean_nothing_are_refused() {
    let workplace = Workplace::new();
    refused(&workplace, &["bench", "overlap", "--link", "fast"], &["--link fast", "LATENCY_US,MB_PER_S"]);
    refused(&workplace, &["bench", "overlap", "--link", "1,0"], &["--link 1,0"]);
    refused(&workplace, &["bench", "comm-like", "--link", "1,1"], &["--link", "bench overlap"]);
}
