//! The rows of a range of tokens in a tensor of keys or values, handed out some at a time.

use super::sequences::Run;

/// The rows of consecutive tokens in a tensor of keys or values, wherever their blocks are. They are handed out in
/// groups; a group whose rows are not consecutive is copied.
pub(super) struct TokenRows<'a, T> {
    values: &'a [T],
    /// Elements of a row.
    width: usize,
    runs: &'a [Run],
    /// The run that the last group began in.
    run: usize,
    copy: Vec<T>,
}

impl<'a, T: Copy> TokenRows<'a, T> {
    /// Takes the rows of `runs` in a tensor of `values`, in which a row has `width` elements.
    pub(super) fn new(values: &'a [T], width: usize, runs: &'a [Run]) -> Self {
        Self { values, width, runs, run: 0, copy: Vec::new() }
    }

    /// Returns the number of tokens.
    pub(super) fn len(&self) -> usize {
        self.runs.last().map_or(0, |run| run.tokens.end)
    }

    /// Returns the number of elements of a row.
    #[inline(always)]
    pub(super) fn width(&self) -> usize {
        self.width
    }

    /// Returns the rows of `count` tokens from `first` on, one behind the other. Groups must be asked for in the
    /// order of their tokens.
    #[inline(always)]
    pub(super) fn group(&mut self, first: usize, count: usize) -> &[T] {
        while first >= self.runs[self.run].tokens.end {
            self.run += 1;
        }
        let Run { tokens, first_row } = &self.runs[self.run];
        if first + count <= tokens.end {
            return &self.values[(first_row + first - tokens.start) * self.width..][..count * self.width];
        }
        self.copied(first, count)
    }

    /// Copies rows of several runs.
    #[cold]
    #[inline(never)]
    fn copied(&mut self, first: usize, count: usize) -> &[T] {
        self.copy.clear();
        for run in &self.runs[self.run..] {
            let (start, end) = (first.max(run.tokens.start), (first + count).min(run.tokens.end));
            if start < end {
                let row = run.first_row + start - run.tokens.start;
                self.copy.extend_from_slice(&self.values[row * self.width..][..(end - start) * self.width]);
            }
        }
        assert_eq!(self.copy.len(), count * self.width, "rows of {count} tokens from {first} on");
        &self.copy
    }
}
