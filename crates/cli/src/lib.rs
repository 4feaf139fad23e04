//! The commands of `moeworks`: raw arguments, one resolved configuration, printing. The work is done in the crates
//! below.
//!
//! A program calls [`run`] with its arguments and ends with the exit code that it returns. It can be called again and
//! again in a process:
//!
//! ```
//! assert_eq!(moeworks::run(["moeworks", "simulate", "--no-such-option"]), 2);
//! assert_eq!(moeworks::run(["moeworks", "--version"]), 0);
//! ```
//!
//! Exit codes: 0 done; 2 something the user gave is wrong; 130, 143 and 129 stopped by Ctrl-C, SIGTERM and SIGHUP, of
//! which the process tells ([`Interrupts`]); 101 the program's own fault.

#[macro_use]
mod output;

mod account;
mod args;
mod bench;
mod chat;
mod completions;
mod convert;
mod doctor;
mod environment;
mod estimate;
mod evaluate;
mod exit_code;
mod failure;
mod generate;
mod host;
mod inspect;
mod interrupts;
mod log;
mod model;
mod page;
mod plan;
mod progress;
mod quote;
mod ranks;
mod reading;
mod routing;
mod sampling;
mod serve;
mod sharding;
mod simulate;
mod study;
mod tables;
mod terminal;
mod train;
mod version;

use std::ffi::OsString;

pub use host::Host;
pub use interrupts::{Interrupts, Reaction};

/// Runs the command that `args` names, the program's name first, and returns its exit code. The process lends
/// nothing: see [`Host`].
pub fn run(args: impl IntoIterator<Item = impl Into<OsString>>) -> u8 {
    Host::default().run(args)
}
