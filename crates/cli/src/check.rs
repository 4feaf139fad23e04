//! `moeworks check`: compares the losses and gradients of a configuration on one rank with those in every layout that
//! this machine can hold.

use moeworks_train::TrainError;
use moeworks_train::layout_check::{CheckedLayout, Fault, LayoutCheck, LayoutOutcome, SkippedLayout, layouts};
use serde_json::{Value, json};

use crate::args::LayoutCheckArgs;
use crate::estimate::BYTE_VOCABULARY;
use crate::exit_code::ExitCode;
use crate::failure::Failure;
use crate::ranks::MAX_THREADS;
use crate::tables;
use crate::train::layers;

/// The most ranks of a layout, unless the configuration has more or another number is given.
const RANKS: usize = 4;
/// The exit code of a configuration that is not the same in all layouts.
const DIFFERS: u8 = 1;

/// The outcome of a layout: a step, or the reason why its ranks failed.
type Outcome = Result<LayoutOutcome, TrainError>;

/// A layout that was tried.
struct Tried {
    layout: CheckedLayout,
    outcome: Outcome,
}

pub(crate) fn run(args: &LayoutCheckArgs) -> Result<ExitCode, Failure> {
    if !(args.tolerance >= 0.0 && args.tolerance.is_finite()) {
        return Err(Failure::input(format!("--tolerance {}: must be a number of at least 0", args.tolerance)));
    }
    let mut config = layers(&args.config, Vec::new())?.resolve()?;
    if config.model.vocab_size == 0 {
        config.model.vocab_size = BYTE_VOCABULARY;
    }
    let own_ranks = config.parallel.num_ranks();
    let max_ranks = args.ranks.map_or(RANKS.max(own_ranks), usize::from);
    if max_ranks > MAX_THREADS {
        let limit = format!("the check runs at most {MAX_THREADS} ranks; take fewer, or give --ranks");
        return Err(Failure::input(format!("parallel.* asks for {own_ranks} ranks: {limit}")));
    }
    let mut check = LayoutCheck::new(&config, args.tolerance)?;
    if let Some(tensor) = &args.fault {
        check = check.with_fault(Fault { tensor: tensor.clone() })?;
    }
    let (tried, skipped) = layouts(check.config(), max_ranks);
    if tried.is_empty() {
        let reason = skipped.first().map_or("", |skipped| &skipped.reason);
        return Err(Failure::input(format!("no layout of {max_ranks} ranks takes this configuration: {reason}")));
    }
    let mut rows = Vec::new();
    for layout in tried {
        let outcome = check.check(&layout);
        // The memory of a layout, or of the one rank that all are compared with, is not that of the others.
        if let Err(error @ TrainError::Memory { .. }) = outcome {
            return Err(error.into());
        }
        rows.push(Tried { layout, outcome });
    }
    let are_equal = rows.iter().all(|row| is_equal(&row.outcome));
    if args.json {
        println!("{:#}", json(&rows, &skipped, are_equal));
    } else {
        print(args, &rows, &skipped);
    }
    Ok(if are_equal { ExitCode::SUCCESS } else { ExitCode::from(DIFFERS) })
}

fn is_equal(outcome: &Outcome) -> bool {
    outcome.as_ref().is_ok_and(|outcome| outcome.difference.is_none())
}

/// Returns the verdict on a layout as a line.
fn verdict(outcome: &Outcome) -> String {
    match outcome {
        Ok(LayoutOutcome { difference: Some(difference), .. }) => format!("differs: {difference}"),
        Ok(_) => "equal".to_owned(),
        Err(error) => format!("failed: {error}"),
    }
}

fn print(args: &LayoutCheckArgs, rows: &[Tried], skipped: &[SkippedLayout]) {
    println!(
        "A step in f32 with random tokens, compared with that of one rank; at most {:e} may differ.",
        args.tolerance
    );
    let cells = |Tried { layout, outcome }: &Tried| {
        let figure = |value: fn(&LayoutOutcome) -> String| outcome.as_ref().map_or_else(|_| "-".to_owned(), value);
        vec![
            layout.to_string(),
            layout.num_ranks().to_string(),
            figure(|outcome| format!("{:.6}", outcome.loss)),
            figure(|outcome| format!("{:.1e}", outcome.largest)),
            verdict(outcome),
        ]
    };
    let header = ["layout", "ranks", "loss", "largest difference", "verdict"];
    tables::print(&header, &rows.iter().map(cells).collect::<Vec<_>>());
    if args.skipped {
        skipped.iter().for_each(|skipped| println!("left out: {}: {}", skipped.layout, skipped.reason));
    }
    let num_equal = rows.iter().filter(|row| is_equal(&row.outcome)).count();
    let left_out = match skipped.len() {
        0 => String::new(),
        num if args.skipped => format!("; {num} left out"),
        num => format!("; {num} left out, which --skipped explains"),
    };
    println!("\n{num_equal} of {} layouts are equal{left_out}.", rows.len());
}

fn json(rows: &[Tried], skipped: &[SkippedLayout], are_equal: bool) -> Value {
    let row = |Tried { layout, outcome }: &Tried| {
        let difference = outcome.as_ref().ok().and_then(|outcome| outcome.difference.as_ref());
        json!({
            "layout": layout.to_string(),
            "ranks": layout.num_ranks(),
            "is_equal": is_equal(outcome),
            "loss": outcome.as_ref().ok().map(|outcome| outcome.loss),
            "largest_difference": outcome.as_ref().ok().map(|outcome| outcome.largest),
            "difference": difference.map(|difference| json!({
                "of": difference.of, "rank": difference.rank, "index": difference.index, "share": difference.share,
                "on_one_rank": difference.expected, "found": difference.found,
            })),
            "error": outcome.as_ref().err().map(ToString::to_string),
        })
    };
    let left_out = |skipped: &SkippedLayout| json!({ "layout": skipped.layout.to_string(), "reason": skipped.reason });
    json!({
        "are_equal": are_equal,
        "layouts": rows.iter().map(row).collect::<Vec<_>>(),
        "left_out": skipped.iter().map(left_out).collect::<Vec<_>>(),
    })
}
