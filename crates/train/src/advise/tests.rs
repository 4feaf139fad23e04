//! Tests of the rules, on figures that are made by hand.

mod limits;

use super::*;
use crate::config::{Override, RunConfig, setting_rows};
use crate::metrics::LayerRecord;

fn configured(settings: &[&str]) -> RunConfig {
    let overrides = settings.iter().map(|text| Override::parse(text).unwrap()).collect();
    let layers = crate::config::ConfigLayers { overrides, ..Default::default() };
    let mut config = layers.resolve().unwrap();
    config.model.vocab_size = 257;
    config
}

fn layer(layer: usize, counts: &[u64]) -> LayerFigures {
    LayerFigures {
        load: LayerRecord { layer, tokens_per_expert: counts.to_vec(), ..LayerRecord::default() },
        router_entropy: 1.2,
        mean_prob_entropy: 2.0,
        logit_rms: 1.0,
        drop_rate: 0.0,
    }
}

/// A run of 200 steps that nothing holds back: 8 experts, 2 a token.
fn healthy(settings: &[&str]) -> RunFigures {
    let point = |step: u64| Point {
        step,
        loss: 4.0 - 0.01 * step as f64,
        lr: 1e-3,
        grad_norm: 1.0,
        is_skipped: false,
        memory_peak_bytes: 1 << 30,
    };
    let evaluated = |step: u64| Evaluated { step, loss: 4.0 - 0.01 * step as f64 };
    RunFigures {
        run: "run".into(),
        settings: configured(settings),
        course: Course {
            points: (1..=200).map(point).collect(),
            evaluations: [50, 100, 150, 200].map(evaluated).into(),
        },
        window: Window {
            first_step: 161,
            last_step: 200,
            num_records: 40,
            loss: 2.2,
            tokens_per_s: 1000.0,
            mfu: 0.4,
            step_ms: 100.0,
            drop_rate: 0.0,
            layers: vec![layer(0, &[100; 8]), layer(1, &[90, 110, 100, 100, 95, 105, 100, 100])],
            ranks: None,
        },
        placements: None,
        trace: None,
        machine_bytes: Some(64 << 30),
    }
}

fn ranks() -> RankFigures {
    RankFigures {
        imbalance: 1.02,
        waiting_ms: 2.0,
        standing_ms: 5.0,
        work_ms: vec![80.0, 82.0],
        ..RankFigures::default()
    }
}

/// Returns the only finding of a run with the figures that `change` makes.
fn only(settings: &[&str], change: impl FnOnce(&mut RunFigures)) -> Finding {
    let mut run = healthy(settings);
    change(&mut run);
    let mut findings = advise(&run);
    assert_eq!(findings.len(), 1, "{findings:?}");
    findings.remove(0)
}

fn settings_of(finding: &Finding) -> Vec<(&'static str, &str)> {
    let changes = finding.remedies.iter().flat_map(|remedy| &remedy.changes);
    changes.map(|change| (change.setting, change.value.as_str())).collect()
}

#[test]
fn a_healthy_run_has_no_finding() {
    assert_eq!(advise(&healthy(&[])), []);
    let mut on_ranks = healthy(&["parallel.ep=2"]);
    on_ranks.window.ranks = Some(ranks());
    assert_eq!(advise(&on_ranks), []);
}

#[test]
fn unknown_figures_are_not_judged() {
    let mut run = healthy(&[]);
    let Window { loss, tokens_per_s, mfu, step_ms, drop_rate, .. } = &mut run.window;
    [loss, tokens_per_s, mfu, step_ms, drop_rate].into_iter().for_each(|figure| *figure = f64::NAN);
    run.window.layers.iter_mut().for_each(|layer| layer.router_entropy = f64::NAN);
    run.course.points.iter_mut().for_each(|point| (point.loss, point.memory_peak_bytes) = (f64::NAN, 0));
    assert_eq!(advise(&run), []);
    assert_eq!(advise(&RunFigures::default()), []);
}

#[test]
fn skipped_updates_ask_for_a_lower_rate_and_for_clipping() {
    let finding = only(&["train.clip_norm=0.0"], |run| {
        run.course.points[198].is_skipped = true;
        run.course.points[199].is_skipped = true;
    });
    assert_eq!(finding.topic, Topic::NotFinite);
    assert_eq!(finding.figures[0], Figure { name: "train/is_skipped".into(), value: 2.0, over: Over::RunCount });
    assert_eq!(settings_of(&finding)[..2], [("train.clip_norm", "1.0"), ("train.lr", "0.00075")]);
    assert_eq!(finding.at_stake, 2.0 / 40.0, "of the window");
}

