use proptest::prelude::*;

use super::*;

/// Uniform numbers from -1 to 1, by a linear congruential generator.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
    }

    /// A number of about normal distribution with variance 1.
    fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.next()).sum::<f64>() / 2.0
    }
}

const NUM_EXPERTS: usize = 16;
/// The deviation of shares that the trace has around their means.
const SIGMA: f64 = 0.004;

/// A trace of shares around their means, of which `carried` of each deviation stays to the next window.
fn trace(carried: f64, num_windows: usize) -> (Vec<f64>, Vec<Vec<f64>>) {
    let means: Vec<f64> = (0..NUM_EXPERTS).map(|e| 0.03 + 0.065 * e as f64 / 15.0).collect();
    let total: f64 = means.iter().sum();
    let means: Vec<f64> = means.iter().map(|mean| mean / total).collect();
    let (mut noise, mut deviations) = (Noise(7), vec![0.0; NUM_EXPERTS]);
    let mut window = || {
        for deviation in &mut deviations {
            *deviation = carried * *deviation + SIGMA * (1.0 - carried * carried).sqrt() * noise.normal();
        }
        // The deviations sum to 0, so that shares sum to 1.
        let mean = deviations.iter().sum::<f64>() / NUM_EXPERTS as f64;
        means.iter().zip(&deviations).map(|(share, deviation)| share + deviation - mean).collect()
    };
    let windows = (0..num_windows).map(|_| window()).collect();
    (means, windows)
}

fn root_mean_square(values: impl Iterator<Item = f64>) -> f64 {
    let (count, sum) = values.fold((0, 0.0), |(count, sum), value| (count + 1, sum + value * value));
    (sum / f64::from(count)).sqrt()
}

fn error_of(forecast: &LoadForecast, method: ForecastMethod) -> f64 {
    forecast.errors().into_iter().find(|error| error.method == method).unwrap().mean
}

#[test]
fn a_moving_averages_error_is_sigma_over_the_root_of_the_windows_and_below_the_last_values() {
    for (carried, num_windows) in [(0.0, 10), (0.0, 40), (0.3, 40)] {
        let (means, windows) = trace(carried, 2000);
        let options = ForecastOptions { num_windows, ..ForecastOptions::default() };
        let mut forecast = LoadForecast::new(NUM_EXPERTS, options).unwrap();
        let mut deviations = Vec::new();
        for (count, window) in windows.iter().enumerate() {
            forecast.observe(window, 0.0).unwrap();
            if count >= num_windows {
                let average = forecast.predict(ForecastMethod::MovingAverage, 0.0).unwrap();
                deviations.extend(average.iter().zip(&means).map(|(found, mean)| found - mean));
            }
        }
        // The variance of the mean of w values with this correlation, less the part that the sum of 1 takes.
        let correlation = (1.0 + carried) / (1.0 - carried);
        let freedom = 1.0 - 1.0 / NUM_EXPERTS as f64;
        let expected = SIGMA * (correlation * freedom / num_windows as f64).sqrt();
        let found = root_mean_square(deviations.into_iter());
        assert!((found / expected - 1.0).abs() < 0.08, "{carried} {num_windows}: {found} for {expected}");
        let (average, last) =
            (error_of(&forecast, ForecastMethod::MovingAverage), error_of(&forecast, ForecastMethod::LastValue));
        assert!(average < 0.9 * last, "{carried} {num_windows}: {average}, {last}");
    }
}

#[test]
fn an_average_foretells_many_windows_together_as_well_as_its_own_error_allows() {
    let (num_windows, num_ahead) = (10, 100);
    let (_, windows) = trace(0.0, 2000);
    let options = ForecastOptions { num_windows, num_ahead, ..ForecastOptions::default() };
    let mut forecast = LoadForecast::new(NUM_EXPERTS, options).unwrap();
    windows.iter().for_each(|window| forecast.observe(window, 0.0).unwrap());
    let of = |method| forecast.errors().into_iter().find(|error| error.method == method).unwrap();
    assert_eq!(of(ForecastMethod::MovingAverage).num_windows, windows.len() - num_ahead);
    // The error is the absolute deviation of a mean of 10 windows from one of 100.
    let deviation = SIGMA * (1.0 / num_windows as f64 + 1.0 / num_ahead as f64).sqrt();
    let expected = NUM_EXPERTS as f64 * (2.0 / std::f64::consts::PI).sqrt() * deviation;
    let found = of(ForecastMethod::MovingAverage).mean;
    assert!((found / expected - 1.0).abs() < 0.1, "{found} for {expected}");
    assert!(found < 0.5 * of(ForecastMethod::LastValue).mean);
    // Little of a deviation is carried over to so many windows, and a trend of noise leads far away.
    assert!(of(ForecastMethod::Trend).mean > found);
}

