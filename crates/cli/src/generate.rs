//! `moeworks generate`: continues a prompt, printing as it goes.

use std::io::{Read as _, stdin};
use std::ops::ControlFlow;
use std::process::ExitCode;
use std::time::Instant;

use moeworks_model::BatchError;
use moeworks_model::generation::{
    CachedSequence, GenerateRequest, Sampler, SamplingOptions, StopReason, TextStream, generate_cached,
};
use moeworks_ops::cuda::{Gpu, RoomStats};

use crate::args::{GenerateArgs, SamplingArgs};
use crate::failure::Failure;
use crate::model::Model;

/// Tokens to generate where nobody says how many.
const DEFAULT_TOKENS: usize = 200;

pub(crate) fn run(args: &GenerateArgs) -> Result<ExitCode, Failure> {
    let mut sampler = sampler(&args.sampling)?;
    let text = if args.prompt == "-" { prompt_of_stdin()? } else { args.prompt.clone() };
    let model = Model::load(&args.model, &args.compute)?;
    let mut prompt =
        if model.has_encoder() { model.tokenizer.encode_source(&text)? } else { model.tokenizer.encode(&text)? };
    if prompt.is_empty() {
        // An empty prompt asks for a document from its beginning, which follows the end of another.
        prompt.extend(model.tokenizer.eos_id());
    }
    if prompt.is_empty() {
        return Err(Failure::input("--prompt is empty, and the tokenizer has no token that a text begins with"));
    }
    let max_new_tokens = args.max_tokens.unwrap_or(DEFAULT_TOKENS.min(model.decoder.room(prompt.len())));
    let request = GenerateRequest { prompt: &prompt, max_new_tokens, stop_ids: &model.stop_ids };
    // A model with an encoder answers its prompt and does not continue it.
    if !model.has_encoder() {
        print!("{text}");
        flush();
    }
    let start = Instant::now();
    let mut sequence = CachedSequence::new(model.decoder.config());
    let Printed { count, .. } = print_answer(&model, &mut sequence, &request, &mut sampler, || false)?;
    println!();
    tracing::info!("{count} tokens, {:.1} tokens/s", count as f64 / start.elapsed().as_secs_f64());
    if let Some(stats) = model.ctx.gpu().and_then(Gpu::expert_room_stats) {
        let RoomStats { found, foreseen, fetched, sent_ahead } = stats;
        tracing::info!(
            "experts were on the GPU {found} times, of which {foreseen} had been sent ahead ({sent_ahead} were in all), and \
             were waited for {fetched} times"
        );
    }
    Ok(ExitCode::SUCCESS)
}

fn prompt_of_stdin() -> Result<String, Failure> {
    let mut text = String::new();
    stdin().read_to_string(&mut text).map_err(|error| Failure::input(format!("--prompt -: {error}")))?;
    // The end of the last line is the terminal's or the shell's, not the author's.
    text.truncate(text.strip_suffix('\n').map_or(text.len(), |line| line.strip_suffix('\r').unwrap_or(line).len()));
    Ok(text)
}

pub(crate) fn sampler(args: &SamplingArgs) -> Result<Sampler, Failure> {
    let SamplingArgs { temperature, top_k, top_p, min_p, seed } = *args;
    Ok(Sampler::new(SamplingOptions { temperature, top_k, top_p, min_p, seed })?)
}

/// What was generated and printed.
pub(crate) struct Printed {
    /// With special tokens where they say what follows.
    pub(crate) text: String,
    /// Tokens, with the one that ended it.
    pub(crate) count: usize,
    pub(crate) reason: StopReason,
}

/// Generates and prints as it goes, until `is_stopped`. No line end is printed behind.
pub(crate) fn print_answer(
    model: &Model,
    sequence: &mut CachedSequence,
    request: &GenerateRequest<'_>,
    sampler: &mut Sampler,
    is_stopped: impl Fn() -> bool,
) -> Result<Printed, Failure> {
    let tokenizer = &model.tokenizer;
    // Which span follows, or which channel, special tokens say.
    let shows_special = model.has_encoder() || tokenizer.has_channels();
    let mut stream = if shows_special { TextStream::with_special(tokenizer) } else { TextStream::new(tokenizer) };
    let (mut answer, mut failure) = (String::new(), None);
    let (compute, decoder) = ((&model.ctx, &model.weights), &model.decoder);
    let (ids, reason) = generate_cached(decoder, compute, sequence, request, sampler, |id| {
        if request.stop_ids.contains(&id) {
            return ControlFlow::Continue(());
        }
        match stream.push(id) {
            Ok(text) => {
                print!("{text}");
                answer += &text;
            }
            Err(error) => failure = Some(error),
        }
        flush();
        if is_stopped() || failure.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })
    .map_err(|error| if error == BatchError::NotANumber { model.not_a_number() } else { error.into() })?;
    if let Some(error) = failure {
        return Err(error.into());
    }
    let rest = stream.finish()?;
    print!("{rest}");
    flush();
    Ok(Printed { text: answer + &rest, count: ids.len(), reason })
}

pub(crate) fn flush() {
    crate::output::flush();
}
