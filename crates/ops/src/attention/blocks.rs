//! What both passes of attention are made of: blocks of query rows, and small matrix products.

use std::ops::Range;

use super::AttentionShape;
use super::words::Words;
use crate::Isa;
use crate::simd::{Level, kernel};

/// Query rows of a block.
pub(super) const ROWS: usize = 64;
/// Keys of a block.
pub(super) const KEYS: usize = 128;
/// Rows of products come in multiples of this.
pub(super) const ROW_UNIT: usize = 8;
/// Columns of products come in multiples of this.
pub(super) const COL_UNIT: usize = 16;

/// Columns of scores that are computed together: what the widest tile of a product has.
pub(super) const SCORE_COLS: usize = 2 * COL_UNIT;

/// A part of the scores of a block of rows and a block of keys.
pub(super) struct ScorePart {
    /// Rows, which are the columns of scores.
    pub(super) cols: Range<usize>,
    /// Keys, counted from the first of the block; a multiple of [`ROW_UNIT`].
    pub(super) keys: Range<usize>,
}

/// A block of query rows: all queries and query heads of one sequence that use one key head, by query and then by head.
#[derive(Clone, Copy)]
pub(super) struct RowBlock<'a> {
    shape: &'a AttentionShape,
    batch: usize,
    kv_head: usize,
    start: usize,
    pub(super) len: usize,
}

impl<'a> RowBlock<'a> {
    /// Blocks that the rows of one sequence and key head are cut into.
    pub(super) fn count(shape: &AttentionShape) -> usize {
        (shape.seq_len * group(shape)).div_ceil(ROWS)
    }

    pub(super) fn new(shape: &'a AttentionShape, batch: usize, kv_head: usize, index: usize) -> Self {
        let start = index * ROWS;
        Self { shape, batch, kv_head, start, len: ROWS.min(shape.seq_len * group(shape) - start) }
    }

    /// Where the rows of `keys` (at most [`KEYS`]) start in `k` and in `v`.
    pub(super) fn key_elements(&self, keys: &Range<usize>) -> ([usize; KEYS], [usize; KEYS]) {
        key_elements(self.shape, self.batch, self.kv_head, keys)
    }

    /// Rows rounded up to whole vectors.
    pub(super) fn padded_len(&self) -> usize {
        self.len.next_multiple_of(COL_UNIT)
    }

    fn query_and_head(&self, row: usize) -> (usize, usize) {
        let (row, group) = (self.start + row, group(self.shape));
        (row / group, self.kv_head * group + row % group)
    }

    fn element(&self, row: usize, dim: usize) -> usize {
        let (query, head) = self.query_and_head(row);
        ((self.batch * self.shape.seq_len + query) * self.shape.num_heads + head) * dim
    }

    /// Where the rows start in `q` and its gradient.
    pub(super) fn elements(&self) -> [usize; ROWS] {
        std::array::from_fn(|row| self.element(row.min(self.len - 1), self.shape.head_dim))
    }

    /// Where the rows start in `o` and its gradient.
    pub(super) fn value_elements(&self) -> [usize; ROWS] {
        std::array::from_fn(|row| self.element(row.min(self.len - 1), self.shape.value_dim))
    }

    /// The query head of a row.
    pub(super) fn head(&self, row: usize) -> usize {
        self.query_and_head(row.min(self.len - 1)).1
    }

    /// Where a row is in `lse`.
    pub(super) fn statistic(&self, row: usize) -> usize {
        let (query, head) = self.query_and_head(row);
        (self.batch * self.shape.num_heads + head) * self.shape.seq_len + query
    }

    /// The number of keys that a row sees; it never falls from one row to the next. Rows beyond the last see as many.
    pub(super) fn visible(&self, row: usize) -> usize {
        let (query, _) = self.query_and_head(row.min(self.len - 1));
        query + self.shape.kv_len - self.shape.seq_len + 1
    }

    /// [`visible`](Self::visible) of all rows, in the form that kernels compare with.
    pub(super) fn visible_counts(&self) -> [i32; ROWS] {
        std::array::from_fn(|row| i32::try_from(self.visible(row)).unwrap_or(i32::MAX))
    }

