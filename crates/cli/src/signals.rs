//! Handling of Ctrl-C, SIGTERM and SIGHUP, for the program only.
//!
//! By default the first signal ends the program at once, with exit code 128 plus the signal's number as in a shell,
//! after partly written files are removed. This is done by the program and not by the library: loading, tokenizing
//! and computing do not check whether to continue, so that only ending the process ends them, and a process belongs
//! to its `main`. A training run finishes its step and writes a checkpoint first, and a chat ends its answer; the
//! library reports these cases, and the second signal then ends the program.
//!
//! A thread waits for signals, because the handling takes locks and allocates memory, which is not allowed in a
//! signal handler.

use std::io::{IsTerminal as _, Write as _, stderr};
use std::sync::Arc;
use std::thread;

use moeworks::{Interrupts, Reaction};
use moeworks_model::files::remove_unfinished;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::iterator::Signals;

/// Starts watching for signals. Signals that the program was started to ignore, as by `nohup`, stay ignored.
pub(crate) fn watch(interrupts: Interrupts) {
    let ignored = ignored_signals();
    let wanted: Vec<i32> = [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|signal| !is_in(ignored, *signal)).collect();
    // If no thread can be started, signals have their default effect.
    let _ = thread::Builder::new().name("signals".to_owned()).spawn(move || {
        if let Ok(mut signals) = Signals::new(wanted) {
            signals.forever().for_each(|signal| receive(&interrupts, signal));
        }
    });
    // A file that grows beyond the user's limit becomes a write error, like a full disk. By default the signal would
    // end the program.
    let _ = signal_hook::flag::register(SIGXFSZ, Arc::default());
}

fn receive(interrupts: &Interrupts, signal: i32) {
    if interrupts.receive(signal) == Reaction::Handled {
        return;
    }
    remove_unfinished();
    if stderr().is_terminal() {
        // The shell's next prompt starts on a new line.
        let _ = stderr().write_all(b"\n");
    }
    signal_hook::low_level::exit(128 + signal);
}

fn is_in(set: u64, signal: i32) -> bool {
    set >> (signal - 1) & 1 == 1
}

/// Returns the signals that this process ignores as a bit set; 0 if the system does not report them.
fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let set = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    set.and_then(|set| u64::from_str_radix(set.trim(), 16).ok()).unwrap_or(0)
}
