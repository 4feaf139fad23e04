//! The input of a chat: lines typed in a terminal with editing and history, or read from a file or another program.

use std::fs;
use std::io::{BufRead as _, IsTerminal as _, stdin, stdout};
use std::path::PathBuf;

use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{Config, Context, Editor, Helper};

use super::commands::NAMES;
use crate::environment;
use crate::failure::Failure;

const PROMPT: &str = "> ";
/// The mark that opens and closes a message of several lines.
const QUOTES: &str = "\"\"\"";
const MAX_HISTORY: usize = 1000;

/// An input of the user.
pub(super) enum Typed {
    Line(String),
    /// Ctrl-C at the prompt.
    Interrupted,
    /// The end of the input: Ctrl-D, or the end of a file.
    End,
}

/// The source of the input.
pub(super) enum Input {
    /// Lines read without a prompt.
    Piped,
    Terminal(Box<Terminal>),
}

impl Input {
    /// Opens standard input. With `with_history`, typed lines are kept in a file.
    pub(super) fn open(with_history: bool) -> Result<Self, Failure> {
        if stdin().is_terminal() && stdout().is_terminal() {
            return Ok(Self::Terminal(Box::new(Terminal::open(with_history)?)));
        }
        Ok(Self::Piped)
    }

    pub(super) fn is_terminal(&self) -> bool {
        matches!(self, Self::Terminal(_))
    }

    /// Returns whether Ctrl-C at the prompt is read as a key. A terminal without escape codes sends a signal instead.
    pub(super) fn reads_interrupts(&self) -> bool {
        self.is_terminal() && environment::terminal_gives_keys()
    }

    pub(super) fn next(&mut self) -> Result<Typed, Failure> {
        match self {
            Self::Piped => piped_line(),
            Self::Terminal(terminal) => terminal.next(),
        }
    }
}

fn piped_line() -> Result<Typed, Failure> {
    let mut line = String::new();
    let count = stdin().lock().read_line(&mut line).map_err(|error| failure(&error))?;
    Ok(if count == 0 { Typed::End } else { Typed::Line(line.trim_end_matches(['\n', '\r']).to_owned()) })
}

fn failure(error: &impl std::fmt::Display) -> Failure {
    Failure::input(format!("standard input: {error}"))
}

/// A line editor with its history.
pub(super) struct Terminal {
    editor: Editor<ChatHelper, FileHistory>,
    /// The file of the history; `None` if no history is kept.
    history: Option<PathBuf>,
}

impl Terminal {
    fn open(with_history: bool) -> Result<Self, Failure> {
        let config = Config::builder().max_history_size(MAX_HISTORY).map_err(|error| failure(&error))?;
        let config = config.history_ignore_space(true).build();
        let mut editor = Editor::with_config(config).map_err(|error| failure(&error))?;
        editor.set_helper(Some(ChatHelper));
        let history = history_file().filter(|_| with_history);
        if let Some(file) = history.as_ref().filter(|file| file.exists())
            && let Err(error) = editor.load_history(file)
        {
            tracing::warn!("the history {} cannot be read: {error}", file.display());
        }
        Ok(Self { editor, history })
    }

    fn next(&mut self) -> Result<Typed, Failure> {
        match self.editor.readline(PROMPT) {
            Ok(line) => {
                self.add_to_history(&line);
                Ok(Typed::Line(message(&line)))
            }
            Err(ReadlineError::Interrupted) => Ok(Typed::Interrupted),
            Err(ReadlineError::Eof) => Ok(Typed::End),
            Err(error) => Err(failure(&error)),
        }
    }

    /// Adds a line to the history. A line that starts with a space is left out, as in a shell.
    fn add_to_history(&mut self, line: &str) {
        let is_new = self.editor.add_history_entry(line).unwrap_or(false);
        let Some(file) = self.history.clone().filter(|_| is_new) else { return };
        let folder = file.parent().map_or(Ok(()), fs::create_dir_all);
        let written = folder.map_err(ReadlineError::from).and_then(|()| self.editor.append_history(&file));
        if let Err(error) = written {
            tracing::warn!(
                "the history {} cannot be written: {error}; lines are kept in this chat alone",
                file.display()
            );
            self.history = None;
        }
    }
}

/// Returns the path of the history, the file `history` in the user's state folder.
fn history_file() -> Option<PathBuf> {
    environment::state_folder().map(|folder| folder.join("history"))
}

/// Extracts the message from typed text: without the quotes around several lines and the backslashes at the ends of
/// lines.
fn message(typed: &str) -> String {
    let inner = typed.trim().strip_prefix(QUOTES).and_then(|text| text.strip_suffix(QUOTES));
    match inner {
        Some(inner) => inner.trim_matches('\n').to_owned(),
        None => typed.replace("\\\n", "\n"),
    }
}

/// Returns whether the text continues on the next line.
fn goes_on(typed: &str) -> bool {
    match typed.trim().strip_prefix(QUOTES) {
        Some(rest) => !rest.ends_with(QUOTES),
        None => typed.ends_with('\\'),
    }
}

/// A helper of the line editor that completes commands and detects the end of a message.
struct ChatHelper;

impl Validator for ChatHelper {
    fn validate(&self, context: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        let goes_on = goes_on(context.input());
        Ok(if goes_on { ValidationResult::Incomplete } else { ValidationResult::Valid(None) })
    }
}

impl Completer for ChatHelper {
    type Candidate = String;

    fn complete(&self, line: &str, position: usize, _: &Context<'_>) -> rustyline::Result<(usize, Vec<String>)> {
        let typed = &line[..position];
        let found = NAMES.iter().filter(|name| typed.starts_with('/') && name.starts_with(typed));
        Ok((0, found.map(|&name| name.to_owned()).collect()))
    }
}

impl Hinter for ChatHelper {
    type Hint = String;
}

impl Highlighter for ChatHelper {}

impl Helper for ChatHelper {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_several_lines_go_on_behind_a_backslash_or_inside_quotes() {
        assert!(!goes_on("Hello"));
        assert!(goes_on("Hello\\"));
        assert!(!goes_on("Hello\\\nthere"));
        assert!(goes_on("\"\"\"a"));
        assert!(goes_on("\"\"\""));
        assert!(!goes_on("\"\"\"a\nb\"\"\""));
        assert_eq!(message("Hello\\\nthere"), "Hello\nthere");
        assert_eq!(message("\"\"\"\na\nb\\\n\"\"\""), "a\nb\\");
        assert_eq!(message("say \"\"\" twice"), "say \"\"\" twice");
    }
}
