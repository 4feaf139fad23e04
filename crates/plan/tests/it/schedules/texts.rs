//! The text form.

use std::path::PathBuf;

use moeworks_plan::schedule::Action;
use moeworks_plan::{Schedule, ScheduleError, ScheduleKind, Times};
use proptest::prelude::*;

use super::generate;

fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("tests/it/golden/schedules/{name}.txt"))
}

/// All twelve kinds, and 1F1B with pairs once more with all-to-alls and with messages written out.
fn samples() -> Vec<(String, Schedule)> {
    let times = Times::uniform(1.0, 1.0, 1.0);
    let of_kind = |kind: ScheduleKind| (kind.name().to_owned(), generate(kind, 4, 8, &times));
    let mut samples: Vec<_> = ScheduleKind::ALL.into_iter().map(of_kind).collect();
    let overlap = generate(ScheduleKind::OneFOneBOverlap, 2, 4, &times);
    let checked = overlap.check().expect("a right schedule");
    let expanded = checked.with_all_to_alls(&[1, 2]).expect("a number for each stage");
    samples.push(("1f1b_overlap_messages".to_owned(), checked.with_messages()));
    samples.push(("1f1b_overlap_all_to_alls".to_owned(), expanded.clone()));
    let both = expanded.check().expect("an expanded schedule is right").with_messages();
    samples.push(("1f1b_overlap_both".to_owned(), both));
    samples
}

