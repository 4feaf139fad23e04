//! `moeworks chat`: a conversation by the model's own template, with commands that begin with a slash.

mod commands;
mod conversation;
mod input;
pub(crate) mod render;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use moeworks_model::chat::ChatTemplate;

use self::commands::{Line, help};
use self::conversation::{Conversation, TurnError};
use self::input::{Input, Typed};
use crate::args::{ChatArgs, TokenLimit};
use crate::failure::{Failure, say_error};
use crate::generate::{End, Printed};
use crate::model::{Model, Source};
use crate::sampling::{Sampling, stop_texts, warn_of_unused};

/// The exit code of a program that Ctrl-C ended.
const INTERRUPTED: u8 = 130;
/// The exit code where a piped turn was refused.
const REFUSED: u8 = 2;

pub(crate) fn run(args: &ChatArgs) -> Result<ExitCode, Failure> {
    let source = Source::open(&args.model)?;
    let (defaults, file) = source.sampling_defaults()?;
    let sampling = Sampling::resolve(&args.sampling, &defaults, file)?;
    let (sampler, stops) = (sampling.sampler()?, stop_texts(&args.stop, &args.sampling, &defaults)?);
    if args.max_tokens == Some(TokenLimit::Tokens(0)) {
        return Err(Failure::input("--max-tokens 0: an answer needs at least 1 token, or -1 for as many as fit"));
    }
    let model = Model::of(&source, &args.compute)?;
    warn_of_unused(&args.sampling, &defaults, file);
    let template = template(args, &source, &model)?;
    let input = Input::open(!args.no_history)?;
    let of_model = defaults.max_new_tokens.filter(|_| !args.sampling.no_model_sampling);
    let mut conversation = Conversation::new(&model, template, sampler);
    (conversation.limit, conversation.limit_of_model) = (args.max_tokens, of_model);
    conversation.stops = stops;
    conversation.set_system(args.system.as_deref());
    greet(&input, &sampling);
    let interrupts = Interrupts::watch(Arc::clone(&conversation.is_asked), input.reads_interrupts())?;
    Session { input, conversation, interrupts, is_leaving: false, was_refused: false }.run()
}

fn template(args: &ChatArgs, source: &Source, model: &Model) -> Result<ChatTemplate, Failure> {
    if let Some(path) = &args.template {
        return Ok(ChatTemplate::from_file(path, &model.tokenizer)?);
    }
    source.chat_template(&model.tokenizer)?.ok_or_else(|| {
        let path = source.path().display();
        Failure::input(format!("{path}: has no chat template; give one by --template FILE, or use `generate`"))
    })
}

/// Says how the chat is used, to someone at a terminal.
fn greet(input: &Input, sampling: &Sampling) {
    if input.is_terminal() {
        notice!("Sampling: {}. /help lists the commands, Ctrl-D ends the chat.", sampling.description);
    } else {
        tracing::info!("sampling: {}", sampling.description);
    }
}

/// A chat under way.
struct Session<'a> {
    input: Input,
    conversation: Conversation<'a>,
    interrupts: Interrupts,
    /// Whether the last thing that was typed is Ctrl-C.
    is_leaving: bool,
    /// Whether a turn was refused.
    was_refused: bool,
}

impl Session<'_> {
    /// Answers line by line until the end.
    fn run(mut self) -> Result<ExitCode, Failure> {
        loop {
            let line = match self.input.next()? {
                Typed::Line(line) => line,
                Typed::End => break,
                Typed::Interrupted if self.is_leaving => return Ok(ExitCode::from(INTERRUPTED)),
                Typed::Interrupted => {
                    self.is_leaving = true;
                    notice!("(Ctrl-C again, Ctrl-D or /exit ends the chat.)");
                    continue;
                }
            };
            self.is_leaving = false;
            let line = Line::new(&line);
            if line == Line::Exit {
                break;
            }
            let end = self.obey(&line)?;
            if end == Some(End::Interrupted) && !self.input.is_terminal() {
                return Ok(ExitCode::from(INTERRUPTED));
            }
        }
        let is_failed = self.was_refused && !self.input.is_terminal();
        Ok(if is_failed { ExitCode::from(REFUSED) } else { ExitCode::SUCCESS })
    }

    /// Carries out a line. Returns how an answer ended, if there was one.
    fn obey(&mut self, line: &Line<'_>) -> Result<Option<End>, Failure> {
        match line {
            Line::Say(text) => return self.answer(|conversation| conversation.say(text)),
            Line::Regenerate => return self.regenerate(),
            Line::Help => eprintln!("{}", help()),
            Line::Clear => self.conversation.clear(),
            Line::Undo if self.conversation.undo() => notice!("(The last turn is taken back.)"),
            Line::Undo => self.refuse("there is no turn to take back"),
            Line::ShowSystem => match self.conversation.system() {
                Some(text) => eprintln!("{text}"),
                None => notice!("(There is no system message. /system TEXT sets one.)"),
            },
            Line::SetSystem(text) => self.conversation.set_system(*text),
            Line::Unknown(name) => self.refuse(format!(
                "{name} is no command: /help lists them; begin with // to say a message that begins with a slash"
            )),
            Line::Empty | Line::Exit => {}
        }
        Ok(None)
    }

    fn regenerate(&mut self) -> Result<Option<End>, Failure> {
        if self.conversation.has_turn() {
            return self.answer(|conversation| conversation.regenerate());
        }
        self.refuse("there is no message to answer again");
        Ok(None)
    }

    fn answer(
        &mut self,
        turn: impl FnOnce(&mut Conversation<'_>) -> Result<Printed, TurnError>,
    ) -> Result<Option<End>, Failure> {
        self.interrupts.set_answering(true);
        let result = turn(&mut self.conversation);
        self.interrupts.set_answering(false);
        match result {
            Ok(answer) => Ok(Some(answer.end)),
            Err(TurnError::Refused(failure)) => {
                self.refuse(failure);
                Ok(None)
            }
            Err(TurnError::Fatal(failure)) => Err(failure),
        }
    }

    fn refuse(&mut self, why: impl std::fmt::Display) {
        self.was_refused = true;
        say_error(why);
    }
}

/// Ctrl-C ends an answer. Between answers it ends the program, unless the line editor reads it as a key.
struct Interrupts {
    is_ending: Arc<AtomicBool>,
    is_asked: Arc<AtomicBool>,
    reads_interrupts: bool,
}

impl Interrupts {
    fn watch(is_asked: Arc<AtomicBool>, reads_interrupts: bool) -> Result<Self, Failure> {
        let result = Self { is_ending: Arc::new(AtomicBool::new(!reads_interrupts)), is_asked, reads_interrupts };
        let signal = signal_hook::consts::SIGINT;
        let is_ending = Arc::clone(&result.is_ending);
        signal_hook::flag::register_conditional_shutdown(signal, INTERRUPTED.into(), is_ending)
            .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&result.is_asked)))
            .map_err(|error| Failure::input(format!("cannot watch for signals: {error}")))?;
        Ok(result)
    }

    /// Says whether an answer is under way.
    fn set_answering(&self, is_answering: bool) {
        self.is_asked.store(false, Ordering::Relaxed);
        self.is_ending.store(!is_answering && !self.reads_interrupts, Ordering::Relaxed);
    }
}
