//! The progress of reading data: a live line on a terminal, plain lines at intervals elsewhere, and nothing for short
//! reads.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use moeworks_infer::data::{ReadPhase, ReadProgress, Watch};
use moeworks_train::data::Dataset;

use crate::environment;
use crate::progress::{bytes, duration, live_line, thousands};

/// The shortest read that is shown on a terminal.
const MOMENT: Duration = Duration::from_millis(400);

/// The shortest time between two lines without a terminal, and before the first one.
const PLAIN_INTERVAL: Duration = Duration::from_secs(5);

/// Creates a watch that shows the progress of reading and ends soon after `stop` is set. It keeps tokens in the
/// user's cache folder.
pub(crate) fn watch(stop: Arc<AtomicBool>) -> Watch {
    let display = Mutex::new(Display { bar: live_line(), pass: None });
    Watch::new(stop).with_user_cache(environment::cache_folder()).with_listener(move |progress| {
        display.lock().unwrap_or_else(PoisonError::into_inner).show(progress);
    })
}

/// The display of the current pass over the data.
struct Display {
    bar: Option<ProgressBar>,
    pass: Option<Shown>,
}

/// A pass over the data, its start, and the time of the last plain line.
struct Shown {
    phase: ReadPhase,
    started: Instant,
    last_plain: Instant,
}

impl Display {
    fn show(&mut self, progress: ReadProgress) {
        if progress.is_over {
            self.pass = None;
            if let Some(bar) = &self.bar {
                bar.set_message("");
                bar.tick();
            }
            return;
        }
        let now = Instant::now();
        if self.pass.as_ref().is_none_or(|pass| pass.phase != progress.phase) {
            self.pass = Some(Shown { phase: progress.phase, started: now, last_plain: now });
        }
        let Some(pass) = &mut self.pass else { return };
        let elapsed = now - pass.started;
        match &self.bar {
            Some(bar) if elapsed > MOMENT => {
                bar.set_message(line(&progress, elapsed));
                bar.tick();
            }
            None if now - pass.last_plain > PLAIN_INTERVAL => {
                pass.last_plain = now;
                notice!("{}", line(&progress, elapsed));
            }
            _ => {}
        }
    }
}

fn line(progress: &ReadProgress, elapsed: Duration) -> String {
    let ReadProgress { phase, num_files_done, num_files, num_bytes_done, num_bytes, .. } = *progress;
    let seconds = elapsed.as_secs_f64().max(1e-3);
    let speed = num_bytes_done as f64 / seconds;
    let what = match phase {
        ReadPhase::Piped => "reading what comes through a pipe",
        ReadPhase::Looking => "reading",
        ReadPhase::Sampling => "reading for the tokenizer",
        ReadPhase::Tokenising => "tokenising",
    };
    if num_bytes == 0 {
        return format!("{what}: {}, {}/s", bytes(num_bytes_done), bytes(speed as u64));
    }
    let share = 100.0 * (num_bytes_done as f64 / num_bytes as f64).min(1.0);
    let left = num_bytes.saturating_sub(num_bytes_done) as f64 / speed.max(1.0);
    format!(
        "{what}: file {} of {num_files}, {} of {} ({share:.0}%), {}/s, left {}",
        (num_files_done + 1).min(num_files),
        bytes(num_bytes_done),
        bytes(num_bytes),
        bytes(speed as u64),
        duration(left),
    )
}

/// Describes each of several sources in a line: its share, its tokens, and how often they are read in `num_steps`
/// steps.
pub(crate) fn sources(dataset: &Dataset, num_steps: u64) -> Vec<String> {
    if dataset.parts().len() < 2 {
        return Vec::new();
    }
    let counts = dataset.sequences_of_parts(dataset.num_sequences(num_steps));
    let shown = |(i, (part, count)): (usize, (&moeworks_train::data::Part, u64))| {
        let passes = count as f64 / part.train().len() as f64;
        format!(
            "{} {:.1}%: {} tokens, passed {passes:.2} times",
            part.name(),
            100.0 * dataset.share(i),
            thousands(part.tokens().len()),
        )
    };
    dataset.parts().iter().zip(counts).enumerate().map(shown).collect()
}

/// Describes the shares of the sources in the first `num_steps` steps; `None` for a single source.
pub(crate) fn shares(dataset: &Dataset, num_steps: u64) -> Option<String> {
    let num_sequences = dataset.num_sequences(num_steps);
    if dataset.parts().len() < 2 || num_sequences == 0 {
        return None;
    }
    let counts = dataset.sequences_of_parts(num_sequences);
    let share = |count: u64| 100.0 * count as f64 / num_sequences as f64;
    let shown = dataset.parts().iter().zip(counts).map(|(part, count)| format!("{} {:.2}%", part.name(), share(count)));
    Some(shown.collect::<Vec<_>>().join(", "))
}
