//! `moeworks train`: from a command line to a run, shown as it goes.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use moeworks_train::config::{ConfigLayers, Override, RunConfig, print_config};
use moeworks_train::report::write_report;
use moeworks_train::store::{Pick, newest_run, resolve_run};
use moeworks_train::{Event, Outcome, Requests, Trainer};

use crate::args::{ConfigArgs, ReportArgs, TrainArgs};
use crate::failure::Failure;
use crate::progress::{Display, duration, thousands};

/// The exit code of a program that Ctrl-C ended.
pub(crate) const EXIT_INTERRUPTED: u8 = 130;

pub(crate) fn run(args: TrainArgs) -> Result<ExitCode, Failure> {
    let flags = flag_settings(&args)?;
    if args.print_config {
        print!("{}", print_config(&resolve_from(&args, flags)?.0));
        return Ok(ExitCode::SUCCESS);
    }
    let requests = requests()?;
    let started = std::time::Instant::now();
    let mut trainer = match &args.resume {
        Some(run) => resume(run, &args, flags)?,
        None => {
            let (config, from) = resolve_from(&args, flags)?;
            let run_dir = args.out.clone().unwrap_or_else(|| new_run_dir(&config));
            Trainer::start_from(config, run_dir, from.as_deref())?
        }
    };
    announce(&trainer);
    let outcome = watch(&mut trainer, &requests);
    let run_dir = trainer.run_dir().to_owned();
    // The report is also wanted of a run that failed.
    let report = write_report(&run_dir);
    let outcome = outcome?;
    let report = report?;
    let steps = trainer.progress().step;
    let shown = run_dir.display();
    eprintln!();
    match outcome {
        Outcome::Finished => {
            eprintln!("Done: {} steps in {}.", thousands(steps), duration(started.elapsed().as_secs_f64()));
        }
        Outcome::Stopped => eprintln!("Stopped after step {} of {}.", steps, trainer.config().train.steps),
    }
    if let Some(loss) = trainer.progress().val_loss {
        eprintln!("Validation loss {loss:.4} ({:.3} bits a token).", loss / std::f64::consts::LN_2);
    }
    if let Some(checkpoint) = trainer.last_checkpoint() {
        eprintln!("Checkpoint: {}", checkpoint.display());
    }
    eprintln!("Report:     {}", report.display());
    // As this program was called, so that the line can be pasted.
    let program = std::env::args().next().unwrap_or_else(|| "moeworks".to_owned());
    if outcome == Outcome::Stopped {
        eprintln!("Go on:      {program} train --resume {shown}");
        return Ok(ExitCode::from(EXIT_INTERRUPTED));
    }
    eprintln!("Next:       {program} generate {shown} --prompt {:?}", trainer.config().train.sample_prompt);
    Ok(ExitCode::SUCCESS)
}

/// `moeworks report`.
pub(crate) fn report(args: &ReportArgs) -> Result<ExitCode, Failure> {
    println!("{}", write_report(&args.run)?.display());
    Ok(ExitCode::SUCCESS)
}

/// Lays preset, file and settings over the defaults; `flags` come last.
pub(crate) fn resolve_config(args: &ConfigArgs, flags: Vec<Override>) -> Result<RunConfig, Failure> {
    Ok(layers(args, flags)?.resolve()?)
}

/// As [`resolve_config`], over the model that `--from` names, whose folder is returned too.
fn resolve_from(args: &TrainArgs, flags: Vec<Override>) -> Result<(RunConfig, Option<PathBuf>), Failure> {
    let from = args.from.as_deref().map(|path| resolve_run(path, Pick::Latest)).transpose()?;
    let from = from.map(|resolved| resolved.model_dir);
    let layers = ConfigLayers { from: from.clone(), ..layers(&args.config, flags)? };
    Ok((layers.resolve()?, from))
}

fn layers(args: &ConfigArgs, flags: Vec<Override>) -> Result<ConfigLayers, Failure> {
    let mut overrides: Vec<Override> =
        args.settings.iter().map(|text| Override::parse(text)).collect::<Result<_, _>>()?;
    overrides.extend(flags);
    Ok(ConfigLayers { preset: args.preset.clone(), from: None, file: args.config.clone(), overrides })
}

