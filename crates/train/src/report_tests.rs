use std::fmt::Write as _;
use std::path::Path;

use super::numbers::{Unit, bytes, duration, grouped, short, tick_labels, ticks};
use super::*;
use crate::metrics::{Columns, LayerRecord, MetricsWriter, RankRecord, RanksRecord, Record, SAMPLES_JSONL, Sample};
use crate::routing::Specialization;

/// Writes a run of `num_steps` steps with `num_layers` MoE layers of `num_experts` experts.
fn write_run(run_dir: &Path, num_steps: u64, num_layers: usize, num_experts: usize) {
    let layers: Vec<usize> = (0..num_layers).collect();
    let mut writer = MetricsWriter::create(run_dir, &Columns::new(&layers, &[])).unwrap();
    for step in 1..=num_steps {
        let layer = |layer: usize| LayerRecord {
            layer,
            tokens_per_expert: (0..num_experts as u64).map(|expert| (expert * 31 + step * 7) % 97).collect(),
            num_dropped: step % 5,
            num_rerouted: 0,
            router_entropy: 1.0,
            mean_prob_entropy: 1.5,
            router_z: 2.0,
            router_logit_rms: 0.6,
            specialization: step.is_multiple_of(2).then_some(Specialization { nats: 0.2, share: 0.1 }),
            checkpoint_agreement: step.is_multiple_of(4).then_some(0.9),
        };
        let record = Record {
            step,
            tokens: step * 100,
            loss: 6.0 / step as f64,
            lr: 3e-4,
            grad_norm: 0.5,
            tokens_per_s: 1e4,
            mfu: 0.5,
            step_ms: 10.0,
            val_loss: step.is_multiple_of(2).then_some(7.0 / step as f64),
            is_skipped: step == 2,
            layers: layers.iter().map(|&index| layer(index)).collect(),
            ..Record::default()
        };
        writer.write(&record).unwrap();
    }
}

fn report_of(run_dir: &Path) -> String {
    fs::read_to_string(write_report(run_dir).unwrap()).unwrap()
}

/// Panics where a tag is not closed in order, as an XML parser would.
fn assert_tags_balance(html: &str) {
    let mut open = Vec::new();
    for tag in html.split('<').skip(1) {
        let tag = tag.split('>').next().unwrap();
        let name = tag.split([' ', '/']).find(|part| !part.is_empty()).unwrap();
        if tag.starts_with('/') {
            assert_eq!(open.pop(), Some(name), "<{tag}>");
        } else if !tag.ends_with('/') && !["!doctype", "meta"].contains(&name) {
            open.push(name);
        }
    }
    assert!(open.is_empty(), "not closed: {open:?}");
}

fn assert_is_self_contained(html: &str) {
    for foreign in ["<script", "<link", "<iframe", "http://", "https://", "@import", "url(h", " on"] {
        let html = html.replace(" on ", " ").replace(" one ", " ");
        assert!(!html.contains(foreign), "{foreign}");
    }
    assert!(html.len() < 2_000_000, "{} bytes", html.len());
}

#[test]
fn a_run_on_ranks_shows_each_of_them() {
    let run = tempfile::tempdir().unwrap();
    let mut writer = MetricsWriter::create(run.path(), &Columns::default()).unwrap();
    for step in 1..=3 {
        let rank = |work_ms| RankRecord {
            work_ms,
            standing_ms: 12.25,
            tensor_ms: 3.5,
            node_bytes: 5_000_000,
            ..RankRecord::default()
        };
        let ranks = Some(RanksRecord { ranks: vec![rank(10.0), rank(30.0)] });
        writer.write(&Record { step, ranks, ..Record::default() }).unwrap();
    }
    let html = report_of(run.path());
    assert_tags_balance(&html);
    assert_is_self_contained(&html);
    for shown in ["<h2>Ranks</h2>", "<td>1</td><td>30", "<td>12.25</td><td>3.5</td><td>4.77 MiB", "busiest over mean"] {
        assert!(html.contains(shown), "{shown}");
    }
    let alone = tempfile::tempdir().unwrap();
    write_run(alone.path(), 2, 1, 4);
    assert!(!report_of(alone.path()).contains("<h2>Ranks</h2>"));
}

