//! Reduction of a run folder to its figures.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};

use super::figures::{Course, Evaluated, LayerFigures, Point, RankFigures, RunFigures, Window};
use super::settings::{ReadSettings, read_settings};
use super::trace::read_trace;
use super::trial::TrialFigures;
use crate::error::TrainError;
use crate::metrics::{LayerRecord, METRICS_JSONL, MetricsError, RankRecord, RanksRecord, Record, read_records};
use crate::parallel::placements;

/// The file of a trace that is looked for in a run folder.
const TRACE_FILE: &str = "trace.json";
/// The window: this share of the records, within limits.
const WINDOW_SHARE: usize = 5;
const WINDOW_LIMITS: [usize; 2] = [5, 100];

/// The reason why there is no advice on a folder.
#[derive(Debug, thiserror::Error)]
pub enum AdviceError {
    /// The folder does not exist.
    #[error("{}: there is no such folder; name the folder of a run", path.display())]
    NoFolder {
        /// The folder.
        path: PathBuf,
    },
    /// The path is that of a file.
    #[error("{}: is a file; name the folder of a run", path.display())]
    IsFile {
        /// The file.
        path: PathBuf,
    },
    /// The settings cannot be read.
    #[error(transparent)]
    Settings(#[from] TrainError),
    /// The records cannot be read.
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    /// The run has no record yet.
    #[error("{}: holds no record of a step; advice needs some steps of training", path.display())]
    NoRecords {
        /// The metrics file.
        path: PathBuf,
    },
    /// The trace cannot be used.
    #[error("{}: {problem}", path.display())]
    Trace {
        /// The trace.
        path: PathBuf,
        /// The problem.
        problem: String,
    },
}

/// The options of reading a run.
#[derive(Clone, Debug, Default)]
pub struct ReadOptions {
    /// The number of last records that count; none for a fifth of them, from 5 to 100.
    pub last: Option<usize>,
    /// The trace; none for `trace.json` in the run, if it is there.
    pub trace: Option<PathBuf>,
    /// The memory of the machine in bytes.
    pub machine_bytes: Option<u64>,
}

/// The figures of a run, and remarks on what could not be read.
#[derive(Clone, Debug)]
pub struct ReadRun {
    /// The figures.
    pub figures: RunFigures,
    /// Remarks for the user, each a sentence.
    pub remarks: Vec<String>,
}

impl RunFigures {
    /// Reads the folder of a run. Nothing in it is changed. Damaged lines, settings of another version and figures
    /// that an older version did not record are left out, and remarks say so.
    ///
    /// # Errors
    /// If the folder is not a run, has no record of a step, or a file cannot be read.
    pub fn read(run_dir: &Path, options: &ReadOptions) -> Result<ReadRun, AdviceError> {
        if !run_dir.is_dir() {
            let path = run_dir.to_owned();
            return Err(if path.exists() { AdviceError::IsFile { path } } else { AdviceError::NoFolder { path } });
        }
        let ReadSettings { config: settings, left_out } = read_settings(run_dir)?;
        let mut remarks = Vec::new();
        if !left_out.is_empty() {
            remarks.push(format!(
                "config.toml is of another version: {} left out, with defaults in their place",
                left_out.join(", ")
            ));
        }
        let metrics = run_dir.join(METRICS_JSONL);
        if !metrics.exists() {
            return Err(AdviceError::NoRecords { path: metrics });
        }
        let Read { course, records, num_damaged } = read_course(&metrics, options.last)?;
        if records.is_empty() {
            return Err(AdviceError::NoRecords { path: metrics });
        }
        if num_damaged > 0 {
            remarks.push(format!("{num_damaged} damaged or incomplete lines of metrics.jsonl are left out"));
        }
        let window = window(&records);
        remarks.extend(unknown(&course, &window));
        let in_run = run_dir.join(TRACE_FILE);
        let trace = options.trace.clone().or_else(|| in_run.exists().then_some(in_run));
        let trace = trace.as_deref().map(read_trace).transpose()?;
        let placements = (settings.parallel.ep > 1).then(|| placements(&settings).ok()).flatten();
        let run = run_dir.display().to_string();
        let figures = Self { run, settings, course, window, placements, trace, machine_bytes: options.machine_bytes };
        Ok(ReadRun { figures, remarks })
    }
}

/// The records of a run: all as points, the last ones whole.
struct Read {
    course: Course,
    records: VecDeque<Record>,
    num_damaged: usize,
}

fn read_course(path: &Path, last: Option<usize>) -> Result<Read, MetricsError> {
    let (mut course, mut records) = (Course::default(), VecDeque::new());
    let most = last.unwrap_or(WINDOW_LIMITS[1]);
    let mut lines = read_records(path)?;
    for record in lines.by_ref() {
        let record = record?;
        if let Some(loss) = record.val_loss.filter(|loss| loss.is_finite()) {
            course.evaluations.push(Evaluated { step: record.step, loss });
        }
        // The record of an evaluation before training has no training figures.
        if record.step == 0 {
            continue;
        }
        let Record { step, loss, lr, grad_norm, is_skipped, memory_peak_bytes, .. } = record;
        course.points.push(Point { step, loss, lr, grad_norm, is_skipped, memory_peak_bytes });
        records.push_back(record);
        if records.len() > most {
            records.pop_front();
        }
    }
    if last.is_none() {
        let size = (course.points.len() / WINDOW_SHARE).clamp(WINDOW_LIMITS[0], WINDOW_LIMITS[1]);
        records.drain(..records.len().saturating_sub(size));
    }
    Ok(Read { course, records, num_damaged: lines.num_damaged })
}

/// Returns remarks on figures that the run does not record, so that silence about them is not taken for health.
fn unknown(course: &Course, window: &Window) -> Option<String> {
    let has_peak = course.points.iter().any(|point| point.memory_peak_bytes > 0);
    let has_entropy = window.layers.iter().all(|layer| layer.router_entropy.is_finite());
    let known = [
        ("train/loss", course.points.iter().any(|point| point.loss.is_finite() || point.is_skipped)),
        ("perf/step_ms", window.step_ms.is_finite()),
        ("perf/mfu", window.mfu.is_finite()),
        ("perf/memory_peak_bytes", has_peak),
        ("moe/layer_*/router_entropy", has_entropy),
    ];
    let missing: Vec<&str> = known.iter().filter(|(_, is_known)| !is_known).map(|(name, _)| *name).collect();
    (!missing.is_empty()).then(|| format!("not recorded in this run, and not judged: {}", missing.join(", ")))
}

/// Returns the mean of the finite values; NaN without one.
fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (mut sum, mut count) = (0.0, 0_u32);
    for value in values.filter(|value| value.is_finite()) {
        (sum, count) = (sum + value, count + 1);
    }
    if count == 0 { f64::NAN } else { sum / f64::from(count) }
}

