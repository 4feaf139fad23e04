//! All-to-alls in chunks, of which one travels while experts compute another.

use moeworks_plan::cost::pipeline::overlapped_seconds;
use moeworks_plan::schedule::{Action, Entry, Transfers};
use moeworks_plan::{Schedule, ScheduleKind, StageTimes, Times};
use proptest::prelude::*;

use super::generate;

/// A schedule with its all-to-alls, of stages with `layers` MoE layers each.
fn expanded(kind: ScheduleKind, ranks: usize, layers: u16, times: &Times) -> Schedule {
    let schedule = generate(kind, ranks, 2 * ranks, times);
    let checked = schedule.check().unwrap();
    checked.with_all_to_alls(&vec![layers; schedule.num_stages()]).unwrap()
}

fn in_chunks(chunks: u16) -> Transfers {
    Transfers { chunks, ..Transfers::default() }
}

/// Times of stages without gradients of weights, whose experts take `share` of a forward and of a backward.
fn times(way: f64, [forward, backward]: [f64; 2], share: f64) -> Times {
    let stage =
        StageTimes { dispatch: way, combine: way, expert_share: share, ..StageTimes::new(forward, backward, 0.0) };
    Times { stages: vec![stage], ..Times::uniform(0.0, 0.0, 0.0) }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_layer_takes_the_time_of_the_closed_form(
        chunks in 1_u16..9,
        way in 0.01..5.0,
        forward in 0.01..9.0,
        backward in 0.01..9.0,
        share in 0.0..1.0,
    ) {
        let times = times(way, [forward, backward], share);
        let one_layer = expanded(ScheduleKind::OneFOneB, 1, 1, &times);
        let num_microbatches = one_layer.num_microbatches() as f64;
        let checked = one_layer.check().unwrap();
        let simulated = checked.simulate(&times, &in_chunks(chunks)).unwrap();
        let parts = f64::from(chunks);
        let layer = |compute: f64| {
            (1.0 - share) * compute + overlapped_seconds(chunks.into(), way / parts, share * compute / parts)
        };
        let expected = num_microbatches * (layer(forward) + layer(backward));
        prop_assert!((simulated.step - expected).abs() < 1e-9 * expected, "{} for {expected}", simulated.step);
        let busy = num_microbatches * (forward + backward);
        prop_assert!((simulated.timeline.busy[0] - busy).abs() < 1e-9 * busy);
        let sent = num_microbatches * 4.0 * way;
        prop_assert!((simulated.timeline.communication - sent).abs() < 1e-9 * sent);
        prop_assert!((simulated.timeline.exposed - (expected - busy)).abs() < 1e-9 * expected, "{:?}", simulated.timeline);
    }
}

#[test]
fn every_schedule_ends_in_chunks_with_the_same_work() {
    for kind in ScheduleKind::ALL {
        for layers in [1, 3] {
            let times = times(0.4, [1.0, 1.5], 0.6);
            let schedule = expanded(kind, 4, layers, &times);
            let checked = schedule.check().unwrap();
            let [whole, parts] = [1, 4].map(|chunks| checked.simulate(&times, &in_chunks(chunks)).unwrap().timeline);
            for (whole, parts) in whole.busy.iter().zip(&parts.busy) {
                assert!((whole - parts).abs() < 1e-9, "{kind}: {whole} and {parts}");
            }
            assert!((whole.communication - parts.communication).abs() < 1e-9, "{kind}");
            assert!(parts.makespan <= whole.makespan + 1e-9, "{kind}: {} after {}", parts.makespan, whole.makespan);
        }
    }
}

#[test]
fn experts_wait_for_the_last_chunk_where_something_stands_before_the_combine() {
    let times = Times {
        stages: vec![StageTimes { weight_grad: 0.25, ..times(1.0, [1.0, 1.0], 1.0).stages[0] }],
        ..times(1.0, [1.0, 1.0], 1.0)
    };
    let schedule = expanded(ScheduleKind::OneFOneB, 1, 1, &times);
    let mut moved = schedule.clone();
    let place = |text: &str| {
        let action: Action = text.parse().unwrap();
        schedule.ranks[0].iter().position(|&entry| entry == Entry::One(action)).unwrap()
    };
    // The gradient of the experts' weights before the all-to-all back, in both microbatches.
    for microbatch in 0..2 {
        moved.ranks[0].swap(place(&format!("0BD{microbatch}.0")), place(&format!("0WE{microbatch}.0")));
    }
    let makespan =
        |schedule: &Schedule| schedule.check().unwrap().simulate(&times, &in_chunks(4)).unwrap().timeline.makespan;
    assert!(makespan(&moved) > makespan(&schedule) + 1.0, "{} and {}", makespan(&moved), makespan(&schedule));
    assert_eq!(makespan(&moved), {
        let whole = moved.check().unwrap().simulate(&times, &in_chunks(1)).unwrap().timeline;
        let forward_saved = 2.0 * (3.0 - overlapped_seconds(4, 0.25, 0.25));
        whole.makespan - forward_saved
    });
}
