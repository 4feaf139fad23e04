//! `moeworks generate`: continues a prompt, printing as it goes.

use std::io::{Read as _, stdin};
use std::ops::ControlFlow;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use moeworks_gpu::{ExpertCacheStats, Gpu};
use moeworks_model::BatchError;
use moeworks_model::generation::{
    CachedSequence, GenerateRequest, Sampler, StopReason, StopTexts, TextStream, generate_cached,
};

use crate::args::{GenerateArgs, TokenLimit};
use crate::failure::Failure;
use crate::model::{Model, Source};
use crate::sampling::{Sampling, stop_texts, warn_of_unused};
use crate::terminal::shown;

/// Tokens to generate where nobody says how many.
const DEFAULT_TOKENS: usize = 200;

pub(crate) fn run(args: &GenerateArgs) -> Result<ExitCode, Failure> {
    let text = prompt_text(args)?;
    let source = Source::open(&args.model)?;
    let (defaults, file) = source.sampling_defaults()?;
    let sampling = Sampling::resolve(&args.sampling, &defaults, file)?;
    let (mut sampler, stops) = (sampling.sampler()?, stop_texts(&args.stop, &args.sampling, &defaults)?);
    let model = Model::of(&source, &args.compute)?;
    warn_of_unused(&args.sampling, &defaults, file);
    tracing::info!("sampling: {}", sampling.description);
    let prompt = prompt_ids(&model, &text, args.special)?;
    let of_model = defaults.max_new_tokens.filter(|_| !args.sampling.no_model_sampling);
    let max_new_tokens = num_tokens(&model, prompt.len(), args.max_tokens, of_model)?;
    // A model with an encoder answers its prompt and does not continue it.
    if !model.has_encoder() {
        print!("{}", shown(&text));
        flush();
    }
    let request = GenerateRequest { prompt: &prompt, max_new_tokens, stop_ids: &model.stop_ids };
    let start = Instant::now();
    let mut sequence = CachedSequence::new(model.decoder.config());
    let answer = if max_new_tokens == 0 {
        Ok(Printed::default())
    } else {
        print_answer(&model, &mut sequence, &request, &mut sampler, &stops, || false)
    };
    // An error stands on a line of its own.
    println!();
    let Printed { count, end, .. } = answer?;
    let speed = count as f64 / start.elapsed().as_secs_f64();
    tracing::info!("{count} tokens, {speed:.1} tokens/s, ended by {}", end.name());
    tell_expert_cache(&model);
    Ok(ExitCode::SUCCESS)
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

fn prompt_ids(model: &Model, text: &str, reads_special: bool) -> Result<Vec<u32>, Failure> {
    let tokenizer = &model.tokenizer;
    let prompt = match model.has_encoder() {
        true => tokenizer.encode_source(text)?,
        false => tokenizer.encode_prompt(text, reads_special)?,
    };
    if prompt.is_empty() {
        return Err(Failure::input("--prompt is empty, and the tokenizer has no token that a text begins with"));
    }
    Ok(prompt)
}

/// The tokens to generate at most: as many as are asked for, which must fit behind the prompt, or as many as the model's files or the
/// program choose and fit.
fn num_tokens(
    model: &Model,
    prompt_len: usize,
    asked: Option<TokenLimit>,
    of_model: Option<usize>,
) -> Result<usize, Failure> {
    let (room, context) = (model.decoder.room(prompt_len), model.decoder.config().max_seq_len);
    if (room == 0 && asked != Some(TokenLimit::Tokens(0))) || prompt_len > context.saturating_add(room) {
        let longest = context.saturating_sub(1);
        return Err(Failure::input(format!(
            "the prompt has {prompt_len} tokens, but the model's context is {context}: shorten it to at most {longest}"
        )));
    }
    match asked {
        Some(TokenLimit::Tokens(count)) if count > room => Err(Failure::input(format!(
            "--max-tokens {count}: the model's context is {context} tokens and the prompt has {prompt_len}: \
             give at most {room}, or -1 for as many as fit"
        ))),
        Some(TokenLimit::Tokens(count)) => Ok(count),
        Some(TokenLimit::Room) => Ok(room),
        None => Ok(of_model.unwrap_or(DEFAULT_TOKENS).min(room)),
    }
}

/// The text to continue, from wherever it is to come.
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
    let shown = path.display();
    let bytes = std::fs::read(path).map_err(|error| Failure::input(format!("--prompt-file {shown}: {error}")))?;
    let text = String::from_utf8(bytes).map_err(|error| {
        let place = error.utf8_error().valid_up_to();
        Failure::input(format!("--prompt-file {shown}: not UTF-8 at byte {place}; convert it, for example by iconv"))
    })?;
    Ok(without_line_end(text.strip_prefix('\u{feff}').map_or(text.clone(), str::to_owned)))
}

