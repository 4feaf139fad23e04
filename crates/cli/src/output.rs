//! Printing. The standard macros panic where a stream cannot be written; these do what a program in a pipeline is
//! expected to do.
//!
//! Standard output that was closed at the other end, as by `moeworks bench | head`, ends the call quietly: nobody
//! reads what is still to come. Standard output that is full, or was closed from the start, is an error. The call
//! ends by unwinding with [`OutputGone`], which it catches. What standard error does not take is lost; there is
//! nowhere to say it.

use std::fmt::Arguments;
use std::io::{self, ErrorKind, Write, stderr, stdout};
use std::panic;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::failure::say_error;

/// The exit code where standard output cannot be written.
const FAILED: u8 = 2;

/// The streams of the call under way: there is one call at a time, since the process has one standard output.
static STREAMS: Streams = Streams {
    is_quiet: AtomicBool::new(false),
    is_closed: AtomicBool::new(false),
    is_mid_line: AtomicBool::new(false),
};

struct Streams {
    /// Whether notes are left out.
    is_quiet: AtomicBool,
    /// Whether there is no standard output.
    is_closed: AtomicBool,
    /// Whether the last print did not end its line.
    is_mid_line: AtomicBool,
}

/// The end of a call whose standard output cannot be written.
pub(crate) struct OutputGone {
    /// The call's exit code.
    pub(crate) code: u8,
}

/// Prints a line.
macro_rules! println {
    () => { $crate::output::print(format_args!("\n")) };
    ($($arg:tt)*) => { $crate::output::print(format_args!("{}\n", format_args!($($arg)*))) };
}

/// Prints without a line end.
macro_rules! print {
    ($($arg:tt)*) => { $crate::output::print(format_args!($($arg)*)) };
}

/// Prints a line on standard error.
macro_rules! eprintln {
    () => { $crate::output::print_error(format_args!("\n")) };
    ($($arg:tt)*) => { $crate::output::print_error(format_args!("{}\n", format_args!($($arg)*))) };
}

/// Prints on standard error without a line end.
macro_rules! eprint {
    ($($arg:tt)*) => { $crate::output::print_error(format_args!($($arg)*)) };
}

/// Prints a line for the user to standard error, unless `--quiet` was given.
macro_rules! notice {
    () => { $crate::output::print_note(format_args!("\n")) };
    ($($arg:tt)*) => { $crate::output::print_note(format_args!("{}\n", format_args!($($arg)*))) };
}

/// Begins a call, with nothing of the one before.
pub(crate) fn begin(is_closed: bool) {
    STREAMS.is_quiet.store(false, Ordering::Relaxed);
    STREAMS.is_closed.store(is_closed, Ordering::Relaxed);
    STREAMS.is_mid_line.store(false, Ordering::Relaxed);
}

/// Ends a call: brings out what a failed command has printed, if that is possible.
pub(crate) fn end() {
    let _ = stdout().flush();
}

/// Leaves out notes from now on, or does not.
pub(crate) fn set_quiet(is_quiet: bool) {
    STREAMS.is_quiet.store(is_quiet, Ordering::Relaxed);
}

/// Whether notes are left out.
pub(crate) fn is_quiet() -> bool {
    STREAMS.is_quiet.load(Ordering::Relaxed)
}

/// Writes a note in one piece: other ranks write there, too.
pub(crate) fn print_note(text: Arguments<'_>) {
    if !is_quiet() {
        print_error(text);
    }
}

/// Prints on standard output, or ends the call where that is not possible.
pub(crate) fn print(text: Arguments<'_>) {
    let text = text.to_string();
    let Some(&last) = text.as_bytes().last() else { return };
    STREAMS.is_mid_line.store(last != b'\n', Ordering::Relaxed);
    or_end(write(text.as_bytes()));
}

/// Prints on standard error in one write: other ranks write there, too.
pub(crate) fn print_error(text: Arguments<'_>) {
    let _ = stderr().write_all(text.to_string().as_bytes());
}

/// Brings what was printed to its reader.
pub(crate) fn flush() {
    or_end(stdout().flush());
}

/// Ends a line of standard output that is not ended, before something else is said.
pub(crate) fn end_line() {
    if STREAMS.is_mid_line.swap(false, Ordering::Relaxed) {
        // Whoever reads it may be gone; what follows is not for them.
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

/// Log lines on standard error, which take no harm where it cannot be written.
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
