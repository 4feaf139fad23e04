//! The process around a call, and the call itself.

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
    bench, chat, completions, convert, doctor, estimate, evaluate, generate, inspect, plan, ranks, routing, serve,
    simulate, study, train,
};

/// The exit code where the arguments are wrong.
const REFUSED: u8 = 2;
/// The exit code of a call that ended by a panic, as of a program of Rust.
const PANICKED: u8 = 101;

/// One call at a time: standard output, standard error and the log are the process's.
static TURN: Mutex<()> = Mutex::new(());

/// The process that calls commands: what it lends them. By default it lends nothing, and a command does no more to it
/// than to print.
#[derive(Clone, Debug, Default)]
pub struct Host {
    /// Set where the process watches for signals.
    interrupts: Option<Interrupts>,
    /// Ends the process.
    end: Option<fn(u8)>,
    /// Whether the process has no standard output.
    is_output_closed: bool,
    /// The program that carries chat templates out; none for that of the process itself.
    sandbox: Option<Sandbox>,
}

/// A call of a command, as the command sees it.
pub(crate) struct Call<'a> {
    /// The process around it.
    host: &'a Host,
    /// The command line, the program's name first.
    words: &'a [OsString],
    interrupts: Interrupts,
}

impl Host {
    /// Lends the signals that the process watches for.
    #[must_use]
    pub fn with_interrupts(self, interrupts: Interrupts) -> Self {
        Self { interrupts: Some(interrupts), ..self }
    }

    /// Lends a way to end the process, which is used for one thing: where a rank, a thread of the process, hangs
    /// after others have failed. No thread can be ended from outside; without this the call waits for it.
    #[must_use]
    pub fn with_end(self, end: fn(u8)) -> Self {
        Self { end: Some(end), ..self }
    }

    /// Says that the process was started without a standard output, so that printing is an error.
    #[must_use]
    pub fn with_closed_output(self, is_output_closed: bool) -> Self {
        Self { is_output_closed, ..self }
    }

    /// Names the program that carries chat templates out. Otherwise it is the program of the process, called with
    /// `render-template`: one whose `main` hands its arguments to [`Host::run`].
    #[must_use]
    pub fn with_sandbox(self, sandbox: Sandbox) -> Self {
        Self { sandbox: Some(sandbox), ..self }
    }

    /// Runs the command that `args` names, the program's name first, and returns its exit code. It may be called
    /// again and again; calls from several threads take turns.
    ///
    /// It does not end the process and does not panic. There is one exception, which is MPI's: where a launcher has
    /// started the process beside others that train, a rank that fails ends them all.
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

    /// Says what is wrong with the arguments, or what was asked about them.
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
            Command::Generate(args) => generate::run(&args),
            Command::Chat(args) => chat::run(&args, self),
            Command::Serve(args) => serve::run(&args, self),
            Command::Evaluate(args) => evaluate::run(&args),
            Command::Inspect(args) => inspect::run(&args),
            Command::Estimate(args) => estimate::run(&args),
            Command::Plan(args) => plan::run(&args),
            Command::Simulate(args) => simulate::run(&args),
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

    /// The command line, the program's name first.
    pub(crate) fn words(&self) -> &[OsString] {
        self.words
    }

    /// The signals of the call.
    pub(crate) fn interrupts(&self) -> &Interrupts {
        &self.interrupts
    }

    /// Gives signals to a run until the result is dropped; where the process watches for signals, SIGUSR1 asks for a
    /// checkpoint.
    pub(crate) fn give_signals_to(&self, requests: &Requests) -> Result<Receiving<'_>, Failure> {
        let receiving = self.interrupts.give_to_run(requests);
        if self.host.interrupts.is_some() { receiving.saving_on_usr1(requests) } else { Ok(receiving) }
    }

    /// The way to end the process, if there is one.
    pub(crate) fn end(&self) -> Option<fn(u8)> {
        self.host.end
    }

    /// The program that carries chat templates out.
    pub(crate) fn sandbox(&self) -> Result<Sandbox, Failure> {
        if let Some(sandbox) = &self.host.sandbox {
            return Ok(sandbox.clone());
        }
        let program = std::env::current_exe()
            .map_err(|error| Failure::input(format!("cannot start a process for the chat template: {error}")))?;
        Ok(Sandbox::new(program, ["render-template"]))
    }
}

/// Returns the exit code of `work`, also where it ended by a panic.
fn caught(work: impl FnOnce() -> ExitCode) -> u8 {
    let payload = match panic::catch_unwind(AssertUnwindSafe(work)) {
        Ok(code) => return code.number(),
        Err(payload) => payload,
    };
    // The message was printed where the panic began.
    payload.downcast_ref::<OutputGone>().map_or(PANICKED, |gone| gone.code)
}

/// Returns what `work` returns, or, where a GPU failed in it, the GPU's error: operations have no error results, and
/// end with a panic then.
fn or_device_failure(work: impl FnOnce() -> Result<ExitCode, Failure>) -> Result<ExitCode, Failure> {
    panic::catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|payload| match payload.downcast::<GpuError>() {
        Ok(error) => Err(Failure::from(*error)),
        Err(payload) => panic::resume_unwind(payload),
    })
}

/// Makes panics with an error of a GPU print nothing of their own, once and for all: they are said as errors. Ranks
/// that run in threads, or under MPI, say them for themselves.
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
