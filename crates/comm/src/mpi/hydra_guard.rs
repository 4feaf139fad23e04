//! A process beside each rank, under MPICH's launcher (Hydra).
//!
//! That launcher ends all ranks within a millisecond when the pipes that it has to one of them close, and then says
//! the number of a process, not the rank. The process beside holds the same pipes, and lets go of them only some time
//! after a rank has ended in the middle of its run: until then the other ranks, which learn of it from the system,
//! have said which it was.

use std::env;
use std::io::{self, PipeWriter, Write as _};
use std::os::fd::AsRawFd as _;

/// How long it holds on to a rank that is gone: longer than it takes the others to say so.
const HOLD_MS: i32 = 3000;

/// What Hydra tells the processes that it starts.
const HYDRA_VARIABLE: &str = "HYDI_CONTROL_FD";

/// Tells the process beside that the run has ended as it should.
pub(crate) struct HydraGuard {
    goodbye: PipeWriter,
}

impl HydraGuard {
    /// Starts the process where it is of use. To be called before MPI is initialised, which makes forking a delicate
    /// matter.
    pub(crate) fn start() -> Option<Self> {
        env::var_os(HYDRA_VARIABLE)?;
        let guard = Self::fork();
        guard.inspect_err(|error| tracing::info!("no process that outlives this one: {error}")).ok()
    }

    fn fork() -> io::Result<Self> {
        let (listen, goodbye) = io::pipe()?;
        // SAFETY: the child calls nothing but what a signal handler may call, whatever other threads held when it was
        // made.
        match unsafe { libc::fork() } {
            -1 => Err(io::Error::last_os_error()),
            // SAFETY: as above; these are the pipe's two ends.
            0 => unsafe { run_guard(listen.as_raw_fd(), goodbye.as_raw_fd()) },
            _ => Ok(Self { goodbye }),
        }
    }

    pub(crate) fn end(&self) {
        // Where it is gone there is nobody to tell.
        let _ = (&self.goodbye).write(&[1]);
    }
}

/// The life of the process: it waits until the rank says goodbye or is gone without.
///
/// # Safety
/// To be called in a new process with the ends of a pipe, of which the rank alone has the other `goodbye`.
unsafe fn run_guard(listen: i32, goodbye: i32) -> ! {
    let mut byte = 0_u8;
    // SAFETY: calls that are allowed after a fork; `byte` is valid for writing.
    unsafe {
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
            libc::signal(signal, libc::SIG_DFL);
        }
        libc::signal(libc::SIGUSR1, libc::SIG_IGN);
        libc::close(goodbye);
        if libc::read(listen, (&raw mut byte).cast(), 1) != 1 {
            libc::poll(std::ptr::null_mut(), 0, HOLD_MS);
        }
        libc::_exit(0)
    }
}
