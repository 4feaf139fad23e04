//! `moeworks chat`: a conversation by the model's own template, a line a turn.

pub(crate) mod render;

use std::io::{BufRead as _, IsTerminal as _, stdin, stdout};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use moeworks_model::BatchError;
use moeworks_model::chat::{ChatTemplate, Message, final_message};
use moeworks_model::generation::{CachedSequence, GenerateRequest, Sampler};

use crate::args::{ChatArgs, TokenLimit};
use crate::failure::Failure;
use crate::generate::{End, flush, print_answer};
use crate::model::{Model, Source};
use crate::sampling::{Sampling, stop_texts, warn_of_unused};

/// The exit code of a program that Ctrl-C ended.
const INTERRUPTED: u8 = 130;

pub(crate) fn run(args: &ChatArgs) -> Result<ExitCode, Failure> {
    let source = Source::open(&args.model)?;
    let (defaults, file) = source.sampling_defaults()?;
    let sampling = Sampling::resolve(&args.sampling, &defaults, file)?;
    let (sampler, stops) = (sampling.sampler()?, stop_texts(&args.stop, &args.sampling, &defaults)?);
    let model = Model::of(&source, &args.compute)?;
    warn_of_unused(&args.sampling, &defaults, file);
    tracing::info!("sampling: {}", sampling.description);
    let template = match &args.template {
        Some(path) => ChatTemplate::from_file(path, &model.tokenizer)?,
        None => source.chat_template(&model.tokenizer)?.ok_or_else(|| {
            let path = source.path().display();
            Failure::input(format!("{path}: has no chat template; give one by --template FILE, or use `generate`"))
        })?,
    };
    let system = args.system.iter().map(|text| Message::new("system", model.tokenizer.guard(text)));
    let mut chat = Chat {
        messages: system.collect(),
        sequence: CachedSequence::new(model.decoder.config()),
        max_tokens: match args.max_tokens {
            Some(TokenLimit::Tokens(count)) => Some(count),
            Some(TokenLimit::Room) => None,
            None => defaults.max_new_tokens.filter(|_| !args.sampling.no_model_sampling),
        },
        stops,
        interrupts: Interrupts::watch()?,
        model: &model,
        template,
        sampler,
    };
    let is_interactive = stdin().is_terminal() && stdout().is_terminal();
    loop {
        let Some(line) = next_line(is_interactive)? else { return Ok(ExitCode::SUCCESS) };
        if line.trim().is_empty() {
            continue;
        }
        let end = chat.turn(&line)?;
        if end == End::Interrupted && !is_interactive {
            return Ok(ExitCode::from(INTERRUPTED));
        }
    }
}

/// The next line of standard input without its end; none at the end.
fn next_line(is_interactive: bool) -> Result<Option<String>, Failure> {
    if is_interactive {
        print!("> ");
        flush();
    }
    let mut line = String::new();
    let count =
        stdin().lock().read_line(&mut line).map_err(|error| Failure::input(format!("standard input: {error}")))?;
    if count == 0 {
        if is_interactive {
            println!();
        }
        return Ok(None);
    }
    Ok(Some(line.trim_end_matches(['\n', '\r']).to_owned()))
}

/// Ctrl-C ends an answer; between answers it ends the program.
struct Interrupts {
    is_waiting: Arc<AtomicBool>,
    is_asked: Arc<AtomicBool>,
}

impl Interrupts {
    fn watch() -> Result<Self, Failure> {
        let result = Self { is_waiting: Arc::new(AtomicBool::new(true)), is_asked: Arc::default() };
        let signal = signal_hook::consts::SIGINT;
        let is_waiting = Arc::clone(&result.is_waiting);
        signal_hook::flag::register_conditional_shutdown(signal, INTERRUPTED.into(), is_waiting)
            .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&result.is_asked)))
            .map_err(|error| Failure::input(format!("cannot watch for signals: {error}")))?;
        Ok(result)
    }

    /// Whether an answer is under way.
    fn set_answering(&self, is_answering: bool) {
        self.is_asked.store(false, Ordering::Relaxed);
        self.is_waiting.store(!is_answering, Ordering::Relaxed);
    }
}

/// A conversation.
struct Chat<'a> {
    model: &'a Model,
    template: ChatTemplate,
    sampler: Sampler,
    messages: Vec<Message>,
    sequence: CachedSequence,
    max_tokens: Option<usize>,
    stops: Vec<String>,
    interrupts: Interrupts,
}

impl Chat<'_> {
    /// Says `text` to the model and prints what it answers.
    fn turn(&mut self, text: &str) -> Result<End, Failure> {
        let Model { tokenizer, decoder, stop_ids, .. } = self.model;
        self.messages.push(Message::new("user", tokenizer.guard(text)));
        let prompt = tokenizer.encode_rendered(&render::render(&self.template, &self.messages)?)?;
        let max_seq_len = decoder.config().max_seq_len;
        let room = decoder.room(prompt.len()).min(max_seq_len);
        if room == 0 {
            return Err(BatchError::TooLong { len: prompt.len() + 1, max_seq_len }.into());
        }
        let max_new_tokens = self.max_tokens.map_or(room, |max| max.min(room));
        let request = GenerateRequest { prompt: &prompt, max_new_tokens, stop_ids };
        self.interrupts.set_answering(true);
        let is_asked = &self.interrupts.is_asked;
        let is_asked = || is_asked.load(Ordering::Relaxed);
        let answer = print_answer(self.model, &mut self.sequence, &request, &mut self.sampler, &self.stops, is_asked);
        self.interrupts.set_answering(false);
        // An error stands on a line of its own.
        println!();
        let answer = answer?;
        let kept = if tokenizer.has_channels() { final_message(&answer.text) } else { &answer.text };
        self.messages.push(Message::new("assistant", tokenizer.guard(kept)));
        Ok(answer.end)
    }
}
