use std::fs;
use std::io::Write as _;
use std::path::Path;

use proptest::prelude::*;

use super::lines::{csv_header, csv_line, json_line, parse_record};
use super::*;

fn layer(tokens_per_expert: &[u64]) -> LayerRecord {
    LayerRecord { tokens_per_expert: tokens_per_expert.to_vec(), ..LayerRecord::default() }
}

fn record(step: u64) -> Record {
    let layers = [1, 3].map(|index| LayerRecord {
        layer: index,
        tokens_per_expert: (0..4).map(|expert| step * 7 + expert * index as u64).collect(),
        num_dropped: step % 3,
        num_rerouted: step % 2,
        router_entropy: 1.0 / step as f64,
        mean_prob_entropy: 1.25,
        router_z: 0.3,
        router_logit_rms: 0.7,
        specialization: step.is_multiple_of(5).then_some(Specialization { nats: 0.5, share: 0.25 }),
        checkpoint_agreement: step.is_multiple_of(10).then_some(0.875),
    });
    Record {
        step,
        tokens: step * 4096,
        loss: 5.0 / step as f64,
        lr: 3e-4,
        grad_norm: if step == 6 { f64::NAN } else { 0.1 },
        mfu: f64::NAN,
        val_loss: step.is_multiple_of(5).then_some(0.1 + 0.2),
        is_skipped: step == 6,
        layers: layers.to_vec(),
        ..Record::default()
    }
}

fn write_steps(writer: &mut MetricsWriter, steps: std::ops::RangeInclusive<u64>) {
    for step in steps {
        writer.write(&record(step)).unwrap();
        if step % 4 == 0 {
            let sample = Sample { step, prompt: "fn ".to_owned(), text: format!("<{step}>\n\"ä\"") };
            writer.write_sample(&sample).unwrap();
        }
    }
}

fn read_run(run_dir: &Path) -> [String; 3] {
    [METRICS_JSONL, METRICS_CSV, SAMPLES_JSONL].map(|name| fs::read_to_string(run_dir.join(name)).unwrap())
}

#[test]
fn figures_of_balance_are_those_of_their_definitions() {
    let even = layer(&[5, 5, 5, 5]);
    assert_eq!((even.cv(), even.e_max_violation(), even.dead_expert_frac()), (0.0, 0.0, 0.0));
    assert!((even.expert_diversity() - 1.0).abs() < 1e-12);
    let collapsed = layer(&[0, 20, 0, 0]);
    assert!((collapsed.cv() - 3f64.sqrt()).abs() < 1e-12);
    assert!((collapsed.expert_diversity() - 0.25).abs() < 1e-12);
    assert_eq!((collapsed.e_max_violation(), collapsed.dead_expert_frac()), (3.0, 0.75));
    // With numpy: a = [1, 2, 3, 6]; a.std() / a.mean(); exp(-sum(p * log(p))) / 4.
    let skewed = LayerRecord { num_dropped: 3, ..layer(&[1, 2, 3, 6]) };
    assert!((skewed.cv() - 0.623_609_564_462_323_6).abs() < 1e-12);
    assert!((skewed.expert_diversity() - 0.829_074_676_069_231_7).abs() < 1e-12);
    assert_eq!((skewed.e_max_violation(), skewed.drop_rate()), (1.0, 0.25));
    assert_eq!((skewed.max_over_mean(), skewed.reroute_rate()), (2.0, 0.0));
}

#[test]
fn a_layer_without_tokens_or_experts_and_one_with_too_many_do_no_harm() {
    for layer in [layer(&[]), layer(&[0, 0]), layer(&[u64::MAX, u64::MAX])] {
        let record = Record { layers: vec![layer], ..Record::default() };
        let line = json_line(&record);
        assert!(!line.contains("NaN") && !line.contains("inf"), "{line}");
        assert_eq!(parse_record(line.as_bytes()).unwrap().layers, record.layers);
    }
}

