//! Tests of where each rule begins: a run just inside a limit has no finding, and one just beyond it has that alone.

use super::{healthy, layer, ranks};
use crate::advise::*;

/// A figure of a run just inside a limit, and just beyond it.
struct Around {
    inside: f64,
    beyond: f64,
}

/// Asserts that the run has no finding inside the limit, and only `topic` beyond it.
fn begins(topic: Topic, settings: &[&str], around: Around, change: impl Fn(&mut RunFigures, f64)) {
    let findings = |value: f64| {
        let mut run = healthy(settings);
        change(&mut run, value);
        advise(&run)
    };
    assert_eq!(findings(around.inside), [], "{topic:?} at {}", around.inside);
    let topics: Vec<Topic> = findings(around.beyond).iter().map(|finding| finding.topic).collect();
    assert_eq!(topics, [topic], "at {}", around.beyond);
}

#[test]
fn one_skipped_update_is_found() {
    begins(Topic::NotFinite, &[], Around { inside: 0.0, beyond: 1.0 }, |run, skipped| {
        run.course.points[199].is_skipped = skipped > 0.0;
    });
}

#[test]
fn a_loss_diverges_from_15_percent_above_its_best_on() {
    begins(Topic::Diverging, &[], Around { inside: 1.12, beyond: 1.18 }, |run, rise| {
        for point in &mut run.course.points {
            point.loss = if point.step <= 100 { 2.0 } else { 2.0 * rise };
        }
    });
}

#[test]
fn a_loss_spikes_from_30_percent_above_the_median_and_its_spread_on() {
    begins(Topic::Spikes, &[], Around { inside: 1.35, beyond: 1.55 }, |run, jump| run.course.points[120].loss *= jump);
}

#[test]
fn a_validation_loss_rises_from_2_percent_above_its_best_on() {
    begins(Topic::ValidationRises, &[], Around { inside: 1.01, beyond: 1.03 }, |run, rise| {
        let losses = [(50, 3.0), (100, 2.5), (150, 2.51), (200, 2.5 * rise)];
        run.course.evaluations = losses.map(|(step, loss)| Evaluated { step, loss }).into();
    });
}

#[test]
fn a_validation_loss_may_rise_with_the_training_loss() {
    let mut run = healthy(&[]);
    run.course.evaluations =
        [(50, 3.0), (100, 2.5), (150, 2.6), (200, 2.8)].map(|(step, loss)| Evaluated { step, loss }).into();
    run.window.loss = 2.9;
    assert_eq!(advise(&run), []);
}

#[test]
fn a_load_has_collapsed_from_a_dead_expert_of_eight_on() {
    begins(Topic::RouterCollapsed, &[], Around { inside: 60.0, beyond: 0.0 }, |run, last| {
        run.window.layers[0] = layer(0, &[110, 110, 110, 110, 100, 100, 100, last as u64]);
    });
}

#[test]
fn a_load_is_not_judged_by_less_than_five_records() {
    let mut run = healthy(&[]);
    run.window.layers[0] = layer(0, &[800, 0, 0, 0, 0, 0, 0, 0]);
    run.window.num_records = 4;
    assert_eq!(advise(&run), []);
}

#[test]
fn a_router_is_undecided_from_an_entropy_of_98_5_percent_on() {
    begins(Topic::RouterUniform, &[], Around { inside: 0.98, beyond: 0.99 }, |run, share| {
        run.window.layers.iter_mut().for_each(|layer| layer.router_entropy = share * 8_f64.ln());
    });
}

#[test]
fn drops_are_found_from_1_percent_on() {
    let settings = ["model.capacity_factor=1.0"];
    begins(Topic::DroppedTokens, &settings, Around { inside: 0.009, beyond: 0.011 }, |run, rate| {
        run.window.drop_rate = rate;
        run.window.layers[1].drop_rate = 2.0 * rate;
    });
}

#[test]
fn experts_are_too_many_where_the_router_spreads_over_less_than_half() {
    begins(Topic::TopK, &["model.top_k=4"], Around { inside: 2.1, beyond: 1.9 }, |run, spread: f64| {
        run.window.layers.iter_mut().for_each(|layer| layer.router_entropy = spread.ln());
    });
}

#[test]
fn ranks_wait_too_long_from_a_tenth_of_a_step_on() {
    begins(Topic::WaitingForRank, &["parallel.ep=2"], Around { inside: 9.5, beyond: 10.5 }, |run, waiting_ms| {
        run.window.ranks = Some(RankFigures { waiting_ms, standing_ms: waiting_ms + 5.0, ..ranks() });
    });
}

#[test]
fn communication_takes_too_long_from_a_quarter_of_a_step_on() {
    begins(Topic::Links, &["parallel.ep=2"], Around { inside: 24.0, beyond: 26.0 }, |run, blocked_ms| {
        run.window.ranks =
            Some(RankFigures { waiting_ms: 1.0, standing_ms: 1.0 + blocked_ms, node_mb: 10.0, ..ranks() });
    });
}

#[test]
fn products_are_small_where_both_rows_and_speed_are() {
    let few_rows = ["train.batch_size=1", "train.seq_len=64"];
    begins(Topic::SmallProducts, &few_rows, Around { inside: 0.26, beyond: 0.24 }, |run, mfu| run.window.mfu = mfu);
    begins(Topic::SmallProducts, &[], Around { inside: 64.0, beyond: 32.0 }, |run, rows| {
        // Two of eight experts a token: four tokens a row of an expert.
        (run.settings.train.batch_size, run.settings.train.seq_len) = (4, rows as usize);
        run.window.mfu = 0.05;
    });
}

#[test]
fn pauses_are_long_from_a_fifth_of_a_trace_on() {
    begins(Topic::Pauses, &["train.eval_every=50"], Around { inside: 19.0, beyond: 21.0 }, |run, ms| {
        run.trace = Some(TraceFigures { total_ms: 100.0, spans: vec![SpanTotal { name: "evaluation".into(), ms }] });
    });
}

#[test]
fn memory_is_nearly_full_from_four_fifths_on() {
    begins(Topic::Memory, &[], Around { inside: 0.79, beyond: 0.81 }, |run, share| {
        run.machine_bytes = Some(((1_u64 << 30) as f64 / share) as u64);
    });
}
