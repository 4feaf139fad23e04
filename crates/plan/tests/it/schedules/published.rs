//! Figures that papers and repositories publish of pipeline schedules.

use moeworks_plan::schedule::{Entry, Kind};
use moeworks_plan::{Schedule, ScheduleKind, ScheduleRequest, Times};

use super::{generate, letters, peaks, with_timeline};

/// A row of tables 5 and 9 of the zero-bubble paper: sizes, milliseconds, bubble rates.
struct Row {
    ranks: usize,
    microbatches: usize,
    /// Stages of a rank in interleaved 1F1B.
    layers: usize,
    /// Milliseconds of F, B, W and communication.
    times: [f64; 4],
    one_f_one_b: f64,
    interleaved: f64,
    h1: f64,
    h2: f64,
    zb_2p: f64,
}

const fn row(sizes: [usize; 3], times: [f64; 4], rates: [f64; 5]) -> Row {
    let [ranks, microbatches, layers] = sizes;
    let [one_f_one_b, interleaved, h1, h2, zb_2p] = rates;
    Row { ranks, microbatches, layers, times, one_f_one_b, interleaved, h1, h2, zb_2p }
}

/// Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024: table 9 (times) and table 5 (rates).
const TABLE: [Row; 12] = [
    row([8, 24, 3], [18.522, 18.086, 9.337, 0.601], [0.2431, 0.1055, 0.1585, 0.1083, 0.0433]),
    row([8, 32, 3], [18.513, 18.086, 9.331, 0.626], [0.1985, 0.0818, 0.1242, 0.0837, 0.0039]),
    row([8, 64, 3], [18.546, 18.097, 9.321, 0.762], [0.1240, 0.0443, 0.0674, 0.0444, 0.0026]),
    row([8, 24, 4], [29.718, 29.444, 19.927, 0.527], [0.2347, 0.0808, 0.1323, 0.0698, 0.0029]),
    row([8, 32, 4], [29.802, 29.428, 19.530, 0.577], [0.1898, 0.0628, 0.1045, 0.0559, 0.0022]),
    row([8, 64, 4], [29.935, 29.621, 19.388, 0.535], [0.1091, 0.0320, 0.0554, 0.0294, 0.0010]),
    row([16, 48, 3], [11.347, 11.248, 8.132, 0.377], [0.2552, 0.1104, 0.1397, 0.0672, 0.0066]),
    row([16, 64, 3], [11.307, 11.254, 8.101, 0.379], [0.2082, 0.0852, 0.1088, 0.0516, 0.0054]),
    row([16, 128, 3], [11.325, 11.308, 8.109, 0.378], [0.1251, 0.0445, 0.0576, 0.0266, 0.0028]),
    row([32, 96, 2], [10.419, 10.207, 7.715, 0.408], [0.2646, 0.1493, 0.1421, 0.0641, 0.0038]),
    row([32, 128, 2], [10.408, 10.204, 7.703, 0.408], [0.2168, 0.1164, 0.1106, 0.0490, 0.0029]),
    row([32, 256, 2], [10.402, 10.248, 7.698, 0.460], [0.1352, 0.0624, 0.0594, 0.0257, 0.0018]),
];

impl Row {
    /// The paper's times. Its memory is M_B = sb(34h + 5as) and M_W = 32sbh: for its models (5as/h is 53 in the first
    /// three rows and 40 in the others) M_W is 0.37 and 0.43 of M_B.
    fn times(&self) -> Times {
        let [forward, input_grad, weight_grad, message] = self.times;
        let mut times = Times::uniform(forward, input_grad, weight_grad).with_message(message);
        times.stages[0].weight_grad_input = if forward < 19.0 && forward > 18.0 { 32.0 / 87.3 } else { 32.0 / 74.0 };
        times
    }

    fn assert_rate(&self, kind: ScheduleKind, published: f64) {
        let times = self.times();
        let schedule = generate(kind, self.ranks, self.microbatches, &times);
        let rate = with_timeline(&schedule, &times, |timeline| timeline.span_bubble());
        assert_rate(rate, published, &format!("{kind}, {} ranks, {} microbatches", self.ranks, self.microbatches));
    }
}

fn assert_rate(rate: f64, published: f64, what: &str) {
    assert!((rate - published).abs() < 0.51e-4, "{what}: {rate:.5} against {published}");
}

