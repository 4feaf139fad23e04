//! Forecasts of the load of experts in the coming window of steps, or several, by several methods whose errors are
//! measured as windows come.
//!
//! Loads are compared as shares of all choices. The error of a forecast is `sum_e |forecast_e - share_e|`: the mean
//! over experts of the absolute error, in units of the mean share, and likewise the relative error of a share, each
//! expert weighed by its share. Even the true shares would have an error, because a window is a sample:
//! [`sampling_error`] is what multinomial counts have anyway.
//!
//! "Prediction Is All MoE Needs" (2404.16914) finds the moving average best once loads are stable. A method is chosen
//! here by its own error on the past windows, so that another one is taken where traffic changes.

use std::collections::VecDeque;

use super::loads::{BalanceError, check_loads};

/// The decay of measured errors from window to window.
const ERROR_DECAY: f64 = 0.95;
/// Seconds of a day.
const DAY_S: f64 = 86_400.0;

/// A way to foretell the coming window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ForecastMethod {
    /// The shares of the last window.
    LastValue,
    /// The mean of the last windows.
    MovingAverage,
    /// The straight line through the last windows, a window further.
    Trend,
    /// The mean of the last windows, and of the last one's deviation from it the part that was carried over from
    /// window to window so far (the lag-1 correlation, one for all experts).
    Transition,
    /// The mean of the earlier windows at this time of the day.
    TimeOfDay,
}

impl ForecastMethod {
    /// All methods.
    pub const ALL: [Self; 5] = [Self::LastValue, Self::MovingAverage, Self::Trend, Self::Transition, Self::TimeOfDay];

    /// Returns the name for people.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::LastValue => "last value",
            Self::MovingAverage => "moving average",
            Self::Trend => "trend",
            Self::Transition => "transition",
            Self::TimeOfDay => "time of day",
        }
    }
}

/// The settings of forecasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ForecastOptions {
    /// Windows that averages, trends and transitions look back on.
    pub num_windows: usize,
    /// Parts of a day with a mean of their own.
    pub day_parts: usize,
    /// Coming windows whose shares together are foretold.
    pub num_ahead: usize,
}

impl Default for ForecastOptions {
    fn default() -> Self {
        Self { num_windows: 10, day_parts: 24, num_ahead: 1 }
    }
}

/// The error of a method so far.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ForecastError {
    /// The method.
    pub method: ForecastMethod,
    /// Windows that it foretold.
    pub num_windows: usize,
    /// The mean error over all of these windows.
    pub mean: f64,
    /// The mean error in which the last windows count most; methods are chosen by it.
    pub recent: f64,
}

/// Forecasts of one layer's loads.
#[derive(Clone, Debug)]
pub struct LoadForecast {
    num_experts: usize,
    options: ForecastOptions,
    /// The shares of the last windows, oldest first.
    past: Vec<Vec<f64>>,
    day: Vec<DayPart>,
    /// Forecasts whose windows are not all over, oldest first.
    pending: VecDeque<PendingForecast>,
    errors: Vec<RunningError>,
    sampling: RunningError,
}

/// The forecasts of all methods for the same windows.
#[derive(Clone, Debug)]
struct PendingForecast {
    /// The shares by each method; none by a method that does not know enough.
    shares: Vec<Option<Vec<f64>>>,
    /// The loads of these windows so far.
    loads: Vec<f64>,
    /// The windows that are over.
    num_over: usize,
}

/// The mean of the windows in a part of the day.
#[derive(Clone, Debug, Default)]
struct DayPart {
    num_windows: usize,
    mean: Vec<f64>,
}

/// The mean of errors, and the one that forgets.
#[derive(Clone, Copy, Debug, Default)]
struct RunningError {
    count: usize,
    sum: f64,
    weighted: f64,
    weight: f64,
}

impl RunningError {
    fn add(&mut self, error: f64) {
        self.count += 1;
        self.sum += error;
        self.weighted = self.weighted * ERROR_DECAY + error;
        self.weight = self.weight * ERROR_DECAY + 1.0;
    }

    fn mean(&self) -> f64 {
        self.sum / self.count.max(1) as f64
    }
}

impl LoadForecast {
    /// Makes forecasts for `num_experts` experts that know no window yet.
    ///
    /// # Errors
    /// If a number is 0.
    pub fn new(num_experts: usize, options: ForecastOptions) -> Result<Self, BalanceError> {
        let ForecastOptions { num_windows, day_parts, num_ahead } = options;
        for (what, value) in [
            ("experts", num_experts),
            ("windows", num_windows),
            ("parts of a day", day_parts),
            ("windows ahead", num_ahead),
        ] {
            if value == 0 {
                return Err(BalanceError::Size { what, value, expected: "must be at least 1".to_owned() });
            }
        }
        let (day, errors) = (vec![DayPart::default(); day_parts], vec![RunningError::default(); 5]);
        let (past, pending, sampling) = (Vec::new(), VecDeque::new(), RunningError::default());
        Ok(Self { num_experts, options, past, day, pending, errors, sampling })
    }

