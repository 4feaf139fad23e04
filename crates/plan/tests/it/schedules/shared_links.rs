//! The simulation event by event: the same times as the timeline without links, and slower where links are shared.

use moeworks_plan::network::{Places, Traffic};
use moeworks_plan::schedule::{PairTime, Transfers};
use moeworks_plan::{Cluster, Layout, Level, Schedule, ScheduleKind, ScheduleRequest, StageTimes, Times, Topology};
use proptest::prelude::*;

use super::generate;

/// A number of unit times and the times that the pair takes.
fn unit_times() -> Times {
    Times { pair: PairTime::Fixed(3.0), ..Times::uniform(1.0, 1.0, 1.0) }
}

#[test]
fn dualpipe_with_unit_times_has_the_makespans_of_its_repository() {
    let times = unit_times();
    for (ranks, microbatches, makespan) in [(8, 20, 66.0), (4, 10, 32.0), (8, 32, 102.0), (6, 20, 64.0)] {
        let schedule = generate(ScheduleKind::DualPipe, ranks, microbatches, &times);
        let checked = schedule.check().unwrap();
        let simulation = checked.simulate(&times, &Transfers::default()).unwrap();
        assert_eq!(simulation.timeline.makespan, makespan, "{ranks} ranks, {microbatches} microbatches");
        assert_eq!(simulation.step, makespan);
    }
}

fn stage_times() -> impl Strategy<Value = StageTimes> {
    (0.0..9.0, 0.0..9.0, 0.0..9.0, 0.0..4.0, 0.0..4.0, 0.0..1.0).prop_map(
        |(f, b, w, dispatch, combine, expert_share)| StageTimes {
            dispatch,
            combine,
            expert_share,
            ..StageTimes::new(f, b, w)
        },
    )
}

/// Holds the simulation of `schedule` against its timeline.
fn assert_same_times(schedule: &Schedule, times: &Times) -> Result<(), TestCaseError> {
    let checked = schedule.check().unwrap();
    let exact = checked.timeline(times).unwrap();
    let simulation = checked.simulate(times, &Transfers::default()).unwrap();
    let ours = &simulation.timeline;
    let name = &schedule.name;
    for (rank, (ours, exact)) in ours.spans.iter().zip(&exact.spans).enumerate() {
        for (position, (ours, exact)) in ours.iter().zip(exact).enumerate() {
            let is_near = (ours.start - exact.start).abs() + (ours.end - exact.end).abs() < 1e-9;
            let entry = schedule.ranks[rank][position];
            prop_assert!(is_near, "{} rank {} {}: {:?} for {:?}", name, rank, entry, ours, exact);
        }
    }
    prop_assert_eq!((ours.makespan, ours.longest_span), (exact.makespan, exact.longest_span));
    for (ours, exact) in ours.busy.iter().zip(&exact.busy) {
        prop_assert!((ours - exact).abs() < 1e-9);
    }
    prop_assert!((ours.communication - exact.communication).abs() < 1e-6, "{}", name);
    prop_assert!((ours.exposed - exact.exposed).abs() < 1e-6, "{}: {} for {}", name, ours.exposed, exact.exposed);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    /// Every generator, with messages and all-to-alls implied and written out.
    #[test]
    fn without_links_the_times_are_those_of_the_timeline(
        kind in 0..12_usize,
        half in 1..4_usize,
        rounds in 2..5_usize,
        stages in prop::collection::vec(stage_times(), 12),
        layers in prop::collection::vec(0..4_u16, 12),
        message in 0.0..5.0,
    ) {
        let kind = ScheduleKind::ALL[kind];
        let (ranks, microbatches) = (2 * half, 2 * half * rounds);
        let v = kind.virtual_stages(None).unwrap();
        let times = Times { stages: stages[..ranks * v].to_vec(), message, pair: PairTime::Sum };
        let schedule = kind.generate(&ScheduleRequest::new(ranks, microbatches, &times)).unwrap();
        assert_same_times(&schedule, &times)?;
        let checked = schedule.check().unwrap();
        assert_same_times(&checked.with_messages(), &times)?;
        let expanded = checked.with_all_to_alls(&layers[..ranks * v]).unwrap();
        assert_same_times(&expanded, &times)?;
        assert_same_times(&expanded.check().unwrap().with_messages(), &times)?;
    }
}

