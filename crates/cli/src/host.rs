//! The process around a call of a command, and the call itself.

use std::ffi::OsString;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Mutex, Once, PoisonError};

use clap::error::ErrorKind;
use moeworks_gpu::GpuError;
use moeworks_infer::chat::Sandbox;
use moeworks_train::Requests;

use crate::args::{self, Command, OneLine};
use crate::exit_code::ExitCode;
use crate::failure::{Failure, say_error};
use crate::interrupts::{Interrupts, Receiving};
use crate::log::Log;
use crate::output::{self, OutputGone};
use crate::{
    advise, balance, bench, chat, check, completions, convert, doctor, estimate, evaluate, gateway, generate, inspect,
    plan, ranks, routing, serve, simulate, study, train,
};

/// The exit code for invalid arguments.
const REFUSED: u8 = 2;
/// The exit code of a call that panicked, as of any Rust program.
const PANICKED: u8 = 101;

/// Serializes calls, because standard output, standard error and the log belong to the process.
static TURN: Mutex<()> = Mutex::new(());

/// The resources that the calling process provides to commands. The default provides none, and a command then only
/// prints.
#[derive(Clone, Debug, Default)]
pub struct Host {
    /// The signals, if the process watches for them.
    interrupts: Option<Interrupts>,
    /// A function that ends the process.
    end: Option<fn(u8)>,
    /// True if the process has no standard output.
    is_output_closed: bool,
    /// The program that renders chat templates; `None` for the program of the process itself.
    sandbox: Option<Sandbox>,
}

/// A call of a command.
pub(crate) struct Call<'a> {
    /// The process around the call.
    host: &'a Host,
    /// The command line, starting with the program's name.
    words: &'a [OsString],
    interrupts: Interrupts,
}

impl Host {
    /// Provides the signals that the process watches for.
    #[must_use]
    pub fn with_interrupts(self, interrupts: Interrupts) -> Self {
        Self { interrupts: Some(interrupts), ..self }
    }

    /// Provides a function that ends the process. It is used in one case: a rank (a thread of the process) hangs
    /// after others have failed. A thread cannot be ended from outside, so that the call would otherwise wait for it.
    #[must_use]
    pub fn with_end(self, end: fn(u8)) -> Self {
        Self { end: Some(end), ..self }
    }

    /// Declares that the process was started without a standard output, so that printing is an error.
    #[must_use]
    pub fn with_closed_output(self, is_output_closed: bool) -> Self {
        Self { is_output_closed, ..self }
    }

    /// Names the program that renders chat templates. The default is the program of the process, called with
    /// `render-template`; this requires that its `main` passes its arguments to [`Host::run`].
    #[must_use]
    pub fn with_sandbox(self, sandbox: Sandbox) -> Self {
        Self { sandbox: Some(sandbox), ..self }
    }

    /// Runs the command in `args`, which start with the program's name, and returns its exit code. It can be called
    /// any number of times; calls from several threads run one after the other.
    ///
    /// It does not end the process and does not panic, with one exception caused by MPI: if a launcher has started
    /// the process together with others for a command, a rank that fails ends them all.
    pub fn run(&self, args: impl IntoIterator<Item = impl Into<OsString>>) -> u8 {
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let words: Vec<OsString> = args.into_iter().map(Into::into).collect();
        let call = Call { host: self, words: &words, interrupts: self.interrupts.clone().unwrap_or_default() };
        output::begin(self.is_output_closed);
        moeworks_model::hf::warn_again();
        describe_device_failures();
        let code = caught(|| call.code());
        output::end();
        code
    }
}

