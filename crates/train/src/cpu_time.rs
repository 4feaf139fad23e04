//! CPU time, which other programs on a machine change far less than they change the time that passes.

/// Returns the CPU seconds of all threads of this process; NaN where the system does not say.
#[cfg(unix)]
pub(crate) fn seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

#[cfg(not(unix))]
pub(crate) fn seconds() -> f64 {
    f64::NAN
}
