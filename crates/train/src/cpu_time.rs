//! CPU time, which other programs on a machine affect far less than wall-clock time.

/// Returns the CPU seconds of all threads of this process; NaN if the system does not report them.
#[cfg(unix)]
pub(crate) fn seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

#[cfg(not(unix))]
pub(crate) fn seconds() -> f64 {
    f64::NAN
}
