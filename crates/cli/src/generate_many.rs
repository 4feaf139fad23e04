//! `moeworks generate --data`: the prompts of a file, many at a time.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use moeworks_infer::open::Source;
use moeworks_infer::routing_record::{RecordSource, RoutingRecorder};
use moeworks_model::files::write_whole;
use moeworks_serve::Engine;
use moeworks_serve::batch::{BatchAnswer, BatchDefaults, BatchPrompt, answer_all, read};
use moeworks_serve::server::ServedModel;

use crate::args::{GenerateArgs, LoadArgs};
use crate::exit_code::ExitCode;
use crate::failure::Failure;
use crate::form::form;
use crate::host::Call;
use crate::model_ranks::ModelRank;
use crate::record;
use crate::sampling::{Sampling, warn_of_unused};
use crate::serve::{kv_type, limits, name_of, template};

/// The time between two lines that say how far it is.
const PROGRESS: Duration = Duration::from_secs(10);
/// Tokens of a turn, as `serve` has it.
const TURN_TOKENS: usize = 512;
/// Tokens of a block of keys and values, as `serve` has it.
const BLOCK_LEN: usize = 16;

/// The files of prompts and of answers.
pub(crate) struct Files<'a> {
    pub(crate) data: &'a Path,
    pub(crate) out: &'a Path,
}

pub(crate) fn run(
    args: &GenerateArgs,
    files: &Files<'_>,
    rank: ModelRank<'_>,
    call: &Call<'_>,
) -> Result<ExitCode, Failure> {
    let Files { data, out } = *files;
    check_out(out, args.batch.force)?;
    record::check(&args.record)?;
    let shown = data.display();
    let text = std::fs::read(data).map_err(|error| Failure::input(format!("--data {shown}: {error}")))?;
    let form = form(&args.form)?;
    let source = Source::open(&args.model)?;
    let defaults = source.sampling_defaults()?;
    // Says what is wrong with the command's own settings before the model is loaded.
    let sampling = Sampling::resolve(&args.sampling, &args.stop, &defaults)?;
    let model = Arc::new(rank.open(&source)?);
    warn_of_unused(&args.sampling, &defaults);
    tracing::info!("sampling: {}", sampling.description);
    let load = load(args);
    let (limits, kv_type) = (limits(&load, &model)?, kv_type(&load, &model)?);
    let served = ServedModel {
        names: vec![name_of(&args.model)],
        template: template(args.batch.chat_template.as_deref(), &source, &model)?,
        model: Arc::clone(&model),
        defaults,
        sandbox: call.sandbox()?,
        max_sequence_tokens: limits.max_sequence_tokens().saturating_add(1),
    };
    let batch = BatchDefaults {
        max_tokens: args.max_tokens,
        settings: args.sampling.settings(),
        stops: args.stop.clone(),
        reads_special: args.special,
        form,
    };
    let prompts = read(&served, &text, &batch).map_err(|error| Failure::input(format!("--data {shown}, {error}")))?;
    if prompts.is_empty() {
        return Err(Failure::input(format!("--data {shown}: has no prompt; give a JSON object a line")));
    }
    let recorder = record::begin(&args.record, RecordSource::Generate, &served.model, &args.model)?;
    let engine = Engine::with_kv_type(&served.model, limits, kv_type)?;
    let answers = answered(&served, prompts, engine, recorder)?;
    model.end_ranks()?;
    write_whole(out, answers.as_bytes())
        .map_err(|error| Failure::input(format!("--out {}: cannot be written: {error}", out.display())))?;
    Ok(ExitCode::SUCCESS)
}

/// Refuses a place where no file can be, or where one is, before any work is done.
fn check_out(out: &Path, is_forced: bool) -> Result<(), Failure> {
    let shown = out.display();
    let dir = out.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if out.is_dir() || out.file_name().is_none() {
        return Err(Failure::input(format!("--out {shown}: is a folder; give the name of a file")));
    }
    if !dir.is_dir() {
        return Err(Failure::input(format!("--out {shown}: there is no folder {}", dir.display())));
    }
    if out.exists() && !is_forced {
        return Err(Failure::input(format!(
            "--out {shown}: is there already; give another name, or --force to replace it"
        )));
    }
    Ok(())
}

/// The bounds of the engine as `serve` has them.
fn load(args: &GenerateArgs) -> LoadArgs {
    let max_running = args.batch.max_running;
    LoadArgs {
        max_running,
        max_waiting: max_running,
        turn_tokens: TURN_TOKENS.max(max_running),
        kv_memory: args.batch.kv_memory,
        kv_type: args.batch.kv_type,
        block_len: BLOCK_LEN,
        no_prefix_cache: false,
        request_timeout: 0.0,
        shutdown_timeout: 0.0,
        metrics_prefix: String::new(),
    }
}

/// Answers all prompts and returns the lines of their answers.
fn answered(
    served: &ServedModel,
    prompts: Vec<BatchPrompt>,
    mut engine: Engine<'_>,
    recorder: Option<RoutingRecorder>,
) -> Result<String, Failure> {
    recorder.into_iter().for_each(|recorder| engine.record_routing(recorder));
    let names: Vec<_> = prompts.iter().map(|prompt| (prompt.id.clone(), prompt.info)).collect();
    let (start, count) = (Instant::now(), prompts.len());
    let (mut last, mut num_done, mut num_tokens) = (start, 0, 0);
    let answers = answer_all(&mut engine, prompts, |tokens| {
        num_done += 1;
        num_tokens += tokens;
        if last.elapsed() >= PROGRESS {
            last = Instant::now();
            notice!("{num_done} of {count} answers, {num_tokens} tokens");
        }
    })?;
    let speed = num_tokens as f64 / start.elapsed().as_secs_f64();
    tracing::info!("{count} answers, {num_tokens} tokens, {speed:.1} tokens/s");
    let line = |(answer, (id, info)): (&BatchAnswer, &_)| format!("{}\n", answer.to_json(served, id, info));
    Ok(answers.iter().zip(&names).map(line).collect())
}
