//! The writer of a run's records, which continues them after a kill as if there had been none.
//!
//! A record goes to each file by one unbuffered `write` call: killing the process loses nothing that was written and
//! truncates at most the last line. [`MetricsWriter::resume`] reads only the end of the files, so that its time does
//! not depend on the length of the run.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::lines::{MetricsError, csv_header, csv_line, csv_step, json_line, json_step, parse_record, read_records};
use super::{Columns, METRICS_CSV, METRICS_JSONL, Record, SAMPLES_JSONL};
use crate::events::EventFile;

/// Steps between histograms of the expert load in TensorBoard, which samples them anyway; they are large.
const HISTOGRAM_INTERVAL: u64 = 10;

/// A text sampled from the model during training.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// Optimizer steps done.
    pub step: u64,
    /// The prompt.
    pub prompt: String,
    /// The generated text, without the prompt.
    pub text: String,
}

/// The metrics files of one run: `metrics.jsonl`, `metrics.csv`, `samples.jsonl` and a TensorBoard event file.
#[derive(Debug)]
pub struct MetricsWriter {
    run_dir: PathBuf,
    columns: Columns,
    jsonl: File,
    csv: File,
    samples: File,
    events: EventFile,
}

impl MetricsWriter {
    /// Starts the records of a new run in `run_dir`, which is created if it is missing. Old records are replaced.
    /// `columns` are those of the CSV file.
    pub fn create(run_dir: &Path, columns: &Columns) -> Result<Self, MetricsError> {
        fs::create_dir_all(run_dir).map_err(MetricsError::new("make", run_dir))?;
        for name in [METRICS_JSONL, METRICS_CSV, SAMPLES_JSONL] {
            let path = run_dir.join(name);
            File::create(&path).map_err(MetricsError::new("write", &path))?;
        }
        EventFile::remove_all(run_dir).map_err(MetricsError::new("empty", run_dir))?;
        Self::open(run_dir, columns, None)
    }

    /// Continues after step `step`. Records of later steps, left by a killed run, and an incomplete last line are
    /// removed, so that the files equal those of an uninterrupted run. A new event file tells TensorBoard to discard
    /// the later steps.
    pub fn resume(run_dir: &Path, columns: &Columns, step: u64) -> Result<Self, MetricsError> {
        fs::create_dir_all(run_dir).map_err(MetricsError::new("make", run_dir))?;
        for (name, step_of) in
            [(METRICS_JSONL, json_step as StepOf), (SAMPLES_JSONL, json_step), (METRICS_CSV, csv_step)]
        {
            let path = run_dir.join(name);
            cut_after(&path, step, step_of).map_err(MetricsError::new("write", &path))?;
        }
        Self::open(run_dir, columns, Some(step))
    }

    pub(super) fn open(run_dir: &Path, columns: &Columns, resumed: Option<u64>) -> Result<Self, MetricsError> {
        let csv_path = run_dir.join(METRICS_CSV);
        let header = csv_header(columns);
        if first_line(&csv_path).map_err(MetricsError::new("read", &csv_path))? != header {
            rewrite_csv(run_dir, columns)?;
        }
        Ok(Self {
            jsonl: append_to(&run_dir.join(METRICS_JSONL))?,
            csv: append_to(&csv_path)?,
            samples: append_to(&run_dir.join(SAMPLES_JSONL))?,
            events: EventFile::create(run_dir, resumed.map(|step| step + 1))
                .map_err(MetricsError::new("write event file in", run_dir))?,
            run_dir: run_dir.to_owned(),
            columns: columns.clone(),
        })
    }

