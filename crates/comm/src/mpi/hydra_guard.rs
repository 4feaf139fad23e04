//! A guard process beside each rank under MPICH's launcher (Hydra).
//!
//! Hydra ends all ranks within a millisecond of one rank's pipes closing, and names only the process, not the rank.
//! The guard holds the same pipes, and releases them some time after its rank ended too early. Until then the other
//! ranks, which learn of it from the system, have reported which rank it was.

use std::env;
use std::io::{self, PipeWriter, Write as _};
use std::os::fd::AsRawFd as _;

/// The time that the guard holds the pipes of a rank that is gone: longer than the others take to report it.
const HOLD_MS: i32 = 3000;

/// The variable that Hydra sets for the processes that it starts.
const HYDRA_VARIABLE: &str = "HYDI_CONTROL_FD";

/// The end of the pipe that tells the guard when the run has ended as it should.
pub(crate) struct HydraGuard {
    goodbye: PipeWriter,
}

impl HydraGuard {
    /// Starts the guard under Hydra; `None` elsewhere. Call it before MPI is initialised, since forking is unsafe
    /// afterwards.
    pub(crate) fn start() -> Option<Self> {
        env::var_os(HYDRA_VARIABLE)?;
        let guard = Self::fork();
        guard.inspect_err(|error| tracing::info!("cannot start the guard process: {error}")).ok()
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
        // If the guard is gone there is nobody to tell.
        let _ = (&self.goodbye).write(&[1]);
    }
}

/// Runs the guard: waits until its rank writes to the pipe or ends without.
///
/// # Safety
/// It is called in a new process with the two ends of a pipe, and otherwise only the rank has the end `goodbye`.
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
