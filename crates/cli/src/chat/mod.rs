//! `moeworks chat`: a conversation with the model's own chat template, and commands that start with a slash.

mod commands;
mod input;

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use moeworks_infer::chat::{ChatTemplate, Conversation, ConversationOptions, Cut, Turn, TurnError, TurnEvent};
use moeworks_infer::generation::{End, TokenLimit, TokenLimits};
use moeworks_infer::open::{Model, Source};

use self::commands::{Line, help};
use self::input::{Input, Typed};
use crate::args::ChatArgs;
use crate::exit_code::ExitCode;
use crate::failure::{Failure, say_error};
use crate::form::form;
use crate::generate::print_piece;
use crate::host::Call;
use crate::interrupts::ChatSignals;
use crate::model::with_options;
use crate::model_ranks::{ModelOptions, ModelRank, on_model_ranks};
use crate::sampling::{Sampling, warn_of_unused};

/// The exit code of a program that Ctrl-C ended.
const INTERRUPTED: u8 = 130;
/// The exit code if a piped turn was rejected.
const REFUSED: u8 = 2;

pub(crate) fn run(args: &ChatArgs, call: &Call<'_>) -> Result<ExitCode, Failure> {
    let options = ModelOptions { compute: &args.compute, ranks: &args.ranks };
    on_model_ranks(call, &args.model, options, None, |rank| one_rank(args, rank, call))
}

/// Chats on the rank that makes the passes.
fn one_rank(args: &ChatArgs, rank: ModelRank<'_>, call: &Call<'_>) -> Result<ExitCode, Failure> {
    let form = form(&args.form)?;
    let source = Source::open(&args.model)?;
    let defaults = source.sampling_defaults()?;
    let mut sampling = Sampling::resolve(&args.sampling, &args.stop, &defaults)?;
    if args.max_tokens == Some(TokenLimit::Tokens(0)) {
        return Err(Failure::input("--max-tokens 0: an answer needs at least 1 token, or -1 for as many as fit"));
    }
    let model = rank.open(&source)?;
    warn_of_unused(&args.sampling, &defaults);
    let template = template(args, &source, &model)?;
    if let Some(form) = form {
        if model.tokenizer.has_channels() {
            let field = form.field;
            return Err(Failure::input(format!("{field}: the model answers in channels, which a form does not know")));
        }
        sampling.hold_to(form, &model)?;
    }
    let input = Input::open(!args.no_history)?;
    greet(&input, &sampling);
    let Sampling { sampler, stops, limit_of_model, .. } = sampling;
    let options =
        ConversationOptions { limits: TokenLimits { asked: args.max_tokens, of_model: limit_of_model }, stops };
    let mut conversation = Conversation::new(&model, template, call.sandbox()?, sampler, options);
    conversation.set_system(args.system.as_deref());
    let signals = ChatSignals::new(input.reads_interrupts());
    let _receiving = call.interrupts().give_to_chat(&signals);
    let code = Session { input, conversation, signals, is_leaving: false, was_refused: false }.run()?;
    model.end_ranks()?;
    Ok(code)
}

/// Runs as the sandbox process in which another process of this program renders chat templates.
pub(crate) fn serve_template() -> Result<ExitCode, Failure> {
    moeworks_infer::chat::serve()?;
    Ok(ExitCode::SUCCESS)
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

/// Prints how to use the chat, if input is typed at a terminal.
fn greet(input: &Input, sampling: &Sampling) {
    if input.is_terminal() {
        notice!("Sampling: {}. /help lists the commands, Ctrl-D ends the chat.", sampling.description);
    } else {
        tracing::info!("sampling: {}", sampling.description);
    }
}

/// The state of a chat.
struct Session<'a> {
    input: Input,
    conversation: Conversation<'a>,
    signals: ChatSignals,
    /// True if the last input was Ctrl-C.
    is_leaving: bool,
    /// True if a turn was rejected.
    was_refused: bool,
}

impl Session<'_> {
    /// Answers the input line by line until it ends.
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

    /// Executes a line. Returns how the answer ended, if there was one.
    fn obey(&mut self, line: &Line<'_>) -> Result<Option<End>, Failure> {
        match line {
            Line::Say(text) => return self.answer(|conversation, on_event| conversation.say(text, on_event)),
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
            return self.answer(|conversation, on_event| conversation.regenerate(on_event));
        }
        self.refuse("there is no message to answer again");
        Ok(None)
    }

    fn answer(
        &mut self,
        turn: impl FnOnce(&mut Conversation<'_>, &mut OnEvent<'_>) -> Result<Turn, TurnError>,
    ) -> Result<Option<End>, Failure> {
        self.signals.set_answering(true);
        let is_asked = Arc::clone(&self.signals.is_asked);
        let result = turn(&mut self.conversation, &mut |event| show(event, &is_asked));
        self.signals.set_answering(false);
        if let Err(TurnError::Refused(error)) = result {
            self.refuse(with_options(error));
            return Ok(None);
        }
        // The line is ended so that an error is on a line of its own.
        println!();
        match result {
            Ok(turn) => {
                say_cut(&turn);
                Ok(Some(turn.answer.end))
            }
            Err(TurnError::Refused(error) | TurnError::Fatal(error)) => Err(with_options(error)),
        }
    }

    fn refuse(&mut self, why: impl std::fmt::Display) {
        self.was_refused = true;
        say_error(why);
    }
}

/// The callback for the events of a turn; it may end the answer.
type OnEvent<'a> = dyn FnMut(TurnEvent<'_>) -> ControlFlow<()> + 'a;

/// Prints an event of a turn, and ends the answer if Ctrl-C requested it.
fn show(event: TurnEvent<'_>, is_asked: &AtomicBool) -> ControlFlow<()> {
    match event {
        TurnEvent::Text(piece) => print_piece(piece),
        TurnEvent::Forgot { num_turns, context } => {
            let turns = match num_turns {
                1 => "oldest turn was".to_owned(),
                count => format!("{count} oldest turns were"),
            };
            notice!("(The context of {context} tokens is full: the {turns} forgotten.)");
        }
    }
    if is_asked.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
}

/// Prints why an answer ended early, if it did.
fn say_cut(turn: &Turn) {
    let why = match turn.cut {
        None => return,
        Some(Cut::ModelLimit) => "as the model's files recommend",
        Some(Cut::NextTurn) => "to leave room for the next turn",
    };
    let count = turn.answer.num_tokens;
    notice!("(The answer was cut after {count} tokens, {why}; --max-tokens N sets another limit.)");
}
