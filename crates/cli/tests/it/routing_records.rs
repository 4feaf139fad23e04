//! Records of routing: written by every command that passes tokens, and read by statistics, export and `balance`.

use std::fs;

use moeworks_infer::routing_record::{Block, LayerLoads, LoadBlock, RecordHeader, RecordSource, RecordWriter};
use serde_json::Value;

use crate::bad_input::refused;
use crate::program::{Workplace, assert_success, stderr, stdout};

fn json(work: &Workplace, args: &[&str]) -> Value {
    let output = work.run(args);
    assert_success(&output);
    serde_json::from_str(&stdout(&output)).expect("JSON")
}

fn counts(value: &Value) -> Vec<u64> {
    value.as_array().expect("a list").iter().map(|count| count.as_u64().expect("a count")).collect()
}

/// The choices of each layer by the statistics of a record.
fn chosen(work: &Workplace, record: &str) -> Vec<Vec<u64>> {
    let stats = json(work, &["routing", "stats", record, "--json"]);
    stats["layers"].as_array().expect("layers").iter().map(|layer| counts(&layer["chosen"])).collect()
}

#[test]
fn an_evaluation_records_the_choices_that_it_counts() {
    let work = Workplace::new();
    assert_success(&work.train("run", 2, &[]));
    let text = ["evaluate", "run", "--data", "text.txt", "--seq-len", "32", "--max-sequences", "6", "--json"];
    let record = ["--record-routing", "a.records", "--record-weights", "--record-token-ids"];
    let plain = json(&work, &text);
    let recorded = json(&work, &[&text[..], &record].concat());
    assert_eq!(plain, recorded);
    let layers = recorded["layers"].as_array().expect("layers");
    let expected: Vec<Vec<u64>> = layers.iter().map(|layer| counts(&layer["tokens_per_expert"])).collect();
    assert_eq!(chosen(&work, "a.records"), expected);
    let stats = json(&work, &["routing", "stats", "a.records", "--json"]);
    assert_eq!((&stats["tokens"], &stats["source"], &stats["damage"]), (&192.into(), &"evaluate".into(), &Value::Null));
    assert!(stats["layers"][0]["next_layer"]["top_1"].as_f64().unwrap() > 0.0);
    assert_eq!(stats["layers"][1]["next_layer"], Value::Null);
    // The text shows the figures of the JSON.
    let shown = stdout(&work.run(&["routing", "stats", "a.records", "--page", "stats.html"]));
    let entropy = format!("{:.3}", stats["layers"][0]["entropy"].as_f64().unwrap());
    assert!(shown.contains("choices of 192 tokens") && shown.contains(&entropy), "{shown}");
    assert!(fs::read_to_string(work.path("stats.html")).unwrap().contains("Chosen together"));
}

#[test]
fn exports_have_every_choice_and_are_not_written_over_other_files() {
    let work = Workplace::new();
    assert_success(&work.train("run", 2, &[]));
    let generate =
        ["generate", "run", "-p", "Line 7 of", "-n", "9", "--record-routing", "a.records", "--record-token-ids"];
    let output = work.run(&generate);
    assert_success(&output);
    assert_eq!(stdout(&work.run(&generate[..6])), stdout(&output));
    let exported = work.run(&["routing", "export", "a.records", "--out", "a.jsonl"]);
    assert_success(&exported);
    let text = fs::read_to_string(work.path("a.jsonl")).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(lines[0]["kind"], "header");
    let positions: Vec<u64> = lines[1..].iter().map(|line| line["position"].as_u64().unwrap()).collect();
    // The last token that is drawn is not passed.
    assert_eq!(positions, (0..positions.len() as u64).collect::<Vec<_>>());
    assert_eq!(stdout(&exported), format!("a.jsonl: {} tokens and the loads of 0 steps\n", positions.len()));
    let layers = lines[1]["layers"].as_array().unwrap();
    assert!(layers.len() == 2 && !layers[0]["experts"].as_array().unwrap().is_empty(), "{}", lines[1]);
    refused(&work, &["routing", "export", "a.records", "--out", "a.jsonl"], &["a.jsonl: is there already"]);
    refused(&work, &["routing", "export", "a.records", "--out", "a.csv"], &["must end with .jsonl or .parquet"]);
    assert_success(&work.run(&["routing", "export", "a.records", "--out", "a.parquet"]));
    let parquet = fs::read(work.path("a.parquet")).unwrap();
    assert!(parquet.starts_with(b"PAR1") && parquet.ends_with(b"PAR1"));
}