    /// The first key that a row sees; it never falls from one row to the next either.
    pub(super) fn first_visible(&self, row: usize) -> usize {
        self.shape.window.map_or(0, |window| self.visible(row).saturating_sub(window))
    }

    /// [`first_visible`](Self::first_visible) of all rows, in the form that kernels compare with.
    pub(super) fn first_visible_counts(&self) -> [i32; ROWS] {
        std::array::from_fn(|row| i32::try_from(self.first_visible(row)).unwrap_or(i32::MAX))
    }

    /// Whether any of the rows sees any of the keys.
    pub(super) fn sees_any(&self, keys: &Range<usize>) -> bool {
        self.visible(self.len - 1) > keys.start && self.first_visible(0) < keys.end
    }

    /// Of the keys from `first` to `end`, how many are not behind row `row`.
    pub(super) fn visible_in(&self, row: usize, keys: &Range<usize>) -> usize {
        self.visible(row).clamp(keys.start, keys.end) - keys.start
    }

    /// What to compute of the scores of [`SCORE_COLS`] rows from `col` on: keys that the first half sees for all, and what
    /// only the second half sees for that alone.
    pub(super) fn score_parts(&self, col: usize, keys: &Range<usize>) -> impl Iterator<Item = ScorePart> {
        let seen = |row: usize| self.visible_in(row, keys).next_multiple_of(ROW_UNIT);
        let (middle, end) = (col + COL_UNIT, self.padded_len().min(col + SCORE_COLS));
        let (first, all) = (seen(middle - 1), seen(end - 1));
        let parts = [ScorePart { cols: col..end, keys: 0..first }, ScorePart { cols: middle..end, keys: first..all }];
        parts.into_iter().filter(|part| !part.keys.is_empty())
    }
}

/// Query heads that share a key head.
fn group(shape: &AttentionShape) -> usize {
    shape.num_heads / shape.num_kv_heads
}

/// Where the rows of `keys` (at most [`KEYS`]) start in `k` and in `v`.
pub(super) fn key_elements(
    shape: &AttentionShape,
    batch: usize,
    kv_head: usize,
    keys: &Range<usize>,
) -> ([usize; KEYS], [usize; KEYS]) {
    let starts = |dim: usize| key_starts(shape, (batch, kv_head), keys, dim);
    (starts(shape.head_dim), starts(shape.value_dim))
}

/// Where the rows of `keys` (at most [`KEYS`]) of a sequence and key head start in a tensor with `dim` elements a head.
pub(super) fn key_starts(
    shape: &AttentionShape,
    (batch, kv_head): (usize, usize),
    keys: &Range<usize>,
    dim: usize,
) -> [usize; KEYS] {
    let at = |key: usize| (batch * shape.kv_capacity + key) * shape.num_kv_heads + kv_head;
    std::array::from_fn(|i| at((keys.start + i).min(keys.end - 1)) * dim)
}

/// The left operand of a product, in words: a matrix with rows `stride` apart, or its transpose.
#[derive(Clone, Copy)]
pub(super) struct Left<'a> {
    values: &'a [f32],
    stride: usize,
    is_transposed: bool,
}

impl<'a> Left<'a> {
    /// The matrix as it lies.
    pub(super) fn rows(values: &'a [f32], stride: usize) -> Self {
        Self { values, stride, is_transposed: false }
    }

    /// The transpose of what lies there.
    pub(super) fn columns(values: &'a [f32], stride: usize) -> Self {
        Self { values, stride, is_transposed: true }
    }

    /// Where a part of so many rows and words ends.
    fn end(&self, rows: usize, inner: usize) -> usize {
        let (last, len) = if self.is_transposed { (inner - 1, rows) } else { (rows - 1, inner) };
        last * self.stride + len
    }
}

/// A row-major matrix, possibly a part of a wider one.
#[derive(Clone, Copy)]
pub(super) struct Right<'a> {
    pub(super) values: &'a [f32],
    pub(super) stride: usize,
}

