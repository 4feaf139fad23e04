//! Notes to the user on standard error, which `--quiet` leaves out.

use std::fmt::Arguments;
use std::io::{Write as _, stderr};
use std::sync::atomic::{AtomicBool, Ordering};

static IS_QUIET: AtomicBool = AtomicBool::new(false);

/// Prints a line for the user to standard error, unless `--quiet` was given.
macro_rules! notice {
    () => { $crate::notice::say(format_args!("\n")) };
    ($($arg:tt)*) => { $crate::notice::say(format_args!("{}\n", format_args!($($arg)*))) };
}

/// Leaves out notes from now on, or does not.
pub(crate) fn set_quiet(is_quiet: bool) {
    IS_QUIET.store(is_quiet, Ordering::Relaxed);
}

/// Whether notes are left out.
pub(crate) fn is_quiet() -> bool {
    IS_QUIET.load(Ordering::Relaxed)
}

/// Writes a note in one piece: other ranks write there, too.
pub(crate) fn say(text: Arguments<'_>) {
    if !is_quiet() {
        // Where nobody listens nothing can be said.
        let _ = stderr().write_all(text.to_string().as_bytes());
    }
}
