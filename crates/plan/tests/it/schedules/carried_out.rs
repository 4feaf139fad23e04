//! Timelines: of schedules of every kind and size, and where all-to-alls and messages are actions.

use moeworks_plan::schedule::{GenerateError, PairTime};
use moeworks_plan::{Schedule, ScheduleKind, ScheduleRequest, StageTimes, Times};
use proptest::prelude::*;

use super::{generate, with_timeline};

/// Returns the closest size that every kind takes: DualPipe needs an even number of ranks and twice as many
/// microbatches, interleaved 1F1B a multiple of them.
fn sizes(half: usize, rounds: usize) -> (usize, usize) {
    (2 * half, 2 * half * rounds)
}

fn stage_times() -> impl Strategy<Value = StageTimes> {
    (1..20_u32, 1..20_u32, 1..20_u32, 0..8_u32, 0..8_u32, 1..9_u32, 1..9_u32).prop_map(|(f, b, w, d, c, size, left)| {
        StageTimes {
            dispatch: d.into(),
            combine: c.into(),
            activation: f64::from(size.max(left)),
            weight_grad_input: left.into(),
            ..StageTimes::new(f.into(), b.into(), w.into())
        }
    })
}

/// Returns a lower bound of the makespan: each rank's own work, and the way of a microbatch through all stages and
/// back.
fn lower_bound(schedule: &Schedule, times: &Times) -> f64 {
    let num_stages = schedule.num_stages() as u32;
    let of = |stage| times.stage(stage);
    let way = |copy: usize| {
        let ranks = &schedule.copies[copy].stage_ranks;
        let hops = ranks.windows(2).filter(|pair| pair[0] != pair[1]).count() as f64;
        2.0 * hops * times.message + (0..num_stages).map(|stage| of(stage).forward + of(stage).input_grad).sum::<f64>()
    };
    let work = |rank: usize| -> f64 {
        let held = schedule.stages_of(rank).into_iter();
        held.map(|(copy, stage)| f64::from(schedule.copies[copy].num_microbatches) * of(stage).total()).sum()
    };
    let works = (0..schedule.num_ranks()).map(work);
    works.chain((0..schedule.copies.len()).map(way)).fold(0.0, f64::max)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Every generated schedule is right, and takes no less time than its work and no more than all of it one after
    /// the other; memory ends where it began, and its most is that of the checker.
    #[test]
    fn every_kind_and_size_is_carried_out(
        kind in 0..12_usize,
        half in 1..5_usize,
        rounds in 2..6_usize,
        virtual_stages in 2..5_usize,
        stages in prop::collection::vec(stage_times(), 40),
        message in 0..5_u32,
    ) {
        let kind = ScheduleKind::ALL[kind];
        let (ranks, microbatches) = sizes(half, rounds);
        let takes_any = matches!(kind, ScheduleKind::Interleaved | ScheduleKind::InterleavedOverlap);
        let v = kind.virtual_stages(takes_any.then_some(virtual_stages)).unwrap();
        let times = Times { stages: stages[..ranks * v].to_vec(), message: message.into(), pair: PairTime::Sum };
        let request = ScheduleRequest { virtual_stages: Some(v), ..ScheduleRequest::new(ranks, microbatches, &times) };
        let schedule = kind.generate(&request).unwrap();
        let checked = schedule.check().unwrap();
        let timeline = checked.timeline(&times).unwrap();
        let bound = lower_bound(&schedule, &times);
        prop_assert!(timeline.makespan >= bound, "{} {} < {}", kind, timeline.makespan, bound);
        let all: f64 = timeline.busy.iter().sum::<f64>() + timeline.communication;
        prop_assert!(timeline.makespan <= all + 1e-9);
        prop_assert!(timeline.exposed <= timeline.communication);
        let peaks = checked.peak_memory(&times);
        for (rank, &peak) in peaks.iter().enumerate() {
            let memory = timeline.memory(rank);
            prop_assert_eq!(memory.last().map(|&(_, held)| held), Some(0.0));
            let most = memory.iter().map(|&(_, held)| held).fold(0.0, f64::max);
            prop_assert!(most <= peak + 1e-9, "{} rank {}: {} over time, {} by the checker", kind, rank, most, peak);
        }
    }

    /// Whatever the times and the limit, the automatic scheduler keeps to it, and more memory is no hindrance.
    #[test]
    fn the_automatic_scheduler_keeps_to_its_memory(
        ranks in 1..9_usize,
        microbatches in 1..30_usize,
        stages in prop::collection::vec(stage_times(), 8),
        message in 0..5_u32,
        limit in 9..100_u32,
    ) {
        let times = Times { stages: stages[..ranks].to_vec(), message: message.into(), pair: PairTime::Sum };
        let request = ScheduleRequest { memory_limit: Some(limit.into()), ..ScheduleRequest::new(ranks, microbatches, &times) };
        let schedule = ScheduleKind::Zb1p.generate(&request).unwrap();
        let checked = schedule.check().unwrap();
        for most in checked.peak_memory(&times) {
            prop_assert!(most <= f64::from(limit), "{} over {}", most, limit);
        }
    }

    /// Messages as actions take the time that they take when they are implied.
    #[test]
    fn written_out_messages_change_no_time(kind in 0..12_usize, half in 1..4_usize, rounds in 2..4_usize, message in 0..5_u32) {
        let (ranks, microbatches) = sizes(half, rounds);
        let times = Times::uniform(3.0, 4.0, 2.0).with_message(message.into());
        let schedule = generate(ScheduleKind::ALL[kind], ranks, microbatches, &times);
        let makespan = with_timeline(&schedule, &times, |timeline| (timeline.makespan, timeline.hidden()));
        let with_messages = schedule.check().unwrap().with_messages();
        let written_out = with_timeline(&with_messages, &times, |timeline| (timeline.makespan, timeline.hidden()));
        prop_assert_eq!(makespan, written_out);
    }
}