#[test]
fn the_method_that_fits_the_traffic_is_chosen_by_its_error() {
    let options = ForecastOptions { num_windows: 40, ..ForecastOptions::default() };
    let chosen = |windows: &[Vec<f64>], seconds: f64| {
        let mut forecast = LoadForecast::new(windows[0].len(), options).unwrap();
        for (index, window) in windows.iter().enumerate() {
            forecast.observe(window, index as f64 * seconds).unwrap();
        }
        forecast.best_method().unwrap()
    };
    assert_eq!(chosen(&trace(0.0, 100).1, 3600.0), ForecastMethod::MovingAverage);
    assert_eq!(chosen(&trace(0.6, 200).1, 3600.0), ForecastMethod::Transition);
    let rising: Vec<Vec<f64>> = (0..60).map(|t| vec![0.2 + 0.01 * f64::from(t), 0.8 - 0.01 * f64::from(t)]).collect();
    assert_eq!(chosen(&rising, 1.0), ForecastMethod::Trend);
    let by_day: Vec<Vec<f64>> =
        (0..240).map(|hour| if (hour * 7) % 24 % 2 == 0 { vec![0.9, 0.1] } else { vec![0.2, 0.8] }).collect();
    assert_eq!(chosen(&by_day, 3600.0), ForecastMethod::TimeOfDay);
}

#[test]
fn the_sampling_error_is_that_of_counts_of_independent_choices() {
    let shares = [0.5, 0.3, 0.15, 0.05];
    let (mut noise, num_choices) = (Noise(3), 2000);
    let mut sum = 0.0;
    for _ in 0..400 {
        let mut counts = [0.0; 4];
        for _ in 0..num_choices {
            let at = (noise.next() + 1.0) / 2.0;
            let expert = [0.5, 0.8, 0.95].iter().filter(|&&edge| at >= edge).count();
            counts[expert] += 1.0 / f64::from(num_choices);
        }
        sum += share_error(&shares, &counts);
    }
    let (found, expected) = (sum / 400.0, sampling_error(&shares, f64::from(num_choices)));
    assert!((found / expected - 1.0).abs() < 0.05, "{found} for {expected}");
}

#[test]
fn the_last_value_follows_a_change_at_once_and_an_average_when_old_windows_have_gone() {
    let options = ForecastOptions { num_windows: 10, ..ForecastOptions::default() };
    let follow = |method| windows_to_follow(method, options, 50).unwrap();
    assert_eq!(follow(ForecastMethod::LastValue), Some(1));
    assert_eq!(follow(ForecastMethod::MovingAverage), Some(9));
    assert!(follow(ForecastMethod::Trend).unwrap() < 9);
    assert_eq!(follow(ForecastMethod::TimeOfDay), None);
}

#[test]
fn loads_that_are_none_are_passed_over_and_wrong_ones_refused() {
    let mut forecast = LoadForecast::new(2, ForecastOptions::default()).unwrap();
    assert_eq!((forecast.best(0.0), forecast.best_method()), (None, None));
    forecast.observe(&[0.0, 0.0], 0.0).unwrap();
    assert_eq!(forecast.best_method(), None);
    forecast.observe(&[3.0, 1.0], f64::NAN).unwrap();
    assert_eq!(forecast.best(0.0), Some((ForecastMethod::MovingAverage, vec![0.75, 0.25])));
    assert_eq!(forecast.observe(&[1.0], 0.0).unwrap_err().to_string(), "loads of 1 experts: must be 2");
    assert!(forecast.observe(&[1.0, f64::INFINITY], 0.0).is_err());
    let none = ForecastOptions { num_windows: 0, ..ForecastOptions::default() };
    assert_eq!(LoadForecast::new(2, none).unwrap_err().to_string(), "windows = 0: must be at least 1");
}

proptest! {
    #[test]
    fn forecasts_are_shares(
        windows in prop::collection::vec(prop::collection::vec(0.0_f64..1e6, 5), 1..30),
        seconds in prop::num::f64::ANY,
    ) {
        let mut forecast = LoadForecast::new(5, ForecastOptions { num_windows: 4, day_parts: 3, num_ahead: 1 }).unwrap();
        for window in &windows {
            forecast.observe(window, seconds).unwrap();
        }
        for method in ForecastMethod::ALL {
            if let Some(shares) = forecast.predict(method, seconds) {
                let sum: f64 = shares.iter().sum();
                prop_assert!(shares.iter().all(|share| (0.0..=1.0 + 1e-9).contains(share)));
                prop_assert!(sum == 0.0 || (sum - 1.0).abs() < 1e-9);
            }
        }
    }
}