/// 36 of the 48 rates, by carrying the schedules out, to all four decimals.
#[test]
fn bubble_rates_of_1f1b_zb_h1_and_zb_h2_are_those_of_the_paper() {
    for row in &TABLE {
        row.assert_rate(ScheduleKind::OneFOneB, row.one_f_one_b);
        row.assert_rate(ScheduleKind::ZbH1, row.h1);
        row.assert_rate(ScheduleKind::ZbH2, row.h2);
    }
}

/// The other 12, and that ZB-1p is ZB-H1, to all four decimals.
#[test]
fn bubble_rates_of_the_automatic_scheduler_are_those_of_the_paper() {
    for row in &TABLE {
        row.assert_rate(ScheduleKind::Zb1p, row.h1);
        row.assert_rate(ScheduleKind::Zb2p, row.zb_2p);
    }
}

/// The closed forms with communication; that of interleaved 1F1B counts its messages as if they were waited for in
/// turn, so that carried out it may differ by a few of them.
#[test]
fn bubble_rates_by_closed_forms_are_those_of_the_paper() {
    for row in &TABLE {
        let [f, b, w, c] = row.times;
        let (p, m, v) = (row.ranks as f64, row.microbatches as f64, row.layers as f64);
        let total = f + b + w;
        let rate = |bubble: f64| bubble / (bubble + m * total);
        let one_f_one_b = (p - 1.0) * total + (2.0 * (p - 1.0) * m / p + 2.0 * (p - 2.0)) * c;
        assert_rate(rate(one_f_one_b), row.one_f_one_b, "1F1B");
        assert_rate(rate((p - 1.0) * (f + b - w) + 4.0 * (p - 1.0) * c), row.h1, "ZB-H1");
        assert_rate(rate((p - 1.0) * (f + b - 2.0 * w) + 2.0 * (p - 1.0) * c), row.h2, "ZB-H2");
        let interleaved = (p - 1.0) * total / v + (2.0 * p * v - p - 2.0) * c;
        assert_rate(rate(interleaved), row.interleaved, "interleaved");
        let times = Times::uniform(f / v, b / v, w / v).with_message(c);
        let request = ScheduleRequest::new(row.ranks, row.microbatches, &times);
        let request = ScheduleRequest { virtual_stages: Some(row.layers), ..request };
        let schedule = ScheduleKind::Interleaved.generate(&request).expect("sizes of the paper");
        let carried_out = with_timeline(&schedule, &times, |timeline| timeline.span_bubble());
        assert!((carried_out - row.interleaved).abs() < 0.004, "interleaved: {carried_out}");
    }
}

fn unit() -> Times {
    Times::uniform(1.0, 1.0, 1.0)
}

/// The makespans of the schedule that DeepSeek's repository draws, by unit times and with a pair as long as its
/// parts.
#[test]
fn makespans_of_dualpipe_and_dualpipe_v() {
    for (ranks, microbatches, makespan) in [(8, 20, 66.0), (4, 10, 32.0), (8, 32, 102.0), (6, 20, 64.0)] {
        let schedule = generate(ScheduleKind::DualPipe, ranks, microbatches, &unit());
        with_timeline(&schedule, &unit(), |timeline| {
            assert_eq!(timeline.makespan, makespan, "{ranks} ranks, {microbatches} microbatches");
            let busy = 3.0 * microbatches as f64;
            assert!(timeline.busy.iter().all(|&rank| rank == busy), "{:?}", timeline.busy);
            assert_eq!(timeline.makespan - busy, ranks as f64 - 2.0);
        });
        // A rank of DualPipeV has two half stages, so its unit is half as long, and its bubble is p - 1 units of a
        // whole one.
        let half = Times::uniform(0.5, 0.5, 0.5);
        let schedule = generate(ScheduleKind::DualPipeV, ranks, microbatches, &half);
        let bubble = with_timeline(&schedule, &half, |timeline| timeline.makespan - 3.0 * microbatches as f64);
        assert_eq!(bubble, ranks as f64 - 1.0);
    }
}

/// At p = 8 and m = 20: 1F1B 21, ZB-H1 7, DualPipe 6, DualPipeV 7 units.
#[test]
fn bubbles_of_schedules_side_by_side() {
    for (kind, bubble) in [(ScheduleKind::OneFOneB, 21.0), (ScheduleKind::ZbH1, 7.0), (ScheduleKind::DualPipe, 6.0)] {
        let schedule = generate(kind, 8, 20, &unit());
        assert_eq!(with_timeline(&schedule, &unit(), |timeline| timeline.makespan - 60.0), bubble, "{kind}");
    }
}