impl Call<'_> {
    fn code(&self) -> ExitCode {
        let cli = match args::parse(self.words.iter().cloned()) {
            Ok(cli) => cli,
            Err(error) => return self.refuse(&error),
        };
        output::set_quiet(cli.talk.quiet);
        let _log = Log::begin(cli.talk);
        match or_device_failure(|| self.carry_out(cli.command)) {
            Ok(code) => {
                output::flush();
                code
            }
            Err(Failure { message, code }) => {
                ranks::fail_together(self, &message);
                say_error(message);
                ExitCode::from(code)
            }
        }
    }

    /// Prints the error of an invalid command line, or the help or version that was requested.
    fn refuse(&self, error: &clap::Error) -> ExitCode {
        let code = ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(REFUSED));
        if !error.use_stderr() {
            print!("{}", error.render());
            output::flush();
            return code;
        }
        if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
            eprint!("{}", error.render());
            return code;
        }
        let OneLine { message, usage } = OneLine::new(error);
        ranks::fail_together(self, &message);
        say_error(if usage.is_empty() { message } else { format!("{message}\n\n{usage}") });
        ExitCode::from(REFUSED)
    }

    fn carry_out(&self, command: Command) -> Result<ExitCode, Failure> {
        match command {
            Command::Train(args) => train::run(args, self),
            Command::Generate(args) => generate::run(&args, self),
            Command::Chat(args) => chat::run(&args, self),
            Command::Serve(args) => serve::run(&args, self),
            Command::Gateway(args) => gateway::run(&args, self),
            Command::Evaluate(args) => evaluate::run(&args, self),
            Command::Inspect(args) => inspect::run(&args),
            Command::Estimate(args) => estimate::run(&args),
            Command::Plan(args) => plan::run(&args),
            Command::Advise(args) => advise::run(&args, self),
            Command::Balance(args) => balance::run(&args),
            Command::Simulate(args) => simulate::run(&args),
            Command::Check(args) => check::run(&args),
            Command::Routing(args) => routing::run(&args),
            Command::Study(args) => study::run(&args, self),
            Command::Upcycle(args) => convert::upcycle(&args),
            Command::Convert(args) => convert::run(&args),
            Command::Bench(args) => bench::run(&args),
            Command::Report(args) => train::report(&args),
            Command::Doctor(args) => doctor::run(&args),
            Command::Completions(args) => completions::run(&args),
            Command::RenderTemplate => chat::serve_template(),
        }
    }

    /// Returns the command line, starting with the program's name.
    pub(crate) fn words(&self) -> &[OsString] {
        self.words
    }

    /// Returns the signals of the call.
    pub(crate) fn interrupts(&self) -> &Interrupts {
        &self.interrupts
    }

    /// Directs signals to a run until the result is dropped. If the process watches for signals, SIGUSR1 requests a
    /// checkpoint.
    pub(crate) fn give_signals_to(&self, requests: &Requests) -> Result<Receiving<'_>, Failure> {
        let receiving = self.interrupts.give_to_run(requests);
        if self.host.interrupts.is_some() { receiving.saving_on_usr1(requests) } else { Ok(receiving) }
    }

    /// Returns the function that ends the process, if there is one.
    pub(crate) fn end(&self) -> Option<fn(u8)> {
        self.host.end
    }

    /// Returns the program that renders chat templates.
    pub(crate) fn sandbox(&self) -> Result<Sandbox, Failure> {
        if let Some(sandbox) = &self.host.sandbox {
            return Ok(sandbox.clone());
        }
        let program = std::env::current_exe()
            .map_err(|error| Failure::input(format!("cannot start a process for the chat template: {error}")))?;
        Ok(Sandbox::new(program, ["render-template"]))
    }
}

/// Returns the exit code of `work`, also if it panicked.
fn caught(work: impl FnOnce() -> ExitCode) -> u8 {
    let payload = match panic::catch_unwind(AssertUnwindSafe(work)) {
        Ok(code) => return code.number(),
        Err(payload) => payload,
    };
    // The message was printed when the panic started.
    payload.downcast_ref::<OutputGone>().map_or(PANICKED, |gone| gone.code)
}

/// Returns the result of `work`, or the GPU's error if a GPU failed. Operations do not return errors, and panic in
/// that case.
fn or_device_failure(work: impl FnOnce() -> Result<ExitCode, Failure>) -> Result<ExitCode, Failure> {
    panic::catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|payload| match payload.downcast::<GpuError>() {
        Ok(error) => Err(Failure::from(*error)),
        Err(payload) => panic::resume_unwind(payload),
    })
}

/// Installs a panic hook, once, that prints nothing for a GPU error: it is reported as an error instead. Ranks in
/// threads or under MPI report theirs themselves.
fn describe_device_failures() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        moeworks_comm::describe_panics_by(|payload| payload.downcast_ref::<GpuError>().map(ToString::to_string));
        let usual = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !info.payload().is::<GpuError>() {
                usual(info);
            }
        }));
    });
}
