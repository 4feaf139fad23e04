//! The program `moeworks` in a Python process.

use std::ffi::OsString;
use std::io::{IsTerminal as _, Write as _, stderr};
use std::{process, thread};

use moeworks::{Host, Interrupts, Reaction};
use moeworks_infer::chat::Sandbox;
use moeworks_model::files::remove_unfinished;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::calls::{object, unlocked};

/// `run(arguments, program, is_process) -> exit code`: runs a command of the program. The arguments start with the
/// program's name; `program` starts another one, which renders chat templates. Where the program is all that the
/// process does, signals are the program's, as in its own binary.
pub(crate) fn run(args: &Bound<'_, PyTuple>) -> PyResult<Py<PyAny>> {
    let (words, program, is_process): (Vec<OsString>, Vec<OsString>, bool) = args.extract()?;
    let Some((name, arguments)) = program.split_first() else {
        return Err(PyValueError::new_err("no program for chat templates"));
    };
    let mut arguments = arguments.to_vec();
    arguments.push("render-template".into());
    let mut host = Host::default().with_sandbox(Sandbox::new(name, arguments));
    if is_process {
        let interrupts = Interrupts::default();
        watch(interrupts.clone());
        host = host.with_interrupts(interrupts).with_end(|code| process::exit(i32::from(code)));
    }
    let code = unlocked(args.py(), || host.run(words))?;
    object(args.py(), code)
}

/// Watches for signals on a thread: a run or a chat handles them, otherwise they end the process.
fn watch(interrupts: Interrupts) {
    // Without a thread signals have the effect that Python gives them.
    let _ = thread::Builder::new().name("signals".to_owned()).spawn(move || {
        let Ok(mut signals) = Signals::new([SIGINT, SIGTERM, SIGHUP]) else { return };
        for signal in signals.forever() {
            if interrupts.receive(signal) == Reaction::Handled {
                continue;
            }
            remove_unfinished();
            if stderr().is_terminal() {
                // The shell's next prompt starts on a new line.
                let _ = stderr().write_all(b"\n");
            }
            signal_hook::low_level::exit(128 + signal);
        }
    });
}