/// Closed forms without communication, over sizes.
#[test]
fn bubbles_are_those_of_the_closed_forms() {
    let (f, b, w) = (3.0, 4.0, 2.0);
    let times = Times::uniform(f, b, w);
    for p in 1..9_usize {
        let ahead = p as f64 - 1.0;
        for m in [2 * p, 3 * p, 5 * p] {
            let bubble = |kind| {
                let schedule = generate(kind, p, m, &times);
                with_timeline(&schedule, &times, |timeline| timeline.longest_span - m as f64 * (f + b + w))
            };
            assert_eq!(bubble(ScheduleKind::Gpipe), ahead * (f + b + w));
            assert_eq!(bubble(ScheduleKind::OneFOneB), ahead * (f + b + w));
            assert_eq!(bubble(ScheduleKind::ZbH1), ahead * (f + b - w));
            assert_eq!(bubble(ScheduleKind::ZbH2), ahead * (f + b - 2.0 * w));
            for v in [2, 3] {
                let request = ScheduleRequest { virtual_stages: Some(v), ..ScheduleRequest::new(p, m, &times) };
                let schedule = ScheduleKind::Interleaved.generate(&request).expect("a size that it takes");
                let total = (m * v) as f64 * (f + b + w);
                let bubble = with_timeline(&schedule, &times, |timeline| timeline.makespan - total);
                assert_eq!(bubble, ahead * (f + b + w), "in units of one of the {v} stages of a rank");
            }
        }
    }
}

/// (p-1)(F+B)/v: the overlapped schedules wait for a forward and a backward through all ranks but one.
#[test]
fn bubbles_of_overlapped_schedules() {
    for p in 1..7_usize {
        for (kind, v) in [(ScheduleKind::OneFOneBOverlap, 1), (ScheduleKind::InterleavedOverlap, 2)] {
            let m = 4 * p;
            let schedule = generate(kind, p, m, &unit());
            let bubble = with_timeline(&schedule, &unit(), |timeline| timeline.makespan - (3 * m * v) as f64);
            assert_eq!(bubble, 2.0 * (p as f64 - 1.0), "{kind}, {p} ranks");
        }
    }
}

/// With equal times ZB-V and ZB-H2 leave no bubble.
#[test]
fn zb_v_has_no_bubble_where_f_b_and_w_take_equally_long() {
    for p in 1..9 {
        for m in [2 * p, 2 * p + 1, 5 * p] {
            for kind in [ScheduleKind::ZbV, ScheduleKind::ZbH2, ScheduleKind::Zb2p] {
                let schedule = generate(kind, p, m, &unit());
                let bubble = with_timeline(&schedule, &unit(), |timeline| timeline.span_bubble());
                assert!(bubble.abs() < 1e-12, "{kind}, {p} ranks, {m} microbatches: {bubble}");
            }
        }
    }
}

/// Peaks in microbatches of a stage: of activations, of weight gradients that wait, of both.
#[test]
fn memory_of_each_schedule_is_that_of_the_papers() {
    for p in [2, 4, 8_usize] {
        let m = 4 * p;
        let of = |kind| peaks(&generate(kind, p, m, &unit()));
        for r in 0..p {
            assert_eq!(of(ScheduleKind::Gpipe)[r], [m, 0, m], "all microbatches");
            assert_eq!(of(ScheduleKind::OneFOneB)[r], [p - r, 0, p - r], "the distance to the end");
            assert_eq!(of(ScheduleKind::ZbH1)[r], [p - r, r + 1, p], "as much as the first rank of 1F1B");
            assert_eq!(of(ScheduleKind::ZbH2)[r], [2 * (p - r) - 1, 2 * r + 1, 2 * p - 1], "twice that");
            assert_eq!(of(ScheduleKind::ZbV)[r], [2 * p, 2 * r + 1, 2 * p], "2p half stages");
            assert!(of(ScheduleKind::Zb1p)[r][2] <= p && of(ScheduleKind::Zb2p)[r][2] <= 2 * p);
            assert_eq!(of(ScheduleKind::DualPipe)[r][2], p + 1, "p + 1");
            assert_eq!(of(ScheduleKind::DualPipeV)[r][2], 2 * p + 1, "2p + 1 half stages");
            assert_eq!(of(ScheduleKind::OneFOneBOverlap)[r][0], 2 * (p - r), "the longer warm-up");
            // p + (p-1)/v stages on the first rank, counted in its 1/v parts; one more where the first steady forward
            // moved.
            let interleaved = 2 * (p - 1 - r) + p + 1;
            assert_eq!(of(ScheduleKind::Interleaved)[r], [interleaved, 0, interleaved]);
            assert_eq!(of(ScheduleKind::InterleavedOverlap)[r][0], interleaved + 1);
        }
    }
}