#[test]
fn figures_that_only_some_steps_have_are_left_out_of_json_and_empty_in_csv() {
    let fields = |step| -> serde_json::Value { serde_json::from_str(&json_line(&record(step))).unwrap() };
    let agreement = "moe/layer_3/checkpoint_agreement";
    assert_eq!((fields(10)[agreement].as_f64(), fields(5).get(agreement)), (Some(0.875), None));
    assert_eq!(fields(5)["moe/layer_1/specialization"], 0.25);
    assert_eq!(fields(5)["moe/layer_1/specialization_nats"], 0.5);
    assert_eq!(fields(4).get("moe/layer_1/specialization"), None);
    for step in [4, 5, 10] {
        assert_eq!(parse_record(json_line(&record(step)).as_bytes()).unwrap().layers, record(step).layers);
        let line = csv_line(&record(step), &Columns::default());
        let cells: Vec<&str> = line.trim_end().split(',').collect();
        let header = csv_header(&Columns::new(&[1, 3], &[]));
        let at = |name: &str| cells[header.trim_end().split(',').position(|cell| cell == name).unwrap()];
        assert_eq!(at(agreement), if step == 10 { "0.875" } else { "" });
        assert_eq!(at("moe/layer_1/specialization"), if step == 4 { "" } else { "0.25" });
        assert_eq!(at("moe/layer_3/router_logit_rms"), "0.7");
    }
}

#[test]
fn losses_that_are_not_computed_are_left_out_of_json_and_empty_in_csv() {
    let router_losses = RouterLosses { importance: Some(0.25), l1: Some(3.0), ..RouterLosses::default() };
    let record = Record { step: 3, router_losses, ..Record::default() };
    let fields: serde_json::Value = serde_json::from_str(&json_line(&record)).unwrap();
    assert_eq!((fields["moe/importance_loss"].as_f64(), fields["moe/l1_loss"].as_f64()), (Some(0.25), Some(3.0)));
    assert_eq!((fields.get("moe/device_loss"), fields.get("moe/load_loss")), (None, None));
    assert_eq!(parse_record(json_line(&record).as_bytes()).unwrap().router_losses, router_losses);
    let (header, line) = (csv_header(&Columns::new(&[], &[])), csv_line(&record, &Columns::default()));
    let cell =
        |name: &str| line.trim_end().split(',').nth(header.trim_end().split(',').position(|n| n == name).unwrap());
    assert_eq!([cell("moe/importance_loss"), cell("moe/local_entropy_loss")], [Some("0.25"), Some("")]);
}

#[test]
fn numbers_that_are_not_finite_are_null_in_json_and_empty_in_csv() {
    let record = Record { step: 1, loss: f64::NAN, grad_norm: f64::INFINITY, lr: 1e-300, ..Record::default() };
    let json: serde_json::Value = serde_json::from_str(&json_line(&record)).unwrap();
    assert!(json["train/loss"].is_null() && json["train/grad_norm"].is_null());
    assert_eq!(json["train/lr"], 1e-300);
    assert!(
        csv_line(&record, &Columns::default()).starts_with("1,0,,0,0,1e-300,,0,,"),
        "{}",
        csv_line(&record, &Columns::default())
    );
}

#[test]
fn the_csv_header_has_a_name_for_each_field() {
    let header = csv_header(&Columns::new(&[1, 3], &[]));
    assert!(header.starts_with("step,tokens,train/loss,"));
    assert!(header.contains(",moe/layer_3/expert_diversity,"));
    assert_eq!(header.split(',').count(), csv_line(&record(2), &Columns::default()).split(',').count());
}

#[test]
fn metrics_of_a_task_have_columns_of_their_own_also_on_steps_without_an_evaluation() {
    let columns = Columns::new(&[], &["accuracy"]);
    let train = NamedFigure { name: "train/accuracy".to_owned(), value: 0.25 };
    let record = Record { step: 3, metrics: vec![train], ..Record::default() };
    let (header, line) = (csv_header(&columns), csv_line(&record, &columns));
    let field = |name: &str| {
        let at = header.trim_end().split(',').position(|column| column == name).expect("a column");
        line.trim_end().split(',').nth(at).expect("a field").to_owned()
    };
    assert_eq!([field("train/accuracy"), field("val/accuracy")], ["0.25", ""]);
    let json = json_line(&record);
    assert!(json.contains("\"train/accuracy\":0.25") && !json.contains("val/accuracy"), "{json}");
}

