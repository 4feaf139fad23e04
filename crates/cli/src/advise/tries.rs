//! `moeworks advise --try`: each setting for some steps from the run's last checkpoint.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use moeworks_infer::data::is_piped;
use moeworks_train::Requests;
use moeworks_train::advise::trial::{Trial, TrialFigures, TrialOptions, can_try};
use moeworks_train::advise::{Change, Finding, Remedy, RunFigures};
use serde_json::{Value, json};

use super::{number, peak};
use crate::args::AdviseArgs;
use crate::environment;
use crate::exit_code::ExitCode;
use crate::failure::Failure;
use crate::host::Call;
use crate::ranks::{RunRanks, on_ranks};
use crate::reading;
use crate::tables;

/// The results of all trials.
pub(super) struct Tried {
    dir: PathBuf,
    rows: Vec<Row>,
    /// The settings that cannot be tried from a checkpoint.
    left_out: Vec<String>,
    is_stopped: bool,
}

/// One trial.
struct Row {
    changes: Vec<Change>,
    outcome: Result<TrialFigures, String>,
}

/// The trials of a command.
struct Trials<'a> {
    args: &'a AdviseArgs,
    call: &'a Call<'a>,
    figures: &'a RunFigures,
    dir: PathBuf,
}

/// Refuses a run that cannot be tried, and a folder that cannot take the trials.
pub(super) fn check(args: &AdviseArgs, figures: &RunFigures) -> Result<(), Failure> {
    if let Some(path) = figures.settings.data.paths.iter().find(|path| is_piped(path)) {
        return Err(Failure::input(format!("--try reads the run's data again, which was a pipe: {path}")));
    }
    folder(args).map(drop)
}

/// Tries the run as it is, and each remedy.
pub(super) fn run(
    args: &AdviseArgs,
    call: &Call<'_>,
    figures: &RunFigures,
    findings: &[Finding],
) -> Result<Tried, Failure> {
    let dir = folder(args)?;
    let mut tried = Tried { dir: dir.clone(), rows: Vec::new(), left_out: Vec::new(), is_stopped: false };
    let mut remedies: Vec<&Remedy> = Vec::new();
    for remedy in findings.iter().flat_map(|finding| &finding.remedies) {
        if !can_try(&remedy.changes) {
            tried.left_out.push(name(&remedy.changes));
        } else if remedies.iter().all(|known| known.changes != remedy.changes) {
            remedies.push(remedy);
        }
    }
    if remedies.is_empty() {
        return Ok(tried);
    }
    fs::create_dir_all(&dir).map_err(|error| Failure::input(format!("--out {}: {error}", dir.display())))?;
    let trials = Trials { args, call, figures, dir };
    let unchanged = Remedy {
        changes: Vec::new(),
        command: None,
        placement: None,
        expected: String::new(),
        reach: moeworks_train::advise::Reach::Resume,
    };
    for (index, remedy) in std::iter::once(&unchanged).chain(remedies).enumerate() {
        let Some(outcome) = trials.one(index, remedy) else {
            tried.is_stopped = true;
            break;
        };
        // Without the run as it is there is nothing to compare with.
        if let (0, Err(error)) = (index, &outcome) {
            return Err(Failure::input(error));
        }
        tried.rows.push(Row { changes: remedy.changes.clone(), outcome });
    }
    Ok(tried)
}

