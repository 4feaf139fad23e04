//! Real training steps, timed.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use moeworks_comm::{Communicator, RankOptions, try_run_ranks};
use moeworks_infer::data::Watch;
use moeworks_ops::{Context, MachineOptions};
use moeworks_train::config::RunConfig;
use moeworks_train::language_model::{LanguageModel, LanguageModelStart};
use moeworks_train::metrics::{METRICS_JSONL, read_records};
use moeworks_train::{Event, Ranks, Requests, TrainError};

use super::configs::NamedConfig;
use super::probe::Probe;
use crate::error::BenchError;
use crate::ranks::{TIMEOUT, num_cores};
use crate::timing::median;

/// Steps of a measurement, and those of them at the beginning that are not counted. On several ranks some are, in
/// which the number of chunks of an exchange is tried.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepCounts {
    pub(super) counted: usize,
    pub(super) uncounted: usize,
    pub(super) uncounted_on_ranks: usize,
}

/// A temporary folder, removed when dropped.
pub(super) struct Scratch(PathBuf);

impl Scratch {
    pub(super) fn new() -> Result<Self, BenchError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("moeworks-bench-machine-{}-{number}", std::process::id()));
        fs::create_dir_all(&path).map_err(|error| BenchError::Request(format!("{}: {error}", path.display())))?;
        Ok(Self(path))
    }

    fn text(&self) -> Result<PathBuf, BenchError> {
        let path = self.0.join("text.txt");
        if path.exists() {
            return Ok(path);
        }
        let line = |i: usize| format!("Line {i} of a text to measure with, {} and {}.\n", i * 7 % 1000, i * i % 977);
        fs::write(&path, (0..4000).map(line).collect::<String>())
            .map_err(|error| BenchError::Request(format!("{}: {error}", path.display())))?;
        Ok(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A folder for temporary files that cannot be removed is left to the system.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The times of a configuration's steps.
pub(super) struct TimedSteps {
    pub(super) config: RunConfig,
    /// The median of the steps in seconds.
    pub(super) seconds: f64,
    /// The median of the steps, each over the time of a probe right after it.
    pub(super) probes: f64,
}

/// Trains some steps of a configuration and times them.
pub(super) fn time_steps(
    named: &NamedConfig,
    scratch: &Scratch,
    options: &MachineOptions,
    counts: StepCounts,
) -> Result<TimedSteps, BenchError> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let is_on_ranks = named.resolve(&scratch.text()?, 1)?.parallel.layout().stage_group_size() > 1;
    let uncounted = if is_on_ranks { counts.uncounted_on_ranks } else { counts.uncounted };
    let config = named.resolve(&scratch.text()?, uncounted + counts.counted)?;
    let dir = scratch.0.join(NEXT.fetch_add(1, Ordering::Relaxed).to_string());
    let probes = train(&config, &dir, options)?;
    let records = read_records(&dir.join("run").join(METRICS_JSONL)).map_err(TrainError::from)?;
    let times = records.map(|record| record.map(|record| record.step_ms / 1e3)).collect::<Result<Vec<f64>, _>>();
    let times = times.map_err(TrainError::from)?;
    // The machine's speed during a step is that before and after it.
    let speed = |step: usize| if step == 0 { probes[0] } else { (probes[step - 1] + probes[step]) / 2.0 };
    let ratios = times.iter().enumerate().map(|(step, seconds)| seconds / speed(step));
    let ratios: Vec<f64> = ratios.skip(uncounted).collect();
    // Runs are small, but there are many.
    let _ = fs::remove_dir_all(&dir);
    Ok(TimedSteps { config, seconds: median(times.into_iter().skip(uncounted).collect()), probes: median(ratios) })
}

/// Trains `config` in the folder `dir`, and returns the seconds of a probe after each step.
fn train(config: &RunConfig, dir: &Path, options: &MachineOptions) -> Result<Vec<f64>, BenchError> {
    let watch = Watch::default();
    let probes = Mutex::new(Vec::new());
    let num_ranks = config.parallel.num_ranks();
    let train = |comm: Option<&dyn Communicator>| -> Result<(), TrainError> {
        let ranks = comm.map(|comm| Ranks::of_config(comm, config, false)).transpose()?;
        let mut config = config.clone();
        config.model.vocab_size = 0;
        config.data.cache_dir = dir.join("cache");
        let start = LanguageModelStart {
            machine: options.clone(),
            ranks,
            ..LanguageModelStart::new(config, dir.join("run"), &watch)
        };
        let probe = Probe::new(&Context::cpu((num_cores() / num_ranks).max(1)).on_machine(options));
        // All ranks work at a probe at the same time, after they have all ended the step. A rank that fails ends the
        // training with its error, which is better than one from here.
        let meet = || comm.map_or(Ok(()), |comm| comm.barrier()).is_ok();
        let meet_after = |start: Instant| meet().then(|| start.elapsed().as_secs_f64());
        let mut after_step = |event: Event<'_>| {
            if let Event::Step { .. } = event
                && meet()
            {
                let start = Instant::now();
                let seconds = probe.seconds();
                // Ranks wait for the slowest.
                let seconds = if num_ranks == 1 { seconds } else { meet_after(start).unwrap_or(seconds) };
                if comm.is_none_or(|comm| comm.rank() == 0) {
                    probes.lock().unwrap_or_else(PoisonError::into_inner).push(seconds);
                }
            }
        };
        LanguageModel::start(start)?.run(&Requests::default(), &mut after_step)?;
        Ok(())
    };
    if num_ranks == 1 {
        train(None)?;
    } else {
        let options = RankOptions::new(num_ranks).with_timeout(TIMEOUT.max(Duration::from_secs(60)));
        try_run_ranks(&options, |comm: &dyn Communicator| train(Some(comm)))?;
    }
    Ok(probes.into_inner().unwrap_or_else(PoisonError::into_inner))
}
