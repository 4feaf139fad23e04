//! Chat templates carried out in a process of limited memory and time.
//!
//! A template comes with a model, from anywhere. The engine counts its steps, but what it keeps in variables can
//! double with each of them. So a program is started for each rendering, with a limit on memory that only that
//! process feels, and ended if it takes too long. As a rule it is the program itself, with an argument that makes it
//! call [`serve`].

use std::ffi::OsString;
use std::io::{self, Read, Write as _, stdin, stdout};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::{ChatError, ChatTemplate, Message, RenderOptions};

/// Memory of the process, the program itself included.
const MAX_MEMORY: u64 = 1 << 30;
/// The longest that a rendering takes.
const MAX_TIME: Duration = Duration::from_secs(10);
/// The time between two looks at whether the process has ended.
const POLL: Duration = Duration::from_millis(1);
/// The exit code of a process in which a template failed.
const REFUSED: i32 = 2;

/// An error of carrying a template out in a process.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// The process cannot be started.
    #[error("cannot start a process for the chat template: {0}")]
    Start(#[source] io::Error),
    /// The process was stopped, or ended by itself.
    #[error("the chat template was stopped: {why}")]
    Stopped {
        /// The limit that it ran into.
        why: String,
    },
    /// The template fails, as the process said.
    #[error("{message}")]
    Refused {
        /// The reason.
        message: String,
    },
    /// The template fails, in the process itself.
    #[error(transparent)]
    Template(#[from] ChatError),
    /// A request or a text cannot be passed between the processes.
    #[error("{stream}: {source}")]
    Stream {
        /// The stream's name.
        stream: &'static str,
        /// The reason.
        #[source]
        source: io::Error,
    },
}

/// A request to the process: a template with the messages to render.
#[derive(Serialize, Deserialize)]
struct Request {
    template: ChatTemplate,
    messages: Vec<Message>,
    options: RenderOptions,
}

/// A program that carries templates out: started with the arguments, it calls [`serve`], says an error as `error:
/// MESSAGE` on standard error, and ends with exit code 2 then.
#[derive(Clone, Debug)]
pub struct Sandbox {
    program: PathBuf,
    arguments: Vec<OsString>,
}

impl Sandbox {
    /// A sandbox of this program with these arguments.
    pub fn new(program: impl Into<PathBuf>, arguments: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        Self { program: program.into(), arguments: arguments.into_iter().map(Into::into).collect() }
    }

    /// Renders a conversation in a process of its own.
    ///
    /// # Errors
    /// If the process cannot be started, runs into a limit, or says that the template fails.
    pub fn render(
        &self,
        template: &ChatTemplate,
        messages: &[Message],
        options: &RenderOptions,
    ) -> Result<String, SandboxError> {
        let request = Request { template: template.clone(), messages: messages.to_vec(), options: options.clone() };
        let request = serde_json::to_vec(&request).map_err(|error| SandboxError::Start(error.into()))?;
        let mut child = self.command().spawn().map_err(SandboxError::Start)?;
        let Some(Output { status, stdout, stderr }) = converse(&mut child, request) else {
            return Err(stopped(format!("it takes more than {} seconds", MAX_TIME.as_secs())));
        };
        if status.success() {
            return Ok(String::from_utf8_lossy(&stdout).into_owned());
        }
        if status.code() == Some(REFUSED) {
            let message = String::from_utf8_lossy(&stderr);
            let message = message.trim().strip_prefix("error: ").unwrap_or(message.trim()).to_owned();
            return Err(SandboxError::Refused { message });
        }
        Err(stopped(format!("it takes more than {} MiB of memory, or has no end", MAX_MEMORY >> 20)))
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.args(&self.arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // Ctrl-C is for the answer: a terminal sends it to a whole group of processes.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        command
    }
}

fn stopped(why: String) -> SandboxError {
    SandboxError::Stopped { why }
}

/// Gives the process a request and takes all that it says; none if it had to be ended.
fn converse(child: &mut Child, request: Vec<u8>) -> Option<Output> {
    let (to, from, errors) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    thread::scope(|scope| {
        // A process that has ended early does not read: what it said tells why.
        scope.spawn(move || to.map(|mut to| to.write_all(&request)));
        let stdout = scope.spawn(move || read(from));
        let stderr = scope.spawn(move || read(errors));
        let status = wait(child)?;
        Some(Output { status, stdout: stdout.join().unwrap_or_default(), stderr: stderr.join().unwrap_or_default() })
    })
}

/// Reads a stream to its end. What cannot be read is missing; the exit code says that something went wrong.
fn read(from: Option<impl Read>) -> Vec<u8> {
    let mut bytes = Vec::new();
    let _ = from.map(|mut from| from.read_to_end(&mut bytes));
    bytes
}

/// Waits for the process to end; none if it had to be ended.
fn wait(child: &mut Child) -> Option<ExitStatus> {
    let start = Instant::now();
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Some(status),
            Ok(None) if start.elapsed() < MAX_TIME => thread::sleep(POLL),
            _ => {
                let _ = child.kill();
                let _ = child.wait();
                return None;
            }
        }
    }
}

/// Serves a [`Sandbox`]: limits the memory of this process, reads a request from standard input and writes the text
/// to standard output. The process is to end afterwards.
pub fn serve() -> Result<(), SandboxError> {
    limit_memory();
    let failed = |stream| move |source| SandboxError::Stream { stream, source };
    let mut request = Vec::new();
    stdin().read_to_end(&mut request).map_err(failed("standard input"))?;
    let request = serde_json::from_slice(&request).map_err(|error| failed("standard input")(error.into()))?;
    let Request { template, messages, options } = request;
    let text = template.render(&messages, &options)?;
    let mut to = stdout();
    to.write_all(text.as_bytes()).and_then(|()| to.flush()).map_err(failed("standard output"))
}

fn limit_memory() {
    #[cfg(unix)]
    {
        use rustix::process::{Resource, Rlimit, setrlimit};
        let limit = |bytes| Rlimit { current: Some(bytes), maximum: Some(bytes) };
        // Where a system has no such limit, steps, text and time are limited still.
        let _ = setrlimit(Resource::As, limit(MAX_MEMORY));
        // A process that ran into the limit leaves no copy of itself behind.
        let _ = setrlimit(Resource::Core, limit(0));
    }
}
