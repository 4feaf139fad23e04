//! Chat templates carried out in a process of limited memory and time.
//!
//! A template comes with a model, from anywhere. The engine counts its steps, but what it keeps in variables can double with
//! each of them. So the program starts itself once more for each rendering, with a limit on memory that only that process
//! feels, and ends it if it takes too long.

use std::io::{Read, Write as _, stdin, stdout};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use moeworks_model::chat::{ChatTemplate, Message};
use serde::{Deserialize, Serialize};

use crate::failure::Failure;

/// Memory of the process, the program itself included.
const MAX_MEMORY: u64 = 1 << 30;
/// The longest that a rendering takes.
const MAX_TIME: Duration = Duration::from_secs(10);
/// How often the process is asked whether it has ended.
const POLL: Duration = Duration::from_millis(1);

#[derive(Serialize, Deserialize)]
struct Request {
    template: ChatTemplate,
    messages: Vec<Message>,
}

/// The text of a conversation, with the beginning of an answer behind.
pub(super) fn render(template: &ChatTemplate, messages: &[Message]) -> Result<String, Failure> {
    let request = Request { template: template.clone(), messages: messages.to_vec() };
    let request = serde_json::to_vec(&request)?;
    let cannot =
        |error: std::io::Error| Failure::input(format!("cannot start a process for the chat template: {error}"));
    let mut command = Command::new(std::env::current_exe().map_err(cannot)?);
    command.arg("render-template").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // Ctrl-C is for the answer: a terminal sends it to a whole group of processes.
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let mut child = command.spawn().map_err(cannot)?;
    let (mut to, from, errors) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let (text, message, status) = thread::scope(|scope| {
        // A process that has ended early does not read: what it said tells why.
        scope.spawn(move || to.take().map(|mut to| to.write_all(&request)));
        let text = scope.spawn(move || read(from));
        let message = scope.spawn(move || read(errors));
        let status = wait(&mut child);
        (text.join().unwrap_or_default(), message.join().unwrap_or_default(), status)
    });
    match status {
        None => Err(stopped(&format!("it takes more than {} seconds", MAX_TIME.as_secs()))),
        Some(status) if status.success() => Ok(text),
        Some(status) if status.code() == Some(2) => {
            Err(Failure::input(message.trim().strip_prefix("error: ").unwrap_or(message.trim())))
        }
        Some(_) => Err(stopped(&format!("it takes more than {} MiB of memory, or has no end", MAX_MEMORY >> 20))),
    }
}

fn stopped(why: &str) -> Failure {
    Failure::input(format!("the chat template was stopped: {why}"))
}

fn read(from: Option<impl Read>) -> String {
    let mut bytes = Vec::new();
    // What cannot be read is missing; the exit code says that something went wrong.
    let _ = from.map(|mut from| from.read_to_end(&mut bytes));
    String::from_utf8_lossy(&bytes).into_owned()
}

/// How the process ended; none if it had to be ended.
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

/// The other side: reads a request from standard input and prints the text.
pub(crate) fn serve() -> Result<ExitCode, Failure> {
    limit_memory();
    let mut request = Vec::new();
    stdin().read_to_end(&mut request).map_err(|error| Failure::input(format!("standard input: {error}")))?;
    let Request { template, messages } = serde_json::from_slice(&request)?;
    let text = template.render(&messages, true)?;
    stdout().write_all(text.as_bytes()).map_err(|error| Failure::input(format!("standard output: {error}")))?;
    Ok(ExitCode::SUCCESS)
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
