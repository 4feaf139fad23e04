//! `moeworks advise`: runs made with a defect are diagnosed, a healthy one is not, and no run is changed.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::bad_input::refused;
use crate::program::{Workplace, assert_success, stderr, stdout};

/// Settings with which the tiny model learns without any fault.
const GOOD: [&str; 8] = [
    "--set",
    "train.batch_size=8",
    "--set",
    "train.lr=1e-2",
    "--set",
    "train.checkpoint_every=20",
    "--set",
    "train.eval_every=20",
];

/// Trains a run of `steps` steps with the settings `more`.
fn trained(steps: u64, more: &[&str]) -> Workplace {
    let work = Workplace::new();
    let more: Vec<&str> = GOOD.into_iter().chain(more.iter().flat_map(|setting| ["--set", *setting])).collect();
    assert_success(&work.train("run", steps, &more));
    work
}

fn advice(work: &Workplace, more: &[&str]) -> Value {
    let output = work.run(&[&["advise", "run", "--json"], more].concat());
    assert_success(&output);
    serde_json::from_str(&stdout(&output)).expect("JSON")
}

fn topics(advice: &Value) -> Vec<&str> {
    advice["findings"].as_array().unwrap().iter().map(|finding| finding["topic"].as_str().unwrap()).collect()
}

/// The bytes of every file below a folder.
fn contents(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            all.extend(contents(&path));
        } else {
            drop(all.insert(path.clone(), fs::read(&path).unwrap()));
        }
    }
    all
}

#[test]
fn a_healthy_run_is_said_to_be_healthy() {
    let work = trained(120, &[]);
    let json = advice(&work, &[]);
    assert_eq!((topics(&json), &json["healthy"]), (Vec::new(), &Value::from(true)), "{json}");
    let output = work.run(&["advise", "run"]);
    assert!(stdout(&output).contains("Nothing holds this run back"), "{}", stdout(&output));
}

#[test]
fn defects_of_routers_are_diagnosed_by_the_figures_of_the_metrics_file() {
    let uniform = trained(30, &["model.router.temperature=100.0"]);
    let json = advice(&uniform, &[]);
    assert_eq!(topics(&json)[0], "router_uniform", "{json}");
    let figure = &json["findings"][0]["figures"][0];
    let name = figure["name"].as_str().unwrap();
    let text = fs::read_to_string(uniform.path("run/metrics.jsonl")).unwrap();
    let values = text.lines().skip(24).map(|line| serde_json::from_str::<Value>(line).unwrap()[name].as_f64().unwrap());
    let values: Vec<f64> = values.collect();
    assert_eq!(values.len(), 6, "a fifth of the records");
    let mean = values.iter().sum::<f64>() / 6.0;
    assert!((figure["value"].as_f64().unwrap() - mean).abs() < 1e-12, "{figure} {mean}");
    let skewed = ["model.router.kind=forced", "model.router.forced_load=zipf"];
    assert_eq!(topics(&advice(&trained(12, &skewed), &[])), ["router_collapsed"]);
    assert_eq!(topics(&advice(&trained(12, &["model.capacity_factor=0.6"]), &[])), ["dropped_tokens"]);
}

#[test]
fn a_loss_that_is_not_finite_and_a_full_memory_are_diagnosed() {
    let blown = ["train.lr=1e30", "train.clip_norm=0.0", "train.max_bad_steps=20"];
    let json = advice(&trained(15, &blown), &[]);
    assert_eq!(topics(&json)[0], "loss_not_finite", "{json}");
    let work = trained(12, &[]);
    assert_eq!(topics(&advice(&work, &["--memory", "2.3MB"])), ["memory"]);
    assert_eq!(topics(&advice(&work, &["--memory", "64GB"])), Vec::<&str>::new());
}

