//! `moeworks simulate`: the timeline of a pipeline schedule with given times, without running any rank.

use std::path::Path;
use std::{fs, io};

use moeworks_plan::schedule::{PairTime, Peaks, SvgOptions, Timeline};
use moeworks_plan::{Schedule, ScheduleKind, ScheduleRequest, StageTimes, Times};
use serde_json::json;

use crate::args::SimulateArgs;
use crate::exit_code::ExitCode;
use crate::failure::Failure;
use crate::page::{Target, write_whole};
use crate::tables;

/// The largest number of ranks shown in the table.
const SHOWN: usize = 32;

pub(crate) fn run(args: &SimulateArgs) -> Result<ExitCode, Failure> {
    for (option, place, mark) in [("--svg", &args.svg, "aria-label=\"timeline of"), ("--text", &args.text, "schedule ")]
    {
        if let Some(path) = place {
            Target { option, path, mark, is_forced: args.force }.check()?;
        }
    }
    let times = times(args)?;
    let schedule = with_all_to_alls(schedule(args, &times)?, args)?;
    let checked = schedule.check().map_err(|error| wrong_file(args, &error))?;
    let timeline = checked.timeline(&times)?;
    let memory = checked.peak_memory(&times);
    if let Some(place) = &args.text {
        write_whole(place, &schedule.to_string())?;
    }
    if let Some(place) = &args.svg {
        write_whole(place, &timeline.to_svg(&SvgOptions { unit: &args.unit, ..SvgOptions::default() }))?;
    }
    if args.json {
        print_json(&schedule, &timeline, checked.peaks(), &memory);
    } else {
        print_table(&schedule, &timeline, checked.peaks(), &memory);
    }
    Ok(ExitCode::SUCCESS)
}

fn times(args: &SimulateArgs) -> Result<Times, Failure> {
    let (forward, input_grad, weight_grad, message) = match args.times[..] {
        [forward, input_grad, weight_grad] => (forward, input_grad, weight_grad, 0.0),
        [forward, input_grad, weight_grad, message] => (forward, input_grad, weight_grad, message),
        _ => return Err(Failure::input(format!("--times: has {} numbers: give F,B,W or F,B,W,T", args.times.len()))),
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

fn pair_of(option: &str, form: &str, values: &[f64]) -> Result<[f64; 2], Failure> {
    let wrong = |_| Failure::input(format!("{option}: has {} numbers: give {form}", values.len()));
    values.try_into().map_err(wrong)
}

/// Returns the schedule with a given name, or the one in a file.
fn schedule(args: &SimulateArgs, times: &Times) -> Result<Schedule, Failure> {
    let unknown = match args.schedule.parse::<ScheduleKind>() {
        Ok(kind) => return generate(kind, args, times),
        Err(unknown) => unknown,
    };
    let text = match fs::read_to_string(&args.schedule) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
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

fn percent(share: f64) -> String {
    format!("{:.1}%", 100.0 * share)
}

/// Formats a number with at most six significant digits, or with all digits before the decimal point.
fn number(value: f64) -> String {
    let decimals = if value == 0.0 { 0 } else { (5.0 - value.abs().log10().floor()).clamp(0.0, 12.0) as usize };
    let text = format!("{value:.decimals$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

fn print_table(schedule: &Schedule, timeline: &Timeline<'_>, peaks: &[Peaks], memory: &[f64]) {
    let (ranks, stages) = (schedule.num_ranks(), schedule.num_stages());
    println!("{}: {ranks} ranks, {stages} stages, {} microbatches", schedule.name, schedule.num_microbatches());
    println!("  makespan {}, bubble {}", number(timeline.makespan), percent(timeline.bubble()));
    let span = number(timeline.longest_span);
    println!("  longest rank {span}, bubble {} (from its own first action on)", percent(timeline.span_bubble()));
    match timeline.hidden() {
        Some(hidden) => println!("  communication {}, hidden {}", number(timeline.communication), percent(hidden)),
        None => println!("  no communication"),
    }
    println!("Peaks of each rank, in microbatches of a stage; memory in the unit of --memory:");
    let row = |rank: usize| {
        let Peaks { activations, weight_grads, held } = peaks[rank];
        let counts = [activations, weight_grads, held].map(|count| count.to_string());
        let mut row = vec![rank.to_string(), number(timeline.busy[rank])];
        row.extend(counts);
        row.push(number(memory[rank]));
        row
    };
    let header = ["rank", "busy", "activations", "W waiting", "both", "memory"];
    tables::print(&header, &(0..ranks.min(SHOWN)).map(row).collect::<Vec<_>>());
    if ranks > SHOWN {
        println!("  and {} more", ranks - SHOWN);
    }
}

fn print_json(schedule: &Schedule, timeline: &Timeline<'_>, peaks: &[Peaks], memory: &[f64]) {
    let rank = |rank: usize| {
        let Peaks { activations, weight_grads, held } = peaks[rank];
        json!({
            "busy": timeline.busy[rank],
            "peak_activations": activations,
            "peak_weight_grads": weight_grads,
            "peak_held": held,
            "peak_memory": memory[rank],
        })
    };
    let value = json!({
        "schedule": schedule.name,
        "num_stages": schedule.num_stages(),
        "num_microbatches": schedule.num_microbatches(),
        "makespan": timeline.makespan,
        "bubble": timeline.bubble(),
        "longest_span": timeline.longest_span,
        "span_bubble": timeline.span_bubble(),
        "communication": timeline.communication,
        "communication_hidden": timeline.hidden(),
        "ranks": (0..schedule.num_ranks()).map(rank).collect::<Vec<_>>(),
    });
    println!("{value:#}");
}
