//! `moeworks train --auto-layout`: the planner's best few layouts make some real steps, and the run goes on in the
//! fastest. When its steps leave what was measured, it is stopped at a checkpoint and layouts are tried again.

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use moeworks_bench::ranks::num_cores;
use moeworks_bench::training::{memory_bytes_per_s, tokens_per_second};
use moeworks_comm::mpi::is_launched;
use moeworks_infer::data::DataError;
use moeworks_model::model_cost::training_flops_per_token;
use moeworks_plan::{RankSpec, Topology};
use moeworks_train::auto_layout::{
    Candidate, LAYOUTS_JSONL, Measured, Monitor, Probe, candidates, decision_line, fastest,
};
use moeworks_train::config::RunConfig;
use moeworks_train::metrics::Record;
use moeworks_train::{Outcome, Requests, TrainError, machine_bytes, resumed_config};

use super::{End, Outside, Start, one_rank};
use crate::args::TrainArgs;
use crate::environment;
use crate::estimate::vocabulary;
use crate::exit_code::ExitCode;
use crate::failure::Failure;
use crate::host::Call;
use crate::ranks::{MAX_THREADS, RunRanks, on_ranks, too_many_ranks};
use crate::reading;

/// The memory assumed for a machine that does not report its own.
const UNKNOWN_MEMORY: u64 = 16 << 30;
/// Choices of a layout in a call at most.
const MOST_CHOICES: usize = 8;
/// Steps left below which another layout is not worth its trial.
const LEAST_LEFT: u64 = 20;

/// The root's part of a run in a chosen layout: it records the decision, and follows the times of steps.
pub(super) struct Follow {
    /// The lines for the file of decisions.
    lines: String,
    /// The watch over the times of steps; none for the last layout of a call.
    monitor: Option<Mutex<Monitor>>,
    /// The reason to try layouts again, once there is one.
    reason: Mutex<Option<String>>,
}

impl Follow {
    /// Appends the decision to the file in the run's folder.
    pub(super) fn record(&self, run_dir: &Path) -> Result<(), TrainError> {
        let path = run_dir.join(LAYOUTS_JSONL);
        let written = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .and_then(|mut file| file.write_all(self.lines.as_bytes()));
        written.map_err(|source| TrainError::Io { path, source })
    }

    /// Takes the record of a step, and asks for a stop if steps have left what was measured.
    pub(super) fn step(&self, record: &Record, total_steps: u64, requests: &Requests) {
        let Some(monitor) = &self.monitor else { return };
        let mut monitor = monitor.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(median) = monitor.add(record.step_ms) else { return };
        let is_worth_it = total_steps.saturating_sub(record.step) >= LEAST_LEFT;
        if is_worth_it && !requests.stop.swap(true, Ordering::SeqCst) {
            let reason = format!(
                "the median of ten steps is {median:.1} ms up to step {}, in place of {:.1} ms",
                record.step,
                monitor.expected_ms()
            );
            *self.reason.lock().unwrap_or_else(PoisonError::into_inner) = Some(reason);
        }
    }

