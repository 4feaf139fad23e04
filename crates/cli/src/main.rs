//! The `moeworks` program: runs the library's commands in a process.

mod signals;

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

use moeworks::{Host, Interrupts};

/// True if the program was started without a standard output. The standard library opens `/dev/null` in its place
/// before `main`.
static WAS_CLOSED: AtomicBool = AtomicBool::new(false);

#[cfg(unix)]
ctor::declarative::ctor! {
    /// Runs before `main`, and before the standard library checks its streams.
    #[ctor(unsafe)]
    fn note_closed_output() {
        let is_closed = rustix::io::fcntl_getfd(rustix::stdio::stdout()).is_err();
        WAS_CLOSED.store(is_closed, Ordering::Relaxed);
    }
}

fn main() -> ExitCode {
    let interrupts = Interrupts::default();
    signals::watch(interrupts.clone());
    let host = Host::default()
        .with_interrupts(interrupts)
        .with_end(|code| std::process::exit(i32::from(code)))
        .with_closed_output(WAS_CLOSED.load(Ordering::Relaxed));
    ExitCode::from(host.run(std::env::args_os()))
}
