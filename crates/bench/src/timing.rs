//! Repeated runs of a closure, and statistics of their times.

use std::time::Instant;

use moeworks_ops::Context;
pub use moeworks_ops::peak::best_seconds;

/// The approximate total time of the runs of [`run_seconds`], in seconds.
const SECONDS: f64 = 0.3;
const MIN_RUNS: usize = 3;
const MAX_RUNS: usize = 40;

/// Runs a closure for a quarter of a second, at least three times, and returns the shortest time in seconds. A run
/// ends when the device has finished.
pub fn best_seconds_of_many(ctx: &Context, mut run: impl FnMut()) -> f64 {
    let mut run = || {
        run();
        ctx.wait();
    };
    let start = Instant::now();
    let mut best = best_seconds(3, &mut run);
    while start.elapsed().as_secs_f64() < 0.25 {
        best = best.min(best_seconds(1, &mut run));
    }
    best
}

/// Returns the seconds of each of several runs after a warm-up. A run ends when the device has finished.
pub fn run_seconds(ctx: &Context, mut run: impl FnMut()) -> Vec<f64> {
    let mut run = || {
        let start = Instant::now();
        run();
        ctx.wait();
        start.elapsed().as_secs_f64()
    };
    run();
    let first = run();
    let num_runs = ((SECONDS / first) as usize).clamp(MIN_RUNS, MAX_RUNS);
    (0..num_runs).map(|_| run()).collect()
}

/// Returns the median of the values, the greater of the middle two if their number is even.
///
/// # Panics
/// If there is no value.
#[must_use]
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