#[test]
fn every_shape_of_run_gives_a_well_formed_page() {
    for (num_steps, num_layers, num_experts) in [(1, 0, 1), (1, 1, 1), (2, 1, 9), (30, 4, 8), (60, 9, 64), (700, 2, 4)]
    {
        let run = tempfile::tempdir().unwrap();
        write_run(run.path(), num_steps, num_layers, num_experts);
        let html = report_of(run.path());
        assert_tags_balance(&html);
        assert_is_self_contained(&html);
        assert!(!html.contains("NaN") && !html.contains("inf"), "{num_steps} {num_layers} {num_experts}");
        assert_eq!(html.contains("Expert load"), num_layers > 0);
        assert_eq!(html.contains(">Specialisation<"), num_layers > 0 && num_steps >= 2);
        assert_eq!(html.contains(">Agreement with the checkpoint before<"), num_layers > 0 && num_steps >= 4);
        assert!(!html.contains(">Rerouted tokens<"), "nothing was rerouted");
        assert_eq!(html.matches("data:image/png").count(), num_layers);
    }
}

#[test]
fn a_page_stays_small_whatever_the_size_of_the_model() {
    let run = tempfile::tempdir().unwrap();
    write_run(run.path(), 170, 70, 300);
    let html = report_of(run.path());
    assert_tags_balance(&html);
    assert_is_self_contained(&html);
    assert!(html.contains("64 of 70 layers") && html.contains("mean of 3 neighbouring experts"));
}

#[test]
fn text_from_outside_cannot_become_markup() {
    let run = tempfile::tempdir().unwrap();
    let hostile = "<script>alert('1')</script>\"&amp;\u{0}\u{1b}[31m";
    let run_dir = run.path().join("<img src=x onerror='1'>");
    write_run(&run_dir, 3, 1, 4);
    let config = toml::Table::from_iter([(hostile.to_owned(), toml::Value::String(hostile.repeat(100)))]);
    fs::write(run_dir.join(CONFIG_FILE), config.to_string()).unwrap();
    let mut writer = MetricsWriter::resume(&run_dir, &Columns::new(&[0], &[]), 3).unwrap();
    writer.write_sample(&Sample { step: 3, prompt: hostile.to_owned(), text: hostile.repeat(1000) }).unwrap();
    let html = report_of(&run_dir);
    assert_tags_balance(&html);
    assert!(!html.contains("<script") && !html.contains("<img") && !html.contains(['\u{0}', '\u{1b}']));
    assert!(html.contains("&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt;&quot;&amp;amp;··[31m"));
}

#[test]
fn damaged_and_absurd_records_are_passed_over_or_drawn() {
    let run = tempfile::tempdir().unwrap();
    let lines = [
        "{\"step\":1,\"train/loss\":2.5}",
        "not json",
        "{\"step\":2,\"train/loss\":null,\"train/grad_norm\":1e308,\"train/lr\":-1e308,\"perf/step_ms\":1e308}",
        "{\"step\":18446744073709551615,\"train/loss\":1e-320,\"val/loss\":null,\"tokens\":-1}",
        "{\"step\":3,\"train/loss\":2.0,\"moe/layer_0/tokens_per_expert\":[1,2]}",
        "{\"step\":\"4\"}",
        "[[[[",
        "{\"step\":5,\"train/lo",
    ];
    fs::write(run.path().join(METRICS_JSONL), lines.join("\n")).unwrap();
    fs::write(run.path().join(CONFIG_FILE), "this is [not toml").unwrap();
    fs::write(run.path().join(SAMPLES_JSONL), "\u{0}").unwrap();
    assert_tags_balance(&report_of(run.path()));
    // Layers without experts, and loads that exceed the integer range.
    let experts = "\"moe/layer_0/tokens_per_expert\":[],\"moe/layer_7/tokens_per_expert\":[18446744073709551615,9]";
    fs::write(run.path().join(METRICS_JSONL), format!("{{\"step\":1,{experts}}}\n{{\"step\":2,{experts}}}\n")).unwrap();
    assert_tags_balance(&report_of(run.path()));
}