proptest! {
    #[test]
    fn a_record_reads_back_from_json_bit_for_bit(
        (step, tokens) in (any::<u64>(), any::<u64>()),
        numbers in prop::array::uniform8(any::<f64>()),
        val_loss in prop::option::of(any::<f64>()),
        counts in prop::collection::vec(prop::collection::vec(any::<u32>(), 0..9), 0..4),
    ) {
        let finite = |value: f64| if value.is_finite() { value } else { 0.5 };
        let [loss, balance_loss, z_loss, lr, grad_norm, tokens_per_s, mfu, router_z] = numbers.map(finite);
        let to_layer = |(index, counts): (usize, &Vec<u32>)| LayerRecord {
            layer: index * 2,
            tokens_per_expert: counts.iter().copied().map(u64::from).collect(),
            num_dropped: 1,
            num_rerouted: 2,
            router_entropy: router_z,
            mean_prob_entropy: loss,
            router_z,
            router_logit_rms: mfu,
            specialization: (index == 1).then_some(Specialization { nats: lr, share: z_loss }),
            checkpoint_agreement: (index == 0).then_some(grad_norm),
        };
        let layers = counts.iter().enumerate().map(to_layer).collect();
        let router_losses = RouterLosses { load: Some(lr), l1: Some(z_loss), ..RouterLosses::default() };
        let metrics = [("train/accuracy", mfu), ("val/accuracy", lr)]
            .map(|(name, value)| NamedFigure { name: name.to_owned(), value })
            .to_vec();
        let written = Record {
            step, tokens, loss, balance_loss, z_loss, router_losses, routing_flops_saved: mfu, lr, grad_norm, tokens_per_s, mfu, step_ms: loss, processor_ms: mfu,
            memory_peak_bytes: 1 << 40, val_loss: val_loss.map(finite), is_skipped: step % 2 == 0, layers, metrics,
            ranks: (step % 3 == 0).then(|| RanksRecord { ranks: vec![RankRecord { work_ms: 3.5, node_bytes: 7, ..RankRecord::default() }; 2] }),
        };
        prop_assert_eq!(parse_record(json_line(&written).as_bytes()).unwrap(), written);
    }
}

#[test]
fn a_killed_and_resumed_run_has_the_records_of_one_that_was_never_stopped() {
    let whole = tempfile::tempdir().unwrap();
    write_steps(&mut MetricsWriter::create(whole.path(), &Columns::new(&[1, 3], &[])).unwrap(), 1..=20);
    // A run that was killed at step 15 after a checkpoint at step `resumed`, with `rest` after its last complete
    // line.
    for (resumed, rest) in [(10, ""), (10, "{\"step\":16,\"tok"), (15, "16,655"), (0, "\0\0\0"), (12, "{}\n\n")] {
        let run = tempfile::tempdir().unwrap();
        let mut writer = MetricsWriter::create(run.path(), &Columns::new(&[1, 3], &[])).unwrap();
        write_steps(&mut writer, 1..=15);
        writer.sync().unwrap();
        for name in [METRICS_JSONL, METRICS_CSV, SAMPLES_JSONL] {
            let mut file = fs::OpenOptions::new().append(true).open(run.path().join(name)).unwrap();
            file.write_all(rest.as_bytes()).unwrap();
        }
        let mut writer = MetricsWriter::resume(run.path(), &Columns::new(&[1, 3], &[]), resumed).unwrap();
        write_steps(&mut writer, resumed + 1..=20);
        assert_eq!(read_run(run.path()), read_run(whole.path()), "resumed at {resumed} with {rest:?}");
    }
}

#[test]
fn a_file_that_was_cut_at_any_byte_is_repaired() {
    let whole = tempfile::tempdir().unwrap();
    write_steps(&mut MetricsWriter::create(whole.path(), &Columns::new(&[1, 3], &[])).unwrap(), 1..=3);
    let [jsonl, csv, _] = read_run(whole.path());
    for cut in (0..jsonl.len().max(csv.len())).step_by(7) {
        let run = tempfile::tempdir().unwrap();
        fs::write(run.path().join(METRICS_JSONL), &jsonl[..cut.min(jsonl.len())]).unwrap();
        fs::write(run.path().join(METRICS_CSV), &csv[..cut.min(csv.len())]).unwrap();
        drop(MetricsWriter::resume(run.path(), &Columns::new(&[1, 3], &[]), 3).unwrap());
        let [repaired_jsonl, repaired_csv, _] = read_run(run.path());
        let whole_lines = |text: &str| text.rfind('\n').map_or(0, |end| end + 1);
        assert_eq!(repaired_jsonl, jsonl[..whole_lines(&jsonl[..cut.min(jsonl.len())])]);
        let kept = &csv[..whole_lines(&csv[..cut.min(csv.len())])];
        // A table without its header is rebuilt from the JSON lines.
        assert!(if kept.is_empty() { csv.starts_with(&repaired_csv) } else { repaired_csv == kept }, "cut at {cut}");
    }
}

