//! `moeworks generate`: continues a prompt and prints the text while it is generated.

use std::io::{Read as _, stdin};
use std::ops::ControlFlow;
use std::path::Path;
use std::time::Instant;

use moeworks_gpu::{ExpertCacheStats, Gpu};
use moeworks_infer::generation::{
    Answer, CachedSequence, End, GenerateRequest, TokenLimits, answer, max_new_tokens, prompt_ids,
};
use moeworks_infer::open::{Model, Source};
use moeworks_infer::routing_record::{RecordSource, RoutingRecorder};

use crate::args::GenerateArgs;
use crate::exit_code::ExitCode;
use crate::failure::Failure;
use crate::files::text_of;
use crate::form::form;
use crate::generate_many::{self, Files};
use crate::host::Call;
use crate::model::with_options;
use crate::model_ranks::{ModelOptions, ModelRank, on_model_ranks};
use crate::record;
use crate::sampling::{Sampling, warn_of_unused};
use crate::terminal::shown;

/// Bytes of a file with a prompt at most.
const MAX_PROMPT_BYTES: u64 = 256 << 20;

pub(crate) fn run(args: &GenerateArgs, call: &Call<'_>) -> Result<ExitCode, Failure> {
    let options = ModelOptions { compute: &args.compute, ranks: &args.ranks };
    on_model_ranks(call, &args.model, options, None, |rank| match (&args.batch.data, &args.batch.out) {
        (Some(data), Some(out)) => generate_many::run(args, &Files { data, out }, rank, call),
        _ => one_prompt(args, rank),
    })
}

/// Continues one prompt.
fn one_prompt(args: &GenerateArgs, rank: ModelRank<'_>) -> Result<ExitCode, Failure> {
    record::check(&args.record)?;
    let text = prompt_text(args)?;
    let form = form(&args.form)?;
    let source = Source::open(&args.model)?;
    let defaults = source.sampling_defaults()?;
    let mut sampling = Sampling::resolve(&args.sampling, &args.stop, &defaults)?;
    let model = rank.open(&source)?;
    if let Some(form) = form {
        sampling.hold_to(form, &model)?;
    }
    warn_of_unused(&args.sampling, &defaults);
    tracing::info!("sampling: {}", sampling.description);
    let prompt = prompt_ids(&model, &text, args.special).map_err(with_options)?;
    let limits = TokenLimits { asked: args.max_tokens, of_model: sampling.limit_of_model };
    let max_new_tokens = max_new_tokens(&model, prompt.len(), limits).map_err(with_options)?;
    let recorder = record::begin(&args.record, RecordSource::Generate, &model, &args.model)?;
    // A model with an encoder answers the prompt instead of continuing it, so the prompt is not printed.
    if !model.has_encoder() {
        print!("{}", shown(&text));
        crate::output::flush();
    }
    let request = GenerateRequest { prompt: &prompt, max_new_tokens, stop_ids: &model.stop_ids };
    let start = Instant::now();
    let answer = print_answer(&model, &request, &mut sampling, recorder);
    // The line is ended so that an error is on a line of its own.
    println!();
    let Answer { num_tokens, end, .. } = answer?;
    let speed = num_tokens as f64 / start.elapsed().as_secs_f64();
    tracing::info!("{num_tokens} tokens, {speed:.1} tokens/s, ended by {}", name_of(end));
    tell_expert_cache(&model);
    model.end_ranks()?;
    Ok(ExitCode::SUCCESS)
}

/// Generates an answer and prints it in pieces, without a newline at the end.
fn print_answer(
    model: &Model,
    request: &GenerateRequest<'_>,
    sampling: &mut Sampling,
    recorder: Option<RoutingRecorder>,
) -> Result<Answer, Failure> {
    if request.max_new_tokens == 0 {
        return Ok(Answer::default());
    }
    let config = model.decoder.config();
    let mut sequence = match recorder {
        Some(recorder) => CachedSequence::recorded(config, recorder),
        None => CachedSequence::new(config),
    };
    let on_text = |piece: &str| {
        print_piece(piece);
        ControlFlow::Continue(())
    };
    let answer = answer(model, &mut sequence, request, &mut sampling.sampler, &sampling.stops, on_text);
    let answer = answer.map_err(with_options)?;
    sequence.end_recording()?;
    Ok(answer)
}

/// Prints a piece of an answer and flushes it.
pub(crate) fn print_piece(piece: &str) {
    if !piece.is_empty() {
        print!("{}", shown(piece));
        crate::output::flush();
    }
}

fn name_of(end: End) -> &'static str {
    match end {
        End::StopToken => "a stop token",
        End::StopText => "a stop text",
        End::Limit => "the limit on tokens",
        End::Interrupted => "Ctrl-C",
    }
}

/// Logs the hits and misses of the expert cache, if there is one.
fn tell_expert_cache(model: &Model) {
    if let Some(stats) = model.ctx.gpu().and_then(Gpu::expert_cache_stats) {
        let ExpertCacheStats { hits, prefetch_hits, misses, prefetches } = stats;
        tracing::info!(
            "expert cache: {hits} hits, of which {prefetch_hits} had been prefetched ({prefetches} prefetches in all), and \
             {misses} misses"
        );
    }
}

/// Reads the prompt from the command line, a file or standard input.
fn prompt_text(args: &GenerateArgs) -> Result<String, Failure> {
    match &args.prompt_file {
        Some(path) => prompt_of_file(path),
        None if args.prompt == "-" => {
            let mut text = String::new();
            stdin().read_to_string(&mut text).map_err(|error| Failure::input(format!("--prompt -: {error}")))?;
            Ok(without_line_end(text))
        }
        None => Ok(args.prompt.clone()),
    }
}

fn prompt_of_file(path: &Path) -> Result<String, Failure> {
    let text = text_of("--prompt-file", path, MAX_PROMPT_BYTES)?;
    Ok(without_line_end(text.strip_prefix('\u{feff}').map_or(text.clone(), str::to_owned)))
}

/// Removes the newline at the end, which an editor or the shell added.
fn without_line_end(mut text: String) -> String {
    text.truncate(text.strip_suffix('\n').map_or(text.len(), |line| line.strip_suffix('\r').unwrap_or(line).len()));
    text
}
