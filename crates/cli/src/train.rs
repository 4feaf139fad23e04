//! `moeworks train`: starts or resumes a run and shows its progress.

mod auto_layout;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use moeworks_infer::data::DataError;
use moeworks_infer::store::{Pick, Store, newest_run, resolve_run};
use moeworks_model::hf;
use moeworks_ops::Context;
use moeworks_train::config::{ConfigLayers, OutputConfig, Override, RunConfig, print_config};
use moeworks_train::language_model::{LanguageModel, LanguageModelResume, LanguageModelStart, LanguageModelTrainer};
use moeworks_train::report::write_report;
use moeworks_train::{Event, IfTaken, Outcome, Progress, Ranks, Requests, RunFolder, TrainError, resumed_config};

use crate::args::{CheckWeights, ConfigArgs, ReportArgs, TrainArgs};
use crate::environment;
use crate::exit_code::ExitCode;
use crate::failure::Failure;
use crate::host::Call;
use crate::model::check_weights;
use crate::page::Target;
use crate::progress::{Display, duration, thousands};
use crate::quote;
use crate::ranks::{RunRanks, on_ranks};
use crate::reading;
use crate::terminal::printable;
use auto_layout::Follow;

/// The start of a trace file that this program wrote.
const TRACE_MARK: &str =
    "\"traceEvents\":[\n{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":0,\"tid\":0,\"args\":{\"name\":\"rank 0\"}}";

pub(crate) fn run(args: TrainArgs, call: &Call<'_>) -> Result<ExitCode, Failure> {
    let flags = flag_settings(&args)?;
    let start = Start::from_args(&args, flags)?;
    if args.print_config {
        print!("{}", print_config(start.config()));
        return Ok(ExitCode::SUCCESS);
    }
    if args.auto_layout.is_some() {
        return auto_layout::run(&args, start, call);
    }
    let started = std::time::Instant::now();
    let trace = args.trace.as_deref();
    if let Some(path) = trace {
        if start.config().parallel.num_ranks() == 1 {
            return Err(Failure::input("--trace shows what ranks do: it needs --ep, --dp, --tp or --pp above 1"));
        }
        Target { option: "--trace", path, mark: TRACE_MARK, is_forced: args.force }.check()?;
    }
    let requests = Requests::default();
    let _receiving = call.give_signals_to(&requests)?;
    let wanted = RunRanks { config: start.config(), is_traced: trace.is_some() };
    let end =
        on_ranks(call, wanted, |ranks| one_rank(&start, ranks, Outside { requests: &requests, trace, follow: None }));
    if matches!(end, Err(TrainError::Data(DataError::Stopped))) {
        eprintln!("Stopped while data was read; nothing was written.");
        return Ok(ExitCode::from(call.interrupts().exit_code()));
    }
    match end? {
        Some(end) => end.show(call, started.elapsed().as_secs_f64()),
        None => Ok(ExitCode::SUCCESS),
    }
}

/// The ways to start a run.
enum Start {
    New { config: RunConfig, folder: RunFolder, from: Option<PathBuf> },
    Resumed { config: RunConfig, run_dir: PathBuf },
}

impl Start {
    fn from_args(args: &TrainArgs, flags: Vec<Override>) -> Result<Self, Failure> {
        if let Some(run) = &args.resume {
            return resumed(run, args, flags);
        }
        let (config, from) = resolve_from(args, flags)?;
        let folder = new_folder(args, &config);
        Ok(Self::New { config, folder, from })
    }

    /// Returns the folder of the run, or that which is asked for.
    fn folder(&self) -> &Path {
        match self {
            Self::New { folder, .. } => folder.path(),
            Self::Resumed { run_dir, .. } => run_dir,
        }
    }

    /// Returns the step of the checkpoint to go on from; 0 without one.
    fn step(&self) -> u64 {
        let Self::Resumed { run_dir, .. } = self else { return 0 };
        let newest = Store::open(run_dir).latest().ok().flatten();
        newest.map_or(0, |checkpoint| checkpoint.metadata.step)
    }

    fn config(&self) -> &RunConfig {
        match self {
            Self::New { config, .. } | Self::Resumed { config, .. } => config,
        }
    }

    fn trainer(&self, ranks: Option<Ranks>, requests: &Requests) -> Result<LanguageModelTrainer, TrainError> {
        let (machine, watch) = (environment::machine(), &reading::watch(Arc::clone(&requests.stop)));
        match self {
            Self::New { config, folder, from } => {
                let (config, folder, from) = (config.clone(), folder.clone(), from.clone());
                LanguageModel::start(LanguageModelStart { config, folder, from, ranks, machine, watch })
            }
            Self::Resumed { config, run_dir } => {
                let (config, run_dir) = (config.clone(), run_dir.clone());
                LanguageModel::resume(LanguageModelResume { run_dir, config, ranks, machine, watch })
            }
        }
    }
}