#[test]
fn trials_leave_the_run_as_it_is_bit_for_bit() {
    let work = trained(20, &["model.capacity_factor=0.6", "model.router.temperature=100.0"]);
    let before = contents(&work.path("run"));
    let json = advice(&work, &["--try", "--steps", "3"]);
    assert_eq!(contents(&work.path("run")), before);
    let rows = json["tries"]["rows"].as_array().unwrap();
    let row = |setting: &str, value: &str| {
        let is_row = |row: &&Value| row["settings"][0]["setting"] == setting && row["settings"][0]["value"] == value;
        rows.iter().find(is_row).unwrap_or_else(|| panic!("{setting} in {json}"))
    };
    assert!(rows.iter().all(|row| row["error"].is_null() && row["steps"] == 3), "{json}");
    assert!(rows[0]["settings"].as_array().unwrap().is_empty() && rows[0]["moe/drop_rate"].as_f64().unwrap() > 0.3);
    assert_eq!(row("model.capacity_factor", "0.0")["moe/drop_rate"].as_f64(), Some(0.0));
    let cooler = row("model.router.temperature", "1.0")["router_entropy_share"].as_f64().unwrap();
    assert!(cooler < rows[0]["router_entropy_share"].as_f64().unwrap(), "{json}");
    assert!(work.path("run-tries").is_dir());
    let said = json["tries"]["sentences"].as_array().unwrap();
    assert!(said.len() == 2 && said[0].as_str().unwrap().contains("validation loss"), "{json}");
    refused(&work, &["advise", "run", "--try", "--out", "run/inside"], &["--out run/inside", "is in the run"]);
    refused(&work, &["advise", "run", "--try", "--out", "run-tries"], &["--out run-tries", "is not empty"]);
}

#[test]
fn folders_that_are_no_whole_run_of_this_version_are_read_as_far_as_they_go() {
    let work = trained(12, &[]);
    let metrics = work.path("run/metrics.jsonl");
    let whole = fs::read_to_string(&metrics).unwrap();
    fs::write(&metrics, &whole[..whole.len() - 100]).unwrap();
    let config = work.path("run/config.toml");
    let text = fs::read_to_string(&config).unwrap();
    fs::write(&config, text.replace("[train]\n", "[train]\nsetting_of_tomorrow = 3\n")).unwrap();
    let notes = advice(&work, &[])["notes"].to_string();
    assert!(notes.contains("1 damaged or incomplete") && notes.contains("train.setting_of_tomorrow"), "{notes}");
    fs::write(&metrics, "{\"step\":1,\"tokens\":64,\"train/loss\":5.5}\n{\"step\":2,\"train/loss\":5.4}\n").unwrap();
    let json = advice(&work, &[]);
    assert!(json["notes"].to_string().contains("perf/mfu") && json["healthy"] == true, "{json}");
    refused(&work, &["advise", "run", "--trace", "text.txt"], &["text.txt: is not JSON"]);
    fs::write(&metrics, "").unwrap();
    refused(&work, &["advise", "run"], &["metrics.jsonl", "holds no record of a step"]);
    fs::remove_file(&metrics).unwrap();
    refused(&work, &["advise", "run"], &["metrics.jsonl", "holds no record of a step"]);
    fs::remove_file(&config).unwrap();
    refused(&work, &["advise", "run"], &["is not a run: it has no config.toml"]);
    refused(&work, &["advise", "nowhere"], &["nowhere: there is no such folder"]);
    refused(&work, &["advise", "text.txt"], &["text.txt: is a file; name the folder of a run"]);
}

#[test]
fn wrong_options_are_named() {
    let work = Workplace::new();
    refused(&work, &["advise", "run", "--last", "0"], &["--last 0: must be from 1 to"]);
    refused(&work, &["advise", "run", "--last", "-3"], &["'-3'", "--last"]);
    refused(&work, &["advise", "run", "--memory", "-3GB"], &["-3"]);
    refused(&work, &["advise", "run", "--memory", "lots"], &["'lots'", "must be a size such as 64GB"]);
    refused(&work, &["advise", "run", "--try", "--steps", "0"], &["--steps 0: must be from 1 to"]);
    let output = work.run(&["advise", "run", "--out", "there"]);
    assert!(stderr(&output).contains("--try"), "{}", stderr(&output));
}
