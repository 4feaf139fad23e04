//! The division of weights among ranks that `inspect --sharding` lists, and the settings that change it.

use serde_json::Value;

use crate::bad_input::refused;
use crate::program::{Workplace, assert_success, stdout};

/// Runs `inspect run --sharding` with more options and parses its JSON.
fn sharding(work: &Workplace, options: &[&str]) -> Value {
    let output = work.run(&[&["inspect", "run", "--sharding", "--json"], options].concat());
    assert_success(&output);
    let value: Value = serde_json::from_str(&stdout(&output)).expect("JSON");
    value["sharding"].clone()
}

fn weight<'a>(sharding: &'a Value, name: &str) -> &'a Value {
    let weights = sharding["weights"].as_array().expect("a list");
    weights.iter().find(|weight| weight["name"] == name).unwrap_or_else(|| panic!("no {name}"))
}

fn ranks(part: &Value) -> Vec<u64> {
    part["ranks"].as_array().expect("a list").iter().map(|rank| rank.as_u64().expect("a rank")).collect()
}

#[test]
fn inspect_lists_the_part_of_each_weight_on_each_rank() {
    let work = Workplace::new();
    assert_success(&work.train("run", 1, &[]));
    let one = sharding(&work, &[]);
    let parameters: u64 = one["trainable_parameters"].as_u64().expect("a number");
    assert_eq!(one["rank_bytes"][0].as_u64(), Some(4 * parameters), "one rank has all of it");
    let many = sharding(&work, &["--dp", "2", "--ep", "2", "--tp", "1"]);
    let experts = weight(&many, "model.layers.0.mlp.experts.down_proj");
    let parts = experts["parts"].as_array().expect("parts");
    assert_eq!(parts.iter().map(ranks).collect::<Vec<_>>(), [[0, 2], [1, 3]], "{experts}");
    let norm = weight(&many, "model.norm.weight");
    assert_eq!((&norm["cut"], ranks(&norm["parts"][0])), (&Value::from("replicated"), vec![0, 1, 2, 3]));
    let cut = sharding(&work, &["--tp", "2"]);
    let queries = weight(&cut, "model.layers.0.self_attn.q_proj.weight");
    assert_eq!((&queries["dim"], queries["parts"].as_array().expect("parts").len()), (&Value::from(0), 2), "{queries}");
    let whole = sharding(&work, &["--tp", "2", "--shard", "model.layers.0.self_attn.*=replicated"]);
    let queries = weight(&whole, "model.layers.0.self_attn.q_proj.weight");
    assert_eq!(queries["parts"].as_array().expect("parts").len(), 1, "{queries}");
}

#[test]
fn each_layers_placement_is_shown() {
    let work = Workplace::new();
    let text = "placement experts=4 ranks=2\nlayer 0:\n0: 1\n1: 0\n2: 0\n3: 1\nlayer 1:\n0: 0\n1: 0\n2: *\n3: 1\n";
    let file = work.file("layers.placement", text);
    let placement = format!("parallel.placement={file}");
    assert_success(&work.train("run", 1, &["--ep", "2", "--set", &placement]));
    let ranges = |options: &[&str]| {
        let sharding = sharding(&work, options);
        [0, 1].map(|layer| {
            let weight = weight(&sharding, &format!("model.layers.{layer}.mlp.experts.down_proj"));
            let parts = weight["parts"].as_array().expect("parts");
            parts.iter().map(|part| part["ranges"].to_string()).collect::<Vec<_>>()
        })
    };
    let placed = [["[[1,3]]", "[[0,1],[3,4]]"], ["[[0,3]]", "[[2,4]]"]];
    assert_eq!(ranges(&[]), placed, "the run's own");
    assert_eq!(ranges(&["--ep", "2", "--placement", &file]), placed);
    assert_eq!(ranges(&["--ep", "2"]), [["[[0,2]]", "[[2,4]]"]; 2]);
    let shown = stdout(&work.run(&["inspect", "run", "--sharding"]));
    for row in [["experts.down_proj", "#0", "1..3 | 0..1+3..4"], ["experts.down_proj", "#1", "0..3 | 2..4"]] {
        assert!(shown.lines().any(|line| row.iter().all(|cell| line.contains(cell))), "{row:?} in {shown}");
    }
    refused(
        &work,
        &["inspect", "run", "--sharding", "--ep", "3", "--placement", &file],
        &["layers.placement", "on 2 ranks"],
    );
}

#[test]
fn the_table_shows_cuts_and_frozen_weights_of_a_run() {
    let work = Workplace::new();
    assert_success(&work.train("run", 1, &["--set", "train.freeze=*.mlp.experts.*"]));
    let output = work.run(&["inspect", "run", "--sharding", "--tp", "2"]);
    assert_success(&output);
    let shown = stdout(&output);
    for part in ["model.layers.*.self_attn.q_proj.weight", "dim 0 over tp, heads", "dim 0 over ep, experts", "frozen"] {
        assert!(shown.contains(part), "{part:?} in {shown}");
    }
    let output = work.run(&["inspect", "run"]);
    assert!(stdout(&output).contains("trained"), "{}", stdout(&output));
}

#[test]
fn rules_and_patterns_that_cannot_be_carried_out_are_named() {
    let work = Workplace::new();
    assert_success(&work.train("run", 1, &[]));
    let inspect = |options: &[&str], parts: &[&str]| {
        refused(&work, &[&["inspect", "run", "--sharding"], options].concat(), parts);
    };
    inspect(
        &["--shard", "*.q_prj.weight=replicated"],
        &["parallel.sharding", "near names: model.layers.*.self_attn.q_proj"],
    );
    inspect(&["--shard", "*.q_proj.weight=replicated"], &["replicated as a whole", "self_attn.*=replicated"]);
    inspect(&["--tp", "64"], &["num_heads", "parallel.tp, 64"]);
    let train = |setting: &str, parts: &[&str]| {
        refused(&work, &["train", "--data", "text.txt", "--set", setting], parts);
    };
    train("train.freeze=*.expert.*", &["train.freeze", "matches no weight; near names: model.layers.*.mlp.experts."]);
    train("train.freeze=*", &["train.freeze", "leaves no weight to train"]);
    train("parallel.sharding=*.experts.*=replicated", &["parallel.sharding", "parallel.placement"]);
    refused(&work, &["inspect", "run", "--tp", "2"], &["--sharding"]);
}
