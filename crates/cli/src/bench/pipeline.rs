//! `moeworks bench pipeline`: prints measured steps of pipelines beside the makespans of their schedules.

use moeworks_bench::pipeline::{self, Measured, SCHEDULES, STAGE_GROUPS};
use moeworks_plan::ScheduleKind;

use crate::args::PipelineBenchArgs;
use crate::exit_code::ExitCode;
use crate::failure::Failure;
use crate::tables;

const HEADER: [&str; 8] =
    ["schedule", "ranks", "microbatches", "computations", "makespan, s", "step, s", "ratio", "all-to-alls hidden"];

pub(super) fn run(args: &PipelineBenchArgs) -> Result<ExitCode, Failure> {
    let kinds = kinds(&args.schedules)?;
    let (num_steps, mut measured) = (usize::from(args.steps), Vec::new());
    for &kind in &kinds {
        for pp in STAGE_GROUPS {
            let num_microbatches = usize::from(args.microbatches).next_multiple_of(2 * pp);
            measured.push(pipeline::with_waits(kind, pp, num_microbatches, num_steps)?);
        }
        if !args.waits {
            let num_microbatches = usize::from(args.microbatches).next_multiple_of(4);
            measured.push(pipeline::with_computations(kind, num_microbatches, num_steps)?);
        }
    }
    measured.sort_by_key(|measured| (!measured.are_waits, measured.num_ranks));
    if args.json {
        println!("{:#}", serde_json::json!(measured.iter().map(Measured::json).collect::<Vec<_>>()));
    } else {
        println!("medians of {num_steps} steps; hidden: by the schedule's timeline, and measured");
        tables::print(&HEADER, &measured.iter().map(cells).collect::<Vec<_>>());
    }
    Ok(ExitCode::SUCCESS)
}

/// The schedules of these names; all that are measured if there are none.
fn kinds(names: &[String]) -> Result<Vec<ScheduleKind>, Failure> {
    if names.is_empty() {
        return Ok(SCHEDULES.to_vec());
    }
    let kind = |name: &String| {
        let kind = name.parse::<ScheduleKind>().ok().filter(|kind| SCHEDULES.contains(kind));
        let right = SCHEDULES.map(ScheduleKind::name).join(", ");
        kind.ok_or_else(|| Failure::input(format!("schedule {name:?}: must be one of {right}")))
    };
    names.iter().map(kind).collect()
}

fn cells(measured: &Measured) -> Vec<String> {
    let percent = |share: Option<f64>| share.map_or_else(|| "-".to_owned(), super::percent);
    vec![
        measured.schedule.to_owned(),
        measured.num_ranks.to_string(),
        measured.num_microbatches.to_string(),
        if measured.are_waits { "waits" } else { "real" }.to_owned(),
        format!("{:.3}", measured.makespan_s),
        format!("{:.3}", measured.step_s),
        format!("{:.2}", measured.ratio()),
        format!("{}, {}", percent(measured.hidden), percent(measured.measured_hidden)),
    ]
}