    /// Takes in the loads of the next window, which began at `time_s` seconds since 1970, and measures the error of
    /// each method's forecast for it. A window without any load is passed over.
    ///
    /// # Errors
    /// If there is not one load for each expert, or one is negative or not finite.
    pub fn observe(&mut self, loads: &[f64], time_s: f64) -> Result<(), BalanceError> {
        check_loads(loads, self.num_experts)?;
        let total: f64 = loads.iter().sum();
        if total <= 0.0 || !total.is_finite() {
            return Ok(());
        }
        let shares: Vec<f64> = loads.iter().map(|load| load / total).collect();
        let forecasts = ForecastMethod::ALL.map(|method| self.predict(method, time_s));
        if forecasts.iter().any(Option::is_some) {
            let loads = vec![0.0; self.num_experts];
            self.pending.push_back(PendingForecast { shares: forecasts.to_vec(), loads, num_over: 0 });
        }
        self.compare(loads);
        let part = self.part_of_day(time_s);
        self.day[part].add(&shares);
        self.past.push(shares);
        if self.past.len() > self.options.num_windows {
            self.past.remove(0);
        }
        Ok(())
    }

    /// Adds the loads of a window to those of pending forecasts, and measures the errors of those that are over.
    fn compare(&mut self, loads: &[f64]) {
        for pending in &mut self.pending {
            pending.loads.iter_mut().zip(loads).for_each(|(sum, load)| *sum += load);
            pending.num_over += 1;
        }
        while self.pending.front().is_some_and(|pending| pending.num_over == self.options.num_ahead) {
            let Some(PendingForecast { shares: forecasts, loads, .. }) = self.pending.pop_front() else { break };
            let total: f64 = loads.iter().sum();
            let shares: Vec<f64> = loads.iter().map(|load| load / total).collect();
            for (error, forecast) in self.errors.iter_mut().zip(forecasts) {
                forecast.into_iter().for_each(|forecast| error.add(share_error(&forecast, &shares)));
            }
            self.sampling.add(sampling_error(&shares, total));
        }
    }

    /// Returns the shares that a method expects in the windows from `time_s` on; none before it knows enough: a
    /// window, two for a trend, three for transitions, one at this time of an earlier day.
    #[must_use]
    pub fn predict(&self, method: ForecastMethod, time_s: f64) -> Option<Vec<f64>> {
        let shares = match method {
            ForecastMethod::LastValue => self.past.last()?.clone(),
            ForecastMethod::MovingAverage => self.mean()?,
            ForecastMethod::Trend => self.trend()?,
            ForecastMethod::Transition => self.transition()?,
            ForecastMethod::TimeOfDay => {
                let part = &self.day[self.part_of_day(time_s)];
                (part.num_windows > 0).then(|| part.mean.clone())?
            }
        };
        Some(normalised(shares))
    }

    /// Returns the forecast of the method with the least recent error, and the method; none before the first window.
    #[must_use]
    pub fn best(&self, time_s: f64) -> Option<(ForecastMethod, Vec<f64>)> {
        let method = self.best_method()?;
        let method = if self.predict(method, time_s).is_some() { method } else { ForecastMethod::MovingAverage };
        Some((method, self.predict(method, time_s)?))
    }

    /// Returns the method with the least recent error; the moving average before any error is known, none before the
    /// first window.
    #[must_use]
    pub fn best_method(&self) -> Option<ForecastMethod> {
        let known = self.errors();
        let best = known.iter().min_by(|a, b| a.recent.total_cmp(&b.recent)).map(|error| error.method);
        best.or_else(|| (!self.past.is_empty()).then_some(ForecastMethod::MovingAverage))
    }

    /// Returns the error of each method that has foretold a window.
    #[must_use]
    pub fn errors(&self) -> Vec<ForecastError> {
        let measured = ForecastMethod::ALL.into_iter().zip(&self.errors).filter(|(_, error)| error.count > 0);
        let error = |(method, error): (ForecastMethod, &RunningError)| ForecastError {
            method,
            num_windows: error.count,
            mean: error.mean(),
            recent: error.weighted / error.weight,
        };
        measured.map(error).collect()
    }

    /// Returns the mean error that the true shares would have had in the windows that were foretold.
    #[must_use]
    pub fn sampling_error(&self) -> f64 {
        self.sampling.mean()
    }

    fn part_of_day(&self, time_s: f64) -> usize {
        let share = time_s.rem_euclid(DAY_S) / DAY_S;
        let parts = self.options.day_parts;
        if share.is_finite() { ((share * parts as f64) as usize).min(parts - 1) } else { 0 }
    }

