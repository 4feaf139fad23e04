//! The commands of `moeworks`: they resolve raw arguments to one configuration and print results. The work is done in
//! the other crates.
//!
//! A program calls [`run`] with its arguments and ends with the exit code that it returns. It can be called any
//! number of times in a process:
//!
//! ```
//! assert_eq!(moeworks::run(["moeworks", "simulate", "--no-such-option"]), 2);
//! assert_eq!(moeworks::run(["moeworks", "--version"]), 0);
//! ```
//!
//! Exit codes: 0 for success; 2 for invalid input; 130, 143 and 129 if stopped by Ctrl-C, SIGTERM or SIGHUP, which
//! the process passes on ([`Interrupts`]); 101 for a fault of the program itself.

#[macro_use]
mod output;

mod advise;
mod args;
mod balance;
mod bench;
mod chat;
mod check;
mod completions;
mod convert;
mod cost_tables;
mod doctor;
mod environment;
mod estimate;
mod evaluate;
mod exit_code;
mod failure;
mod files;
mod form;
mod gateway;
mod generate;
mod generate_many;
mod host;
mod inspect;
mod interrupts;
mod listening;
mod log;
mod log_lines;
mod model;
mod model_ranks;
mod page;
mod plan;
mod progress;
mod quote;
mod ranks;
mod reading;
mod record;
mod routing;
mod sampling;
mod serve;
mod serve_rebalance;
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

/// Runs the command in `args`, which start with the program's name, and returns its exit code. The command gets no
/// resources of the process: see [`Host`].
pub fn run(args: impl IntoIterator<Item = impl Into<OsString>>) -> u8 {
    Host::default().run(args)
}