    /// Appends the record of one step to every file.
    ///
    /// # Errors
    /// If a file cannot be written, or if the record has other layers than the files.
    pub fn write(&mut self, record: &Record) -> Result<(), MetricsError> {
        if !record.layers.iter().map(|layer| layer.layer).eq(self.columns.moe_layers.iter().copied()) {
            let problem = format!("a record of step {} has other MoE layers than the table", record.step);
            let error = io::Error::new(io::ErrorKind::InvalidInput, problem);
            return Err(MetricsError::new("write", &self.run_dir.join(METRICS_CSV))(error));
        }
        let write = |file: &mut File, name: &str, line: &str| {
            append_line(file, line).map_err(MetricsError::new("write", &self.run_dir.join(name)))
        };
        write(&mut self.jsonl, METRICS_JSONL, &json_line(record))?;
        write(&mut self.csv, METRICS_CSV, &csv_line(record, &self.columns))?;
        let mut scalars = record.scalars();
        // A non-finite loss or gradient is shown; an unknown figure is omitted.
        scalars.retain(|(name, value)| value.is_finite() || name.starts_with("train/"));
        let result = self.events.scalars(record.step, &scalars).and_then(|()| {
            if !record.step.is_multiple_of(HISTOGRAM_INTERVAL) && record.step != 1 {
                return Ok(());
            }
            let loads = record.layers.iter().map(|layer| {
                (format!("moe/layer_{}/tokens_per_expert", layer.layer), layer.tokens_per_expert.as_slice())
            });
            self.events.histograms(record.step, &loads.collect::<Vec<_>>())
        });
        result.map_err(MetricsError::new("write", self.events.path()))
    }

    /// Appends a sampled text.
    pub fn write_sample(&mut self, sample: &Sample) -> Result<(), MetricsError> {
        let Sample { step, prompt, text } = sample;
        let line = format!("{}\n", json!({ "step": step, "prompt": prompt, "text": text }));
        let path = self.run_dir.join(SAMPLES_JSONL);
        append_line(&mut self.samples, &line).map_err(MetricsError::new("write", &path))?;
        // TensorBoard renders text as Markdown, in which indented lines are verbatim.
        let shown: String = format!("{prompt}{text}").lines().map(|line| format!("    {line}\n")).collect();
        self.events.text(*step, "sample", &shown).map_err(MetricsError::new("write", self.events.path()))
    }

    /// Flushes everything written to the disk. It must be called before a checkpoint is saved, so that the records up
    /// to a checkpoint exist whenever the checkpoint does.
    pub fn sync(&mut self) -> Result<(), MetricsError> {
        for (file, name) in [(&self.jsonl, METRICS_JSONL), (&self.csv, METRICS_CSV), (&self.samples, SAMPLES_JSONL)] {
            file.sync_data().map_err(MetricsError::new("write", &self.run_dir.join(name)))?;
        }
        self.events.sync().map_err(MetricsError::new("write", self.events.path()))
    }
}

/// Reads the sampled texts of a run, oldest first; none if the file is missing. Damaged lines are skipped.
pub fn read_samples(run_dir: &Path) -> Result<Vec<Sample>, MetricsError> {
    let path = run_dir.join(SAMPLES_JSONL);
    let bytes = match fs::read(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        read => read.map_err(MetricsError::new("read", &path))?,
    };
    let sample = |line: &[u8]| {
        let value: Value = serde_json::from_slice(line).ok()?;
        let text = |name: &str| value.get(name).and_then(Value::as_str).map(str::to_owned);
        Some(Sample { step: value.get("step")?.as_u64()?, prompt: text("prompt")?, text: text("text")? })
    };
    Ok(bytes.split(|&byte| byte == b'\n').filter_map(sample).collect())
}

/// Reads the last complete record of a run; `None` if there is none. It reads only the end of the file.
pub fn read_last_record(run_dir: &Path) -> Result<Option<Record>, MetricsError> {
    let path = run_dir.join(METRICS_JSONL);
    let mut file = match File::open(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file.map_err(MetricsError::new("read", &path))?,
    };
    let mut last = None;
    let len = file.metadata().map_err(MetricsError::new("read", &path))?.len();
    let search = end_of_last_line(&mut file, len, |line| {
        last = parse_record(line);
        last.is_some()
    });
    search.map_err(MetricsError::new("read", &path))?;
    Ok(last)
}

/// Appends a line atomically: a partial line, left by a full disk, is removed.
fn append_line(file: &mut File, line: &str) -> io::Result<()> {
    let len = file.metadata()?.len();
    file.write_all(line.as_bytes()).inspect_err(|_| _ = file.set_len(len))
}