    fn reason(&self) -> Option<String> {
        self.reason.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// A start of the run in a chosen layout.
struct Chosen {
    start: Start,
    follow: Follow,
}

/// Trains in the layout that measured steps show to be the fastest.
pub(super) fn run(args: &TrainArgs, start: Start, call: &Call<'_>) -> Result<ExitCode, Failure> {
    let (started, num_ranks) = (Instant::now(), check(args, start.config())?);
    if let Start::New { folder, .. } = &start {
        folder.check()?;
    }
    let (mut start, mut reason) = (start, "the start of the run".to_owned());
    for choice in 1.. {
        let Some(chosen) =
            choose(args, start, call, &Choice { num_ranks, reason: &reason, is_last: choice >= MOST_CHOICES })?
        else {
            return Ok(ExitCode::from(call.interrupts().exit_code()));
        };
        let Chosen { start: kept, follow } = chosen;
        let requests = Requests::default();
        let receiving = call.give_signals_to(&requests)?;
        let wanted = RunRanks { config: kept.config(), is_traced: false };
        let outside = Outside { requests: &requests, trace: None, follow: Some(&follow) };
        let end: Option<End> = on_ranks(call, wanted, |ranks| one_rank(&kept, ranks, outside))?;
        drop(receiving);
        let Some(end) = end else { return Ok(ExitCode::SUCCESS) };
        match follow.reason().filter(|_| end.outcome == Outcome::Stopped) {
            None => return end.show(call, started.elapsed().as_secs_f64()),
            Some(new) => reason = new,
        }
        notice!("Layouts are tried again: {reason}.");
        let config = resumed_config(&end.run_dir, Ok)?;
        start = Start::Resumed { config, run_dir: end.run_dir };
    }
    Ok(ExitCode::SUCCESS)
}

/// Checks the options, and returns the number of ranks.
fn check(args: &TrainArgs, config: &RunConfig) -> Result<usize, Failure> {
    if is_launched() {
        return Err(Failure::input("--auto-layout lays out ranks that are threads; leave it out under mpirun"));
    }
    if !(args.layout_tolerance >= 0.0 && args.layout_tolerance.is_finite()) {
        return Err(Failure::input(format!(
            "--layout-tolerance {}: must be a number of at least 0",
            args.layout_tolerance
        )));
    }
    let given = args.auto_layout.unwrap_or(0);
    let num_ranks = match (given, config.parallel.num_ranks()) {
        (0, 1) => num_cores().max(2),
        (0, configured) => configured,
        (given, _) => given,
    };
    if num_ranks > MAX_THREADS {
        return Err(Failure::input(format!("--auto-layout {num_ranks}: {}", too_many_ranks())));
    }
    Ok(num_ranks)
}

/// A choice to make.
struct Choice<'a> {
    num_ranks: usize,
    reason: &'a str,
    is_last: bool,
}

/// Makes some steps in each layout and returns the start of the run in the fastest; `None` if the user stopped it.
fn choose(args: &TrainArgs, start: Start, call: &Call<'_>, choice: &Choice<'_>) -> Result<Option<Chosen>, Failure> {
    let candidates = laid_out(start.config(), choice.num_ranks)?;
    let has_present = candidates[0].layout() == start.config().parallel.layout();
    let scratch = Scratch::beside(start.folder());
    let (mut tried, mut measured, mut first_error) = (Vec::new(), Vec::new(), None);
    for (index, candidate) in candidates.iter().enumerate() {
        match probe(&start, candidate, &scratch.0.join(index.to_string()), call) {
            Ok(None) => return Ok(None),
            Ok(Some(figures)) => {
                tracing::info!("layout {}: {:?}", figures.layout, figures.figures);
                tried.push(candidate);
                measured.push(figures);
            }
            Err(TrainError::Data(DataError::Stopped)) => return Ok(None),
            Err(error) => {
                tracing::warn!("layout {} is left out: {error}", candidate.layout());
                first_error = first_error.or(Some(error));
            }
        }
    }
    let has_present = has_present && measured.first().is_some_and(|first| first.layout == candidates[0].layout());
    let Some(kept) = fastest(&measured, has_present) else {
        return Err(
            first_error.map_or_else(|| Failure::input("--auto-layout: no layout could be measured"), Failure::from)
        );
    };
    let times: Vec<String> = measured.iter().map(|of| format!("{} {:.1} ms", of.layout, of.step_ms)).collect();
    notice!("Layout:     {} ({})", measured[kept].layout, times.join(", "));
    let monitor = (!choice.is_last).then(|| Mutex::new(Monitor::new(measured[kept].step_ms, args.layout_tolerance)));
    let lines = decision_line(start.step(), choice.reason, &measured, kept);
    let config = tried[kept].config.clone();
    let start = match start {
        Start::New { folder, from, .. } => Start::New { config, folder, from },
        Start::Resumed { run_dir, .. } => Start::Resumed { config, run_dir },
    };
    Ok(Some(Chosen { start, follow: Follow { lines, monitor, reason: Mutex::default() } }))
}

/// Returns the layouts to try, by the planner's costs on this machine.
fn laid_out(config: &RunConfig, num_ranks: usize) -> Result<Vec<Candidate>, Failure> {
    let machine = environment::machine();
    let mut sized = config.clone();
    sized.model.vocab_size = vocabulary(config);
    let speed = tokens_per_second(&sized, &machine)?;
    let whole = RankSpec {
        flops: speed.tokens_per_s * training_flops_per_token(&sized.model, sized.train.seq_len),
        memory_bytes: machine_bytes().unwrap_or(UNKNOWN_MEMORY) as f64,
        memory_bytes_per_s: memory_bytes_per_s(&sized, &machine)?,
    };
    let mut found = candidates(&sized, &Topology::one_machine(num_ranks, whole))?;
    // The vocabulary of a new run is that of its tokenizer.
    found.iter_mut().for_each(|candidate| candidate.config.model.vocab_size = config.model.vocab_size);
    Ok(found)
}

/// Makes the steps of one layout; `None` if the user stopped them.
fn probe(start: &Start, candidate: &Candidate, dir: &Path, call: &Call<'_>) -> Result<Option<Measured>, TrainError> {
    let probe = match start {
        Start::New { from, .. } => Probe::new_run(candidate, dir, from.as_deref()),
        Start::Resumed { run_dir, config } if has_checkpoint(run_dir) => {
            Probe::of_run(candidate, dir, run_dir, config)?
        }
        Start::Resumed { .. } => Probe::new_run(candidate, dir, None),
    };
    let requests = Requests::default();
    let _receiving = call.give_signals_to(&requests).map_err(|failure| TrainError::Task(failure.message.into()))?;
    let watch = reading::watch(Arc::clone(&requests.stop));
    let wanted = RunRanks { config: probe.config(), is_traced: false };
    let is_made = on_ranks(call, wanted, |ranks| probe.train(ranks, environment::machine(), &watch, &requests))?;
    if is_made { probe.measured(candidate).map(Some) } else { Ok(None) }
}

fn has_checkpoint(run_dir: &Path) -> bool {
    moeworks_infer::store::Store::open(run_dir).is_empty().is_ok_and(|is_empty| !is_empty)
}

/// A folder for trials beside a run, removed when dropped.
struct Scratch(PathBuf);

impl Scratch {
    /// Chooses a name that is free.
    fn beside(run_dir: &Path) -> Self {
        let named = |number: u64| {
            let mut name = run_dir.as_os_str().to_owned();
            name.push(format!(".layouts-{number}"));
            PathBuf::from(name)
        };
        Self((1..).map(named).find(|path| !path.exists()).unwrap_or_else(|| named(0)))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if self.0.exists()
            && let Err(error) = fs::remove_dir_all(&self.0)
        {
            tracing::warn!("{}: cannot remove: {error}", self.0.display());
        }
    }
}
