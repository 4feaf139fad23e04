//! How long a rank has waited for others, by a clock that stands still while its process does.

use std::time::{Duration, Instant};

/// What lies between two looks counts no more than this: who looks far more often and finds more has been stopped
/// meanwhile, as by Ctrl-Z or a scheduler that suspends a job, and so were perhaps those that it waits for.
const MOST: Duration = Duration::from_secs(1);

/// The time that a rank has waited.
pub(crate) struct Patience {
    looked: Instant,
    waited: Duration,
}

impl Patience {
    /// From now on.
    pub(crate) fn new() -> Self {
        Self { looked: Instant::now(), waited: Duration::ZERO }
    }

    /// The time until now. To be called several times a second.
    pub(crate) fn look(&mut self) -> Duration {
        self.look_at(Instant::now())
    }

    fn look_at(&mut self, now: Instant) -> Duration {
        self.waited += now.duration_since(self.looked).min(MOST);
        self.looked = now;
        self.waited
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_in_which_nobody_looked_does_not_count() {
        let mut patience = Patience::new();
        let start = patience.looked;
        let look = |patience: &mut Patience, seconds| patience.look_at(start + Duration::from_secs_f64(seconds));
        assert_eq!(look(&mut patience, 0.5), Duration::from_millis(500));
        assert_eq!(look(&mut patience, 3600.5), Duration::from_millis(1500));
        assert_eq!(look(&mut patience, 3600.75), Duration::from_millis(1750));
    }
}
