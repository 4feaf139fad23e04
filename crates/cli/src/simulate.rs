//! `moeworks simulate`: the timeline of a pipeline schedule with given times, or of a step of a model on a cluster,
//! without running any rank.

mod print;
mod step;
mod trace;

use std::path::Path;
use std::{fs, io};

use moeworks_plan::schedule::{Entry, PairTime, SvgOptions, Timeline, UnknownSchedule};
use moeworks_plan::{Cluster, Model, Schedule, ScheduleKind, ScheduleRequest, StageTimes, Times};
use serde_json::json;

use crate::args::SimulateArgs;
use crate::exit_code::ExitCode;
use crate::failure::Failure;
use crate::page::{Target, write_whole};
use crate::tables;

use self::print::{print_json, print_table};

pub(crate) fn run(args: &SimulateArgs) -> Result<ExitCode, Failure> {
    if args.list {
        list(args.json);
        return Ok(ExitCode::SUCCESS);
    }
    for (option, place, mark) in [
        ("--svg", &args.svg, "aria-label=\"timeline of"),
        ("--text", &args.text, "schedule "),
        ("--trace", &args.trace, trace::MARK),
    ] {
        if let Some(path) = place {
            Target { option, path, mark, is_forced: args.force }.check()?;
        }
    }
    if let (Some(model), Some(cluster)) = (&args.step.model, &args.step.cluster) {
        return step::run(args, model, cluster);
    }
    let times = times(args)?;
    let schedule = with_all_to_alls(schedule(args, &times)?, args)?;
    let has_pairs = schedule.ranks.iter().flatten().any(|entry| matches!(entry, Entry::Pair(..)));
    if args.pair.is_some() && !has_pairs {
        let message = format!("--pair: {} has no overlapped pairs, as dualpipe has", schedule.name);
        return Err(Failure::input(message));
    }
    let checked = schedule.check().map_err(|error| wrong_file(args, &error))?;
    let timeline = checked.timeline(&times)?;
    let memory = checked.peak_memory(&times);
    write_files(args, &timeline, &schedule, Unit { name: &args.unit, micros: 1e3 }, NO_STEP)?;
    if args.json {
        print_json(&schedule, &timeline, checked.peaks(), &memory);
    } else {
        print_table(&schedule, &timeline, checked.peaks(), &memory);
    }
    Ok(ExitCode::SUCCESS)
}

/// The parts of a trace that given times do not have.
const NO_STEP: trace::Step<'_> = trace::Step { sums: &[], state_bytes: &[] };

/// A unit of time.
#[derive(Clone, Copy)]
struct Unit<'a> {
    /// The name on the axis of a picture.
    name: &'a str,
    /// Microseconds of a trace.
    micros: f64,
}

/// Writes the files that the arguments ask for.
fn write_files(
    args: &SimulateArgs,
    timeline: &Timeline<'_>,
    schedule: &Schedule,
    unit: Unit<'_>,
    step: trace::Step<'_>,
) -> Result<(), Failure> {
    if let Some(place) = &args.text {
        write_whole(place, &schedule.to_string())?;
    }
    if let Some(place) = &args.svg {
        write_whole(place, &timeline.to_svg(&SvgOptions { unit: unit.name, ..SvgOptions::default() }))?;
    }
    if let Some(place) = &args.trace {
        write_whole(place, &trace::of(timeline, schedule, unit.micros, step))?;
    }
    Ok(())
}

/// Prints the bundled models and clusters.
fn list(is_json: bool) {
    let [models, clusters] = [&Model::NAMES[..], &Cluster::NAMES[..]].map(|all| all.iter().copied());
    if is_json {
        let of = |(name, text): (&str, &str)| json!({ "name": name, "summary": Cluster::summary(text) });
        println!(
            "{:#}",
            json!({ "models": models.map(of).collect::<Vec<_>>(), "clusters": clusters.map(of).collect::<Vec<_>>() })
        );
        return;
    }
    let row = |(name, text): (&str, &str)| vec![format!("{name:18}{}", Cluster::summary(text))];
    tables::print(&["Models, for --model"], &models.map(row).collect::<Vec<_>>());
    println!();
    tables::print(&["Clusters, for --cluster"], &clusters.map(row).collect::<Vec<_>>());
}

