//! Printing to standard output that may have been closed at the other end, as `moeworks bench | head` does: then nothing
//! more is printed and the program goes on, so that a training run never dies of it. The standard macros would panic.

use std::fmt::Arguments;
use std::io::{Write, stdout};

/// Prints a line.
macro_rules! println {
    () => { $crate::output::print(format_args!("\n")) };
    ($($arg:tt)*) => { $crate::output::print(format_args!("{}\n", format_args!($($arg)*))) };
}

/// Prints without a line end.
macro_rules! print {
    ($($arg:tt)*) => { $crate::output::print(format_args!($($arg)*)) };
}

pub(crate) fn print(text: Arguments<'_>) {
    // Nobody is left to be told that nobody reads.
    let _ = stdout().write_fmt(text);
}
