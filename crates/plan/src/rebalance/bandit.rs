//! A bandit that chooses among policies by measured times, and follows when they change.
//!
//! Discounted UCB (Garivier & Moulines, 0805.3415) for times, of which the smallest is best: older observations
//! count less, each arm has a lower bound of its time, and the arm with the lowest bound is chosen. The width of the
//! bound is in units of how far observations lie from their arms' means, so that no scale of times has to be known.
//! There is no chance in it: ranks that observe the same choose the same.

/// The weight of an observation after one more was made.
const DISCOUNT: f64 = 0.9;

/// The observations of one arm, discounted.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Arm {
    weight: f64,
    sum: f64,
    sum_of_squares: f64,
}

impl Arm {
    fn mean(&self) -> f64 {
        self.sum / self.weight
    }
}

/// A bandit of some arms, which are known by their numbers.
///
/// ```
/// let mut bandit = moeworks_plan::Bandit::new(2);
/// assert_eq!(bandit.choose(), 0);
/// bandit.observe(0, 1.0);
/// assert_eq!(bandit.choose(), 1, "each arm is tried once");
/// bandit.observe(1, 2.0);
/// assert_eq!(bandit.choose(), 0, "it was faster");
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Bandit {
    arms: Vec<Arm>,
}

impl Bandit {
    /// Creates a bandit of `num_arms` arms, at least one, of which none was tried.
    #[must_use]
    pub fn new(num_arms: usize) -> Self {
        assert!(num_arms > 0, "a bandit needs an arm");
        Self { arms: vec![Arm::default(); num_arms] }
    }

    /// Returns the arm to try next: the first that was never tried, or else that with the lowest bound of its time.
    #[must_use]
    pub fn choose(&self) -> usize {
        if let Some(untried) = self.arms.iter().position(|arm| arm.weight == 0.0) {
            return untried;
        }
        let bounds: Vec<f64> = self.arms.iter().map(|arm| self.bound(arm)).collect();
        (0..bounds.len()).min_by(|&a, &b| bounds[a].total_cmp(&bounds[b])).unwrap_or(0)
    }

    /// Adds an observation of `arm`: its time in seconds. One that is not finite is left out.
    pub fn observe(&mut self, arm: usize, seconds: f64) {
        if !seconds.is_finite() {
            return;
        }
        for arm in &mut self.arms {
            arm.weight *= DISCOUNT;
            arm.sum *= DISCOUNT;
            arm.sum_of_squares *= DISCOUNT;
        }
        let arm = &mut self.arms[arm];
        arm.weight += 1.0;
        arm.sum += seconds;
        arm.sum_of_squares += seconds * seconds;
    }

    /// Returns the mean time of `arm` with recent observations counting more; none if it was never tried.
    #[must_use]
    pub fn mean(&self, arm: usize) -> Option<f64> {
        Some(&self.arms[arm]).filter(|arm| arm.weight > 0.0).map(Arm::mean)
    }

    /// Returns the lower bound of an arm's time.
    fn bound(&self, arm: &Arm) -> f64 {
        let total: f64 = self.arms.iter().map(|arm| arm.weight).sum();
        arm.mean() - self.spread() * (2.0 * total.max(1.0).ln() / arm.weight).sqrt()
    }

    /// Returns the standard deviation of observations from the means of their arms.
    fn spread(&self) -> f64 {
        let total: f64 = self.arms.iter().map(|arm| arm.weight).sum();
        let squares = |arm: &Arm| arm.sum_of_squares - arm.sum * arm.sum / arm.weight;
        (self.arms.iter().map(squares).sum::<f64>().max(0.0) / total).sqrt()
    }
}
