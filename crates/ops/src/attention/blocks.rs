//! The blocks that both passes of attention are cut into: rows of queries, and the keys that they see.

use std::ops::Range;

use super::operands::OperandFormat;
use super::sequences::Sequence;

/// Query rows of a block.
pub(super) const ROWS: usize = 64;
/// Keys of a block in backward; [forward](keys_forward) has more where it can.
pub(super) const KEYS: usize = 128;
/// Keys of a block of the forward pass, at most.
pub(super) const MAX_KEYS: usize = 2 * KEYS;
/// The number of rows of a product is a multiple of this.
pub(super) const ROW_UNIT: usize = 8;
/// The number of columns of a product is a multiple of this.
pub(super) const COL_UNIT: usize = 16;

/// Columns of scores that are computed together: the width of the widest tile of a product.
pub(super) const SCORE_COLS: usize = 2 * COL_UNIT;

/// Returns the number of keys of a block of the forward pass. Blocks are large, because each one loads and stores the
/// sums of all rows. With AMX tiles, which transpose blocks of values, a block has as many words as there are
/// [`ROWS`].
pub(super) fn keys_forward(format: OperandFormat) -> usize {
    if format == OperandFormat::AmxTiles { KEYS } else { MAX_KEYS }
}

/// A part of the scores of a block of rows and a block of keys.
pub(super) struct ScorePart {
    /// Query rows, which are the columns of scores.
    pub(super) cols: Range<usize>,
    /// Keys, counted from the first of the block; a multiple of [`ROW_UNIT`].
    pub(super) keys: Range<usize>,
}

/// A block of query rows: all queries and query heads of one sequence that use one key head, by query and then by
/// head.
#[derive(Clone, Copy)]
pub(super) struct RowBlock<'a> {
    sequence: &'a Sequence<'a>,
    kv_head: usize,
    start: usize,
    pub(super) len: usize,
}

impl<'a> RowBlock<'a> {
    /// Returns the number of blocks of the rows of a sequence and key head.
    pub(super) fn count(sequence: &Sequence<'_>) -> usize {
        (sequence.num_queries * sequence.heads.group()).div_ceil(ROWS)
    }

    pub(super) fn new(sequence: &'a Sequence<'a>, kv_head: usize, index: usize) -> Self {
        let start = index * ROWS;
        let len = ROWS.min(sequence.num_queries * sequence.heads.group() - start);
        Self { sequence, kv_head, start, len }
    }

    /// Returns the offsets of the rows of `keys` in `k`.
    pub(super) fn key_elements(&self, keys: &Range<usize>) -> [usize; MAX_KEYS] {
        self.sequence.key_starts(self.kv_head, keys, self.sequence.heads.head_dim)
    }

    /// Returns the offsets of the rows of `keys` in `v`.
    pub(super) fn key_value_elements(&self, keys: &Range<usize>) -> [usize; MAX_KEYS] {
        self.sequence.key_starts(self.kv_head, keys, self.sequence.heads.value_dim)
    }

    /// Returns the number of rows, rounded up to the unit of products.
    pub(super) fn padded_len(&self, format: OperandFormat) -> usize {
        self.len.next_multiple_of(if format == OperandFormat::AmxTiles { SCORE_COLS } else { COL_UNIT })
    }

    /// Returns the query and the query head of a row.
    fn query_and_head(&self, row: usize) -> (usize, usize) {
        let (row, group) = (self.start + row, self.sequence.heads.group());
        (row / group, self.kv_head * group + row % group)
    }

    /// Returns `make(query, head)` of each row; rows beyond the last repeat the last. Steps from row to row, because
    /// a division takes as long as a few hundred products.
    #[inline(always)]
    fn of_rows<T>(&self, make: impl Fn(usize, usize) -> T) -> [T; ROWS] {
        let ((mut query, mut head), group) = (self.query_and_head(0), self.sequence.heads.group());
        let end = (self.kv_head + 1) * group;
        std::array::from_fn(|row| {
            if row > 0 && row < self.len {
                head += 1;
                if head == end {
                    (query, head) = (query + 1, end - group);
                }
            }
            make(query, head)
        })
    }

    /// Returns the offsets of the rows in a tensor with `dim` elements a head.
    fn starts(&self, dim: usize) -> [usize; ROWS] {
        let (first, step) = (self.sequence.first_query, self.sequence.heads.num_heads);
        self.of_rows(|query, head| ((first + query) * step + head) * dim)
    }

    /// Returns the offsets of the rows in `q` and its gradient.
    pub(super) fn elements(&self) -> [usize; ROWS] {
        self.starts(self.sequence.heads.head_dim)
    }

    /// Returns the offsets of the rows in `o` and its gradient.
    pub(super) fn value_elements(&self) -> [usize; ROWS] {
        self.starts(self.sequence.heads.value_dim)
    }

    /// Returns the query head of a row.
    pub(super) fn head(&self, row: usize) -> usize {
        self.query_and_head(row.min(self.len - 1)).1
    }

    /// Returns the rows' places in `lse`.
    pub(super) fn statistics(&self) -> [usize; ROWS] {
        self.of_rows(|query, head| self.sequence.statistic(query, head))
    }

