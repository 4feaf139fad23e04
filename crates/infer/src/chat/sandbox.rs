//! Rendering of chat templates in a process with limited memory and time.
//!
//! A template comes with a model of any origin. The engine counts its steps, but its variables can double in size
//! with each step. Each rendering therefore runs in a new process with a memory limit of its own, which is ended if
//! it takes too long. As a rule the process is the program itself, with an argument that makes it call [`serve`].

use std::ffi::OsString;
use std::io::{self, Read, Write as _, stdin, stdout};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::{ChatError, ChatTemplate, Message, RenderOptions};

/// The memory of the process, including the program itself.
const MAX_MEMORY: u64 = 1 << 30;
/// The longest time of a rendering.
const MAX_TIME: Duration = Duration::from_secs(10);
/// The interval between two checks whether the process has ended.
const POLL: Duration = Duration::from_millis(1);
/// The exit code of a process whose template failed.
const REFUSED: i32 = 2;

/// An error of rendering a template in a process.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// The process cannot be started.
    #[error("cannot start a process for the chat template: {0}")]
    Start(#[source] io::Error),
    /// The process was stopped, or ended by itself.
    #[error("the chat template was stopped: {why}")]
    Stopped {
        /// The limit that it exceeded.
        why: String,
    },
    /// The template failed, as reported by the process.
    #[error("{message}")]
    Refused {
        /// The reason.
        message: String,
    },
    /// The template failed, in the process itself.
    #[error(transparent)]
    Template(#[from] ChatError),
    /// A request or a text could not be passed between the processes.
    #[error("{stream}: {source}")]
    Stream {
        /// The stream's name.
        stream: &'static str,
        /// The reason.
        #[source]
        source: io::Error,
    },
}

/// A request to the process: a template, and the messages to render.
#[derive(Serialize, Deserialize)]
struct Request {
    template: ChatTemplate,
    messages: Vec<Message>,
    options: RenderOptions,
}

/// A program that renders templates. Started with the arguments, it calls [`serve`]; on an error it writes `error:
/// MESSAGE` to standard error and ends with exit code 2.
#[derive(Clone, Debug)]
pub struct Sandbox {
    program: PathBuf,
    arguments: Vec<OsString>,
}

impl Sandbox {
    /// Makes a sandbox of a program with these arguments.
    pub fn new(program: impl Into<PathBuf>, arguments: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        Self { program: program.into(), arguments: arguments.into_iter().map(Into::into).collect() }
    }

    /// Renders a conversation in a new process.
    ///
    /// # Errors
    /// Fails if the process cannot be started, exceeds a limit, or reports that the template fails.
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
        // Ctrl-C is meant for the answer, but a terminal sends it to the whole process group.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        command
    }
}

fn stopped(why: String) -> SandboxError {
    SandboxError::Stopped { why }
}

/// Sends the request and reads all output; `None` if the process had to be ended.
fn converse(child: &mut Child, request: Vec<u8>) -> Option<Output> {
    let (to, from, errors) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    thread::scope(|scope| {
        // A process that ended early does not read the request; its output tells why.
        scope.spawn(move || to.map(|mut to| to.write_all(&request)));
        let stdout = scope.spawn(move || read(from));
        let stderr = scope.spawn(move || read(errors));
        let status = wait(child)?;
        Some(Output { status, stdout: stdout.join().unwrap_or_default(), stderr: stderr.join().unwrap_or_default() })
    })
}

/// Reads a stream to its end. On an error the rest is missing, and the exit code tells that something went wrong.
fn read(from: Option<impl Read>) -> Vec<u8> {
    let mut bytes = Vec::new();
    let _ = from.map(|mut from| from.read_to_end(&mut bytes));
    bytes
}

/// Waits for the process to end; `None` if it had to be ended.
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
/// to standard output. The process should end afterwards.
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
        // If the system has no such limit, steps, text and time are still limited.
        let _ = setrlimit(Resource::As, limit(MAX_MEMORY));
        // A process that exceeds the limit leaves no core dump.
        let _ = setrlimit(Resource::Core, limit(0));
    }
}