/// The caller's requests to a run: stop and save requests, and a file for its trace.
#[derive(Clone, Copy)]
struct Outside<'a> {
    requests: &'a Requests,
    trace: Option<&'a Path>,
    /// The layout that was chosen, and the watch over it.
    follow: Option<&'a Follow>,
}

/// Trains on one rank, which may be the only one. Returns the summary on the rank that prints it.
fn one_rank(
    start: &Start,
    ranks: Option<Ranks>,
    Outside { requests, trace, follow }: Outside<'_>,
) -> Result<Option<End>, TrainError> {
    let write_trace = |trainer: &LanguageModelTrainer| trace.map_or(Ok(()), |path| trainer.write_trace(path));
    if ranks.as_ref().is_some_and(|ranks| !ranks.is_root()) {
        let mut trainer = start.trainer(ranks, requests)?;
        trainer.run(requests, &mut |_| ())?;
        write_trace(&trainer)?;
        return Ok(None);
    }
    let mut trainer = start.trainer(ranks, requests)?;
    announce(&trainer);
    follow.map_or(Ok(()), |follow| follow.record(trainer.run_dir()))?;
    let outcome = watch(&mut trainer, requests, follow).and_then(|outcome| write_trace(&trainer).map(|()| outcome));
    // The report is also written for a failed run.
    let report = write_report(trainer.run_dir());
    let outcome = outcome?;
    Ok(Some(End {
        outcome,
        report: report?,
        run_dir: trainer.run_dir().to_owned(),
        checkpoint: trainer.last_checkpoint().map(Path::to_owned),
        progress: trainer.progress().clone(),
        total_steps: trainer.task().config().train.steps,
        prompt: trainer.task().config().train.sample_prompt.clone(),
        shares: reading::shares(trainer.task().dataset(), trainer.progress().step),
    }))
}

/// The summary of a finished run.
struct End {
    outcome: Outcome,
    report: PathBuf,
    run_dir: PathBuf,
    checkpoint: Option<PathBuf>,
    progress: Progress,
    total_steps: u64,
    prompt: String,
    /// The shares of the sources, if there are several.
    shares: Option<String>,
}

impl End {
    fn show(&self, call: &Call<'_>, seconds: f64) -> Result<ExitCode, Failure> {
        let steps = self.progress.step;
        notice!();
        match self.outcome {
            Outcome::Finished => notice!("Done: {} steps in {}.", thousands(steps), duration(seconds)),
            Outcome::Stopped => notice!("Stopped after step {} of {}.", steps, self.total_steps),
        }
        if let Some(loss) = self.progress.val_loss {
            notice!("Validation loss {loss:.4} ({:.3} bits a token).", loss / std::f64::consts::LN_2);
        }
        if let Some(shares) = &self.shares {
            notice!("Shares:     {shares} of the tokens trained on");
        }
        if let Some(checkpoint) = &self.checkpoint {
            notice!("Checkpoint: {}", checkpoint.display());
        }
        notice!("Report:     {}", self.report.display());
        // Commands that the user can paste.
        let (program, run) = (quote::program(call.words()), quote::path(&self.run_dir));
        if self.outcome == Outcome::Stopped {
            notice!("Go on:      {program} train --resume {run}");
            return Ok(ExitCode::from(call.interrupts().exit_code()));
        }
        notice!("Next:       {program} generate {run} {}", quote::option("--prompt", &self.prompt));
        Ok(ExitCode::SUCCESS)
    }
}

/// Runs `moeworks report`.
pub(crate) fn report(args: &ReportArgs) -> Result<ExitCode, Failure> {
    println!("{}", write_report(&args.run)?.display());
    Ok(ExitCode::SUCCESS)
}

/// Resolves a configuration: preset, file and settings over the defaults, and `flags` with the highest priority.
pub(crate) fn resolve_config(args: &ConfigArgs, flags: Vec<Override>) -> Result<RunConfig, Failure> {
    Ok(layers(args, flags)?.resolve()?)
}

/// Resolves the settings over those of the model of `--from`, and returns that model's folder too.
fn resolve_from(args: &TrainArgs, flags: Vec<Override>) -> Result<(RunConfig, Option<PathBuf>), Failure> {
    let from = args.from.as_deref().map(|path| resolve_run(path, Pick::Latest)).transpose()?;
    let from = from.map(|resolved| resolved.model_dir);
    if let Some(dir) = &from {
        let ctx = Context::cpu_all_cores();
        check_weights(dir, CheckWeights::Auto, |most| Ok(hf::check_weights(&ctx, dir, most)?))?;
    }
    let layers = ConfigLayers { from: from.clone(), ..layers(&args.config, flags)? };
    Ok((layers.resolve()?, from))
}