#[test]
fn a_run_records_loads_and_choices_of_its_steps_and_goes_on_with_them() {
    let work = Workplace::new();
    let record = ["--set", "train.record_routing=1", "--set", "train.record_tokens=32"];
    let skewed = ["--set", "model.num_experts=6", "--set", "model.capacity_factor=1.0"];
    // The learning rate does not depend on the number of steps.
    let constant = ["--set", "train.schedule=constant"];
    let more = [&record[..], &skewed, &constant].concat();
    assert_success(&work.train("whole", 4, &more));
    assert_success(&work.train("half", 2, &more));
    let bytes = fs::read(work.path("half/routing.records")).unwrap();
    // What a killed process leaves behind the last checkpoint is written anew.
    fs::write(work.path("half/routing.records"), [&bytes[..], &bytes[bytes.len() - 40..]].concat()).unwrap();
    assert_success(&work.run(&["train", "--resume", "half", "--set", "train.steps=4"]));
    let stats = json(&work, &["routing", "stats", "whole", "--json"]);
    assert_eq!((&stats["steps"], &stats["tokens"]), (&4.into(), &128.into()));
    assert_eq!(chosen(&work, "half"), chosen(&work, "whole"));
    let resumed = json(&work, &["routing", "stats", "half", "--json"]);
    assert_eq!((&resumed["steps"], &resumed["damage"]), (&4.into(), &Value::Null));
    // The loads are those of the metrics.
    let metrics = fs::read_to_string(work.path("whole/metrics.jsonl")).unwrap();
    let mut sums = vec![0; 6];
    for line in metrics.lines() {
        let record: Value = serde_json::from_str(line).unwrap();
        let layer = counts(&record["moe/layer_0/tokens_per_expert"]);
        sums.iter_mut().zip(layer).for_each(|(sum, count)| *sum += count);
    }
    assert_eq!(chosen(&work, "whole")[0], sums);
    let kept: u64 = counts(&stats["layers"][0]["kept"]).iter().sum();
    assert!(kept < sums.iter().sum(), "capacity drops some choices");
    // Without a record the loads of the metrics are shown.
    fs::remove_file(work.path("half/routing.records")).unwrap();
    assert_eq!(chosen(&work, "half"), chosen(&work, "whole"));
}

#[test]
fn a_run_on_ranks_records_what_one_rank_does() {
    let work = Workplace::new();
    let record = ["--set", "train.record_routing=1", "--set", "train.record_tokens=32"];
    assert_success(&work.train("one", 2, &record));
    assert_success(&work.train("two", 2, &[&record[..], &["--ep", "2"]].concat()));
    assert_eq!(chosen(&work, "two"), chosen(&work, "one"));
    let choices = |run: &str| {
        assert_success(&work.run(&["routing", "export", run, "--out", &format!("{run}.jsonl")]));
        let text = fs::read_to_string(work.path(&format!("{run}.jsonl"))).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let experts = |line: Value| (line["position"].clone(), line["layers"][0]["experts"].clone());
        lines.filter(|line| line["kind"] == "token" && line["id"] == 1).map(experts).collect::<Vec<_>>()
    };
    assert_eq!(choices("two"), choices("one"));
}