fn append_to(path: &Path) -> Result<File, MetricsError> {
    OpenOptions::new().create(true).append(true).open(path).map_err(MetricsError::new("write", path))
}

fn first_line(path: &Path) -> io::Result<String> {
    let mut line = Vec::new();
    match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        file => _ = BufReader::new(file?).read_until(b'\n', &mut line)?,
    }
    Ok(String::from_utf8_lossy(&line).into_owned())
}

/// Rebuilds the CSV file from the JSON lines, because it is missing or has other columns.
fn rewrite_csv(run_dir: &Path, columns: &Columns) -> Result<(), MetricsError> {
    let path = run_dir.join(METRICS_CSV);
    let beside = run_dir.join(format!(".{METRICS_CSV}.new"));
    let failed = || MetricsError::new("write", &path);
    let mut file = io::BufWriter::new(File::create(&beside).map_err(failed())?);
    file.write_all(csv_header(columns).as_bytes()).map_err(failed())?;
    let jsonl = run_dir.join(METRICS_JSONL);
    if jsonl.exists() {
        for record in read_records(&jsonl)? {
            file.write_all(csv_line(&record?, columns).as_bytes()).map_err(failed())?;
        }
    }
    let file = file.into_inner().map_err(|error| failed()(error.into_error()))?;
    file.sync_all().and_then(|()| fs::rename(&beside, &path)).map_err(failed())
}

type StepOf = fn(&[u8]) -> Option<u64>;

/// Removes the lines after the last complete one whose step is at most `step`, reading the file from its end. A first
/// line without a step (a table's header) stays.
fn cut_after(path: &Path, step: u64, step_of: StepOf) -> io::Result<()> {
    let mut file = match OpenOptions::new().read(true).write(true).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        file => file?,
    };
    let len = file.metadata()?.len();
    let keep = end_of_last_line(&mut file, len, |line| step_of(line).is_some_and(|of| of <= step))?;
    let keep = match keep {
        Some(keep) => keep,
        None => header_len(&mut file, step_of)?,
    };
    if keep < len {
        file.set_len(keep)?;
        file.sync_all()?;
    }
    Ok(())
}

/// Returns the end of the last complete line for which `is_kept` is true; `None` without one.
fn end_of_last_line(file: &mut File, len: u64, mut is_kept: impl FnMut(&[u8]) -> bool) -> io::Result<Option<u64>> {
    // `tail` holds the bytes from `start` to `end`, the end of the last line that has not been tested.
    let (mut start, mut end) = (len, len);
    let mut tail: Vec<u8> = Vec::new();
    let mut chunk_len = 1 << 16;
    loop {
        // Tests the lines of `tail` whose start is known: those after a line end, and the first one at the start of
        // the file.
        while let Some(line_start) = match tail[..tail.len().saturating_sub(1)].iter().rposition(|&b| b == b'\n') {
            Some(before) => Some(before + 1),
            None => (start == 0 && !tail.is_empty()).then_some(0),
        } {
            let line = &tail[line_start..];
            if line.ends_with(b"\n") && is_kept(line) {
                return Ok(Some(end));
            }
            end = start + line_start as u64;
            tail.truncate(line_start);
        }
        if start == 0 {
            return Ok(None);
        }
        // The line is longer than `tail`: read further back, twice as far each time, so that the total is linear.
        let size = chunk_len.min(start);
        start -= size;
        chunk_len *= 2;
        let mut longer = vec![0; size as usize];
        file.seek(SeekFrom::Start(start))?;
        file.read_exact(&mut longer)?;
        longer.append(&mut tail);
        tail = longer;
    }
}

/// Returns the length of a first line that is complete and has no step.
fn header_len(file: &mut File, step_of: StepOf) -> io::Result<u64> {
    let mut line = Vec::new();
    file.seek(SeekFrom::Start(0))?;
    BufReader::new(file).read_until(b'\n', &mut line)?;
    let is_header = line.ends_with(b"\n") && line.starts_with(b"step,") && step_of(&line).is_none();
    Ok(if is_header { line.len() as u64 } else { 0 })
}