fn window(records: &VecDeque<Record>) -> Window {
    let (Some(first), Some(last)) = (records.front(), records.back()) else { return Window::default() };
    let of = |figure: fn(&Record) -> f64| mean(records.iter().map(figure));
    // The first step of a run also fills caches and pools.
    let timed: Vec<&Record> = records.iter().filter(|record| record.step > 1 || records.len() < 3).collect();
    let timed_mean = |figure: fn(&Record) -> f64| mean(timed.iter().map(|record| figure(record)));
    Window {
        first_step: first.step,
        last_step: last.step,
        num_records: records.len(),
        loss: of(|record| record.loss),
        tokens_per_s: timed_mean(|record| record.tokens_per_s),
        mfu: timed_mean(|record| record.mfu),
        step_ms: timed_mean(|record| record.step_ms),
        drop_rate: of(Record::drop_rate),
        layers: layers(records, last),
        ranks: last.ranks.as_ref().map(|_| ranks(&timed)),
    }
}

/// Sums and averages the layers of the records that have those of the last one.
fn layers(records: &VecDeque<Record>, last: &Record) -> Vec<LayerFigures> {
    let sizes = |record: &Record| -> Vec<(usize, usize)> {
        record.layers.iter().map(|layer| (layer.layer, layer.tokens_per_expert.len())).collect()
    };
    let alike: Vec<&Record> = records.iter().filter(|record| sizes(record) == sizes(last)).collect();
    let layer = |index: usize| {
        let of = |figure: fn(&LayerRecord) -> f64| mean(alike.iter().map(|record| figure(&record.layers[index])));
        let own = &last.layers[index];
        let mut load = LayerRecord {
            layer: own.layer,
            tokens_per_expert: vec![0; own.tokens_per_expert.len()],
            ..LayerRecord::default()
        };
        for record in &alike {
            let counts = &record.layers[index].tokens_per_expert;
            load.tokens_per_expert.iter_mut().zip(counts).for_each(|(sum, count)| *sum = sum.saturating_add(*count));
        }
        LayerFigures {
            load,
            router_entropy: of(|layer| layer.router_entropy),
            mean_prob_entropy: of(|layer| layer.mean_prob_entropy),
            logit_rms: of(|layer| layer.router_logit_rms),
            drop_rate: of(LayerRecord::drop_rate),
        }
    };
    (0..last.layers.len()).map(layer).collect()
}

