//! Time of the processor, which other programs on a machine change far less than they change the time that passes.

/// Seconds that the threads of this process have computed; NaN where the system does not say.
#[cfg(unix)]
pub(crate) fn seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

#[cfg(not(unix))]
pub(crate) fn seconds() -> f64 {
    f64::NAN
}
