//! Printing. The standard macros panic where a stream cannot be written; these do what a program in a pipeline is expected to do.
//!
//! Standard output that was closed at the other end, as by `moeworks bench | head`, ends the program quietly: nobody reads what is still
//! to come. Standard output that is full, or was closed from the start, is an error. What standard error does not take is lost; there is
//! nowhere to say it.

use std::fmt::Arguments;
use std::io::{self, ErrorKind, Write, stderr, stdout};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::failure::say_error;

/// The exit code where standard output cannot be written.
const FAILED: i32 = 2;

/// Whether the program was started without a standard output. The standard library opens `/dev/null` in its place before `main`.
static WAS_CLOSED: AtomicBool = AtomicBool::new(false);
/// Whether what was printed last did not end its line.
static IS_MID_LINE: AtomicBool = AtomicBool::new(false);

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

#[cfg(unix)]
ctor::declarative::ctor! {
    /// Runs before `main`, and before the standard library looks at its streams.
    #[ctor(unsafe)]
    fn note_closed_output() {
        let is_closed = rustix::io::fcntl_getfd(rustix::stdio::stdout()).is_err();
        WAS_CLOSED.store(is_closed, Ordering::Relaxed);
    }
}

/// Prints on standard output, or ends the program where that is not possible.
pub(crate) fn print(text: Arguments<'_>) {
    let text = text.to_string();
    let Some(&last) = text.as_bytes().last() else { return };
    IS_MID_LINE.store(last != b'\n', Ordering::Relaxed);
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
    if IS_MID_LINE.swap(false, Ordering::Relaxed) {
        // Whoever reads it may be gone; what follows is not for them.
        let _ = stdout().write_all(b"\n").and_then(|()| stdout().flush());
    }
}

/// The exit code of a command that is done, once everything that it printed has arrived.
pub(crate) fn finish(code: ExitCode) -> ExitCode {
    flush();
    code
}

fn write(bytes: &[u8]) -> io::Result<()> {
    if WAS_CLOSED.load(Ordering::Relaxed) {
        return Err(io::Error::other("it is closed"));
    }
    stdout().write_all(bytes)
}

fn or_end(result: io::Result<()>) {
    let Err(error) = result else { return };
    if error.kind() == ErrorKind::BrokenPipe {
        std::process::exit(0);
    }
    IS_MID_LINE.store(false, Ordering::Relaxed);
    say_error(format_args!("standard output cannot be written: {error}"));
    std::process::exit(FAILED);
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
