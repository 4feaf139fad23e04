//! `moeworks bench rebalance`: prints tokens a second of training whose load changes, with experts that stay and that
//! move, and step times that decisions foretold beside those that were measured.

use moeworks_bench::rebalance::{Foretold, Measured, Mode, RebalanceBench, measure};
use serde_json::json;

use super::comm::check_ranks;
use super::overlap::parse_link;
use crate::args::RebalanceBenchArgs;
use crate::exit_code::ExitCode;
use crate::failure::Failure;
use crate::tables;

pub(super) fn run(args: &RebalanceBenchArgs) -> Result<ExitCode, Failure> {
    check_ranks(args.ranks)?;
    let bench = bench(args)?;
    let mut all = Vec::new();
    measure(&bench, |measured| all.push(measured))?;
    if all.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    if args.json {
        println!("{:#}", json!(all.iter().map(Measured::json).collect::<Vec<_>>()));
    } else {
        print(&bench, &all);
    }
    Ok(ExitCode::SUCCESS)
}

fn bench(args: &RebalanceBenchArgs) -> Result<RebalanceBench, Failure> {
    if !(args.zipf.is_finite() && (0.0..=4.0).contains(&args.zipf)) {
        return Err(Failure::input(format!("--zipf {}: must be from 0 to 4", args.zipf)));
    }
    let wrong_row = !(args.row_us.is_finite() && args.row_us > 0.0 && args.row_us <= 1e6);
    if wrong_row {
        return Err(Failure::input(format!("--row-us {}: must be above 0 and at most 1000000", args.row_us)));
    }
    let mode = |name: &String| {
        let right = || Mode::ALL.map(Mode::name).join(", ");
        let found = Mode::ALL.into_iter().find(|mode| mode.name() == name);
        found.ok_or_else(|| Failure::input(format!("mode {name:?}: must be one of {}", right())))
    };
    let modes = args.modes.iter().map(mode).collect::<Result<Vec<_>, _>>()?;
    Ok(RebalanceBench {
        num_ranks: args.ranks,
        modes: if modes.is_empty() { Mode::ALL.to_vec() } else { modes },
        num_steps: u64::from(args.steps),
        period: u64::from(args.period),
        every: u64::from(args.every),
        spare: usize::from(args.spare),
        tokens_per_rank: usize::from(args.tokens),
        exponent: args.zipf,
        row_s: (!args.computed).then_some(args.row_us * 1e-6),
        link: args.link.as_deref().map(parse_link).transpose()?,
    })
}

fn print(bench: &RebalanceBench, all: &[Measured]) {
    let RebalanceBench { num_steps, period, every, spare, tokens_per_rank, exponent, row_s, .. } = bench;
    let rows = row_s.map_or_else(|| "computed".to_owned(), |row_s| format!("waits of {:.0} us", row_s * 1e6));
    println!(
        "{} ranks, {tokens_per_rank} tokens each, Zipf exponent {exponent}, another order of experts every {period} of \
         {num_steps} steps;\nrows of experts are {rows}; decisions every {every} steps, {spare} spare slots a rank",
        all[0].num_ranks
    );
    let off = all.iter().find(|measured| measured.mode == Mode::Off).map(|measured| measured.tokens_per_s);
    let heads =
        ["experts", "tokens/s", "times off", "imbalance", "copies", "longest pause", "foretold", "off by", "at most"];
    tables::print(&heads, &all.iter().map(|measured| cells(measured, off)).collect::<Vec<_>>());
    let first: Vec<Vec<String>> = all.iter().filter_map(largest).collect();
    if !first.is_empty() {
        println!("\nthe decision of each that saved most:");
        let heads =
            ["experts", "after step", "policy", "imbalance", "after", "step, ms", "foretold", "measured", "off by"];
        tables::print(&heads, &first);
    }
}

fn cells(measured: &Measured, off: Option<f64>) -> Vec<String> {
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let errors = measured.errors();
    vec![
        measured.mode.name().to_owned(),
        format!("{:.0}", measured.tokens_per_s),
        or_dash(off.map(|off| format!("{:.2}", measured.tokens_per_s / off))),
        format!("{:.2}", measured.imbalance),
        measured.num_copies.to_string(),
        super::percent(measured.max_pause),
        measured.foretold.len().to_string(),
        or_dash(errors.map(|[mean, _]| super::percent(mean))),
        or_dash(errors.map(|[_, max]| super::percent(max))),
    ]
}

/// Returns the row of the decision that saved most.
fn largest(measured: &Measured) -> Option<Vec<String>> {
    let saved = |decision: &&Foretold| decision.before_s - decision.foretold_s;
    let decision = measured.foretold.iter().max_by(|a, b| saved(a).total_cmp(&saved(b)))?;
    let milliseconds = |seconds: f64| format!("{:.2}", seconds * 1e3);
    Some(vec![
        measured.mode.name().to_owned(),
        decision.step.to_string(),
        decision.policy.clone(),
        format!("{:.2}", decision.imbalance[0]),
        format!("{:.2}", decision.imbalance[1]),
        milliseconds(decision.before_s),
        milliseconds(decision.foretold_s),
        milliseconds(decision.after_s),
        format!("{:+.1}%", 100.0 * decision.error()),
    ])
}
