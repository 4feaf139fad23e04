//! A timer of waiting that stands still while the process is stopped.

use std::time::{Duration, Instant};

/// The most that one interval between two ticks counts. A longer one means that the process was stopped, as by Ctrl-Z
/// or a scheduler that suspends a job, and then the ranks it waits for perhaps were too.
const MAX_GAP: Duration = Duration::from_secs(1);

/// The time that a rank has waited.
pub(crate) struct WaitTimer {
    last_tick: Instant,
    waited: Duration,
}

impl WaitTimer {
    /// Starts a timer.
    pub(crate) fn new() -> Self {
        Self { last_tick: Instant::now(), waited: Duration::ZERO }
    }

    /// Adds the time since the last call and returns the total. Call it several times a second.
    pub(crate) fn tick(&mut self) -> Duration {
        self.tick_at(Instant::now())
    }

    fn tick_at(&mut self, now: Instant) -> Duration {
        self.waited += now.duration_since(self.last_tick).min(MAX_GAP);
        self.last_tick = now;
        self.waited
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_in_which_nobody_looked_does_not_count() {
        let mut timer = WaitTimer::new();
        let start = timer.last_tick;
        let tick = |timer: &mut WaitTimer, seconds| timer.tick_at(start + Duration::from_secs_f64(seconds));
        assert_eq!(tick(&mut timer, 0.5), Duration::from_millis(500));
        assert_eq!(tick(&mut timer, 3600.5), Duration::from_millis(1500));
        assert_eq!(tick(&mut timer, 3600.75), Duration::from_millis(1750));
    }
}