#[test]
fn a_run_without_steps_has_no_report_and_says_so() {
    let run = tempfile::tempdir().unwrap();
    assert!(write_report(run.path()).unwrap_err().to_string().contains(METRICS_JSONL));
    fs::write(run.path().join(METRICS_JSONL), "{\"step\":1,\"tr").unwrap();
    assert!(write_report(run.path()).unwrap_err().to_string().contains("holds no record"));
    assert!(!run.path().join(REPORT_HTML).exists());
}

#[test]
fn a_long_run_is_reduced_without_losing_its_course() {
    let run = tempfile::tempdir().unwrap();
    let mut text = String::new();
    for step in 1..=20_000u64 {
        let skipped = u8::from(step == 7_777);
        writeln!(text, "{{\"step\":{step},\"train/loss\":{step},\"val/loss\":{step},\"train/is_skipped\":{skipped}}}")
            .unwrap();
    }
    let path = run.path().join(METRICS_JSONL);
    fs::write(&path, text).unwrap();
    let data = RunData::read(&path).unwrap().unwrap();
    let loss = data.series("train/loss");
    assert!((250..=501).contains(&loss.len()), "{}", loss.len());
    // Each point is the mean of its steps, drawn at the middle of them.
    assert!(loss.iter().all(|(step, value)| step == value));
    assert!(data.evaluations().len() <= 800 && data.evaluations().last() == Some(&(20_000.0, 20_000.0)));
    assert_eq!((data.num_steps, data.num_skipped, data.best_evaluation), (20_000, 1, Some((1.0, 1.0))));
    assert!(data.skipped_steps().len() == 1 && (data.skipped_steps()[0] - 7_777.0).abs() < 64.0);
}

#[test]
fn ticks_are_round_and_inside() {
    for (low, high) in [(0.0, 1.0), (1.3, 6.2), (-5.0, 3.0), (1.0, 1200.0), (1e-9, 3e-4), (1e8, 1.0001e8), (0.0, 1e300)]
    {
        for count in 2..10 {
            let ticks = ticks(low, high, count);
            assert!(!ticks.is_empty() && ticks.len() <= count + 2, "{low}..{high} {count}: {ticks:?}");
            let room = (high - low) * 1e-6;
            assert!(ticks.iter().all(|tick| (low - room..=high + room).contains(tick)), "{low}..{high}: {ticks:?}");
            let labels = tick_labels(&ticks, Unit::Plain);
            assert!(labels.windows(2).all(|pair| pair[0] != pair[1]) || low == 1e8, "{labels:?}");
        }
    }
    assert_eq!(tick_labels(&ticks(0.0, 3e-4, 4), Unit::Plain), ["0", "1e-4", "2e-4", "3e-4"]);
    assert_eq!(tick_labels(&ticks(0.0, 14_000.0, 3), Unit::Plain), ["0", "5k", "10k"]);
    assert_eq!(tick_labels(&ticks(0.0, 0.62, 4), Unit::Percent), ["0", "20%", "40%", "60%"]);
}

#[test]
fn numbers_are_short() {
    let plain = [0.0, 1.6243, 0.05123, 3e-4, 13_123.0, 1.5e9, 1200.0, f64::NAN];
    assert_eq!(
        plain.map(|value| short(value, Unit::Plain)),
        ["0", "1.624", "0.0512", "3e-4", "13.1k", "1.5G", "1200", "–"]
    );
    assert_eq!([0.1234, 1.0, 0.0].map(|value| short(value, Unit::Percent)), ["12.3%", "100%", "0%"]);
    assert_eq!([0, 999, 1_000, 4_915_200].map(grouped), ["0", "999", "1,000", "4,915,200"]);
    assert_eq!(
        [0.31, 43.0, 272.0, 11_100.0, 187_200.0].map(duration),
        ["0.31 s", "43 s", "4 min 32 s", "3 h 05 min", "2 d 04 h"]
    );
    assert_eq!([17, 1_825_361_101].map(bytes), ["17 B", "1.7 GiB"]);
}
