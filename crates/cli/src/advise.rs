//! `moeworks advise`: what holds a run back, the figures that show it, and the settings to try.

mod tries;

use std::path::Path;

use moeworks_train::advise::{Finding, Over, Reach, ReadOptions, ReadRun, Remedy, RunFigures, advise};
use moeworks_train::machine_bytes;
use serde_json::{Value, json};

use self::tries::Tried;
use crate::args::AdviseArgs;
use crate::exit_code::ExitCode;
use crate::failure::Failure;
use crate::host::Call;
use crate::progress::bytes;
use crate::quote;

/// The most steps that are judged or tried.
const MAX_STEPS: u64 = 1_000_000;

pub(crate) fn run(args: &AdviseArgs, call: &Call<'_>) -> Result<ExitCode, Failure> {
    check(args)?;
    let options =
        ReadOptions { last: args.last, trace: args.trace.clone(), machine_bytes: args.memory.or_else(machine_bytes) };
    let ReadRun { figures, remarks } = RunFigures::read(&args.run, &options)?;
    let findings = advise(&figures);
    if args.is_try {
        tries::check(args, &figures)?;
    }
    for remark in &remarks {
        notice!("note: {remark}");
    }
    if !args.json {
        print(&figures, &findings);
    }
    let tried = if args.is_try { Some(tries::run(args, call, &figures, &findings)?) } else { None };
    if args.json {
        println!("{:#}", as_json(&figures, &findings, &remarks, tried.as_ref()));
    } else if let Some(tried) = &tried {
        tried.print();
    }
    Ok(tried.map_or(ExitCode::SUCCESS, |tried| tried.exit_code(call)))
}

fn check(args: &AdviseArgs) -> Result<(), Failure> {
    let last = args.last.map(|last| ("--last", last as u64));
    for (option, value) in last.into_iter().chain([("--steps", args.steps)]) {
        if !(1..=MAX_STEPS).contains(&value) {
            return Err(Failure::input(format!("{option} {value}: must be from 1 to {MAX_STEPS}")));
        }
    }
    Ok(())
}

/// Formats a figure with four significant digits, whole numbers as they are.
fn shown(value: f64) -> String {
    if !value.is_finite() {
        return "unknown".to_owned();
    }
    if value.fract() == 0.0 && value.abs() < 1e15 {
        return format!("{value}");
    }
    let digits = 3 - value.abs().log10().floor() as i32;
    if (0..12).contains(&digits) { format!("{value:.*}", digits as usize) } else { format!("{value:.3e}") }
}

fn print(figures: &RunFigures, findings: &[Finding]) {
    let (window, steps) = (&figures.window, figures.settings.train.steps);
    println!(
        "{}: steps {} to {} of {steps} are judged ({} records)",
        figures.run, window.first_step, window.last_step, window.num_records
    );
    if findings.is_empty() {
        println!("Nothing holds this run back, as far as its figures show:");
        for (name, value) in looked_at(figures) {
            println!("  {name:34} {:>12}", shown(value));
        }
        return;
    }
    for (index, finding) in findings.iter().enumerate() {
        println!();
        let (topic, stake) = (finding.topic.name(), 100.0 * finding.at_stake);
        println!("{}. {topic}, at most {stake:.0}% at stake: {}", index + 1, finding.summary);
        for figure in &finding.figures {
            println!("     {:34} {:>12}  {}", figure.name, shown(figure.value), figure.over.describe());
        }
        for remedy in &finding.remedies {
            print_remedy(figures, remedy);
        }
    }
}

fn print_remedy(figures: &RunFigures, remedy: &Remedy) {
    let change = |change: &moeworks_train::advise::Change| {
        let now = if change.now.is_empty() { "\"\"" } else { &change.now };
        format!("{}={} (now {now})", change.setting, change.value)
    };
    let changes: Vec<String> = remedy.changes.iter().map(change).collect();
    println!("   try {}: {}", changes.join(" and "), remedy.expected);
    for line in commands(figures, remedy) {
        println!("     {line}");
    }
}