/// Leaves out the end of the last line, which is the editor's or the shell's, not the author's.
fn without_line_end(mut text: String) -> String {
    text.truncate(text.strip_suffix('\n').map_or(text.len(), |line| line.strip_suffix('\r').unwrap_or(line).len()));
    text
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum End {
    StopToken,
    StopText,
    /// The number of tokens that was allowed.
    #[default]
    Limit,
    /// The user asked for it.
    Interrupted,
}

impl End {
    fn name(self) -> &'static str {
        match self {
            Self::StopToken => "a stop token",
            Self::StopText => "a stop text",
            Self::Limit => "the limit on tokens",
            Self::Interrupted => "Ctrl-C",
        }
    }
}

/// A text that was generated and printed.
#[derive(Debug, Default)]
pub(crate) struct Printed {
    /// The text, with special tokens where they say what follows.
    pub(crate) text: String,
    /// Tokens, with the one that ended it.
    pub(crate) count: usize,
    pub(crate) end: End,
}

/// Generates and prints as it goes, until one of `stops` comes or `is_stopped`. No line end is printed behind.
pub(crate) fn print_answer(
    model: &Model,
    sequence: &mut CachedSequence,
    request: &GenerateRequest<'_>,
    sampler: &mut Sampler,
    stops: &[String],
    is_stopped: impl Fn() -> bool,
) -> Result<Printed, Failure> {
    let tokenizer = &model.tokenizer;
    // Which span follows, or which channel, special tokens say.
    let shows_special = model.has_encoder() || tokenizer.has_channels();
    let stream = if shows_special { TextStream::with_special(tokenizer) } else { TextStream::new(tokenizer) };
    // An answer is a text of its own; what continues a text is not.
    let stream = if model.has_encoder() { stream } else { stream.after(request.prompt) };
    let mut printer = Printer { stream, stops: StopTexts::new(stops), text: String::new() };
    let (mut failure, mut is_interrupted) = (None, false);
    let (compute, decoder) = ((&model.ctx, &model.weights), &model.decoder);
    let (ids, reason) = generate_cached(decoder, compute, sequence, request, sampler, |id| {
        if request.stop_ids.contains(&id) {
            return ControlFlow::Continue(());
        }
        failure = printer.push(id).err();
        is_interrupted = is_stopped();
        let is_end = is_interrupted || failure.is_some() || printer.stops.is_found();
        if is_end { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })
    .map_err(|error| if error == BatchError::NotANumber { model.not_a_number() } else { error.into() })?;
    if let Some(error) = failure {
        return Err(error);
    }
    printer.finish()?;
    let end = match reason {
        _ if printer.stops.is_found() => End::StopText,
        StopReason::StopId => End::StopToken,
        StopReason::MaxTokens => End::Limit,
        StopReason::Asked => End::Interrupted,
    };
    Ok(Printed { text: printer.text, count: ids.len(), end })
}

/// Prints text as its tokens come, up to a stop text.
struct Printer<'a> {
    stream: TextStream<'a>,
    stops: StopTexts,
    /// The text that was printed.
    text: String,
}

impl Printer<'_> {
    fn push(&mut self, id: u32) -> Result<(), Failure> {
        let piece = self.stream.push(id)?;
        let piece = self.stops.push(&piece);
        self.print(&piece);
        Ok(())
    }

    /// Prints what was held back.
    fn finish(&mut self) -> Result<(), Failure> {
        let rest = self.stream.finish()?;
        let rest = self.stops.push(&rest) + &self.stops.finish();
        self.print(&rest);
        Ok(())
    }

    fn print(&mut self, piece: &str) {
        if !piece.is_empty() {
            print!("{}", shown(piece));
            flush();
            self.text += piece;
        }
    }
}

pub(crate) fn flush() {
    crate::output::flush();
}
