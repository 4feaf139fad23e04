//! Ctrl-C, SIGTERM and SIGHUP. Whatever the program is at, the first one ends it at once, with 128 and the signal's number as in a
//! shell, and what is half-written is removed. Only a run that makes steps finishes the step and writes a checkpoint first; there the
//! second one ends the program.
//!
//! A thread waits for signals, because what is to be done takes locks and memory, which a signal handler must not.

use std::io::IsTerminal as _;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::thread;

use moeworks_model::files::remove_unfinished;
use moeworks_train::Requests;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGXFSZ};
use signal_hook::iterator::Signals;

use crate::failure::Failure;

/// The exit code of a program that Ctrl-C ended, where the signal itself is not known any more.
pub(crate) const EXIT_INTERRUPTED: u8 = 130;

/// The run that may be asked to finish its step, and the signal that asked.
static ASKED: Mutex<Asked> = Mutex::new(Asked { requests: None, signal: None });

struct Asked {
    requests: Option<Requests>,
    signal: Option<i32>,
}

/// Watches for signals from now on. Those that the program was told to ignore, as by `nohup`, stay ignored.
pub(crate) fn watch() {
    let ignored = ignored_signals();
    let wanted: Vec<i32> = [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|signal| !is_in(ignored, *signal)).collect();
    // Where there is no room for a thread signals do what they do to any program.
    let _ = thread::Builder::new().name("signals".to_owned()).spawn(move || {
        if let Ok(mut signals) = Signals::new(wanted) {
            signals.forever().for_each(receive);
        }
    });
    // A file that grows beyond what the user is allowed is an error of writing, as a full disk is; else it would end the program.
    let _ = signal_hook::flag::register(SIGXFSZ, Arc::default());
}

/// What a run is asked for from outside: to stop by the signals that are watched for, to write a checkpoint by SIGUSR1.
pub(crate) fn requests() -> Result<Requests, Failure> {
    let requests = Requests::default();
    signal_hook::flag::register(SIGUSR1, Arc::clone(&requests.save))
        .map_err(|error| Failure::input(format!("cannot watch for signals: {error}")))?;
    asked().requests = Some(requests.clone());
    Ok(requests)
}

/// The exit code of a run that was asked to stop and did so.
pub(crate) fn exit_code() -> u8 {
    asked().signal.and_then(|signal| u8::try_from(128 + signal).ok()).unwrap_or(EXIT_INTERRUPTED)
}

fn asked() -> std::sync::MutexGuard<'static, Asked> {
    ASKED.lock().unwrap_or_else(PoisonError::into_inner)
}

fn receive(signal: i32) {
    let mut asked = asked();
    if asked.signal.is_none() && asked.requests.as_ref().is_some_and(Requests::ask_to_stop) {
        asked.signal = Some(signal);
        return;
    }
    remove_unfinished();
    if std::io::stderr().is_terminal() {
        // The shell's next prompt begins a line.
        eprintln!();
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
