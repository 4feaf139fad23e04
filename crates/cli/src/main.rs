//! The `moeworks` program: raw arguments, one resolved configuration, printing. The work is done in the crates below.
//!
//! Exit codes: 0 done; 1 the program's own fault; 2 something the user gave is wrong; 130, 143 and 129 stopped by
//! Ctrl-C, SIGTERM and SIGHUP.

#[macro_use]
mod output;
#[macro_use]
mod notice;

mod account;
mod args;
mod bench;
mod chat;
mod completions;
mod convert;
mod doctor;
mod estimate;
mod evaluate;
mod failure;
mod generate;
mod inspect;
mod model;
mod page;
mod plan;
mod progress;
mod quote;
mod ranks;
mod reading;
mod routing;
mod sampling;
mod signals;
mod simulate;
mod study;
mod tables;
mod terminal;
mod train;
mod version;

use std::panic::{self, AssertUnwindSafe};
use std::process::ExitCode;

use clap::error::ErrorKind;
use moeworks_gpu::GpuError;
use tracing_subscriber::EnvFilter;

use crate::args::{Command, OneLine, TalkArgs};
use crate::failure::Failure;

fn main() -> ExitCode {
    let cli = args::parse(std::env::args_os()).unwrap_or_else(|error| refuse(&error));
    notice::set_quiet(cli.talk.quiet);
    log(cli.talk);
    match or_device_failure(|| run(cli.command)) {
        Ok(code) => output::finish(code),
        Err(Failure { message, code }) => {
            ranks::fail_together(&message);
            failure::say_error(message);
            ExitCode::from(code)
        }
    }
}

/// Sends what the crates below log to standard error: warnings, or as much as `RUST_LOG`, `--quiet` or `--verbose` asks for.
fn log(talk: TalkArgs) {
    let level = match talk {
        TalkArgs { quiet: true, .. } => Some("error"),
        TalkArgs { verbose: true, .. } => Some("info"),
        _ => None,
    };
    let filter = level
        .map_or_else(|| EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn")), EnvFilter::new);
    let with_colours = terminal::stderr_takes_escapes();
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| output::LogWriter)
        .with_ansi(with_colours)
        .without_time()
        .init();
}

/// Says what is wrong with the arguments, or what was asked about them.
fn refuse(error: &clap::Error) -> ! {
    if !error.use_stderr() {
        print!("{}", error.render());
        output::flush();
        std::process::exit(error.exit_code());
    }
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        eprint!("{}", error.render());
        std::process::exit(error.exit_code());
    }
    let OneLine { message, usage } = OneLine::new(error);
    ranks::fail_together(&message);
    failure::say_error(if usage.is_empty() { message } else { format!("{message}\n\n{usage}") });
    std::process::exit(2)
}

fn run(command: Command) -> Result<ExitCode, Failure> {
    // `chat` has its own use for Ctrl-C, and the process of a template is ended by the one that started it.
    if !matches!(command, Command::Chat(_) | Command::RenderTemplate) {
        signals::watch();
    }
    match command {
        Command::Train(args) => train::run(args),
        Command::Generate(args) => generate::run(&args),
        Command::Chat(args) => chat::run(&args),
        Command::Evaluate(args) => evaluate::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Estimate(args) => estimate::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Simulate(args) => simulate::run(&args),
        Command::Routing(args) => routing::run(&args),
        Command::Study(args) => study::run(&args),
        Command::Upcycle(args) => convert::upcycle(&args),
        Command::Convert(args) => convert::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Report(args) => train::report(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Completions(args) => completions::run(&args),
        Command::RenderTemplate => chat::serve_template(),
    }
}

/// What `work` returns, or, where a GPU failed in it, what the GPU said: operations have no error results, and end with a panic then.
fn or_device_failure(work: impl FnOnce() -> Result<ExitCode, Failure>) -> Result<ExitCode, Failure> {
    // Ranks that run in threads, or under MPI, say it for themselves.
    moeworks_comm::describe_panics_by(|payload| payload.downcast_ref::<GpuError>().map(ToString::to_string));
    let usual = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        if !info.payload().is::<GpuError>() {
            usual(info);
        }
    }));
    panic::catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|payload| match payload.downcast::<GpuError>() {
        Ok(error) => Err(Failure::from(*error)),
        Err(payload) => panic::resume_unwind(payload),
    })
}