#[test]
fn a_cut_record_is_read_up_to_the_cut_and_other_files_are_refused() {
    let work = Workplace::new();
    assert_success(&work.train("run", 2, &["--set", "train.record_routing=1"]));
    let bytes = fs::read(work.path("run/routing.records")).unwrap();
    work.file("cut.records", &bytes[..bytes.len() - 9]);
    let output = work.run(&["routing", "stats", "cut.records"]);
    assert_success(&output);
    assert!(stderr(&output).contains("bytes at the end were left out"), "{}", stderr(&output));
    assert!(stdout(&output).contains("a cut block"), "{}", stdout(&output));
    let stats = json(&work, &["routing", "stats", "cut.records", "--json"]);
    assert!(stats["damage"]["cut_bytes"].as_u64().unwrap() > 0);
    work.file("empty.records", "");
    work.file("header.records", &bytes[..20]);
    refused(&work, &["routing", "stats", "empty.records"], &["empty.records: is no record of routing"]);
    refused(&work, &["routing", "stats", "header.records"], &["header.records: the header of the record is cut"]);
    let header_len = 24 + u32::from_le_bytes(bytes[12..16].try_into().unwrap()) as usize;
    work.file("whole-header.records", &bytes[..header_len]);
    refused(&work, &["routing", "stats", "whole-header.records"], &["the record has no whole block"]);
    refused(&work, &["balance", "whole-header.records", "--ranks", "2"], &["the record has no whole block"]);
    work.file("newer.records", [&bytes[..8], &[9], &bytes[9..]].concat());
    refused(&work, &["routing", "stats", "newer.records"], &["of version 9; this program reads version 1"]);
    refused(&work, &["routing", "stats", "text.txt"], &["text.txt: is no record of routing"]);
    refused(&work, &["routing", "stats", "nowhere"], &["nowhere"]);
    refused(&work, &["routing", "export", "text.txt", "--out", "x.jsonl"], &["text.txt: is no record of routing"]);
    refused(&work, &["balance", "text.txt", "--ranks", "2"], &["text.txt: is neither a run nor a record"]);
    assert!(!work.path("x.jsonl").exists() && !work.path("x.jsonl.tmp").exists());
    let evaluate = ["evaluate", "run", "--data", "text.txt", "--record-routing"];
    refused(&work, &[&evaluate[..], &["text.txt"]].concat(), &["--record-routing text.txt: is there already"]);
    assert_success(&work.train("dense", 2, &["--set", "model.num_experts=0", "--set", "model.dense_width=32"]));
    let dense = ["evaluate", "dense", "--data", "text.txt", "--record-routing", "d.records"];
    refused(&work, &dense, &["dense: is a dense model; it has no MoE layer"]);
    refused(&work, &["routing", "stats", "dense"], &["has no record of an MoE layer"]);
    refused(&work, &["routing", "export", "dense", "--out", "d.jsonl"], &["the run has no routing.records"]);
}

#[test]
fn stats_show_the_load_of_ranks_and_nodes_and_refuse_other_placements() {
    let work = Workplace::new();
    assert_success(&work.train("run", 2, &["--set", "train.record_routing=1", "--set", "model.num_experts=8"]));
    let stats = ["routing", "stats", "run"];
    let found = json(&work, &[&stats[..], &["--ranks", "4", "--nodes", "2", "--json"]].concat());
    let layer = &found["layers"][1];
    let chosen = counts(&layer["chosen"]);
    let of_node: f64 = chosen[..4].iter().sum::<u64>() as f64;
    assert_eq!(
        (layer["ranks"]["load"][0].as_f64(), layer["ranks"]["load_of_nodes"][0].as_f64()),
        (Some((chosen[0] + chosen[1]) as f64), Some(of_node))
    );
    let shown = stdout(&work.run(&[&stats[..], &["--ranks", "4", "--nodes", "2"]].concat()));
    assert!(shown.contains("imbalance of ranks") && shown.contains("% by node"), "{shown}");
    assert_success(&work.run(&["balance", "run", "--ranks", "2", "--spare", "2", "--out", "two.txt"]));
    let placed = json(&work, &[&stats[..], &["--placement", "two.txt", "--json"]].concat());
    assert!(placed["layers"][0]["ranks"]["imbalance"].as_f64().unwrap() < 0.2, "{placed}");
    refused(&work, &[&stats[..], &["--nodes", "2"]].concat(), &["--nodes 2: needs --ranks or --placement"]);
    refused(&work, &[&stats[..], &["--ranks", "4", "--nodes", "3"]].concat(), &["--nodes 3: must divide the 4 ranks"]);
    refused(&work, &[&stats[..], &["--ranks", "0"]].concat(), &["--ranks 0: must be from 1 to"]);
    refused(&work, &[&stats[..], &["--ahead", "0"]].concat(), &["--ahead 0: must be at least 1"]);
    work.file("other.txt", "placement experts=2 ranks=2\n0: 0\n1: 1\n");
    refused(
        &work,
        &[&stats[..], &["--placement", "other.txt"]].concat(),
        &["--placement other.txt: is of 2 experts; the record is of 8"],
    );
    let ranks = ["--placement", "two.txt", "--ranks", "3"];
    refused(&work, &[&stats[..], &ranks].concat(), &["--placement two.txt: is of 2 ranks, not 3"]);
}

