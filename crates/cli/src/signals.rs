//! Ctrl-C, SIGTERM and SIGHUP, for the program alone.
//!
//! The first signal ends the program at once, whatever it is at, with 128 and the signal's number as in a shell, and
//! what is half-written is removed. That is why it is done here and not by the library: loading, tokenising and
//! computing ask nobody whether to go on, so that only the end of the process ends them, and a process belongs to its
//! `main`. A run that makes steps finishes the step and writes a checkpoint first, and a chat ends its answer; the
//! library says so, and there the second signal ends the program.
//!
//! A thread waits for signals, because what is to be done takes locks and memory, which a signal handler must not.

use std::io::{IsTerminal as _, Write as _, stderr};
use std::sync::Arc;
use std::thread;

use moeworks::{Interrupts, Reaction};
use moeworks_model::files::remove_unfinished;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::iterator::Signals;

/// Watches for signals from now on. Those that the program was told to ignore, as by `nohup`, stay ignored.
pub(crate) fn watch(interrupts: Interrupts) {
    let ignored = ignored_signals();
    let wanted: Vec<i32> = [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|signal| !is_in(ignored, *signal)).collect();
    // Where there is no room for a thread signals do what they do to any program.
    let _ = thread::Builder::new().name("signals".to_owned()).spawn(move || {
        if let Ok(mut signals) = Signals::new(wanted) {
            signals.forever().for_each(|signal| receive(&interrupts, signal));
        }
    });
    // A file that grows beyond what the user is allowed is an error of writing, as a full disk is; else it would end
    // the program.
    let _ = signal_hook::flag::register(SIGXFSZ, Arc::default());
}

fn receive(interrupts: &Interrupts, signal: i32) {
    if interrupts.receive(signal) == Reaction::Handled {
        return;
    }
    remove_unfinished();
    if stderr().is_terminal() {
        // The shell's next prompt begins a line.
        let _ = stderr().write_all(b"\n");
    }
    signal_hook::low_level::exit(128 + signal);
}

fn is_in(set: u64, signal: i32) -> bool {
    set >> (signal - 1) & 1 == 1
}

/// The signals that this process ignores, as a set of bits; none where the system does not say.
fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let set = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    set.and_then(|set| u64::from_str_radix(set.trim(), 16).ok()).unwrap_or(0)
}
