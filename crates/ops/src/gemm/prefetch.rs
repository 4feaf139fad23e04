//! Prefetches of the next rows of A and of the next task's B.

use std::ops::Range;

use super::kernel::Prefetch;
use super::source::Source;
use super::{Form, Part, Work};
use crate::Isa;
use crate::prefetch::prefetch_far;

impl Work<'_> {
    /// Plans the prefetches of the rows of A after those of the tiles from `row` on.
    #[inline(always)]
    pub(super) fn rows_ahead(&self, row: usize, start: usize, depth: usize) -> RowPrefetch<'_> {
        let next = row + self.kernels.rows;
        // Intel CPUs, which have tiles or multiply pairs of bf16 slowly, prefetch rows by themselves, and software
        // prefetches would take the line buffers that loads of the kernels need.
        let is_foreseen = self.isa.has_tiles() || self.isa == Isa::Avx512;
        let is_idle = is_foreseen || self.product.form == Form::Tn || self.task.panels.len < 2;
        let end = if is_idle { 0 } else { self.task.rows.len };
        let end = self.task.rows.first + end.min(next + self.kernels.rows);
        let bytes = self.group.a.bytes_of(depth);
        let share = (bytes * self.kernels.rows).div_ceil(64 * self.task.panels.len);
        let mut ahead = RowPrefetch {
            source: &self.group.a,
            rows: self.task.rows.first + next..end,
            start,
            bytes,
            share,
            left: 0,
            at: std::ptr::null(),
        };
        ahead.next_row();
        ahead
    }

    /// Plans the prefetches of the B that is packed after a part of the depth: the next part's or the next task's.
    /// The address `idle` is prefetched if there is none, or if packing fetches it better by itself.
    #[inline(always)]
    pub(super) fn stream_after(&self, part: Part, idle: *const u8) -> Stream {
        let turns = self.kernels.at_once;
        let mut stream = Stream { starts: [idle; 2], num_calls: 1, len: 0, row: None, turns };
        let (next, start) = match self.next {
            _ if !part.is_last => (self.task, part.start + part.depth),
            Some(next) => (next, 0),
            None => return stream,
        };
        let group = &self.product.groups[next.group];
        let is_in_parts = group.depth > next.part;
        if self.product.form == Form::Tn || self.product.form == Form::Nt && is_in_parts {
            return stream;
        }
        let panels = super::Panels::new(group.columns, self.kernels.lanes);
        let (column, ..) = panels.panel(next.panels.first);
        let (last, columns, _) = panels.panel(next.panels.end() - 1);
        let columns = last + columns - column;
        let row_groups = self.task.rows.len.div_ceil(self.kernels.rows);
        stream.num_calls = row_groups * self.task.panels.len;
        if self.product.form == Form::Nt {
            let pair = if self.product.is_paired { group.columns } else { 0 };
            stream.starts = [group.b.address(column, 0), group.b.address(column + pair, 0)];
            stream.len = columns * group.b.bytes_of(group.b.stride);
        } else {
            stream.starts = [group.b.address(start, column); 2];
            stream.len = group.b.bytes_of(columns);
            stream.row = Some(group.b.bytes_of(group.b.stride));
            // A unit may be two rows.
            stream.turns *= self.format().elements_of(1);
        }
        if self.product.is_paired {
            stream.num_calls *= 2;
        }
        stream
    }
}

/// Prefetches of rows of A into the L2 cache, a share at a time, because all at once would delay the loads of the
/// kernel.
pub(super) struct RowPrefetch<'a> {
    source: &'a Source<'a>,
    /// Rows that have not been begun.
    rows: Range<usize>,
    /// First element of a row, and the bytes from there on.
    start: usize,
    bytes: usize,
    /// Cache lines in a share.
    share: usize,
    /// The next address of the current row, and the cache lines from there on.
    at: *const u8,
    left: usize,
}

impl RowPrefetch<'_> {
    #[inline(always)]
    pub(super) fn advance(&mut self) {
        let mut share = self.share;
        while self.left > 0 && share > 0 {
            let lines = self.left.min(share);
            (0..lines).for_each(|line| prefetch_far(self.at.wrapping_add(64 * line)));
            self.at = self.at.wrapping_add(64 * lines);
            (self.left, share) = (self.left - lines, share - lines);
            if self.left == 0 {
                self.next_row();
            }
        }
    }

    #[inline(always)]
    fn next_row(&mut self) {
        if let Some(row) = self.rows.next() {
            (self.at, self.left) = (self.source.address(row, self.start), self.bytes.div_ceil(64));
        }
    }
}

/// Prefetches that kernels make for the next task, one cache line per unit of depth or per few units. Weight matrices
/// are consecutive in memory: rows along the depth are one run of bytes, rows across it are runs one row apart.
pub(super) struct Stream {
    /// First byte; with paired columns, of each half.
    starts: [*const u8; 2],
    /// Kernel calls of this task.
    num_calls: usize,
    /// Bytes of a run.
    len: usize,
    /// Bytes from one row to the next, if runs are short.
    row: Option<usize>,
    /// For one run: units of depth per prefetched line. For many runs: calls over which a line of every row is
    /// prefetched.
    turns: usize,
}

impl Stream {
    /// Returns the bytes from one prefetch of a kernel with `num_units` units to the next, in one run.
    #[inline(always)]
    pub(super) fn step(&self, num_units: usize) -> usize {
        self.len.div_ceil((self.calls_of_run() * (num_units / self.turns)).max(1)).min(64)
    }

    /// Returns how many kernel calls prefetch each run.
    #[inline(always)]
    fn calls_of_run(&self) -> usize {
        if self.is_one_run() { self.num_calls } else { self.num_calls.div_ceil(2) }
    }

    #[inline(always)]
    fn is_one_run(&self) -> bool {
        self.starts[0] == self.starts[1]
    }

    /// Returns the prefetches of kernel call `call` with `num_units` units. In one run they are `step` bytes apart,
    /// as [`step`](Self::step) returned; of many runs a call prefetches a line of each, or of each few.
    #[inline(always)]
    pub(super) fn at_call(&self, call: usize, num_units: usize, step: usize) -> Prefetch {
        if let Some(row) = self.row {
            let at = (64 * (call / self.turns)).min(self.len);
            let first = self.starts[0].wrapping_add(at);
            let is_inside = at < self.len;
            return if is_inside {
                Prefetch { at: first.wrapping_add(call % self.turns * row), step: self.turns * row }
            } else {
                Prefetch { at: first, step: 0 }
            };
        }
        let half = usize::from(!self.is_one_run() && 2 * call >= self.num_calls);
        let at = ((call - half * (self.num_calls / 2)) * (num_units / self.turns) * step).min(self.len);
        Prefetch { at: self.starts[half].wrapping_add(at), step: if at < self.len { step } else { 0 } }
    }
}
