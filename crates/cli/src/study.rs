//! `moeworks study`: trains and compares routing schemes, and writes a page with a table and a plot.

use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;

use moeworks_infer::data::is_piped;
use moeworks_train::config::{ConfigLayers, Override};
use moeworks_train::study::{BASE, Study, plot, report};
use moeworks_train::{Event, Requests};

use crate::args::StudyArgs;
use crate::environment;
use crate::exit_code::ExitCode;
use crate::failure::Failure;
use crate::host::Call;
use crate::page::{Target, write_whole};
use crate::progress::Display;
use crate::quote;
use crate::reading;

/// The largest number of seeds of a variant.
const MAX_SEEDS: u64 = 1000;

pub(crate) fn run(args: &StudyArgs, call: &Call<'_>) -> Result<ExitCode, Failure> {
    if !(1..=MAX_SEEDS).contains(&args.seeds) {
        return Err(Failure::input(format!("--seeds {}: must be from 1 to {MAX_SEEDS}", args.seeds)));
    }
    let target = |path, mark| Target { option: "--out", path, mark, is_forced: args.force };
    target(&*args.out, "# Routing schemes compared").check()?;
    let plot_path = args.out.with_extension("svg");
    if plot_path == args.out {
        return Err(Failure::input(format!(
            "--out {}: is the name of the plot; choose a name that ends in .md",
            args.out.display()
        )));
    }
    target(&*plot_path, "validation loss of routing schemes").check()?;
    if let Some(path) = args.data.iter().find(|path| is_piped(path)) {
        return Err(Failure::input(format!("--data {path}: a study reads its text again for each run; name a file")));
    }
    let study = study_of(args)?;
    let variants = study.variants()?;
    notice!("{} variants, {} seeds each, in {}", variants.len(), args.seeds, args.runs.display());
    let mut shown: Option<(String, Display)> = None;
    let requests = Requests::default();
    let _receiving = call.give_signals_to(&requests)?;
    let watch = reading::watch(Arc::clone(&requests.stop));
    let findings = study.run(&environment::machine(), &requests, &watch, |name, event| {
        if shown.as_ref().is_none_or(|(of, _)| of != name) {
            if let Some((_, display)) = shown.take() {
                display.finish();
            }
            notice!("{name}");
        }
        let (_, display) = shown.get_or_insert_with(|| (name.to_owned(), Display::new(0)));
        if let Event::Step { record, total_steps, val_loss } = event {
            display.step(record, total_steps, val_loss);
        }
    })?;
    let Some(findings) = findings else {
        notice!("Stopped. The same command goes on.");
        return Ok(ExitCode::from(call.interrupts().exit_code()));
    };
    let plot_name = plot_path.file_name().unwrap_or_default().to_string_lossy();
    write_whole(&plot_path, &plot(&findings))?;
    write_whole(&args.out, &report(&study, &findings, &plot_name, &command(call.words())))?;
    println!("{}", args.out.display());
    Ok(ExitCode::SUCCESS)
}

/// Builds the study: a small base model, changed by the user's settings.
fn study_of(args: &StudyArgs) -> Result<Study, Failure> {
    let mut settings: Vec<&str> = Vec::new();
    // A preset or a file determines the size of the model.
    if args.config.preset.is_none() && args.config.config.is_none() {
        settings.extend(BASE);
    }
    settings.extend(args.config.settings.iter().map(String::as_str));
    let mut overrides: Vec<Override> = settings.into_iter().map(Override::parse).collect::<Result<_, _>>()?;
    overrides.push(Override::new("data.paths", args.data.clone()));
    let layers =
        ConfigLayers { from: None, preset: args.config.preset.clone(), file: args.config.config.clone(), overrides };
    let base = layers.resolve()?;
    if base.model.num_experts == 0 {
        return Err(Failure::input("model.num_experts = 0: the base of a study needs experts"));
    }
    let last_seed = base.train.seed.checked_add(args.seeds - 1).filter(|&seed| i64::try_from(seed).is_ok());
    if last_seed.is_none() {
        let message = format!("train.seed = {}: {} seeds from there on are too large", base.train.seed, args.seeds);
        return Err(Failure::input(message));
    }
    Ok(Study { base, runs_dir: args.runs.clone(), num_seeds: args.seeds, only: args.only.clone() })
}

/// Returns the command line as typed, but with the names of files in place of their paths, because the page may be
/// read elsewhere.
fn command(words: &[OsString]) -> String {
    let argument = |argument: &OsString| {
        let name = Path::new(argument);
        let shown = if name.is_absolute() { name.file_name().unwrap_or_default() } else { argument };
        quote::word(shown)
    };
    words.iter().skip(1).fold("moeworks".to_owned(), |line, next| line + " " + &argument(next))
}