/// The sizes of a product: `rows` a multiple of [`ROW_UNIT`], `cols` of [`COL_UNIT`], `inner` in words.
#[derive(Clone, Copy)]
pub(super) struct Size {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) inner: usize,
    pub(super) words: Words,
}

kernel! {
    bf16
    /// `c = a b`, or `c += a b` with `add`, where `c` is row-major with rows `c_stride` apart.
    pub(super) fn product<S: Level>(
        size: Size,
        a: Left<'_>,
        b: Right<'_>,
        add: bool,
        c: &mut [f32],
        c_stride: usize,
    ) {
        let Size { rows, cols, inner, words } = size;
        if rows == 0 || cols == 0 {
            return;
        }
        assert!(rows.is_multiple_of(ROW_UNIT) && cols.is_multiple_of(COL_UNIT));
        assert!(c.len() >= (rows - 1) * c_stride + cols);
        assert!(inner == 0 || b.values.len() >= (inner - 1) * b.stride + cols);
        assert!(words == Words::Singles || S::HAS_PAIR_DOT);
        assert!(inner == 0 || a.values.len() >= a.end(rows, inner));
        // SAFETY: the assertions keep every element of the product inside the three slices.
        unsafe {
            match (a.is_transposed, words) {
                (false, Words::Singles) => tiles::<S, false, false>(size, a, b, add, c, c_stride),
                (true, Words::Singles) => tiles::<S, true, false>(size, a, b, add, c, c_stride),
                (false, Words::Pairs) => tiles::<S, false, true>(size, a, b, add, c, c_stride),
                (true, Words::Pairs) => tiles::<S, true, true>(size, a, b, add, c, c_stride),
            }
        }
    }
}