/// Returns the folder of the trials, which must not hold anything. It is never in the run.
fn folder(args: &AdviseArgs) -> Result<PathBuf, Failure> {
    let run =
        fs::canonicalize(&args.run).map_err(|error| Failure::input(format!("{}: {error}", args.run.display())))?;
    let Some(out) = &args.out else {
        let name = run.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let parent =
            args.run.parent().filter(|_| args.run.file_name().is_some()).map_or_else(|| run.join(".."), Path::to_owned);
        let named = |number: usize| {
            parent.join(if number == 1 { format!("{name}-tries") } else { format!("{name}-tries-{number}") })
        };
        return Ok((1..).map(named).find(|path| !path.exists()).unwrap_or_else(|| parent.join("tries")));
    };
    let whole =
        std::path::absolute(out).map_err(|error| Failure::input(format!("--out {}: {error}", out.display())))?;
    let nearest = whole.ancestors().find_map(|part| fs::canonicalize(part).ok()).unwrap_or_else(|| whole.clone());
    if whole.starts_with(&run) || nearest.starts_with(&run) {
        return Err(Failure::input(format!(
            "--out {}: is in the run, which is not changed; name another folder",
            out.display()
        )));
    }
    let is_taken = out.is_file() || fs::read_dir(out).is_ok_and(|mut entries| entries.next().is_some());
    if is_taken {
        return Err(Failure::input(format!("--out {}: is not empty; name a new folder", out.display())));
    }
    Ok(out.clone())
}

impl Trials<'_> {
    /// Makes one trial; `None` if the user stopped it.
    fn one(&self, index: usize, remedy: &Remedy) -> Option<Result<TrialFigures, String>> {
        let label = if remedy.changes.is_empty() { "unchanged".to_owned() } else { name(&remedy.changes) };
        notice!("trying {label} for {} steps", self.args.steps);
        let safe = |c: char| if c.is_ascii_alphanumeric() || "._=-".contains(c) { c } else { '_' };
        let short: String = label.chars().map(safe).take(80).collect();
        let options = TrialOptions {
            run_dir: &self.args.run,
            settings: &self.figures.settings,
            dir: &self.dir.join(format!("{index}-{short}")),
            changes: &remedy.changes,
            placement: remedy.placement.as_ref(),
            num_steps: self.args.steps,
        };
        let trial = match Trial::prepare(options) {
            Ok(trial) => trial,
            Err(error) => return Some(Err(Failure::from(error).message)),
        };
        let outcome = self.train(&trial);
        if let Err(error) = trial.remove_checkpoints() {
            tracing::warn!("{error}");
        }
        outcome.transpose()
    }

    /// Makes the steps of a trial; `None` if the user stopped it.
    fn train(&self, trial: &Trial) -> Result<Option<TrialFigures>, String> {
        let message = |failure: Failure| failure.message;
        let requests = Requests::default();
        let _receiving = self.call.give_signals_to(&requests).map_err(message)?;
        let watch = reading::watch(Arc::clone(&requests.stop));
        let ranks = RunRanks { config: &trial.config, is_traced: false };
        on_ranks(self.call, ranks, |ranks| trial.train(ranks, environment::machine(), &watch, &requests))
            .map_err(|error| Failure::from(error).message)?;
        let figures = trial.figures().map_err(|error| error.to_string())?;
        Ok((figures.num_steps as u64 >= self.args.steps).then_some(figures))
    }
}

/// Returns the name of a trial.
fn name(changes: &[Change]) -> String {
    let names: Vec<String> = changes.iter().map(|change| format!("{}={}", change.setting, change.value)).collect();
    if names.is_empty() { "unchanged".to_owned() } else { names.join(" ") }
}

/// The share by which a validation loss must be lower to count.
const LEAST_GAIN: f64 = 0.005;
/// The share by which steps must be faster to count: the speeds of a few steps vary.
const LEAST_SPEED: f64 = 0.1;

const HEADER: [&str; 9] =
    ["setting", "loss", "val", "tokens/s", "memory", "dropped", "max/mean", "entropy/ln E", "skipped"];

