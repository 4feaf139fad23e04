//! Which tokens are trained on, which are held out, and the windows that they are cut into.
//!
//! Held-out tokens are stretches of two thousand tokens or more spread evenly over the data, one at a random place in each
//! equal part of it. Stretches rather than documents, because data is often a single file; spread, because the end of
//! sorted files is not like their beginning; short, so that little data still gives several. No token of a held-out
//! stretch is in a training window, not even as the last target.

use std::ops::Range;

use moeworks_tensor::{Purpose, Random};

/// Least tokens and least windows of a held-out stretch, where the data allows.
const STRETCH_TOKENS: u64 = 2048;
const STRETCH_WINDOWS: u64 = 8;

/// The stream of random numbers that places held-out stretches; epochs never get this far.
const SPLIT_STREAM: u64 = (1 << 56) - 1;

/// Windows of `seq_len + 1` tokens, each overlapping the next by one token, over some stretches of the data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Windows {
    seq_len: u64,
    /// First token and number of the first window of each stretch, ascending in both.
    stretches: Vec<(u64, u64)>,
    len: u64,
}

impl Windows {
    /// All windows within the given ranges of tokens. What is left over at the end of a range is not used.
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

    /// Number of windows.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there is no window.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The tokens of window `i`, below [`Self::len`]: `seq_len + 1` of them.
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
    /// Windows to train on.
    pub train: Windows,
    /// Windows that are held out.
    pub validation: Windows,
}

impl Split {
    /// Holds out about `fraction` (0 to 0.5) of `num_tokens`, at least one window if two fit and the fraction is not 0.
    /// Which ones they are is decided by `seed`.
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
        // Room for two windows beside each stretch on average means that somewhere one fits.
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

/// Where in its part stretch `i` begins, with `room` tokens to spare. The only stretch of small data goes to one end if it
/// would otherwise leave no whole window on either side.
fn place(random: &Random, i: u64, room: u64, only: bool, window: u64) -> u64 {
    let start = random.below(i, room + 1);
    if only && start < window && room - start < window { if start.is_multiple_of(2) { room } else { 0 } } else { start }
}

#[cfg(test)]
#[path = "windows_tests.rs"]
mod tests;