/// The steps of DualPipe and DualPipeV with how often each is repeated, as in the repository. `0` is the near side of
/// a rank.
fn steps(outer: usize, inner: usize, main: usize) -> String {
    let mut steps = Vec::new();
    let mut repeat = |step: &str, times: usize| (0..times).for_each(|_| steps.push(step.to_owned()));
    repeat("F0", 2 * outer);
    repeat("F0 F1", inner);
    repeat("B1 W1 F1", outer);
    if outer == 0 {
        repeat("F0 BW1 F1&BW0", 1);
    }
    repeat("F0&BW1 F1&BW0", main - usize::from(outer == 0));
    repeat("BW1 F1&BW0", outer);
    let is_odd = inner % 2 == 1;
    repeat("BW1 BW0", inner / 2);
    repeat("BW1 B0", usize::from(is_odd));
    repeat("B1 B0", inner / 2);
    steps.join(" ")
}

/// The row of a rank with the side in the place of stage and microbatch, up to the first W of step 7.
fn sides(schedule: &Schedule, rank: usize, near: usize) -> String {
    let of = |action: &moeworks_plan::schedule::Action| {
        let copy = schedule.copy_of(action.microbatch).expect("a microbatch");
        let held = schedule.stages_of(rank);
        let is_near = held[near] == (copy, action.stage);
        format!("{}{}", action.kind.letters(), usize::from(!is_near))
    };
    let entries = schedule.ranks[rank].iter().map(|entry| match entry {
        Entry::One(action) => of(action),
        Entry::Pair(forward, backward) => format!("{}&{}", of(forward), of(backward)),
    });
    entries.collect::<Vec<_>>().join(" ")
}

#[test]
fn steps_of_dualpipe_are_repeated_as_often_as_in_the_repository() {
    for (p, m) in [(8, 20), (4, 10), (6, 20), (2, 4)] {
        let dual = generate(ScheduleKind::DualPipe, p, m, &unit());
        for rank in 0..p {
            let r = rank.min(p - 1 - rank);
            let (outer, inner, main) = (p / 2 - r - 1, r + 1, m / 2 - p + r + 1);
            let row = sides(&dual, rank, usize::from(rank >= p / 2));
            check_steps(&row, outer, inner, main);
        }
        let v = generate(ScheduleKind::DualPipeV, p, m, &unit());
        for rank in 0..p {
            let (outer, inner, main) = (p - rank - 1, rank + 1, m - 2 * p + rank + 1);
            check_steps(&sides(&v, rank, 0), outer, inner, main);
        }
    }
}

/// Steps 7 and 8 are `W B0` and then `W`, whichever side a W is of; with the last one no weight gradient is left
/// waiting.
fn check_steps(row: &str, outer: usize, inner: usize, main: usize) {
    let end =
        row.strip_prefix(&steps(outer, inner, main)).unwrap_or_else(|| panic!("{row}: {}", steps(outer, inner, main)));
    let end: Vec<&str> = end.split_whitespace().map(|word| if word.starts_with('W') { "W" } else { word }).collect();
    let expected: Vec<&str> = [["W", "B0"]].repeat(outer).concat().into_iter().chain(vec!["W"; inner]).collect();
    assert_eq!(end, expected, "{row}");
}

/// Every B whose W is apart has that W, after it.
#[test]
fn no_weight_gradient_is_left_waiting() {
    for kind in ScheduleKind::ALL {
        let schedule = generate(kind, 4, 16, &unit());
        for rank in 0..4 {
            let count = |kind| letters(&schedule, rank).filter(|&letters| letters == kind).count();
            assert_eq!(count(Kind::InputGrad), count(Kind::WeightGrad), "{kind}");
        }
    }
}
