//! The live line of a training run on standard error. Standard output is kept for results.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use moeworks_train::metrics::Record;

use crate::output::is_quiet;
use crate::terminal::stderr_takes_escapes;

/// The shortest time between two lines without a terminal.
const PLAIN_INTERVAL: Duration = Duration::from_secs(10);

/// The display of a run's progress: one line that is redrawn on a terminal with escape codes, and a plain line at
/// intervals elsewhere.
pub(crate) struct Display {
    bar: Option<ProgressBar>,
    started: Instant,
    first_step: u64,
    last_plain: Option<Instant>,
    speed: Option<f64>,
}

impl Display {
    pub(crate) fn new(first_step: u64) -> Self {
        Self { bar: live_line(), started: Instant::now(), first_step, last_plain: None, speed: None }
    }

    /// Shows the state after a step.
    pub(crate) fn step(&mut self, record: &Record, total_steps: u64, val_loss: Option<f64>) {
        // A moving average over about ten steps, so that the figure is legible.
        let speed = self.speed.map_or(record.tokens_per_s, |old| 0.9 * old + 0.1 * record.tokens_per_s);
        self.speed = Some(speed);
        let line = self.line(record, total_steps, val_loss, speed);
        if let Some(bar) = &self.bar {
            bar.set_message(line);
            bar.tick();
            return;
        }
        let is_due = self.last_plain.is_none_or(|last| last.elapsed() >= PLAIN_INTERVAL);
        if is_due || record.val_loss.is_some() || record.step == total_steps {
            self.last_plain = Some(Instant::now());
            notice!("{line}");
        }
    }

    fn line(&self, record: &Record, total_steps: u64, val_loss: Option<f64>, speed: f64) -> String {
        let done = record.step.saturating_sub(self.first_step).max(1);
        let left = self.started.elapsed().as_secs_f64() / done as f64 * total_steps.saturating_sub(record.step) as f64;
        let share = 100.0 * record.step as f64 / total_steps.max(1) as f64;
        let val = val_loss.map_or_else(|| "-".to_owned(), |loss| format!("{loss:.4}"));
        format!(
            "step {}/{total_steps} ({share:.0}%)  loss {:.4}  val {val}  lr {:.2e}  {speed:.0} tok/s  MFU {:.0}%  \
             dropped {:.1}%  left {}",
            record.step,
            record.loss,
            record.lr,
            100.0 * record.mfu,
            100.0 * record.drop_rate(),
            duration(left),
        )
    }

    /// Prints a line above the live line.
    pub(crate) fn note(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| notice!("{text}")),
            None => notice!("{text}"),
        }
    }

    /// Stops redrawing the live line and leaves its last state on the screen.
    pub(crate) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.abandon();
        }
    }
}

/// Creates a line that is redrawn, on a terminal with escape codes and without `--quiet`.
pub(crate) fn live_line() -> Option<ProgressBar> {
    (stderr_takes_escapes() && !is_quiet()).then(|| {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(10));
        if let Ok(style) = ProgressStyle::with_template("{msg}") {
            bar.set_style(style);
        }
        bar
    })
}

/// Formats a duration for people.
pub(crate) fn duration(seconds: f64) -> String {
    let seconds = if seconds.is_finite() { seconds.max(0.0).round() as u64 } else { 0 };
    match (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60, seconds % 60) {
        (0, 0, 0, s) => format!("{s}s"),
        (0, 0, m, s) => format!("{m}m{s:02}s"),
        (0, h, m, _) => format!("{h}h{m:02}m"),
        (d, h, ..) => format!("{d}d{h:02}h"),
    }
}

/// Formats a number of bytes for people.
pub(crate) fn bytes(bytes: u64) -> String {
    match bytes {
        0..1_000 => format!("{bytes} B"),
        1_000..1_000_000 => format!("{:.1} kB", bytes as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", bytes as f64 / 1e6),
        _ => format!("{:.2} GB", bytes as f64 / 1e9),
    }
}

/// Formats a large number with thousands separators.
pub(crate) fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}