#[test]
fn a_loss_that_rises_and_one_that_jumps_are_told_apart() {
    let rising = only(&[], |run| {
        run.course.points.iter_mut().skip(100).for_each(|point| point.loss = 3.0 + 0.01 * point.step as f64);
        run.window.loss = 4.8;
    });
    assert_eq!(rising.topic, Topic::Diverging);
    let jumping = only(&[], |run| run.course.points[120..124].iter_mut().for_each(|point| point.loss += 3.0));
    assert_eq!((jumping.topic, jumping.at_stake), (Topic::Spikes, 4.0 / 200.0));
    assert!(jumping.summary.contains("jumped once, most at step 12"), "{}", jumping.summary);
}

#[test]
fn a_validation_loss_that_rises_ends_the_run_at_its_best() {
    let finding = only(&[], |run| {
        run.course.evaluations =
            [(50, 3.0), (100, 2.5), (150, 2.6), (200, 2.8)].map(|(step, loss)| Evaluated { step, loss }).into();
    });
    assert_eq!((finding.topic, settings_of(&finding)[0]), (Topic::ValidationRises, ("train.steps", "100")));
    assert!((finding.at_stake - (1.0 - 2.5 / 2.8)).abs() < 1e-12);
}

#[test]
fn a_collapsed_load_asks_for_balance() {
    let collapse = |run: &mut RunFigures| run.window.layers[1] = layer(3, &[400, 380, 5, 5, 5, 5, 0, 0]);
    let finding = only(&["train.balance=none"], collapse);
    assert_eq!(finding.topic, Topic::RouterCollapsed);
    assert_eq!(settings_of(&finding)[0], ("train.balance", "layer"));
    assert_eq!(finding.figures[0].name, "moe/layer_3/max_over_mean");
    assert_eq!(finding.figures[0].value, 4.0);
    let finding = only(&["train.balance_coef=0.02"], collapse);
    assert_eq!(settings_of(&finding)[0], ("train.balance_coef", "0.06"));
    let finding = only(&["model.router.kind=forced"], collapse);
    assert_eq!(settings_of(&finding), [("model.router.kind", "top_k")]);
}

#[test]
fn an_undecided_router_asks_for_a_lower_temperature() {
    let flatten =
        |run: &mut RunFigures| run.window.layers.iter_mut().for_each(|layer| layer.router_entropy = 8_f64.ln());
    let finding = only(&["model.router.temperature=50.0"], flatten);
    assert_eq!((finding.topic, settings_of(&finding)[0]), (Topic::RouterUniform, ("model.router.temperature", "1.0")));
    assert_eq!(settings_of(&only(&[], flatten))[0], ("model.router.temperature", "0.5"));
    // After twenty steps no router has decided yet.
    let mut young = healthy(&[]);
    flatten(&mut young);
    young.window.last_step = 20;
    assert_eq!(advise(&young), []);
}

#[test]
fn dropped_choices_ask_for_the_capacity_that_the_load_needs() {
    let finding = only(&["model.capacity_factor=1.0"], |run| {
        run.window.drop_rate = 0.2;
        run.window.layers[1].drop_rate = 0.3;
    });
    assert_eq!(finding.topic, Topic::DroppedTokens);
    let expected =
        [("model.capacity_factor", "1.25"), ("model.capacity_factor", "0.0"), ("model.router.overflow", "reroute")];
    assert_eq!(settings_of(&finding), expected);
    assert_eq!(finding.remedies[0].reach, Reach::FromWeights);
}

#[test]
fn experts_that_add_little_ask_for_fewer_of_them() {
    let finding = only(&["model.top_k=6", "model.num_experts=8"], |_| ());
    assert_eq!((finding.topic, settings_of(&finding)), (Topic::TopK, vec![("model.top_k", "2")]));
    let finding =
        only(&["model.top_k=4"], |run| run.window.layers.iter_mut().for_each(|layer| layer.router_entropy = 0.5));
    assert_eq!(settings_of(&finding), [("model.top_k", "2")], "exp(0.5) is 1.65 experts");
}