/// The folder of a new run: by its name, or by the date and time, with a number where that is taken.
fn new_run_dir(config: &RunConfig) -> PathBuf {
    let out = &config.run.out;
    if !config.run.name.is_empty() {
        return out.join(&config.run.name);
    }
    let stamp = timestamp();
    let numbered = (2..).map(|n| out.join(format!("{stamp}-{n}")));
    std::iter::once(out.join(&stamp)).chain(numbered).find(|dir| !dir.exists()).unwrap_or_else(|| out.join(stamp))
}

/// The date and time in UTC, such as 20261121-054200 (days to dates after H. Hinnant, "chrono-compatible low-level date
/// algorithms").
fn timestamp() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let (days, second) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year}{month:02}{day:02}-{hour:02}{minute:02}{second:02}")
}

/// The flags that stand for settings.
fn flag_settings(args: &TrainArgs) -> Result<Vec<Override>, Failure> {
    let mut flags = Vec::new();
    if !args.data.is_empty() {
        flags.push(Override::new("data.paths", args.data.clone()));
    }
    if let Some(steps) = args.steps {
        flags.push(Override::parse(&format!("train.steps={steps}"))?);
    }
    Ok(flags)
}

fn resume(run: &str, args: &TrainArgs, flags: Vec<Override>) -> Result<Trainer, Failure> {
    let run_dir = if run == "auto" {
        let out = resolve_config(&args.config, Vec::new())?.run.out;
        newest_run(&out)?.ok_or_else(|| {
            Failure::input(format!("--resume auto: there is no run with a checkpoint in {}", out.display()))
        })?
    } else {
        PathBuf::from(run)
    };
    let layers = layers(&args.config, flags)?;
    Ok(Trainer::resume(run_dir, |stored| layers.resolve_over(stored))?)
}

/// The first signal asks for an end after the step; a second one leaves at once.
pub(crate) fn requests() -> Result<Requests, Failure> {
    let requests = Requests::default();
    let signals = |error: std::io::Error| Failure::input(format!("cannot watch for signals: {error}"));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        let exit_code = 128 + signal;
        signal_hook::flag::register_conditional_shutdown(signal, exit_code, Arc::clone(&requests.stop))
            .map_err(signals)?;
        signal_hook::flag::register(signal, Arc::clone(&requests.stop)).map_err(signals)?;
    }
    #[cfg(unix)]
    signal_hook::flag::register(signal_hook::consts::SIGUSR1, Arc::clone(&requests.save)).map_err(signals)?;
    Ok(requests)
}

fn announce(trainer: &Trainer) {
    let config = trainer.config();
    let (dataset, seq_len) = (trainer.dataset(), config.train.seq_len as u64);
    let parameters = moeworks_model::account::Parameters::of(&config.model);
    eprintln!(
        "Training {} parameters ({} active per token) on {} tokens, validating on {}.",
        thousands(parameters.total()),
        thousands(parameters.active()),
        thousands(dataset.train().len() * seq_len),
        thousands(dataset.validation().len() * seq_len),
    );
    eprintln!("Run:        {}", trainer.run_dir().display());
}

/// A model that has learnt little writes control characters, which a terminal would obey.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' && c != '\t' { '\u{fffd}' } else { c }).collect()
}

fn watch(trainer: &mut Trainer, requests: &Requests) -> Result<Outcome, Failure> {
    let mut display = Display::new(trainer.progress().step);
    let result = trainer.run(requests, &mut |event| match event {
        Event::Step { record, total_steps, val_loss } => display.step(record, total_steps, val_loss),
        Event::Sample(sample) => {
            display.note(&format!("--- step {}: {}{}\n---", sample.step, sample.prompt, printable(&sample.text)));
        }
        Event::Skipped { step, in_a_row, max_in_a_row } => display.note(&format!(
            "step {step}: loss or gradient is not finite, the update is skipped ({in_a_row} in a row, {max_in_a_row} end the run)"
        )),
        Event::Saved(path) => tracing::info!("checkpoint {}", path.display()),
    });
    display.finish();
    Ok(result?)
}
