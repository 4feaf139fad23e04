//! `moeworks routing export`: a record as JSON lines or Parquet.

use std::fs::{self, File};
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};

use moeworks_infer::routing_record::{Exported, RecordError, RecordReader, write_json_lines, write_parquet};
use moeworks_infer::store::ROUTING_RECORD;
use moeworks_model::files::Unfinished;

use crate::args::RoutingExportArgs;
use crate::exit_code::ExitCode;
use crate::failure::Failure;
use crate::progress::thousands;

/// The forms of an export, by the end of the file's name.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    JsonLines,
    Parquet,
}

pub(super) fn run(args: &RoutingExportArgs) -> Result<ExitCode, Failure> {
    let form = form_of(&args.out)?;
    check_out(args)?;
    let record = record_path(&args.record)?;
    let exported = export(&record, &args.out, form)?;
    let Exported { num_tokens, num_loads, damage } = exported;
    if !damage.is_none() {
        tracing::warn!("{}: {damage}", record.display());
    }
    println!(
        "{}: {} tokens and the loads of {} steps",
        args.out.display(),
        thousands(num_tokens),
        thousands(num_loads)
    );
    Ok(ExitCode::SUCCESS)
}

/// The record at a path: a file, or that of a run.
pub(super) fn record_path(path: &Path) -> Result<PathBuf, Failure> {
    if !path.is_dir() {
        return Ok(path.to_owned());
    }
    let record = path.join(ROUTING_RECORD);
    if record.is_file() {
        return Ok(record);
    }
    let message =
        format!("{}: the run has no {ROUTING_RECORD}; train with --set train.record_routing=N", path.display());
    Err(Failure::input(message))
}

fn form_of(out: &Path) -> Result<Form, Failure> {
    let end = out.extension().map(|end| end.to_string_lossy().to_ascii_lowercase());
    match end.as_deref() {
        Some("jsonl" | "ndjson") => Ok(Form::JsonLines),
        Some("parquet") => Ok(Form::Parquet),
        _ => Err(Failure::input(format!("--out {}: must end with .jsonl or .parquet", out.display()))),
    }
}

fn check_out(args: &RoutingExportArgs) -> Result<(), Failure> {
    let (out, shown) = (&args.out, args.out.display());
    let dir = out.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if out.is_dir() {
        return Err(Failure::input(format!("--out {shown}: is a folder; give the name of a file")));
    }
    if !dir.is_dir() {
        return Err(Failure::input(format!("--out {shown}: there is no folder {}", dir.display())));
    }
    if out.exists() && !args.force {
        let message = format!("--out {shown}: is there already; give another name, or --force to replace it");
        return Err(Failure::input(message));
    }
    Ok(())
}

/// Writes the export beside its place, and then puts it there.
fn export(record: &Path, out: &Path, form: Form) -> Result<Exported, Failure> {
    let mut reader = RecordReader::open(record)?;
    let mut name = out.as_os_str().to_owned();
    name.push(".tmp");
    let unfinished = Unfinished::note(name);
    let as_failure = |error: std::io::Error| Failure::input(format!("--out {}: {error}", out.display()));
    let mut fill = || -> Result<Exported, Failure> {
        let mut file = BufWriter::new(File::create(unfinished.path()).map_err(as_failure)?);
        let exported: Result<Exported, RecordError> = match form {
            Form::JsonLines => write_json_lines(&mut reader, &mut file, out),
            Form::Parquet => write_parquet(&mut reader, &mut file, out),
        };
        let exported = exported?;
        file.flush().and_then(|()| file.get_ref().sync_all()).map_err(as_failure)?;
        fs::rename(unfinished.path(), out).map_err(as_failure)?;
        Ok(exported)
    };
    let exported = fill();
    if exported.is_err() {
        let _ = fs::remove_file(unfinished.path());
    }
    exported
}