#[test]
fn waiting_for_a_rank_is_traced_to_sequences_or_experts() {
    let wait = |run: &mut RunFigures| {
        run.window.ranks = Some(RankFigures { imbalance: 1.5, waiting_ms: 20.0, standing_ms: 25.0, ..ranks() });
    };
    let finding = only(&["parallel.dp=2", "train.batch_size=5"], wait);
    assert_eq!((finding.topic, settings_of(&finding)), (Topic::WaitingForRank, vec![("train.batch_size", "6")]));
    assert_eq!(finding.at_stake, 0.2);
    let finding = only(&["parallel.ep=2"], |run| {
        wait(run);
        run.window.layers = vec![layer(0, &[150, 150, 150, 150, 50, 50, 50, 50])];
    });
    let remedy = &finding.remedies[0];
    assert_eq!(settings_of(&finding), [("parallel.placement", "run/placement.txt")]);
    assert_eq!(remedy.command.as_deref(), Some("balance run --ranks 2"));
    assert_eq!(remedy.expected, "an imbalance of the ranks' load of 0.000 in place of 0.500");
}

#[test]
fn full_links_ask_for_fewer_bytes_and_small_messages_for_larger_ones() {
    let block = |run: &mut RunFigures, node_mb: f64| {
        run.window.ranks = Some(RankFigures { waiting_ms: 1.0, standing_ms: 51.0, node_mb, ..ranks() });
    };
    let full = only(&["parallel.ep=2"], |run| block(run, 400.0));
    assert_eq!(
        (full.topic, settings_of(&full)),
        (Topic::Links, vec![("parallel.wire", "bf16"), ("parallel.chunks", "2")])
    );
    let small = only(&["parallel.ep=2"], |run| block(run, 0.1));
    assert_eq!(settings_of(&small)[0], ("train.batch_size", "16"));
}

#[test]
fn small_products_ask_for_more_tokens_a_microbatch() {
    let settings = ["train.batch_size=1", "train.seq_len=64", "train.grad_accumulation=4"];
    let finding = only(&settings, |run| run.window.mfu = 0.05);
    assert_eq!(finding.topic, Topic::SmallProducts);
    assert_eq!(settings_of(&finding), [("train.batch_size", "4"), ("train.grad_accumulation", "1")]);
}

#[test]
fn long_pauses_of_a_trace_ask_for_rarer_evaluations() {
    let finding = only(&["train.eval_every=50"], |run| {
        let span = |name: &str, ms| SpanTotal { name: name.into(), ms };
        run.trace =
            Some(TraceFigures { total_ms: 100.0, spans: vec![span("evaluation", 40.0), span("checkpoint", 5.0)] });
    });
    assert_eq!((finding.topic, settings_of(&finding)), (Topic::Pauses, vec![("train.eval_every", "200")]));
}

#[test]
fn a_full_memory_asks_for_less_with_the_bytes_it_saves() {
    let finding = only(&["train.batch_size=8"], |run| run.machine_bytes = Some(1_100_000_000));
    assert_eq!((finding.topic, settings_of(&finding)[0]), (Topic::Memory, ("train.checkpoint_layers", "true")));
    assert!(finding.remedies.iter().all(|remedy| remedy.expected.contains("MB a rank in place of")), "{finding:?}");
}

#[test]
fn the_finding_with_the_most_at_stake_comes_first() {
    let mut run = healthy(&["model.capacity_factor=1.0"]);
    run.window.drop_rate = 0.02;
    run.window.layers[0] = layer(0, &[800, 0, 0, 0, 0, 0, 0, 0]);
    let topics: Vec<Topic> = advise(&run).iter().map(|finding| finding.topic).collect();
    assert_eq!(topics, [Topic::RouterCollapsed, Topic::DroppedTokens]);
}

/// Every name of a setting in the sources of the rules, in quotes.
fn quoted_settings() -> Vec<String> {
    let sources = [
        include_str!("loss.rs"),
        include_str!("routers.rs"),
        include_str!("speed.rs"),
        include_str!("machine.rs"),
        include_str!("settings.rs"),
        include_str!("trial.rs"),
    ];
    let is_setting = |word: &&str| {
        let is_dotted = ["train.", "model.", "parallel.", "data."].iter().any(|section| word.starts_with(section));
        is_dotted && word.chars().all(|c| c.is_ascii_lowercase() || "._0123456789".contains(c)) && !word.ends_with('.')
    };
    sources.iter().flat_map(|text| text.split('"')).filter(is_setting).map(str::to_owned).collect()
}

#[test]
fn every_setting_that_advice_names_exists() {
    let rows = setting_rows();
    let named = quoted_settings();
    assert!(named.len() > 30, "{named:?}");
    for setting in named {
        assert!(rows.iter().any(|row| row.name == setting && !row.is_section), "{setting}");
    }
}
