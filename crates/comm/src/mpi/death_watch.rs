//! Detection of processes of this node that end.

use std::time::Duration;

/// The processes of a node, watched through pidfds on Linux.
pub(crate) struct DeathWatch {
    #[cfg(target_os = "linux")]
    processes: Vec<(usize, std::os::fd::OwnedFd)>,
}

#[cfg(target_os = "linux")]
impl DeathWatch {
    /// Watches the processes with these ids. One that cannot be opened is not watched.
    pub(crate) fn new(pids: &[usize]) -> Self {
        use std::os::fd::{FromRawFd as _, OwnedFd};
        let open = |(index, &pid): (usize, &usize)| {
            // SAFETY: the call takes two numbers and gives a new descriptor or an error.
            let descriptor = unsafe { libc::syscall(libc::SYS_pidfd_open, pid as libc::pid_t, 0) };
            // SAFETY: the descriptor is new, and this is its only owner.
            (descriptor >= 0).then(|| (index, unsafe { OwnedFd::from_raw_fd(descriptor as i32) }))
        };
        Self { processes: pids.iter().enumerate().filter_map(open).collect() }
    }

    /// Waits for `tick`, or until one of the processes has ended, and returns the index of that one.
    pub(crate) fn wait(&mut self, tick: Duration) -> Option<usize> {
        use std::os::fd::AsRawFd as _;
        let entry = |fd: &std::os::fd::OwnedFd| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let mut entries: Vec<libc::pollfd> = self.processes.iter().map(|(_, fd)| entry(fd)).collect();
        // SAFETY: as many entries as are said, of open descriptors.
        let num_ended =
            unsafe { libc::poll(entries.as_mut_ptr(), entries.len() as libc::nfds_t, tick.as_millis() as i32) };
        if num_ended <= 0 {
            return None;
        }
        let ended = entries.iter().position(|entry| entry.revents != 0)?;
        Some(self.processes.remove(ended).0)
    }
}

#[cfg(not(target_os = "linux"))]
impl DeathWatch {
    /// Watches nothing: on other systems only the launcher notices that a process ended.
    pub(crate) fn new(_pids: &[usize]) -> Self {
        Self {}
    }

    pub(crate) fn wait(&mut self, tick: Duration) -> Option<usize> {
        std::thread::sleep(tick);
        None
    }
}