    /// Returns the number of keys up to a row's position. It never falls from one row to the next; rows beyond the
    /// last repeat the last.
    pub(super) fn visible(&self, row: usize) -> usize {
        let (query, _) = self.query_and_head(row.min(self.len - 1));
        self.sequence.keys_until(query)
    }

    /// Returns the first row whose keys reach up to `key` or beyond; [`len`](Self::len) if there is none.
    pub(super) fn first_that_sees(&self, key: usize) -> usize {
        let query = (key + self.sequence.num_queries).saturating_sub(self.sequence.num_keys);
        (query * self.sequence.heads.group()).saturating_sub(self.start).min(self.len)
    }

    /// Returns [`visible`](Self::visible) of all rows, in the type that kernels compare with.
    pub(super) fn visible_counts(&self) -> [i32; ROWS] {
        self.of_rows(|query, _| i32::try_from(self.sequence.keys_until(query)).unwrap_or(i32::MAX))
    }

    /// Returns the first key that a row sees. It never falls from one row to the next.
    pub(super) fn first_visible(&self, row: usize) -> usize {
        self.sequence.heads.window.map_or(0, |window| self.visible(row).saturating_sub(window))
    }

    /// Returns [`first_visible`](Self::first_visible) of all rows, in the type that kernels compare with.
    pub(super) fn first_visible_counts(&self) -> [i32; ROWS] {
        self.of_rows(|query, _| {
            let until = self.sequence.keys_until(query);
            let first = self.sequence.heads.window.map_or(0, |window| until.saturating_sub(window));
            i32::try_from(first).unwrap_or(i32::MAX)
        })
    }

    /// Returns whether any of the rows sees any of the keys.
    pub(super) fn sees_any(&self, keys: &Range<usize>) -> bool {
        self.visible(self.len - 1) > keys.start && self.first_visible(0) < keys.end
    }

    /// Returns whether some of the rows see these keys and none before them.
    pub(super) fn begins_with(&self, keys: &Range<usize>) -> bool {
        keys.contains(&self.first_visible(0))
    }

    /// Returns how many of `keys` are not behind row `row`.
    pub(super) fn visible_in(&self, row: usize, keys: &Range<usize>) -> usize {
        self.visible(row).clamp(keys.start, keys.end) - keys.start
    }

    /// Returns the parts of the scores of [`SCORE_COLS`] rows from `col` on that are to be computed: the keys that
    /// the first half sees, for both halves, and the keys that only the second half sees, for that half. With AMX
    /// tiles both halves are one part.
    pub(super) fn score_parts(
        &self,
        format: OperandFormat,
        col: usize,
        keys: &Range<usize>,
    ) -> impl Iterator<Item = ScorePart> + use<> {
        let (middle, end) = (col + COL_UNIT, self.padded_len(format).min(col + SCORE_COLS));
        let (first, all) = (self.num_scored(format, col, keys), self.num_scored(format, end - COL_UNIT, keys));
        let [first, all] = [first, all].map(|keys| keys.next_multiple_of(ROW_UNIT));
        let parts = [ScorePart { cols: col..end, keys: 0..first }, ScorePart { cols: middle..end, keys: first..all }];
        parts.into_iter().filter(|part| !part.keys.is_empty())
    }

    /// Returns the number of keys, from the first of `keys` on, that have weights for the [`COL_UNIT`] rows from
    /// `col` on. The weight is zero where a row does not see a key. With AMX tiles the number is that of all
    /// [`SCORE_COLS`] rows, rounded up to whole tiles.
    pub(super) fn num_scored(&self, format: OperandFormat, col: usize, keys: &Range<usize>) -> usize {
        match format {
            OperandFormat::F32 | OperandFormat::Bf16Pairs => self.visible_in(col + COL_UNIT - 1, keys),
            OperandFormat::AmxTiles => {
                let last = (col / SCORE_COLS + 1) * SCORE_COLS - 1;
                self.visible_in(last, keys).next_multiple_of(format.key_unit())
            }
        }
    }
}

/// Returns how many of `num_keys` keys from `first` on are seen by all of some rows, counted from the start. Row i
/// sees the keys `seen_from[i]..visible[i]`; neither bound falls from one row to the next.
#[inline(always)]
pub(super) fn seen_by_all(first: usize, num_keys: usize, seen_from: &[i32], visible: &[i32]) -> usize {
    match (seen_from.last(), visible.first()) {
        (Some(&from), Some(&end)) if from as usize <= first => (end as usize).saturating_sub(first).min(num_keys),
        _ => 0,
    }
}

/// Returns [`COL_UNIT`] elements of a row of statistics or scores.
#[inline(always)]
pub(super) fn lanes_of<T>(row: &[T], first: usize) -> &[T; COL_UNIT] {
    row[first..].first_chunk().expect("rows are whole vectors")
}

/// Returns [`COL_UNIT`] elements of a row, for writing.
#[inline(always)]
pub(super) fn lanes_of_mut<T>(row: &mut [T], first: usize) -> &mut [T; COL_UNIT] {
    row[first..].first_chunk_mut().expect("rows are whole vectors")
}