/// A cluster of two nodes of two ranks; both ranks of a node share `rails` of 1 kB/s to the other node.
fn two_nodes(rails: usize) -> Cluster {
    let mut cluster = Cluster::from(&Topology { node_sizes: vec![2, 2], ..Topology::example_cluster(1) });
    cluster.levels[1] = Level { rails, shared_by: 2, ..Level::new("line", 2, 0.0, 1e3) };
    cluster
}

/// The ends of the two messages of a schedule in which ranks 0 and 1 send to ranks 2 and 3 at the same time.
fn ends_of_messages(cluster: &Cluster, bytes: [f64; 2]) -> [f64; 2] {
    let text = "schedule side by side\nmicrobatches 0..1: stages on ranks 0 2\nmicrobatches 1..2: stages on ranks 1 3\n\
                rank 0: 0F0, 0BW0\nrank 1: 0F1, 0BW1\nrank 2: 1F0, 1BW0\nrank 3: 1F1, 1BW1\n";
    let schedule: Schedule = text.parse().unwrap();
    let schedule = schedule.check().unwrap().with_messages();
    let layout = Layout::new(1, 1, 1).with_pipeline(4);
    let places = Places::new(cluster, 4);
    let mut traffic = Traffic::new(&places);
    let ids = [0, 1].map(|from| traffic.add(&[places.messages(&layout, from, from + 2, bytes[from])]));
    let messages = vec![vec![(2, ids[0])], vec![(3, ids[1])], Vec::new(), Vec::new()];
    let transfers = Transfers { traffic: traffic.joined(), messages, ..Transfers::default() };
    let times = Times::uniform(1.0, 1.0, 1.0);
    let checked = schedule.check().unwrap();
    let simulation = checked.simulate(&times, &transfers).unwrap();
    assert!(simulation.links.iter().all(|link| link.most <= 1.0 + 1e-9));
    [0, 1].map(|rank| simulation.timeline.spans[rank][1].end)
}

#[test]
fn two_messages_over_one_line_take_twice_as_long() {
    assert_eq!(ends_of_messages(&two_nodes(1), [500.0, 0.0]), [1.5, 1.0]);
    assert_eq!(ends_of_messages(&two_nodes(1), [500.0, 500.0]), [2.0, 2.0]);
    // The shorter one ends first; the longer one then has the line to itself.
    assert_eq!(ends_of_messages(&two_nodes(1), [500.0, 1500.0]), [2.0, 3.0]);
}

#[test]
fn two_rails_carry_two_messages_and_adaptive_routing_splits_one() {
    assert_eq!(ends_of_messages(&two_nodes(2), [500.0, 500.0]), [1.5, 1.5]);
    let mut adaptive = two_nodes(2);
    adaptive.levels[1].routing = moeworks_plan::Routing::Adaptive;
    assert_eq!(ends_of_messages(&adaptive, [500.0, 500.0]), [1.5, 1.5]);
    assert_eq!(ends_of_messages(&adaptive, [500.0, 0.0]), [1.25, 1.0]);
}

#[test]
fn an_oversubscribed_switch_slows_those_that_pass_it_together() {
    let mut cluster = two_nodes(2);
    cluster.levels[1].oversubscription = 4.0;
    // Two nodes of two rails send 4 kB/s, of which the switch carries 1 kB/s.
    assert_eq!(ends_of_messages(&cluster, [500.0, 0.0]), [1.5, 1.0]);
    assert_eq!(ends_of_messages(&cluster, [500.0, 500.0]), [2.0, 2.0]);
}