fn ranks(records: &[&Record]) -> RankFigures {
    let all: Vec<&RanksRecord> = records.iter().filter_map(|record| record.ranks.as_ref()).collect();
    let of = |name: &str| mean(all.iter().map(|ranks| ranks.scalar(name)));
    let num_ranks = all.iter().map(|ranks| ranks.ranks.len()).min().unwrap_or(0);
    let of_rank =
        |rank: usize, figure: fn(&RankRecord) -> f64| mean(all.iter().map(|ranks| figure(&ranks.ranks[rank])));
    RankFigures {
        imbalance: of("imbalance"),
        waiting_ms: of("waiting_ms"),
        standing_ms: of("standing_ms_mean"),
        node_mb: of("node_mb"),
        cluster_mb: of("cluster_mb"),
        tensor_ms: of("tensor_ms_mean"),
        gradients_ms: mean((0..num_ranks).map(|rank| of_rank(rank, |rank| rank.gradients_ms))),
        work_ms: (0..num_ranks).map(|rank| of_rank(rank, |rank| rank.work_ms)).collect(),
    }
}

/// Reads the figures of a trial from its records.
pub(super) fn trial_figures(path: &Path) -> Result<TrialFigures, MetricsError> {
    let Read { course, mut records, .. } = read_course(path, Some(usize::MAX))?;
    let num_steps = records.len();
    // The first step also fills caches and pools.
    if num_steps > 2 {
        records.pop_front();
    }
    let window = window(&records);
    let most = |values: &mut dyn Iterator<Item = f64>| values.fold(f64::NAN, f64::max);
    Ok(TrialFigures {
        num_steps,
        loss: window.loss,
        val_loss: course.evaluations.last().map_or(f64::NAN, |evaluation| evaluation.loss),
        tokens_per_s: window.tokens_per_s,
        memory_peak_bytes: course.points.iter().map(|point| point.memory_peak_bytes).max().unwrap_or(0),
        drop_rate: window.drop_rate,
        max_over_mean: most(&mut window.layers.iter().map(|layer| layer.load.max_over_mean())),
        entropy_share: mean(window.layers.iter().map(LayerFigures::entropy_share)),
        waiting_ms: window.ranks.map_or(f64::NAN, |ranks| ranks.waiting_ms),
        num_skipped: course.points.iter().filter(|point| point.is_skipped).count(),
    })
}