#[test]
fn a_record_is_placed_by_every_policy() {
    let work = Workplace::new();
    let skewed =
        ["--set", "model.num_experts=6", "--set", "model.router.kind=forced", "--set", "model.router.forced_load=zipf"];
    assert_success(&work.train("run", 3, &[&skewed[..], &["--set", "train.record_routing=1"]].concat()));
    for policy in ["eplb", "moves", "beam", "coactivation"] {
        let args = ["balance", "run/routing.records", "--ranks", "2", "--policy", policy, "--split-rows", "--json"];
        let found = json(&work, &[&args[..], &["--out", "p.txt"]].concat());
        let of = |name: &str| found["layers"][0][name].as_f64().unwrap_or_else(|| panic!("{policy}: {name}: {found}"));
        assert!(of("imbalance_after") <= of("imbalance_before"), "{policy}: {found}");
        assert!(of("step_imbalance_after") <= of("step_imbalance_before") + 1e-9, "{policy}: {found}");
        assert!(of("step_imbalance_with_rows_split") <= of("step_imbalance_after") + 1e-9, "{policy}: {found}");
        assert!(fs::read_to_string(work.path("p.txt")).unwrap().starts_with("placement experts=6 ranks=2"));
    }
    let nodes =
        ["balance", "run", "--ranks", "4", "--nodes", "2", "--policy", "coactivation", "--out", "n.txt", "--json"];
    let found = json(&work, &nodes);
    let of = |name: &str| found["layers"][1][name].as_f64().unwrap();
    assert!(of("pairs_in_node_after") >= of("pairs_in_node_before"), "{found}");
    // More ranks than experts: the slots that are over hold copies.
    assert_success(&work.run(&["balance", "run/routing.records", "--ranks", "8", "--out", "many.txt"]));
    fs::remove_file(work.path("run/routing.records")).unwrap();
    refused(&work, &nodes, &["--policy coactivation: run has no choices of single tokens"]);
}

#[test]
fn recorded_loads_by_zipfs_law_are_balanced_by_spare_slots_as_published() {
    // DeepSeek-R1 on 32 ranks: 1.564 without spare slots, and 0.109 with nine slots a rank.
    let work = Workplace::new();
    let path = work.path("zipf.records");
    let header = RecordHeader {
        source: RecordSource::Serve,
        model: "made".to_owned(),
        layers: vec![3],
        num_encoder_layers: 0,
        num_experts: 256,
        num_computing: 256,
        top_k: 8,
        placement: None,
        ranks_per_node: None,
    };
    let chosen: Vec<u32> = (0..256).map(|e| (1e6 / f64::from(e * 37 % 256 + 1).powf(0.57)) as u32).collect();
    let layers = vec![LayerLoads { kept: chosen.clone(), chosen, importance: None }];
    let block = LoadBlock { time_ms: 0, step: 1, num_tokens: 1, first_layer: 0, layers };
    RecordWriter::create(&path, header).unwrap().write(&Block::Loads(block)).unwrap();
    let found = json(&work, &["balance", "zipf.records", "--ranks", "32", "--spare", "32", "--json"]);
    let of = |name: &str| found[name].as_f64().unwrap();
    assert!((1.5..1.65).contains(&of("imbalance_before")) && of("imbalance_after") <= 0.15, "{found}");
    let stats = json(&work, &["routing", "stats", "zipf.records", "--json"]);
    assert!((stats["layers"][0]["zipf"].as_f64().unwrap() - 0.57).abs() < 1e-3, "{stats}");
}
