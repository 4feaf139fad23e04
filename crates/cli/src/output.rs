//! Printing macros. The standard ones panic if a stream cannot be written; these behave as expected of a program in a
//! pipeline.
//!
//! If the reader of standard output has closed it, as in `moeworks bench | head`, the call ends quietly. If standard
//! output is full, or was closed from the start, that is an error. The call ends by unwinding with [`OutputGone`],
//! which it catches. If standard error cannot be written, the message is lost, because there is no other place to
//! report it.

use std::fmt::Arguments;
use std::io::{self, ErrorKind, Write, stderr, stdout};
use std::panic;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::failure::say_error;

/// The exit code if standard output cannot be written.
const FAILED: u8 = 2;

/// The streams of the current call. Calls run one at a time, because the process has one standard output.
static STREAMS: Streams = Streams {
    is_quiet: AtomicBool::new(false),
    is_closed: AtomicBool::new(false),
    is_mid_line: AtomicBool::new(false),
};

struct Streams {
    /// True if notes are suppressed.
    is_quiet: AtomicBool,
    /// True if there is no standard output.
    is_closed: AtomicBool,
    /// True if the last print did not end its line.
    is_mid_line: AtomicBool,
}

/// The panic payload that ends a call whose standard output cannot be written.
pub(crate) struct OutputGone {
    /// The exit code of the call.
    pub(crate) code: u8,
}

/// Prints a line.
macro_rules! println {
    () => { $crate::output::print(format_args!("\n")) };
    ($($arg:tt)*) => { $crate::output::print(format_args!("{}\n", format_args!($($arg)*))) };
}

/// Prints without a newline.
macro_rules! print {
    ($($arg:tt)*) => { $crate::output::print(format_args!($($arg)*)) };
}

/// Prints a line on standard error.
macro_rules! eprintln {
    () => { $crate::output::print_error(format_args!("\n")) };
    ($($arg:tt)*) => { $crate::output::print_error(format_args!("{}\n", format_args!($($arg)*))) };
}

/// Prints on standard error without a newline.
macro_rules! eprint {
    ($($arg:tt)*) => { $crate::output::print_error(format_args!($($arg)*)) };
}

/// Prints a line for the user to standard error, unless `--quiet` was given.
macro_rules! notice {
    () => { $crate::output::print_note(format_args!("\n")) };
    ($($arg:tt)*) => { $crate::output::print_note(format_args!("{}\n", format_args!($($arg)*))) };
}

/// Resets the state at the start of a call.
pub(crate) fn begin(is_closed: bool) {
    STREAMS.is_quiet.store(false, Ordering::Relaxed);
    STREAMS.is_closed.store(is_closed, Ordering::Relaxed);
    STREAMS.is_mid_line.store(false, Ordering::Relaxed);
}

/// Flushes at the end of a call what a failed command has printed, if possible.
pub(crate) fn end() {
    let _ = stdout().flush();
}

/// Sets whether notes are suppressed.
pub(crate) fn set_quiet(is_quiet: bool) {
    STREAMS.is_quiet.store(is_quiet, Ordering::Relaxed);
}

/// Returns whether notes are suppressed.
pub(crate) fn is_quiet() -> bool {
    STREAMS.is_quiet.load(Ordering::Relaxed)
}

/// Prints a note in one write, because other ranks write to the same stream.
pub(crate) fn print_note(text: Arguments<'_>) {
    if !is_quiet() {
        print_error(text);
    }
}

/// Prints on standard output, or ends the call if that is impossible.
pub(crate) fn print(text: Arguments<'_>) {
    let text = text.to_string();
    let Some(&last) = text.as_bytes().last() else { return };
    STREAMS.is_mid_line.store(last != b'\n', Ordering::Relaxed);
    or_end(write(text.as_bytes()));
}

/// Prints on standard error in one write, because other ranks write to the same stream.
pub(crate) fn print_error(text: Arguments<'_>) {
    let _ = stderr().write_all(text.to_string().as_bytes());
}

/// Flushes standard output.
pub(crate) fn flush() {
    or_end(stdout().flush());
}

/// Ends the current line of standard output, before a message on standard error.
pub(crate) fn end_line() {
    if STREAMS.is_mid_line.swap(false, Ordering::Relaxed) {
        // If the reader is gone, an error here is irrelevant.
        let _ = stdout().write_all(b"\n").and_then(|()| stdout().flush());
    }
}

fn write(bytes: &[u8]) -> io::Result<()> {
    if STREAMS.is_closed.load(Ordering::Relaxed) {
        return Err(io::Error::other("it is closed"));
    }
    stdout().write_all(bytes)
}

fn or_end(result: io::Result<()>) {
    let Err(error) = result else { return };
    if error.kind() == ErrorKind::BrokenPipe {
        panic::resume_unwind(Box::new(OutputGone { code: 0 }));
    }
    STREAMS.is_mid_line.store(false, Ordering::Relaxed);
    say_error(format_args!("standard output cannot be written: {error}"));
    panic::resume_unwind(Box::new(OutputGone { code: FAILED }));
}

/// A writer of log lines to standard error that ignores write errors.
pub(crate) struct LogWriter;

impl Write for LogWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let _ = stderr().write_all(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