/// Adds to the rows `to` of a block of queries what the keys that they see give them: `weights`, with the keys along its
/// columns, times the rows of `right`, both in words along the keys.
pub(super) fn add_of_keys(
    isa: Isa,
    words: Words,
    (rows, keys): (RowBlock<'_>, &Range<usize>),
    weights: &[f32],
    right: Right<'_>,
    to: &mut [f32],
) {
    let cols = right.stride;
    for row in (0..rows.len).step_by(ROW_UNIT) {
        let inner = words.count(rows.visible_in(row + ROW_UNIT - 1, keys));
        let size = Size { rows: ROW_UNIT, cols, inner, words };
        product(isa, size, Left::columns(&weights[row..], ROWS), right, true, &mut to[row * cols..], cols);
    }
}

/// A product cut into tiles that fit registers. They divide the units whatever the width of vectors: 8 x 32 or 8 x 16
/// elements, 4 x 16, 4 x 8.
///
/// # Safety
/// The sizes must fit the slices; `COLUMNS` says whether `a` is transposed, `PAIRS` which words there are.
#[inline(always)]
unsafe fn tiles<S: Level, const COLUMNS: bool, const PAIRS: bool>(
    size: Size,
    a: Left<'_>,
    b: Right<'_>,
    add: bool,
    c: &mut [f32],
    c_stride: usize,
) {
    let has_wide_vectors = S::WIDTH == COL_UNIT;
    let mut col = 0;
    while col < size.cols {
        let is_pair = !has_wide_vectors || col + 2 * COL_UNIT <= size.cols;
        for row in (0..size.rows).step_by(if has_wide_vectors { 8 } else { 4 }) {
            let tile = Tile {
                inner: size.inner,
                a: a.values.as_ptr().wrapping_add(if COLUMNS { row } else { row * a.stride }),
                a_stride: a.stride,
                b: b.values.as_ptr().wrapping_add(col),
                b_stride: b.stride,
                c: c.as_mut_ptr().wrapping_add(row * c_stride + col),
                c_stride,
            };
            // SAFETY: the caller's promise.
            unsafe {
                match (has_wide_vectors, is_pair) {
                    (true, true) => tile_product::<S, COLUMNS, PAIRS, 8, 2>(tile, add),
                    (true, false) => tile_product::<S, COLUMNS, PAIRS, 8, 1>(tile, add),
                    (false, _) => tile_product::<S, COLUMNS, PAIRS, 4, 2>(tile, add),
                }
            }
        }
        col += if is_pair { 2 * S::WIDTH } else { S::WIDTH };
    }
}

#[derive(Clone, Copy)]
struct Tile {
    inner: usize,
    a: *const f32,
    a_stride: usize,
    b: *const f32,
    b_stride: usize,
    c: *mut f32,
    c_stride: usize,
}

/// A product small enough that its result stays in registers: `M` rows of `N` vectors.
///
/// # Safety
/// The operands' elements must be readable and the result's writable.
#[inline(always)]
unsafe fn tile_product<S: Level, const COLUMNS: bool, const PAIRS: bool, const M: usize, const N: usize>(
    tile: Tile,
    add: bool,
) {
    /// Steps taken together, so that the addresses of rows are computed once for all.
    const STEPS: usize = 4;
    let Tile { inner, mut a, a_stride, mut b, b_stride, c, c_stride } = tile;
    let mut sums = [[S::splat(0.0); N]; M];
    // SAFETY: the caller's promise. Pointers move past the end with `wrapping_add` only.
    unsafe {
        for _ in 0..inner / STEPS {
            for step in 0..STEPS {
                tile_step::<S, COLUMNS, PAIRS, M, N>(&mut sums, a, a_stride, step, b.add(step * b_stride));
            }
            a = a.wrapping_add(if COLUMNS { STEPS * a_stride } else { STEPS });
            b = b.wrapping_add(STEPS * b_stride);
        }
        for step in 0..inner % STEPS {
            tile_step::<S, COLUMNS, PAIRS, M, N>(&mut sums, a, a_stride, step, b.add(step * b_stride));
        }
        for (m, sums) in sums.iter().enumerate() {
            for (n, &sum) in sums.iter().enumerate() {
                let to = c.add(m * c_stride + n * S::WIDTH);
                let sum = if add { S::vector_mul_add(sum, S::splat(1.0), S::load(to)) } else { sum };
                S::store(to, sum);
            }
        }
    }
}

/// Adds the outer product of column `step` of `a` and a row of `b`.
///
/// # Safety
/// As for [`tile_product`].
#[inline(always)]
unsafe fn tile_step<S: Level, const COLUMNS: bool, const PAIRS: bool, const M: usize, const N: usize>(
    sums: &mut [[S::Vector; N]; M],
    a: *const f32,
    a_stride: usize,
    step: usize,
    b: *const f32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut row_of_b = [S::splat(0.0); N];
        for (n, vector) in row_of_b.iter_mut().enumerate() {
            *vector = S::load(b.add(n * S::WIDTH));
        }
        for (m, sums) in sums.iter_mut().enumerate() {
            let factor = S::splat(*a.add(if COLUMNS { step * a_stride + m } else { m * a_stride + step }));
            for n in 0..N {
                sums[n] = if PAIRS {
                    S::dot_pairs(factor, row_of_b[n], sums[n])
                } else {
                    S::vector_mul_add(factor, row_of_b[n], sums[n])
                };
            }
        }
    }
}

/// Of `num_keys` keys from `first` on, how many at the start are seen by all of some rows, of which each sees the keys
/// from its `seen_from` to before its `visible`; neither falls from one row to the next.
#[inline(always)]
pub(super) fn seen_by_all(first: usize, num_keys: usize, (seen_from, visible): (&[i32], &[i32])) -> usize {
    match (seen_from.last(), visible.first()) {
        (Some(&from), Some(&end)) if from as usize <= first => (end as usize).saturating_sub(first).min(num_keys),
        _ => 0,
    }
}

/// [`COL_UNIT`] elements of a row of statistics or scores.
#[inline(always)]
pub(super) fn lanes_of<T>(row: &[T], first: usize) -> &[T; COL_UNIT] {
    row[first..].first_chunk().expect("rows are whole vectors")
}

/// [`lanes_of`] for writing.
#[inline(always)]
pub(super) fn lanes_of_mut<T>(row: &mut [T], first: usize) -> &mut [T; COL_UNIT] {
    row[first..].first_chunk_mut().expect("rows are whole vectors")
}
