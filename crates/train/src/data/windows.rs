//! The split of tokens into training and validation, and into windows.
//!
//! Held-out tokens are stretches of about two thousand tokens or more, one at a random place in each of equal parts
//! of the data. They are stretches rather than documents, because data is often a single file. They are spread,
//! because sorted files change along their length, and short, so that little data still gives several. No token of a
//! held-out stretch is in a training window, not even as the last target.

use std::ops::Range;

use moeworks_tensor::{Purpose, Random};

/// The least tokens and the least windows of a held-out stretch, if the data suffices.
const STRETCH_TOKENS: u64 = 2048;
const STRETCH_WINDOWS: u64 = 8;

/// The random stream that places held-out stretches, beyond the streams of epochs.
const SPLIT_STREAM: u64 = (1 << 56) - 1;

/// Windows of `seq_len + 1` tokens over stretches of the data; each overlaps the next by one token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Windows {
    seq_len: u64,
    /// The first token and the index of the first window of each stretch, both ascending.
    stretches: Vec<(u64, u64)>,
    len: u64,
}

impl Windows {
    /// Creates all windows within the given ranges of tokens. A remainder at the end of a range is unused.
    pub(super) fn new(seq_len: u64, ranges: impl IntoIterator<Item = Range<u64>>) -> Self {
        let mut windows = Self { seq_len, stretches: Vec::new(), len: 0 };
        for range in ranges {
            let count = (range.end - range.start).saturating_sub(1) / seq_len;
            if count > 0 {
                windows.stretches.push((range.start, windows.len));
                windows.len += count;
            }
        }
        windows
    }

    /// Returns the number of windows.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns whether there are no windows.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the `seq_len + 1` tokens of window `i`, which must be below [`Self::len`].
    #[must_use]
    pub fn tokens(&self, i: u64) -> Range<u64> {
        debug_assert!(i < self.len);
        let (start, first) = self.stretches[self.stretches.partition_point(|&(_, first)| first <= i) - 1];
        let start = start + (i - first) * self.seq_len;
        start..start + self.seq_len + 1
    }
}

/// Training and held-out windows of the same data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Split {
    /// The windows to train on.
    pub train: Windows,
    /// The held-out windows.
    pub validation: Windows,
}

impl Split {
    /// Holds out about `fraction` (0 to 0.5) of `num_tokens`, and at least one window if two fit and the fraction is
    /// not 0. `seed` selects them.
    #[must_use]
    pub fn new(num_tokens: u64, seq_len: u64, fraction: f64, seed: u64) -> Self {
        let window = seq_len + 1;
        if fraction <= 0.0 || num_tokens < 2 * window {
            let none = Windows::new(seq_len, []);
            return Self { train: Windows::new(seq_len, std::iter::once(0..num_tokens)), validation: none };
        }
        let wanted = ((num_tokens as f64 * fraction) as u64).max(window);
        let whole = STRETCH_TOKENS.next_multiple_of(seq_len).max(STRETCH_WINDOWS * seq_len);
        let stretch = whole.min((wanted - 1) / seq_len * seq_len) + 1;
        // With room for two windows per stretch on average, a window fits somewhere.
        let count = (wanted / stretch).clamp(1, (num_tokens / (stretch + 2 * window)).max(1));
        let random = Random::new(seed, Purpose::DataOrder, SPLIT_STREAM);
        let part = |i: u64| (u128::from(num_tokens) * u128::from(i) / u128::from(count)) as u64;
        let held_out: Vec<Range<u64>> = (0..count)
            .map(|i| {
                let room = part(i + 1) - part(i) - stretch;
                let start = part(i) + place(&random, i, room, count == 1, window);
                start..start + stretch
            })
            .collect();
        let ends = held_out.iter().map(|range| range.start).chain([num_tokens]);
        let starts = [0].into_iter().chain(held_out.iter().map(|range| range.end));
        let train = Windows::new(seq_len, starts.zip(ends).map(|(start, end)| start..end));
        Self { train, validation: Windows::new(seq_len, held_out) }
    }
}

/// Returns the start of stretch `i` in its part, which has `room` spare tokens. The only stretch of small data moves
/// to one end if it would otherwise leave no whole window on either side.
fn place(random: &Random, i: u64, room: u64, only: bool, window: u64) -> u64 {
    let start = random.below(i, room + 1);
    if only && start < window && room - start < window { if start.is_multiple_of(2) { room } else { 0 } } else { start }
}

#[cfg(test)]
#[path = "windows_tests.rs"]
mod tests;
