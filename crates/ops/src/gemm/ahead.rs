//! Memory that is asked for before it is needed: the next rows of A, and the B of the task after this one.

use super::kernel::prefetch_far;
use super::source::Source;
use super::{Form, Work};

impl Work<'_> {
    /// The rows of A after those of the tiles from `row` on, to be asked for while these are computed.
    #[inline(always)]
    pub(super) fn ahead_of(&self, row: usize, start: usize, depth: usize) -> Ahead<'_> {
        let next = row + self.kernels.rows;
        let end = if self.product.form == Form::Tn || self.task.panels.1 < 2 { 0 } else { self.task.rows.1 };
        let end = self.task.rows.0 + end.min(next + self.kernels.rows);
        let bytes = self.group.a.bytes_of(depth);
        let share = (bytes * self.kernels.rows).div_ceil(64 * self.task.panels.1);
        Ahead { source: &self.group.a, row: self.task.rows.0 + next, end, start, bytes, at: 0, share }
    }

    /// The B of the next task, to be asked for during this one's products; `idle` is what is asked for if there is none.
    #[inline(always)]
    pub(super) fn stream_of_next(&self, idle: *const u8) -> Stream {
        let mut stream = Stream { starts: [idle; 2], num_calls: 1, len: 0, row: None };
        let Some(next) = self.next else { return stream };
        let group = &self.product.groups[next.group];
        if self.product.form == Form::Tn || group.depth > next.part {
            return stream;
        }
        let panels = super::Panels::of(group.columns, self.kernels.lanes);
        let (column, ..) = panels.panel(next.panels.0);
        let (last, columns, _) = panels.panel(next.panels.0 + next.panels.1 - 1);
        let columns = last + columns - column;
        let row_groups = self.task.rows.1.div_ceil(self.kernels.rows);
        stream.num_calls = row_groups * self.task.panels.1;
        if self.product.form == Form::Nt {
            let pair = if self.product.is_paired { group.columns } else { 0 };
            stream.starts = [group.b.address(column, 0), group.b.address(column + pair, 0)];
            stream.len = columns * group.b.bytes_of(group.b.stride);
        } else {
            stream.starts = [group.b.address(0, column); 2];
            stream.len = group.b.bytes_of(columns);
            stream.row = Some(group.b.bytes_of(group.b.stride));
        }
        if self.product.is_paired {
            stream.num_calls *= 2;
        }
        stream
    }
}

/// Rows of A on their way into the second-level cache, a share of them at a time: asked for all at once they would hold
/// up the loads of the kernel.
pub(super) struct Ahead<'a> {
    source: &'a Source<'a>,
    row: usize,
    end: usize,
    /// First element of a row, and bytes from there on.
    start: usize,
    bytes: usize,
    /// Bytes of the row that have been asked for.
    at: usize,
    /// Cache lines in a share.
    share: usize,
}

impl Ahead<'_> {
    #[inline(always)]
    pub(super) fn advance(&mut self) {
        for _ in 0..self.share {
            if self.row >= self.end {
                return;
            }
            prefetch_far(self.source.address(self.row, self.start).wrapping_add(self.at));
            self.at += 64;
            if self.at >= self.bytes {
                (self.row, self.at) = (self.row + 1, 0);
            }
        }
    }
}

/// What kernels ask for on behalf of the next task, a cache line with each unit of depth. Matrices of weights lie in
/// memory as a whole: rows along the depth are one run of bytes, rows across it are runs a row apart.
pub(super) struct Stream {
    /// First byte; with paired columns, of each half.
    starts: [*const u8; 2],
    /// Kernel calls of this task.
    num_calls: usize,
    /// Bytes from a start on, or of each row.
    len: usize,
    /// Bytes from one row to the next, if runs are short.
    row: Option<usize>,
}

impl Stream {
    /// What kernel call number `call` asks for: an address and the bytes to go on by with each unit.
    #[inline(always)]
    pub(super) fn at_call(&self, call: usize, num_units: usize) -> (*const u8, usize) {
        if let Some(row) = self.row {
            let at = (64 * call).min(self.len);
            return (self.starts[0].wrapping_add(at), if at < self.len { row } else { 0 });
        }
        let (half, calls) = if self.starts[0] == self.starts[1] {
            (0, self.num_calls)
        } else {
            (usize::from(2 * call >= self.num_calls), self.num_calls.div_ceil(2))
        };
        let step = self.len.div_ceil((calls * num_units).max(1)).min(64);
        let at = ((call - half * (self.num_calls / 2)) * num_units * step).min(self.len);
        (self.starts[half].wrapping_add(at), if at < self.len { step } else { 0 })
    }
}
