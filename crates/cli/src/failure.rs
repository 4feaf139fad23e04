//! Failures of commands: one line for the user and an exit code.

use std::fmt::{self, Display};

/// Says what is wrong on a line of its own on standard error, in one write: a launcher may end this process at any
/// moment.
pub(crate) fn say_error(message: impl Display) {
    crate::output::end_line();
    eprintln!("error: {message}");
}

/// A failed command.
#[derive(Debug)]
pub(crate) struct Failure {
    /// The fault, its place, and what would be right, on one line.
    pub(crate) message: String,
    /// The program's exit code.
    pub(crate) code: u8,
}

impl Failure {
    /// Something that the user gave is wrong.
    pub(crate) fn input(message: impl Display) -> Self {
        // Messages may quote file names with line breaks in them: the line stays one line.
        let message = message.to_string().replace(['\n', '\r'], " ");
        Self { message, code: 2 }
    }
}

impl Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl<E: std::error::Error> From<E> for Failure {
    /// Every error of the crates below stems from input: a setting, a file, a full disk.
    fn from(error: E) -> Self {
        let mut message = error.to_string();
        let mut source = error.source();
        while let Some(inner) = source {
            let text = inner.to_string();
            if !message.contains(&text) {
                message += &format!(": {text}");
            }
            source = inner.source();
        }
        Self::input(message)
    }
}