#[test]
fn lines_longer_than_a_read_are_cut_in_the_right_place() {
    let run = tempfile::tempdir().unwrap();
    let path = run.path().join(SAMPLES_JSONL);
    let line =
        |step: u64, len: usize| format!("{{\"prompt\":\"\",\"step\":{step},\"text\":\"{}\"}}\n", "x".repeat(len));
    let kept = line(1, 10) + &line(2, 300_000) + &line(3, 70_000);
    fs::write(&path, kept.clone() + &line(4, 500_000) + &line(5, 65_536) + "{\"half").unwrap();
    drop(MetricsWriter::resume(run.path(), &Columns::new(&[], &[]), 3).unwrap());
    assert_eq!(fs::read_to_string(&path).unwrap(), kept);
}

#[test]
fn a_table_with_other_columns_is_made_anew() {
    let run = tempfile::tempdir().unwrap();
    write_steps(&mut MetricsWriter::create(run.path(), &Columns::new(&[1, 3], &[])).unwrap(), 1..=5);
    let [_, csv, _] = read_run(run.path());
    for damaged in [None, Some("step,old\n1,2\n"), Some("")] {
        let path = run.path().join(METRICS_CSV);
        damaged.map_or_else(|| fs::remove_file(&path), |text| fs::write(&path, text)).unwrap();
        drop(MetricsWriter::resume(run.path(), &Columns::new(&[1, 3], &[]), 5).unwrap());
        assert_eq!(read_run(run.path())[1], csv);
    }
}

#[test]
fn records_of_another_model_are_refused() {
    let run = tempfile::tempdir().unwrap();
    let mut writer = MetricsWriter::create(run.path(), &Columns::new(&[0], &[])).unwrap();
    assert!(writer.write(&record(1)).unwrap_err().to_string().contains("other MoE layers"));
}

#[test]
fn samples_read_back_and_damaged_lines_are_passed_over() {
    let run = tempfile::tempdir().unwrap();
    assert_eq!(read_samples(run.path()).unwrap(), []);
    write_steps(&mut MetricsWriter::create(run.path(), &Columns::new(&[1, 3], &[])).unwrap(), 1..=8);
    let path = run.path().join(SAMPLES_JSONL);
    fs::write(&path, "nonsense\n".to_owned() + &fs::read_to_string(&path).unwrap() + "{\"step\":9").unwrap();
    let samples = read_samples(run.path()).unwrap();
    assert_eq!(samples.iter().map(|sample| sample.step).collect::<Vec<_>>(), [4, 8]);
    assert_eq!(samples[1].text, "<8>\n\"ä\"");
}

#[test]
fn the_last_record_is_found_behind_a_cut_line() {
    let run = tempfile::tempdir().unwrap();
    assert_eq!(read_last_record(run.path()).unwrap(), None);
    write_steps(&mut MetricsWriter::create(run.path(), &Columns::new(&[1, 3], &[])).unwrap(), 1..=8);
    let mut file = fs::OpenOptions::new().append(true).open(run.path().join(METRICS_JSONL)).unwrap();
    file.write_all(b"{\"step\":9,").unwrap();
    let last = read_last_record(run.path()).unwrap().unwrap();
    assert_eq!((last.step, last.layers), (8, record(8).layers));
}

#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_is_one_error_that_names_the_file() {
    let run = tempfile::tempdir().unwrap();
    drop(MetricsWriter::create(run.path(), &Columns::new(&[1, 3], &[])).unwrap());
    fs::remove_file(run.path().join(METRICS_JSONL)).unwrap();
    std::os::unix::fs::symlink("/dev/full", run.path().join(METRICS_JSONL)).unwrap();
    let error = MetricsWriter::open(run.path(), &Columns::new(&[1, 3], &[]), None)
        .unwrap()
        .write(&record(1))
        .unwrap_err()
        .to_string();
    assert!(error.contains("metrics.jsonl") && error.contains("No space left"), "{error}");
}
