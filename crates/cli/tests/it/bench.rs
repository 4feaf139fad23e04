//! The output of `moeworks bench` for each case.

use std::fs::File;

use serde_json::{Value, json};

use crate::bad_input::refused;
use crate::program::{Workplace, assert_success, stderr, stdout};

#[test]
fn bench_says_of_each_case_which_limit_binds_it_and_how_much_of_it_is_reached() {
    let workplace = Workplace::new();
    let output = workplace.run(&["bench", "4096 x 256, 256 classes", "--json"]);
    assert_success(&output);
    let value: Value = serde_json::from_str(&stdout(&output)).expect("JSON");
    let number = |value: &Value, name: &str| value[name].as_f64().expect("a number");
    assert!(value["machine"].as_str().is_some_and(|name| !name.is_empty()));
    let cases = value["cases"].as_array().expect("cases");
    assert_eq!(cases.len(), 4, "the output layer forward and backward, in f32 and bf16");
    for case in cases {
        let name = case["name"].as_str().expect("a name");
        // Not every machine has tiles or bf16 products.
        let tiles = if name.ends_with("BF16") { "bf16_flops_per_s" } else { "f32_in_tiles_flops_per_s" };
        let peak = number(&value, "f32_flops_per_s").max(value[tiles].as_f64().unwrap_or(0.0));
        let of_peak = number(case, "flops_per_s") / peak;
        let share = number(case, "share_of_limit");
        match case["limit"].as_str() {
            Some("peak") => assert!((share / of_peak - 1.0).abs() < 1e-9, "{name}: {share}, {of_peak}"),
            // A machine that is busy while its memory is timed can make memory the limit.
            Some("memory") => {
                let copying = value["copy_bytes_per_s"].as_f64().unwrap_or(f64::INFINITY);
                let slower = number(case, "bytes_per_s") / number(&value, "read_bytes_per_s").min(copying);
                assert!(share > of_peak && share <= slower * (1.0 + 1e-9), "{name}: {share}, {of_peak}, {slower}");
            }
            other => panic!("{name}: limited by {other:?}"),
        }
    }
}

#[test]
fn bench_without_a_case_of_that_name_says_so() {
    let workplace = Workplace::new();
    refused(&workplace, &["bench", "no such case"], &["\"no such case\"", "no name of a case", "layers"]);
    refused(&workplace, &["bench", "decode", "--types", "bf16,q3"], &["'q3'", "f32, bf16, q8, q4"]);
    refused(&workplace, &["bench", "layers", "--layers", "2"], &["--layers", "`bench decode`"]);
    refused(&workplace, &["bench", "decode", "--shape", "nowhere"], &["nowhere"]);
    refused(&workplace, &["bench", "routing no such scheme"], &["\"routing no such scheme\""]);
}

#[test]
fn bench_moe_answers_a_line_for_each_part_of_a_layer_with_the_seconds_of_its_runs() {
    let workplace = Workplace::new();
    let parts = ["layer", "products", "routing", "dispatch", "sort"];
    let line = |part| {
        let layer = json!({"d": 16, "f": 8, "e": 4, "k": 2, "activation": "swiglu", "dtype": "bf16", "tokens": 5});
        let Value::Object(mut layer) = layer else { unreachable!("an object") };
        layer.extend([("part".to_owned(), json!(part)), ("both".to_owned(), json!(true))]);
        Value::Object(layer).to_string()
    };
    let lines = workplace.file("lines", parts.map(line).join("\n"));
    let output = workplace.command(&["bench", "moe"]).stdin(File::open(lines).expect("lines")).output().expect("a run");
    assert_success(&output);
    let answers: Vec<Value> = stdout(&output).lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(answers.len(), parts.len());
    for (part, answer) in parts.iter().zip(&answers) {
        let seconds = answer["seconds"].as_array().expect("a list");
        assert!(seconds.iter().all(|time| time.as_f64().is_some_and(|time| time > 0.0)), "{part}: {answer}");
        assert!(seconds.len() >= 3, "{part}: {answer}");
    }
}

