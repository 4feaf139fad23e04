//! Loads in windows of time: their change, and how well the next one is foretold.

use moeworks_infer::routing_record::{Damage, RecordHeader};
use moeworks_plan::{ForecastOptions, LoadForecast, sampling_error, share_error};

use super::{Concentration, RecordStats, RecordedLayer, Stability};

/// The windows of a course that is kept for pictures.
const MAX_COURSE: usize = 100;

/// The loads of a layer in one window.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Window {
    /// Seconds since 1970 at its start.
    pub time_s: f64,
    /// `[E]`: choices of each expert.
    pub loads: Vec<u64>,
}

/// Computes the statistics of loads alone: `windows` has those of each layer of the header. The loads of `num_ahead`
/// windows together are foretold.
#[must_use]
pub fn stats_of_windows(header: RecordHeader, windows: &[Vec<Window>], num_ahead: usize) -> RecordStats {
    let num_windows = windows.first().map_or(0, Vec::len);
    let num_experts = header.num_experts;
    let of = |windows: &[Window]| of_windows(windows, num_experts, num_ahead);
    let layer = |(&layer, windows): (&usize, &Vec<Window>)| RecordedLayer { layer, ..of(windows) };
    let layers = header.layers.iter().zip(windows).map(layer).collect();
    let notes = vec!["choices of single tokens are not recorded: only loads are shown".to_owned()];
    let num_steps = num_windows as u64;
    let damage = Damage::default();
    RecordStats { header, num_tokens: 0, num_steps, num_windows, num_ahead, layers, damage, notes }
}

/// Computes the statistics of one layer's windows.
pub(super) fn of_windows(windows: &[Window], num_experts: usize, num_ahead: usize) -> RecordedLayer {
    let mut chosen = vec![0_u64; num_experts];
    for window in windows {
        chosen.iter_mut().zip(&window.loads).for_each(|(sum, &load)| *sum = sum.saturating_add(load));
    }
    let forecast = forecast(windows, num_experts, num_ahead);
    let forecasts = forecast.as_ref().map_or_else(Vec::new, LoadForecast::errors);
    RecordedLayer {
        concentration: Concentration::new(&chosen),
        stability: stability(windows),
        forecast_sampling: forecast.filter(|_| !forecasts.is_empty()).map(|forecast| forecast.sampling_error()),
        forecasts,
        course: course(windows),
        chosen,
        ..RecordedLayer::default()
    }
}

fn forecast(windows: &[Window], num_experts: usize, num_ahead: usize) -> Option<LoadForecast> {
    let options = ForecastOptions { num_ahead, ..ForecastOptions::default() };
    let mut forecast = LoadForecast::new(num_experts, options).ok()?;
    for window in windows {
        let loads: Vec<f64> = window.loads.iter().map(|&load| load as f64).collect();
        forecast.observe(&loads, window.time_s).ok()?;
    }
    Some(forecast)
}

fn shares(loads: &[u64]) -> Vec<f64> {
    let total: f64 = loads.iter().map(|&load| load as f64).sum();
    loads.iter().map(|&load| if total > 0.0 { load as f64 / total } else { 0.0 }).collect()
}

fn stability(windows: &[Window]) -> Option<Stability> {
    let windows: Vec<&Window> = windows.iter().filter(|window| window.loads.iter().any(|&load| load > 0)).collect();
    let all: Vec<Vec<f64>> = windows.iter().map(|window| shares(&window.loads)).collect();
    let (Some(first), Some(last)) = (all.first(), all.last().filter(|_| all.len() > 1)) else { return None };
    let (mut change, mut sampling, mut kept) = (0.0, 0.0, 0.0);
    for (pair, counted) in all.windows(2).zip(windows.windows(2)) {
        change += share_error(&pair[0], &pair[1]);
        let mean: Vec<f64> = pair[0].iter().zip(&pair[1]).map(|(a, b)| f64::midpoint(*a, *b)).collect();
        let total = |window: &Window| window.loads.iter().map(|&load| load as f64).sum::<f64>();
        // The difference of two counts has the variance of both: that of 1 / (1/n + 1/m) choices.
        let both = 1.0 / (1.0 / total(counted[0]) + 1.0 / total(counted[1]));
        sampling += sampling_error(&mean, both);
        kept += top_kept(&pair[0], &pair[1]);
    }
    let count = (all.len() - 1) as f64;
    let drift = share_error(first, last);
    Some(Stability { change: change / count, sampling: sampling / count, drift, top_kept: kept / count })
}

/// The share of the busiest tenth that stays.
fn top_kept(before: &[f64], after: &[f64]) -> f64 {
    let count = before.len().div_ceil(10);
    let top = |shares: &[f64]| {
        let mut order: Vec<usize> = (0..shares.len()).collect();
        order.sort_by(|&a, &b| shares[b].total_cmp(&shares[a]).then(a.cmp(&b)));
        order.truncate(count);
        order
    };
    let after = top(after);
    top(before).iter().filter(|expert| after.contains(expert)).count() as f64 / count.max(1) as f64
}

/// The shares over time, of neighbouring windows together where there are many.
fn course(windows: &[Window]) -> Vec<Vec<f64>> {
    let size = windows.len().div_ceil(MAX_COURSE).max(1);
    let sum = |group: &[Window]| {
        let mut sums = vec![0_u64; group[0].loads.len()];
        for window in group {
            sums.iter_mut().zip(&window.loads).for_each(|(sum, &load)| *sum = sum.saturating_add(load));
        }
        shares(&sums)
    };
    windows.chunks(size).map(sum).collect()
}