pub(crate) fn layers(args: &ConfigArgs, flags: Vec<Override>) -> Result<ConfigLayers, Failure> {
    let mut overrides: Vec<Override> =
        args.settings.iter().map(|text| Override::parse(text)).collect::<Result<_, _>>()?;
    overrides.extend(flags);
    Ok(ConfigLayers { preset: args.preset.clone(), from: None, file: args.config.clone(), overrides })
}

/// Chooses the folder of a new run: the given one, or one named by the date and time, with a number if that is taken.
fn new_folder(args: &TrainArgs, config: &RunConfig) -> RunFolder {
    let if_taken = if args.force { IfTaken::Replace } else { IfTaken::Refuse };
    let OutputConfig { out, name } = &config.run;
    match &args.out {
        Some(path) => RunFolder::new(path.clone(), if_taken),
        None if !name.is_empty() => RunFolder::new(out.join(name), if_taken),
        None => RunFolder::new(out.join(timestamp()), IfTaken::Number),
    }
}

/// Formats the date and time in UTC, such as 20261121-054200 (days to dates after H. Hinnant, "chrono-compatible
/// low-level date algorithms").
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

/// Converts the flags that stand for settings.
fn flag_settings(args: &TrainArgs) -> Result<Vec<Override>, Failure> {
    let mut flags = Vec::new();
    if !args.data.is_empty() {
        flags.push(Override::new("data.paths", args.data.clone()));
    }
    if let Some(device) = args.device {
        flags.push(Override::new("train.device", device.to_string()));
    }
    if let Some(when) = &args.rebalance {
        flags.push(Override::new("rebalance.mode", when.clone()));
    }
    if args.no_pin {
        flags.push(Override::parse("parallel.pin=false")?);
    }
    let numbers = [
        ("train.steps", args.steps),
        ("parallel.ep", args.ep),
        ("parallel.dp", args.dp),
        ("parallel.tp", args.tp),
        ("parallel.pp", args.pp),
    ];
    for (setting, number) in numbers.into_iter().filter_map(|(setting, number)| Some((setting, number?))) {
        flags.push(Override::parse(&format!("{setting}={number}"))?);
    }
    Ok(flags)
}

fn resumed(run: &str, args: &TrainArgs, flags: Vec<Override>) -> Result<Start, Failure> {
    let mut layers = layers(&args.config, flags)?;
    let run_dir = if run == "auto" {
        let out = resolve_config(&args.config, Vec::new())?.run.out;
        // `run.out` only tells where to search for runs.
        layers.overrides.retain(|given| given.setting() != "run.out");
        newest_run(&out)?.ok_or_else(|| Failure::input(format!("--resume auto: found no run in {}", out.display())))?
    } else {
        PathBuf::from(run)
    };
    let config = resumed_config(&run_dir, |stored| layers.resolve_over(stored))?;
    Ok(Start::Resumed { config, run_dir })
}

fn announce(trainer: &LanguageModelTrainer) {
    let config = trainer.task().config();
    let (dataset, seq_len) = (trainer.task().dataset(), config.train.seq_len as u64);
    notice!("Data:       {}", dataset.summary());
    for source in reading::sources(dataset, config.train.steps) {
        notice!("            {source}");
    }
    let parameters = moeworks_model::model_cost::Parameters::new(&config.model);
    notice!(
        "Training {} parameters ({} active per token) on {} tokens, validating on {}.",
        thousands(parameters.total()),
        thousands(parameters.active()),
        thousands(dataset.num_train() * seq_len),
        thousands(dataset.num_validation() * seq_len),
    );
    notice!("Run:        {}", trainer.run_dir().display());
}

fn watch(
    trainer: &mut LanguageModelTrainer,
    requests: &Requests,
    follow: Option<&Follow>,
) -> Result<Outcome, TrainError> {
    let mut display = Display::new(trainer.progress().step);
    let result = trainer.run(requests, &mut |event| match event {
        Event::Step { record, total_steps, val_loss } => {
            display.step(record, total_steps, val_loss);
            if let Some(follow) = follow {
                follow.step(record, total_steps, requests);
            }
        }
        Event::Sample(sample) => {
            display.note(&format!("--- step {}: {}{}\n---", sample.step, sample.prompt, printable(&sample.text)));
        }
        Event::Skipped { step, in_a_row, max_in_a_row } => display.note(&format!(
            "step {step}: loss or gradient is not finite, the update is skipped ({in_a_row} in a row, {max_in_a_row} end the run)"
        )),
        Event::Saved(path) => tracing::info!("checkpoint {}", path.display()),
    });
    display.finish();
    result
}