#[test]
fn bench_moe_takes_a_router_for_the_whole_layer() {
    let workplace = Workplace::new();
    let line = |router: &str, part: &str| {
        format!(
            "{{\"d\": 16, \"f\": 8, \"e\": 4, \"k\": 2, \"activation\": \"swiglu\", \"dtype\": \"f32\", \"tokens\": 9, \
             \"both\": true, \"part\": \"{part}\", \"router\": {router}}}"
        )
    };
    let answer = |lines: &str| {
        let lines = workplace.file("lines", lines);
        workplace.command(&["bench", "moe"]).stdin(File::open(lines).expect("lines")).output().expect("a run")
    };
    let routers =
        ["{\"kind\": \"forced\"}", "{\"kind\": \"forced\", \"forced_load\": \"hot\"}", "{\"kind\": \"cosine\"}"];
    let output = answer(&routers.map(|router| line(router, "layer")).join("\n"));
    assert_success(&output);
    assert_eq!(stdout(&output).lines().count(), routers.len());
    for (router, part, expected) in [
        ("{\"kind\": \"odd\"}", "layer", "unknown variant `odd`"),
        ("{\"forced_lode\": 1}", "layer", "unknown field `forced_lode`"),
        ("{\"kind\": \"forced\", \"forced_hot_experts\": 5}", "layer", "router.forced_hot_experts = 5"),
        ("{\"kind\": \"forced\"}", "products", "goes with the part \"layer\" alone"),
    ] {
        let output = answer(&line(router, part));
        let shown = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{shown}");
        assert!(shown.contains(expected) && shown.trim().lines().count() == 1, "{shown}");
    }
}

/// A configuration with latent attention, one dense layer before two MoE layers, and shared experts.
const DEEPSEEK: &str = r#"{
    "model_type": "deepseek_v2", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2,
    "kv_lora_rank": 8, "q_lora_rank": null, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1,
    "moe_intermediate_size": 32, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "topk_method": "greedy",
    "vocab_size": 64, "max_position_embeddings": 600, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0
}"#;

#[test]
fn bench_decode_times_the_shape_of_a_folder_that_has_no_weights() {
    let workplace = Workplace::new();
    workplace.file("config.json", DEEPSEEK);
    let run = |more: &[&str]| {
        let args = [&["bench", "decode", "--shape", ".", "--types", "bf16", "--json"], more].concat();
        let output = workplace.run(&args);
        assert_success(&output);
        let value: Value = serde_json::from_str(&stdout(&output)).expect("JSON");
        let case = &value["cases"].as_array().expect("cases")[0];
        assert_eq!(case["name"], "decode, BF16");
        case["bytes_per_token"].as_f64().expect("bytes")
    };
    // The missing third layer is an MoE layer, which is larger than the dense one.
    let (all, two) = (run(&[]), run(&["--layers", "2"]));
    assert!(two < 0.8 * all && two > 0.4 * all, "{two} of {all} bytes");
    let forced = ["--router", "kind=forced", "--router", "forced_load=zipf"];
    assert_eq!(run(&forced), all, "a token has as many experts whatever the load");
    refused(&workplace, &["bench", "decode", "--shape", ".", "--router", "kind=odd"], &["model.router.kind = \"odd\""]);
    refused(&workplace, &["bench", "decode", "--shape", ".", "--layers", "4"], &["--layers 4", "has 3"]);
    workplace.file("config.json", DEEPSEEK.replace("600", "200"));
    refused(&workplace, &["bench", "decode", "--shape", "."], &["200 tokens at most", "512"]);
}

/// A file of a machine with rates that are easy to check.
const MACHINE: &str = "name = \"paper\"\ncores = 2\nmemory_bytes = 8e9\nmemory_bytes_per_s = 1e10\n\
    [link]\nlatency_s = 1e-6\nbytes_per_s = 4e9\n[overhead]\nlayer_s = 1e-3\npasses = 2.0\n\
    [[products]]\nprecision = \"f32\"\nthreads = 1\nrows = 64\nwidth = 64\nflops = 1e10\n";