/// Any number of ranks and microbatches, where a schedule does not need certain ones.
#[test]
fn small_and_odd_sizes_are_carried_out() {
    let times = Times::uniform(2.0, 3.0, 1.0);
    for ranks in 1..7 {
        for microbatches in 1..15 {
            for kind in ScheduleKind::ALL {
                match kind.generate(&ScheduleRequest::new(ranks, microbatches, &times)) {
                    Ok(schedule) => with_timeline(&schedule, &times, |timeline| assert!(timeline.makespan > 0.0)),
                    Err(GenerateError::Size { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
        }
    }
}

#[test]
fn sizes_that_a_schedule_does_not_take_are_refused() {
    let times = Times::uniform(1.0, 1.0, 1.0);
    let said = |kind: ScheduleKind, num_ranks, num_microbatches, virtual_stages| {
        let request =
            ScheduleRequest { num_ranks, num_microbatches, virtual_stages, times: &times, memory_limit: None };
        kind.generate(&request).map_or_else(|error| error.to_string(), |schedule| schedule.name)
    };
    let cases = [
        (ScheduleKind::OneFOneB, 0, 4, None, "schedule 1f1b with ranks = 0: must be at least 1"),
        (ScheduleKind::OneFOneB, 4, 0, None, "schedule 1f1b with microbatches = 0: must be at least 1"),
        (ScheduleKind::OneFOneB, 4, 4, Some(2), "schedule 1f1b with virtual stages = 2: a rank has 1"),
        (
            ScheduleKind::Interleaved,
            4,
            6,
            None,
            "schedule interleaved with microbatches = 6: must be a multiple of the 4 ranks",
        ),
        (
            ScheduleKind::Interleaved,
            4,
            8,
            Some(1),
            "schedule interleaved with virtual stages = 1: a rank must have at least 2",
        ),
        (ScheduleKind::ZbV, 4, 8, Some(3), "schedule zb_v with virtual stages = 3: a rank has 2"),
        (ScheduleKind::DualPipe, 3, 8, None, "schedule dualpipe with ranks = 3: must be even and at least 2"),
        (
            ScheduleKind::DualPipe,
            4,
            9,
            None,
            "schedule dualpipe with microbatches = 9: must be even and at least 8, twice the ranks",
        ),
        (
            ScheduleKind::DualPipeV,
            4,
            7,
            None,
            "schedule dualpipe_v with microbatches = 7: must be at least 8, twice the ranks",
        ),
        (
            ScheduleKind::Gpipe,
            4,
            usize::MAX,
            None,
            "schedule gpipe with microbatches = 18446744073709551615: 4 ranks can have at most 22369621",
        ),
    ];
    for (kind, ranks, microbatches, virtual_stages, expected) in cases {
        assert_eq!(said(kind, ranks, microbatches, virtual_stages), expected);
    }
    let request = ScheduleRequest { memory_limit: Some(0.5), ..ScheduleRequest::new(2, 4, &times) };
    let said = |kind: ScheduleKind| kind.generate(&request).unwrap_err().to_string();
    let least = "schedule zb_1p with memory limit 0.5: rank 0 needs 1 for the activations of one microbatch";
    assert_eq!(said(ScheduleKind::Zb1p), least);
    assert!(said(ScheduleKind::ZbH1).starts_with("schedule zb_h1 does not take a memory limit"));
    let unknown = "2f2b".parse::<ScheduleKind>().unwrap_err().to_string();
    assert!(unknown.starts_with("unknown schedule \"2f2b\": expected one of gpipe, 1f1b, interleaved,"), "{unknown}");
}

#[test]
fn times_that_do_not_fit_are_refused() {
    let times = Times::uniform(1.0, 1.0, 1.0);
    let schedule = generate(ScheduleKind::OneFOneB, 4, 8, &times);
    let checked = schedule.check().unwrap();
    let said = |times: Times| checked.timeline(&times).map_or_else(|error| error.to_string(), |_| "right".to_owned());
    let of = |stage: StageTimes, count| Times { stages: vec![stage; count], message: 0.0, pair: PairTime::Sum };
    let stage = StageTimes::new(1.0, 1.0, 1.0);
    assert_eq!(said(of(stage, 4)), "right");
    assert_eq!(
        said(of(stage, 3)),
        "times of 3 stages: the schedule has 4; give times for each, or one for all of them"
    );
    assert_eq!(said(of(StageTimes::new(f64::NAN, 1.0, 1.0), 1)), "forward = NaN: must be a number from 0 to 1e15");
    assert_eq!(said(times.with_message(-1.0)), "message = -1: must be a number from 0 to 1e15");
    let share = StageTimes { expert_share: 1.5, ..stage };
    assert_eq!(said(of(share, 1)), "expert_share = 1.5: must be a number from 0 to 1e15 and at most 1");
}

/// A stage of equal halves, whose all-to-alls take half of its computation: F and B 4, W 4, dispatch and combine 1
/// each way and chain.
fn with_all_to_alls() -> Times {
    let stage = StageTimes { dispatch: 1.0, combine: 1.0, ..StageTimes::new(4.0, 4.0, 4.0) };
    Times { stages: vec![stage], message: 0.0, pair: PairTime::Sum }
}

/// In one schedule without overlap every all-to-all is waited for; in pairs that are written out only those of the
/// warm-up and of the end, where a rank has nothing else to do.
#[test]
fn pairs_hide_all_to_alls_under_computation() {
    let times = with_all_to_alls();
    let hidden = |kind: ScheduleKind, microbatches: usize| {
        let schedule = generate(kind, 4, microbatches, &times);
        let moe_layers = vec![2; schedule.num_stages()];
        let expanded = schedule.check().unwrap().with_all_to_alls(&moe_layers).unwrap();
        with_timeline(&expanded, &times, |timeline| timeline.hidden().unwrap())
    };
    let apart = hidden(ScheduleKind::ZbH1, 32);
    assert!(apart < 0.05, "F, B and W apart: {apart}");
    for kind in [ScheduleKind::OneFOneBOverlap, ScheduleKind::InterleavedOverlap, ScheduleKind::DualPipe] {
        let (some, most) = (hidden(kind, 16), hidden(kind, 64));
        assert!(most > some && most > 0.85, "{kind}: {some} and {most}");
    }
}

/// The actions of one stage by hand: FA 2, FD 1, FE 2, FC 1, then BC 1, BE 2, BD 1 (WE 2 under it), BA 2, WA 2.
#[test]
fn one_rank_by_hand() {
    let times = with_all_to_alls();
    let text = "schedule s\nmicrobatches 0..1: stages on ranks 0\nrank 0: 0F0, 0BW0\n";
    let whole: Schedule = text.parse().unwrap();
    with_timeline(&whole, &times, |timeline| {
        assert_eq!((timeline.makespan, timeline.communication, timeline.exposed), (16.0, 4.0, 4.0));
    });
    let expanded = whole.check().unwrap().with_all_to_alls(&[1]).unwrap();
    let row = "rank 0: 0FA0.0, 0FD0.0, 0FE0.0, 0FC0.0, 0BC0.0, 0BE0.0, 0BD0.0, 0WE0.0, 0BA0.0, 0WA0.0\n";
    assert!(expanded.to_string().ends_with(row), "{expanded}");
    with_timeline(&expanded, &times, |timeline| {
        let starts: Vec<f64> = timeline.spans[0].iter().map(|span| span.start).collect();
        assert_eq!(starts, [0.0, 2.0, 3.0, 5.0, 6.0, 7.0, 9.0, 9.0, 11.0, 13.0]);
        assert_eq!((timeline.makespan, timeline.communication, timeline.exposed), (15.0, 4.0, 3.0));
        assert_eq!(timeline.memory(0), [(0.0, 1.0), (15.0, 0.0)]);
    });
}

/// A pair takes what is given; what it saves against its parts counts as hidden.
#[test]
fn the_time_of_a_pair_is_given_apart() {
    let schedule = generate(ScheduleKind::DualPipe, 4, 20, &with_all_to_alls());
    let of = |pair| {
        let times = Times { pair, ..with_all_to_alls() };
        with_timeline(&schedule, &times, |timeline| (timeline.makespan, timeline.hidden().unwrap()))
    };
    let (sum, none) = of(PairTime::Sum);
    let (share, some) = of(PairTime::Share(0.75));
    assert_eq!(of(PairTime::Fixed(12.0)), (share, some), "3/4 of 6 + 10");
    assert!(none == 0.0 && some > 0.5 && share < sum, "{none} {some} {share} {sum}");
}