/// `MOEWORKS_WRITE_GOLDEN=1` writes the files again.
#[test]
fn the_text_form_is_that_of_the_golden_files() {
    for (name, schedule) in samples() {
        let text = schedule.to_string();
        if std::env::var_os("MOEWORKS_WRITE_GOLDEN").is_some() {
            std::fs::write(golden(&name), &text).expect("a file in the checkout");
        }
        let expected = std::fs::read_to_string(golden(&name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(text, expected, "{name}");
        assert_eq!(text.parse(), Ok(schedule.clone()), "{name}");
        schedule.check().unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

#[test]
fn comments_empty_lines_and_spaces_do_not_matter() {
    let text = "\n# by hand\nschedule two  ranks # a name\n\n  microbatches 0..1 :stages on ranks  0   1\n\
                rank 0: 0F0 ,0BW0 # done\n\nrank 1:1F0,1BW0";
    let schedule: Schedule = text.parse().unwrap();
    let plain = "schedule two  ranks\nmicrobatches 0..1: stages on ranks 0 1\nrank 0: 0F0, 0BW0\nrank 1: 1F0, 1BW0\n";
    assert_eq!(schedule.to_string(), plain);
}

/// Each wrong text with the whole line that is said of it.
#[test]
fn errors_name_the_line_the_rank_the_position_and_what_would_be_right() {
    let head = "schedule s\nmicrobatches 0..2: stages on ranks 0 1\n";
    let kinds = "F B W BW SF RF SB RB FA FD FE FC BC BE BD BA WE WA";
    let action = |text: &str| {
        let example = "as in 0F0, or 0FD0.1 for layer 1 of a stage";
        format!("{text:?} is not an action: expected a stage, one of {kinds} and a microbatch, {example}")
    };
    let cases = [
        ("", r#"line 1: "" is not the expected line: it must be "schedule NAME""#.to_owned()),
        (
            "schedule s\nrank 0: 0F0",
            r#"line 2: "rank 0: 0F0" is not the expected line: it must be "microbatches 0..M: stages on ranks R R ...""#.to_owned(),
        ),
        (
            "schedule s\nmicrobatches 1..2: stages on ranks 0",
            "line 2: \"microbatches 1..2: stages on ranks 0\" is not the expected line: it must be \
             \"microbatches 0..END: stages on ranks \" and for each stage the rank that holds it"
                .to_owned(),
        ),
        (
            "schedule s\nmicrobatches 0..2: stages on ranks 0 1\nmicrobatches 2..4: stages on ranks 0",
            "line 3: \"microbatches 2..4: stages on ranks 0\" is not the expected line: it must be \
             \"microbatches 2..END: stages on ranks \" and the ranks of 2 stages, as many as the first copy has"
                .to_owned(),
        ),
        (&format!("{head}moe layers 1"), {
            let must = "\"moe layers \" and a number of layers for each of 2 stages";
            format!("line 3: \"moe layers 1\" is not the expected line: it must be {must}")
        }),
        (&format!("{head}rank 1: 0F0"), {
            "line 3: \"rank 1: 0F0\" is not the expected line: it must be \"rank 0: \" and the actions of the rank".to_owned()
        }),
        (&format!("{head}rank 0: 0F0, 0G1"), format!("line 3: rank 0, position 1: {}", action("0G1"))),
        (&format!("{head}rank 0: 0F0, , 0F1"), format!("line 3: rank 0, position 1: {}", action(""))),
        (&format!("{head}rank 0: 0F0.1"), format!("line 3: rank 0, position 0: {}", action("0F0.1"))),
        (&format!("{head}rank 0: 0FD0"), format!("line 3: rank 0, position 0: {}", action("0FD0"))),
        (&format!("{head}rank 0: 00F0"), format!("line 3: rank 0, position 0: {}", action("00F0"))),
        (&format!("{head}rank 0: 0F-1"), format!("line 3: rank 0, position 0: {}", action("0F-1"))),
        (&format!("{head}rank 0: 0F4294967296"), format!("line 3: rank 0, position 0: {}", action("0F4294967296"))),
        (&format!("{head}rank 0: 0B0&0F1"), {
            let must = "expected an F and then a B or BW, as in 0F1&0BW0";
            format!("line 3: rank 0, position 0: 0B0 and 0F1 are not a pair: {must}")
        }),
        (&format!("{head}rank 0: 0F0&0B1&0W1"), format!("line 3: rank 0, position 0: {}", action("0B1&0W1"))),
    ];
    for (text, expected) in cases {
        let error = text.parse::<Schedule>().expect_err(text);
        assert_eq!(error.to_string(), expected);
    }
}

/// Numbers of any size and texts of any depth are read or refused at once, and what is read is checked at once.
#[test]
fn hostile_texts_take_neither_time_nor_memory() {
    let huge = u32::MAX;
    let head = format!("schedule s\nmicrobatches 0..{huge}: stages on ranks 0 1\n");
    let schedule: Schedule = format!("{head}rank 0: 0F{huge}, {huge}F0\nrank 1:").parse().unwrap();
    assert_eq!(schedule.check().unwrap_err().to_string(), "rank 0: 0F0 is missing: it must be there once");
    let layers = format!("{head}moe layers 65535 65535\nrank 0: 0FA0.65535\nrank 1:");
    assert_eq!(
        layers.parse::<Schedule>().unwrap().check().unwrap_err().to_string(),
        "rank 0: 0FA0.0 is missing: it must be there once"
    );
    let far = "schedule s\nmicrobatches 0..1: stages on ranks 4294967295\nrank 0: 0F0, 0BW0";
    assert_eq!(
        far.parse::<Schedule>().unwrap().check().unwrap_err().to_string(),
        "stage 0 is on rank 4294967295: the schedule has 1 ranks, counted from 0"
    );
    let deep = format!("{head}rank 0: {}", "(".repeat(1 << 20));
    let error = deep.parse::<Schedule>().unwrap_err().to_string();
    assert!(error.len() < 400, "{} bytes", error.len());
    let joined = format!("{head}rank 0: {}", vec!["0F0"; 1 << 18].join("&"));
    assert!(matches!(joined.parse::<Schedule>(), Err(ScheduleError::Entry { rank: 0, position: 0, .. })));
    let copies: String = (0..1 << 12).map(|i| format!("microbatches {i}..{}: stages on ranks 0\n", i + 1)).collect();
    assert!(matches!(format!("schedule s\n{copies}").parse::<Schedule>(), Err(ScheduleError::Line { line: 18, .. })));
}

proptest! {
    /// A schedule that was written reads back equal: for every kind and size, as generated and with all actions
    /// written out.
    #[test]
    fn texts_are_read_as_they_were_written(kind in 0..12_usize, half in 1..4_usize, times in 2..5_usize, layers in 0..4_u16) {
        let (ranks, microbatches) = (2 * half, 2 * half * times);
        let unit = Times::uniform(1.0, 1.0, 1.0);
        let schedule = generate(ScheduleKind::ALL[kind], ranks, microbatches, &unit);
        prop_assert_eq!(schedule.to_string().parse::<Schedule>().unwrap(), schedule.clone());
        let expanded = schedule.check().unwrap().with_all_to_alls(&vec![layers; schedule.num_stages()]).unwrap();
        let with_messages = expanded.check().unwrap().with_messages();
        prop_assert_eq!(with_messages.to_string().parse::<Schedule>().unwrap(), with_messages.clone());
        prop_assert!(with_messages.check().is_ok());
    }

    /// No text makes the parser or the checker panic.
    #[test]
    fn any_text_is_read_or_refused(text in "[0-9FBWSRADCE&,.: \n#-]{0,80}") {
        let _ = text.parse::<Action>();
        let text = format!("schedule s\nmicrobatches 0..2: stages on ranks 0 1\nrank 0: {text}");
        if let Ok(schedule) = text.parse::<Schedule>() {
            let _ = schedule.check();
        }
    }
}
