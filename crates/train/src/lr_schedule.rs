//! The learning rate as a pure function of the step.

/// The course of the learning rate after the linear warm-up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Decay {
    /// Half a cosine down to the minimum at the last step (Loshchilov & Hutter, 1608.03983, without restarts).
    Cosine,
    /// Warm-up, stable, decay (MiniCPM, 2404.06395): constant, then linear to the minimum over the last
    /// `decay_steps`.
    Wsd {
        /// Steps of the final decay.
        decay_steps: u64,
    },
    /// Constant to the end.
    Constant,
}

/// A learning-rate schedule over `total_steps` optimizer steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LrSchedule {
    /// The highest rate.
    pub peak: f64,
    /// The last rate as a share of the highest.
    pub min_ratio: f64,
    /// Steps of the linear warm-up; its first step already has rate `peak / warmup_steps`.
    pub warmup_steps: u64,
    /// All steps of the run.
    pub total_steps: u64,
    /// The course after the warm-up.
    pub decay: Decay,
}

impl LrSchedule {
    /// Returns the learning rate of optimizer step `step`, counted from 0.
    #[must_use]
    pub fn at(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            return self.peak * (step + 1) as f64 / self.warmup_steps as f64;
        }
        let ratio = match self.decay {
            Decay::Constant => 1.0,
            Decay::Cosine => {
                let share = progress(step, self.warmup_steps, self.total_steps);
                self.min_ratio + (1.0 - self.min_ratio) * 0.5 * (1.0 + (std::f64::consts::PI * share).cos())
            }
            Decay::Wsd { decay_steps } => {
                let start = self.total_steps.saturating_sub(decay_steps).max(self.warmup_steps);
                1.0 - (1.0 - self.min_ratio) * progress(step, start, self.total_steps)
            }
        };
        self.peak * ratio
    }
}

/// Returns the relative position of `step` between `start` (0) and the last step before `end` (1).
fn progress(step: u64, start: u64, end: u64) -> f64 {
    let last = end.saturating_sub(1).max(start);
    if step <= start {
        return 0.0;
    }
    (step.min(last) - start) as f64 / (last - start).max(1) as f64
}

#[cfg(test)]
#[path = "lr_schedule_tests.rs"]
mod tests;