/// Returns the commands that carry a remedy out.
fn commands(figures: &RunFigures, remedy: &Remedy) -> Vec<String> {
    let settings: Vec<String> = remedy
        .changes
        .iter()
        .map(|change| quote::option("--set", &format!("{}={}", change.setting, change.value)))
        .collect();
    let (run, settings) = (quote::path(Path::new(&figures.run)), settings.join(" "));
    let steps = figures.settings.train.steps;
    let is_finished = figures.window.last_step >= steps;
    // Half as many steps again.
    let longer = if is_finished { format!(" --steps {}", steps + (steps / 2).max(1)) } else { String::new() };
    let start = match remedy.reach {
        Reach::Resume => format!("moeworks train --resume {run}{longer} {settings}"),
        Reach::FromWeights => format!("moeworks train --config {run}/config.toml --from {run} {settings}"),
        Reach::NewRun => format!("moeworks train --config {run}/config.toml {settings}"),
    };
    remedy.command.iter().map(|command| format!("moeworks {command}")).chain([start]).collect()
}

/// Returns the figures by which a run is judged.
fn looked_at(figures: &RunFigures) -> Vec<(&'static str, f64)> {
    let window = &figures.window;
    let most = |values: &mut dyn Iterator<Item = f64>| values.fold(f64::NAN, f64::max);
    let peak = figures.course.points.iter().map(|point| point.memory_peak_bytes).max().unwrap_or(0);
    let mut list = vec![
        ("train/loss", window.loss),
        ("val/loss", figures.course.evaluations.last().map_or(f64::NAN, |evaluation| evaluation.loss)),
        ("train/is_skipped", figures.course.points.iter().filter(|point| point.is_skipped).count() as f64),
        ("perf/step_ms", window.step_ms),
        ("perf/tokens_per_s", window.tokens_per_s),
        ("perf/mfu", window.mfu),
        ("perf/memory_peak_bytes", peak as f64),
    ];
    if !window.layers.is_empty() {
        list.extend([
            ("moe/drop_rate", window.drop_rate),
            ("max_over_mean, worst layer", most(&mut window.layers.iter().map(|layer| layer.load.max_over_mean()))),
            ("router_entropy / ln E, worst layer", most(&mut window.layers.iter().map(|layer| layer.entropy_share()))),
        ]);
    }
    if let Some(ranks) = &window.ranks {
        list.extend([("ranks/waiting_ms", ranks.waiting_ms), ("ranks/standing_ms_mean", ranks.standing_ms)]);
    }
    list
}

/// Returns a number for JSON; `null` for an unknown one.
fn number(value: f64) -> Value {
    if value.is_finite() { json!(value) } else { Value::Null }
}

fn as_json(figures: &RunFigures, findings: &[Finding], remarks: &[String], tried: Option<&Tried>) -> Value {
    let window = &figures.window;
    let looked_at: serde_json::Map<String, Value> =
        looked_at(figures).into_iter().map(|(name, value)| (name.to_owned(), number(value))).collect();
    let mut value = json!({
        "run": figures.run,
        "window": { "first_step": window.first_step, "last_step": window.last_step, "records": window.num_records },
        "steps": figures.settings.train.steps,
        "healthy": findings.is_empty(),
        "findings": findings.iter().map(|finding| finding_json(figures, finding)).collect::<Vec<_>>(),
        "looked_at": looked_at,
        "notes": remarks,
    });
    if let Some(tried) = tried {
        value["tries"] = tried.json();
    }
    value
}

fn finding_json(figures: &RunFigures, finding: &Finding) -> Value {
    let over = |over: Over| match over {
        Over::Step(step) => json!({ "step": step }),
        over => json!(over.describe()),
    };
    let figure = |figure: &moeworks_train::advise::Figure| json!({ "name": figure.name, "value": number(figure.value), "over": over(figure.over) });
    let remedy = |remedy: &Remedy| {
        let changes = remedy.changes.iter();
        let changes =
            changes.map(|change| json!({ "setting": change.setting, "now": change.now, "value": change.value }));
        json!({
            "settings": changes.collect::<Vec<_>>(),
            "expected": remedy.expected,
            "commands": commands(figures, remedy),
        })
    };
    json!({
        "topic": finding.topic.name(),
        "summary": finding.summary,
        "at_stake": finding.at_stake,
        "figures": finding.figures.iter().map(figure).collect::<Vec<_>>(),
        "try": finding.remedies.iter().map(remedy).collect::<Vec<_>>(),
    })
}

/// Formats a peak of memory; a dash for an unknown one.
fn peak(count: u64) -> String {
    if count == 0 { "-".to_owned() } else { bytes(count) }
}