#[test]
fn a_machine_is_measured_into_a_file_from_which_steps_are_predicted_and_checked() {
    let work = Workplace::new();
    assert_success(&work.run(&["bench", "machine", "--quick", "--topology", "topology.toml"]));
    let text = std::fs::read_to_string(work.path("machine.toml")).expect("the file");
    let machine = moeworks_plan::machine::Machine::parse(&text).expect("a machine");
    assert!(machine.products.len() >= 16 && machine.memory_bytes_per_s > 0.0, "{machine:?}");
    let parts = [machine.experts.len(), machine.attention.len(), machine.output_layers.len(), machine.updates.len()];
    assert!(parts.iter().all(|&num| num > 0) && machine.probe_s.is_some(), "{machine:?}");
    assert_success(&work.run(&["plan", "--topology", "topology.toml"]));
    let output = work.run(&["bench", "machine", "--check", "--most", "1", "--json"]);
    assert_success(&output);
    let json: serde_json::Value = serde_json::from_str(&stdout(&output)).expect("JSON");
    let step = &json["steps"][0];
    let number = |value: &serde_json::Value| value.as_f64().expect("a number");
    let error = number(&step["predicted"]["seconds"]) / (number(&step["measured_s"]) * number(&step["speed"])) - 1.0;
    assert!((error - number(&step["error"])).abs() < 1e-9, "{json}");
    assert_eq!(json["median_error"].as_f64(), Some(error.abs()), "one step alone: {json}");
}

#[test]
fn a_step_is_predicted_from_the_file_alone() {
    let work = Workplace::new();
    work.file("machine.toml", MACHINE);
    let predicted = |more: &[&str]| -> serde_json::Value {
        let output = work.run(&[&["bench", "machine", "--predict", "--json"], more].concat());
        assert_success(&output);
        serde_json::from_str(&stdout(&output)).expect("JSON")
    };
    let (two, eight) = (predicted(&["--set", "model.num_layers=2"]), predicted(&["--set", "model.num_layers=8"]));
    let ratio = eight["layers"].as_f64().expect("seconds") / two["layers"].as_f64().expect("seconds");
    assert!((ratio / 4.0 - 1.0).abs() < 1e-9, "{two} {eight}");
    assert_eq!(two["output_layer"], eight["output_layer"]);
    assert_eq!(two["communication"], 0.0);
    assert!(predicted(&["--set", "parallel.dp=2"])["communication"].as_f64() > Some(0.0));
}

#[test]
fn files_and_options_of_a_machine_that_do_not_fit_are_refused() {
    let work = Workplace::new();
    refused(
        &work,
        &["bench", "machine", "--check"],
        &["machine.toml", "`moeworks bench machine --out machine.toml` writes it"],
    );
    work.file("machine.toml", MACHINE.replace("cores = 2", "cores = -2"));
    refused(&work, &["bench", "machine", "--predict"], &["machine.toml: line 2"]);
    work.file("machine.toml", "my notes");
    refused(&work, &["bench", "machine"], &["machine.toml: is there already"]);
    refused(&work, &["bench", "machine", "--set", "train.steps=3"], &["--predict"]);
    refused(&work, &["bench", "machine", "--check", "--most", "0"], &["--most 0: must be from 1 to 10"]);
}

#[test]
fn bench_rebalance_says_what_moving_experts_brings_and_refuses_what_cannot_be() {
    let workplace = Workplace::new();
    let quick = ["--ranks", "2", "--steps", "60", "--period", "40", "--every", "10", "--row-us", "50", "--json"];
    let output = workplace.run(&[&["bench", "rebalance", "off", "anew"][..], &quick].concat());
    assert_success(&output);
    let value: Value = serde_json::from_str(&stdout(&output)).expect("JSON");
    let modes: Vec<&str> = value.as_array().expect("a list").iter().map(|run| run["mode"].as_str().unwrap()).collect();
    assert_eq!(modes, ["off", "anew"]);
    let imbalance = |run: usize| value[run]["imbalance"].as_f64().expect("a number");
    assert!(imbalance(1) < 0.7 * imbalance(0), "{value}");
    assert!(value[1]["copies"].as_u64().expect("a count") > 0, "{value}");
    let decision = &value[1]["decisions"][0];
    assert!(decision["foretold_s"].as_f64() < decision["before_s"].as_f64(), "{value}");
    let rebalance =
        |more: &[&str], parts: &[&str]| refused(&workplace, &[&["bench", "rebalance"], more].concat(), parts);
    rebalance(&["sometimes"], &["\"sometimes\"", "off, static, moves, anew, auto"]);
    rebalance(&["--zipf", "9"], &["--zipf 9", "from 0 to 4"]);
    rebalance(&["--row-us", "0"], &["--row-us 0", "above 0"]);
    rebalance(&["--link", "fast"], &["--link fast", "LATENCY_US,MB_PER_S"]);
}
