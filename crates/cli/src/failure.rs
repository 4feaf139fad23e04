//! Failures of commands: a one-line message for the user and an exit code.

use std::fmt::{self, Display};

/// Prints an error on a line of its own on standard error, in one write: a launcher may end this process at any
/// moment.
pub(crate) fn say_error(message: impl Display) {
    crate::output::end_line();
    eprintln!("error: {message}");
}

/// A failed command.
#[derive(Debug)]
pub(crate) struct Failure {
    /// One line with the problem, its place and its fix.
    pub(crate) message: String,
    /// The exit code of the program.
    pub(crate) code: u8,
}

impl Failure {
    /// Creates a failure because of invalid input.
    pub(crate) fn input(message: impl Display) -> Self {
        // A message may quote a file name with line breaks; it must stay one line.
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
    /// Converts an error of another crate. All of these are caused by input: a setting, a file, a full disk.
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
