//! Pictures of timelines.

use std::path::PathBuf;

use moeworks_plan::schedule::{PairTime, SvgOptions};
use moeworks_plan::{Schedule, ScheduleKind, StageTimes, Times};

use super::{generate, with_timeline};

fn draw(schedule: &Schedule, times: &Times) -> String {
    with_timeline(schedule, times, |timeline| timeline.to_svg(&SvgOptions { unit: "ms", width: 800.0 }))
}

/// The text between the first `before` and the next `after`.
fn between<'a>(text: &'a str, before: &str, after: &str) -> &'a str {
    let (_, rest) = text.split_once(before).unwrap_or_else(|| panic!("{before}: {text}"));
    rest.split_once(after).map_or(rest, |(part, _)| part)
}

/// Every element that is opened is closed, in order.
fn assert_well_formed(svg: &str) {
    let mut open = Vec::new();
    for tag in svg.split('<').skip(1) {
        let tag = tag.split_once('>').unwrap_or_else(|| panic!("no end of {tag}")).0;
        let name = tag.split([' ', '/']).next().expect("a first part");
        match tag.strip_prefix('/') {
            Some(name) => assert_eq!(open.pop(), Some(name), "{svg}"),
            None if tag.ends_with('/') => {}
            None => open.push(name),
        }
    }
    assert!(open.is_empty(), "{open:?}");
}

#[test]
fn every_kind_is_drawn_without_anything_from_outside() {
    let times = Times::uniform(1.0, 1.0, 1.0).with_message(0.25);
    for kind in ScheduleKind::ALL {
        let svg = draw(&generate(kind, 4, 8, &times), &times);
        assert_well_formed(&svg);
        assert!(!svg.replace("http://www.w3.org/2000/svg", "").contains("://"), "{kind}");
        assert!((0..4).all(|rank| svg.contains(&format!(">rank {rank}</text>"))), "{kind}");
        let has_messages = svg.contains(">message</text>");
        assert!(has_messages && svg.contains("% of communication hidden"), "{kind}");
    }
}

/// One rank, F from 0 to 2 and BW from 2 to 6 of 6 ms: in 800 pixels, 80 beside them, a ms is 120 wide.
#[test]
fn boxes_are_where_the_times_say() {
    let schedule: Schedule = "schedule a<b&c\nmicrobatches 0..1: stages on ranks 0\nrank 0: 0F0, 0BW0".parse().unwrap();
    let svg = draw(&schedule, &Times::uniform(2.0, 3.0, 1.0));
    assert_well_formed(&svg);
    assert_eq!(between(&svg, "fill:url(#F1)\" d=\"", "\""), "M62 62h240v28h-240z");
    assert_eq!(between(&svg, "fill:url(#B1)\" d=\"", "\""), "M302 62h480v19.6h-480z");
    assert_eq!(between(&svg, "fill:url(#W1)\" d=\"", "\""), "M302 81.6h480v8.4h-480z");
    assert!(svg.contains(">F0</text>") && svg.contains(">BW0</text>") && svg.contains(">ms</text>"));
    assert!(svg.contains(">a&lt;b&amp;c</text>"), "{svg}");
}

#[test]
fn all_to_alls_are_drawn_under_the_row_of_their_rank() {
    let stage = StageTimes { dispatch: 1.0, combine: 1.0, ..StageTimes::new(4.0, 4.0, 4.0) };
    let times = Times { stages: vec![stage], message: 0.0, pair: PairTime::Sum };
    let whole = generate(ScheduleKind::OneFOneBOverlap, 2, 4, &times);
    let expanded = whole.check().unwrap().with_all_to_alls(&[1, 1]).unwrap();
    let svg = draw(&expanded, &times);
    assert_well_formed(&svg);
    for fill in ["D", "C"] {
        // One for each microbatch, stage and direction.
        assert_eq!(between(&svg, &format!("<path class=\"{fill}\" d=\""), "\"").matches('M').count(), 16, "{fill}");
    }
}

/// Ranks beyond those that are drawn are counted; a schedule that takes no time is drawn too.
#[test]
fn large_and_empty_timelines_are_drawn() {
    let times = Times::uniform(1.0, 1.0, 1.0);
    let svg = draw(&generate(ScheduleKind::Gpipe, 300, 1, &times), &times);
    assert!(svg.contains(">and 44 more ranks</text>") && !svg.contains(">rank 256</text>"));
    let none = Times::uniform(0.0, 0.0, 0.0);
    assert_well_formed(&draw(&generate(ScheduleKind::OneFOneB, 2, 2, &none), &none));
}

/// The pictures of docs/schedules.md, by the name of the file: those of its lines with `moeworks simulate`.
fn documented() -> Vec<(String, String)> {
    let options = SvgOptions::default();
    let unit = Times::uniform(1.0, 1.0, 1.0);
    let of_kind = |kind: ScheduleKind| {
        let schedule = generate(kind, 4, 8, &unit);
        (kind.name().to_owned(), with_timeline(&schedule, &unit, |timeline| timeline.to_svg(&options)))
    };
    let mut pictures: Vec<_> = ScheduleKind::ALL.into_iter().map(of_kind).collect();
    let stage = StageTimes { dispatch: 1.0, combine: 1.0, ..StageTimes::new(4.0, 4.0, 4.0) };
    let times = Times { stages: vec![stage], message: 0.5, pair: PairTime::Sum };
    let overlap = generate(ScheduleKind::OneFOneBOverlap, 2, 6, &times);
    let expanded = overlap.check().unwrap().with_all_to_alls(&[1, 1]).unwrap();
    pictures.push(("all_to_alls".to_owned(), with_timeline(&expanded, &times, |timeline| timeline.to_svg(&options))));
    pictures
}

/// `MOEWORKS_WRITE_GOLDEN=1` draws them again.
#[test]
fn pictures_of_the_docs_are_those_that_are_drawn() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/schedules");
    for (name, svg) in documented() {
        let path = folder.join(format!("{name}.svg"));
        if std::env::var_os("MOEWORKS_WRITE_GOLDEN").is_some() {
            std::fs::write(&path, &svg).expect("a file in the checkout");
        }
        assert!(std::fs::read_to_string(&path).is_ok_and(|drawn| drawn == svg), "docs/schedules/{name}.svg");
    }
}