impl Tried {
    pub(super) fn print(&self) {
        println!();
        for setting in &self.left_out {
            println!("{setting} cannot be tried from a checkpoint: it needs a new run.");
        }
        if self.rows.is_empty() {
            println!("There is no setting to try.");
            return;
        }
        let number =
            |value: f64, digits: usize| if value.is_finite() { format!("{value:.digits$}") } else { "-".to_owned() };
        let mut failed = Vec::new();
        let mut table = Vec::new();
        for Row { changes, outcome } in &self.rows {
            match outcome {
                Ok(figures) => table.push(vec![
                    name(changes),
                    number(figures.loss, 4),
                    number(figures.val_loss, 4),
                    number(figures.tokens_per_s, 0),
                    peak(figures.memory_peak_bytes),
                    number(100.0 * figures.drop_rate, 1) + "%",
                    number(figures.max_over_mean, 2),
                    number(figures.entropy_share, 3),
                    figures.num_skipped.to_string(),
                ]),
                Err(error) => failed.push(format!("{}: {error}", name(changes))),
            }
        }
        tables::print(&HEADER, &table);
        failed.iter().for_each(|line| println!("failed: {line}"));
        self.sentences().iter().for_each(|line| println!("{line}"));
        println!("Settings and records of the trials: {}", self.dir.display());
    }

    /// Returns what the trials show beside the run as it is: the lowest validation loss, and the highest speed.
    fn sentences(&self) -> Vec<String> {
        let figures = |row: &Row| row.outcome.as_ref().ok().copied();
        let Some(unchanged) = self.rows.first().and_then(figures) else { return Vec::new() };
        let best_by = |share: &dyn Fn(&TrialFigures) -> f64| {
            let shares = self.rows[1..].iter().filter_map(|row| Some((share(&figures(row)?), name(&row.changes))));
            shares.filter(|(share, _)| share.is_finite()).max_by(|a, b| a.0.total_cmp(&b.0))
        };
        let lower = best_by(&|of| 1.0 - of.val_loss / unchanged.val_loss).filter(|(share, _)| *share >= LEAST_GAIN);
        let faster = best_by(&|of| of.tokens_per_s / unchanged.tokens_per_s - 1.0);
        let faster = faster.filter(|(share, _)| *share >= LEAST_SPEED);
        vec![
            lower.map_or_else(
                || format!("No setting lowers the validation loss by {}% in these steps.", 100.0 * LEAST_GAIN),
                |(share, name)| {
                    format!("Lowest validation loss: {name}, {:.1}% below that of the run as it is.", 100.0 * share)
                },
            ),
            faster.map_or_else(
                || format!("No setting makes steps {}% faster.", 100.0 * LEAST_SPEED),
                |(share, name)| format!("Fastest: {name}, {:.0}% more tokens a second.", 100.0 * share),
            ),
        ]
    }

    pub(super) fn json(&self) -> Value {
        let row = |Row { changes, outcome }: &Row| {
            let settings: Vec<Value> =
                changes.iter().map(|change| json!({ "setting": change.setting, "value": change.value })).collect();
            match outcome {
                Err(error) => json!({ "settings": settings, "error": error }),
                Ok(figures) => json!({
                    "settings": settings,
                    "steps": figures.num_steps,
                    "train/loss": number(figures.loss),
                    "val/loss": number(figures.val_loss),
                    "perf/tokens_per_s": number(figures.tokens_per_s),
                    "perf/memory_peak_bytes": figures.memory_peak_bytes,
                    "moe/drop_rate": number(figures.drop_rate),
                    "max_over_mean": number(figures.max_over_mean),
                    "router_entropy_share": number(figures.entropy_share),
                    "ranks/waiting_ms": number(figures.waiting_ms),
                    "skipped": figures.num_skipped,
                }),
            }
        };
        json!({
            "folder": self.dir.display().to_string(),
            "rows": self.rows.iter().map(row).collect::<Vec<_>>(),
            "not_from_a_checkpoint": self.left_out,
            "sentences": self.sentences(),
        })
    }

    /// Returns the exit code: that of a stop, if the user stopped the trials.
    pub(super) fn exit_code(&self, call: &Call<'_>) -> ExitCode {
        if self.is_stopped { ExitCode::from(call.interrupts().exit_code()) } else { ExitCode::SUCCESS }
    }
}