    fn mean(&self) -> Option<Vec<f64>> {
        let count = self.past.len();
        let mean = |e: usize| self.past.iter().map(|shares| shares[e]).sum::<f64>() / count as f64;
        (count > 0).then(|| (0..self.num_experts).map(mean).collect())
    }

    /// Extrapolates each expert's least-squares line to the middle of the coming windows.
    fn trend(&self) -> Option<Vec<f64>> {
        let count = self.past.len();
        let mean = self.mean().filter(|_| count > 1)?;
        let middle = (count - 1) as f64 / 2.0;
        let spread: f64 = (0..count).map(|t| (t as f64 - middle).powi(2)).sum();
        let coming = (count - 1) as f64 + (self.options.num_ahead + 1) as f64 / 2.0;
        let at_end = |e: usize| {
            let rise: f64 = (0..count).map(|t| (t as f64 - middle) * (self.past[t][e] - mean[e])).sum();
            mean[e] + rise / spread * (coming - middle)
        };
        Some((0..self.num_experts).map(at_end).collect())
    }

    /// Adds to the mean the part of the last deviation that the lag-1 correlation lets one expect.
    fn transition(&self) -> Option<Vec<f64>> {
        let count = self.past.len();
        let mean = self.mean().filter(|_| count > 2)?;
        let deviation = |t: usize, e: usize| self.past[t][e] - mean[e];
        let (mut carried, mut all) = (0.0, 0.0);
        for e in 0..self.num_experts {
            carried += (1..count).map(|t| deviation(t, e) * deviation(t - 1, e)).sum::<f64>();
            all += (1..count).map(|t| deviation(t - 1, e).powi(2)).sum::<f64>();
        }
        let share = if all > 0.0 { (carried / all).clamp(-1.0, 1.0) } else { 0.0 };
        // In each further window as much of what was carried over up to it.
        let num_ahead = self.options.num_ahead;
        let powers = std::iter::successors(Some(share), |power| Some(power * share)).take(num_ahead);
        let share = powers.sum::<f64>() / num_ahead as f64;
        Some((0..self.num_experts).map(|e| mean[e] + share * deviation(count - 1, e)).collect())
    }
}

impl DayPart {
    fn add(&mut self, shares: &[f64]) {
        self.num_windows += 1;
        self.mean.resize(shares.len(), 0.0);
        let step = 1.0 / self.num_windows as f64;
        self.mean.iter_mut().zip(shares).for_each(|(mean, share)| *mean += (share - *mean) * step);
    }
}

/// Makes shares of at least 0 that sum to 1.
fn normalised(mut shares: Vec<f64>) -> Vec<f64> {
    shares.iter_mut().for_each(|share| *share = share.max(0.0));
    let total: f64 = shares.iter().sum();
    if total > 0.0 {
        shares.iter_mut().for_each(|share| *share /= total);
    }
    shares
}

/// Returns `sum_e |forecast_e - share_e|`, from 0 to 2.
#[must_use]
pub fn share_error(forecast: &[f64], shares: &[f64]) -> f64 {
    forecast.iter().zip(shares).map(|(forecast, share)| (forecast - share).abs()).sum()
}

/// Returns the error that the true shares have on average where `num_choices` independent choices are counted:
/// `sum_e sqrt(2 p (1 - p) / (pi n))`, the mean absolute deviation of a normal distribution.
#[must_use]
pub fn sampling_error(shares: &[f64], num_choices: f64) -> f64 {
    let deviation = |share: &f64| (2.0 * share * (1.0 - share).max(0.0) / (std::f64::consts::PI * num_choices)).sqrt();
    if num_choices > 0.0 { shares.iter().map(deviation).sum() } else { 0.0 }
}

/// Returns the windows that a method needs to follow a lasting change: after so many windows at the new shares its
/// error is at most a tenth of the change. None if it has not followed after `most` windows.
///
/// # Errors
/// See [`LoadForecast::new`].
pub fn windows_to_follow(
    method: ForecastMethod,
    options: ForecastOptions,
    most: usize,
) -> Result<Option<usize>, BalanceError> {
    let mut forecast = LoadForecast::new(2, options)?;
    let (before, after) = ([0.75, 0.25], [0.25, 0.75]);
    // All windows are at the same time of the day, the hardest case for a mean over days.
    for _ in 0..options.num_windows.max(2) {
        forecast.observe(&before, 0.0)?;
    }
    let change = share_error(&before, &after);
    for count in 1..=most {
        forecast.observe(&after, 0.0)?;
        let error = forecast.predict(method, 0.0).map_or(change, |found| share_error(&found, &after));
        if error <= 0.1 * change * (1.0 + 1e-9) {
            return Ok(Some(count));
        }
    }
    Ok(None)
}

#[cfg(test)]
#[path = "forecast_tests.rs"]
mod tests;