fn times(args: &SimulateArgs) -> Result<Times, Failure> {
    let (forward, input_grad, weight_grad, message) = match args.times[..] {
        [forward, input_grad, weight_grad] => (forward, input_grad, weight_grad, 0.0),
        [forward, input_grad, weight_grad, message] => (forward, input_grad, weight_grad, message),
        _ => return Err(Failure::input(format!("--times: has {}: give F,B,W or F,B,W,T", numbers(args.times.len())))),
    };
    let [activation, weight_grad_input] = pair_of("--memory", "B,W", &args.memory)?;
    let [dispatch, combine] = match &args.all_to_all {
        Some(values) => pair_of("--all-to-all", "D,C", values)?,
        None => [0.0; 2],
    };
    if weight_grad_input > activation {
        let what = format!("--memory {activation},{weight_grad_input}: what is left for W");
        return Err(Failure::input(format!("{what} cannot be more than all activations")));
    }
    let stage = StageTimes {
        dispatch,
        combine,
        activation,
        weight_grad_input,
        ..StageTimes::new(forward, input_grad, weight_grad)
    };
    let times = Times { stages: vec![stage], message, pair: args.pair.map_or(PairTime::Sum, PairTime::Fixed) };
    times.check(1)?;
    Ok(times)
}

/// Returns a count of numbers in words.
fn numbers(count: usize) -> String {
    format!("{count} number{}", if count == 1 { "" } else { "s" })
}

fn pair_of(option: &str, form: &str, values: &[f64]) -> Result<[f64; 2], Failure> {
    let wrong = |_| Failure::input(format!("{option}: has {}: give {form}", numbers(values.len())));
    values.try_into().map_err(wrong)
}

/// Returns the schedule with a given name, or the one in a file.
fn schedule(args: &SimulateArgs, times: &Times) -> Result<Schedule, Failure> {
    match args.schedule.parse::<ScheduleKind>() {
        Ok(kind) => generate(kind, args, times),
        Err(_) => read_schedule(args),
    }
}

/// Reads the schedule of a file. Its sizes are its own.
fn read_schedule(args: &SimulateArgs) -> Result<Schedule, Failure> {
    let text = match fs::read_to_string(&args.schedule) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let unknown = UnknownSchedule { name: args.schedule.clone() };
            return Err(Failure::input(format!("--schedule: {unknown}, or a file")));
        }
        Err(error) => return Err(Failure::input(format!("cannot read {}: {error}", args.schedule))),
    };
    let sizes = [("--pp", args.pp.is_some()), ("--microbatches", args.microbatches.is_some())];
    let others = [("--virtual", args.r#virtual.is_some()), ("--memory-limit", args.memory_limit.is_some())];
    if let Some((option, _)) = sizes.into_iter().chain(others).find(|(_, is_given)| *is_given) {
        return Err(Failure::input(format!(
            "{option}: is for a schedule by name; {} has its own sizes",
            args.schedule
        )));
    }
    text.parse().map_err(|error| wrong_file(args, &error))
}

fn generate(kind: ScheduleKind, args: &SimulateArgs, times: &Times) -> Result<Schedule, Failure> {
    let needs = |option, example| Failure::input(format!("schedule {kind} needs {option}, such as {option} {example}"));
    let request = ScheduleRequest {
        num_ranks: args.pp.ok_or_else(|| needs("--pp", 4))?,
        num_microbatches: args.microbatches.ok_or_else(|| needs("--microbatches", 8))?,
        virtual_stages: args.r#virtual,
        times,
        memory_limit: args.memory_limit,
    };
    Ok(kind.generate(&request)?)
}

fn with_all_to_alls(schedule: Schedule, args: &SimulateArgs) -> Result<Schedule, Failure> {
    if args.all_to_all.is_none() || !schedule.moe_layers.is_empty() {
        return Ok(schedule);
    }
    if args.moe_layers == 0 {
        return Err(Failure::input("--moe-layers 0: --all-to-all needs at least 1 MoE layer a stage"));
    }
    let checked = schedule.check().map_err(|error| wrong_file(args, &error))?;
    Ok(checked.with_all_to_alls(&vec![args.moe_layers; schedule.num_stages()])?)
}

fn wrong_file(args: &SimulateArgs, error: &impl std::error::Error) -> Failure {
    Failure::input(format!("{}: {error}", Path::new(&args.schedule).display()))
}
