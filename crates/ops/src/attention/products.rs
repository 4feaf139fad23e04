//! Attention's small matrix products, in vectors or in AMX tiles.

use std::ops::Range;

use super::blocks::{COL_UNIT, KEYS, ROW_UNIT, ROWS, RowBlock, SCORE_COLS};
use super::operands::{OperandFormat, Rows, Values, transpose};
use crate::Isa;
#[cfg(target_arch = "x86_64")]
use crate::gemm::amx::{
    Registers,
    strided::{self, Matrix},
};
use crate::simd::{Level, kernel};

/// The left operand of a product, in words: a matrix whose rows are `stride` words apart, or its transpose.
#[derive(Clone, Copy)]
pub(super) struct Left<'a> {
    values: &'a [f32],
    stride: usize,
    is_transposed: bool,
}

impl<'a> Left<'a> {
    /// Takes a row-major matrix.
    pub(super) fn rows(values: &'a [f32], stride: usize) -> Self {
        Self { values, stride, is_transposed: false }
    }

    /// Takes the transpose of a row-major matrix.
    pub(super) fn columns(values: &'a [f32], stride: usize) -> Self {
        Self { values, stride, is_transposed: true }
    }

    /// Returns the end of a part of `rows` rows and `inner` words.
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

/// The scores that a sum over keys takes its weights from: [`SCORE_COLS`] rows of a block, from `col` on, and a block
/// of keys.
#[derive(Clone, Copy)]
pub(super) struct ScoreBlock<'a> {
    pub(super) rows: RowBlock<'a>,
    pub(super) col: usize,
    pub(super) keys: &'a Range<usize>,
}

/// The sizes of a product: `rows` is a multiple of [`ROW_UNIT`], `cols` of [`COL_UNIT`]; `inner` counts words.
#[derive(Clone, Copy)]
pub(super) struct Size {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) inner: usize,
    pub(super) format: OperandFormat,
}

kernel! {
    bf16
    /// Computes `c = a b`, or `c += a b` with `add`. The rows of `c` are `c_stride` apart.
    pub(super) fn product<S: Level>(
        size: Size,
        a: Left<'_>,
        b: Right<'_>,
        add: bool,
        c: &mut [f32],
        c_stride: usize,
    ) {
        let Size { rows, cols, inner, format } = size;
        if rows == 0 || cols == 0 {
            return;
        }
        assert!(rows.is_multiple_of(ROW_UNIT) && cols.is_multiple_of(COL_UNIT));
        assert!(c.len() >= (rows - 1) * c_stride + cols);
        assert!(inner == 0 || b.values.len() >= (inner - 1) * b.stride + cols);
        assert!(match format {
            OperandFormat::F32 => true,
            OperandFormat::Bf16Pairs => S::HAS_PAIR_DOT,
            OperandFormat::AmxTiles => false,
        });
        assert!(inner == 0 || a.values.len() >= a.end(rows, inner));
        // SAFETY: the assertions keep every element of the product inside the three slices.
        unsafe {
            match (a.is_transposed, format) {
                (false, OperandFormat::F32) => tiles::<S, false, false>(size, a, b, add, c, c_stride),
                (true, OperandFormat::F32) => tiles::<S, true, false>(size, a, b, add, c, c_stride),
                (false, _) => tiles::<S, false, true>(size, a, b, add, c, c_stride),
                (true, _) => tiles::<S, true, true>(size, a, b, add, c, c_stride),
            }
        }
    }
}

/// Multiplies within a task. Holds the tile registers where the format is for them.
pub(super) struct Products {
    pub(super) isa: Isa,
    pub(super) format: OperandFormat,
    #[cfg(target_arch = "x86_64")]
    tiles: Option<Registers>,
}

impl Products {
    /// Sets the tile registers up if the format is for them.
    ///
    /// # Panics
    /// If the format is for AMX tiles and the instruction set has none.
    pub(super) fn new(isa: Isa, format: OperandFormat) -> Self {
        assert!(format != OperandFormat::AmxTiles || isa.has_tiles(), "tiles");
        Self {
            isa,
            format,
            // SAFETY: an instruction set with tiles is there only where they are, and no task of attention is inside
            // another of anything that uses them.
            #[cfg(target_arch = "x86_64")]
            tiles: (format == OperandFormat::AmxTiles).then(|| unsafe { Registers::set_up() }),
        }
    }

    /// Computes [`product`] in vectors or tiles. For AMX tiles the left operand must not be transposed.
    pub(super) fn run(&self, size: Size, a: Left<'_>, b: Right<'_>, add: bool, c: &mut [f32], c_stride: usize) {
        #[cfg(target_arch = "x86_64")]
        if let Some(tiles) = &self.tiles {
            assert!(!a.is_transposed, "tiles of a transpose");
            let (a, b) = (Matrix { words: a.values, stride: a.stride }, Matrix { words: b.values, stride: b.stride });
            let size = strided::Size { rows: size.rows, cols: size.cols, inner: size.inner };
            return tiles.multiply(size, a, b, add, c, c_stride);
        }
        product(self.isa, size, a, b, add, c, c_stride);
    }

    /// Writes, or with `add` adds, to [`SCORE_COLS`] rows from `col` on of `to` the products of `weights` and the
    /// rows of `right`. `weights` has a row for each word of keys and a column for each query from `col` on. Both
    /// operands are packed along the keys.
    ///
    /// With AMX tiles rows and columns of `to` and of `right` change places, so that no product has a transposed left
    /// operand.
    pub(super) fn sum_of_keys(
        &self,
        ScoreBlock { rows, col, keys }: ScoreBlock<'_>,
        weights: Right<'_>,
        of_keys: &[f32],
        width: usize,
        add: bool,
        to: &mut [f32],
    ) {
        let format = self.format;
        if format == OperandFormat::AmxTiles {
            let inner = format.count(rows.num_scored(format, col, keys));
            let size = Size { rows: width, cols: SCORE_COLS, inner, format };
            return self.run(size, Left::rows(of_keys, KEYS / 2), weights, add, &mut to[col..], ROWS);
        }
        for row in (col..rows.len.min(col + SCORE_COLS)).step_by(ROW_UNIT) {
            let inner = format.count(rows.visible_in(row + ROW_UNIT - 1, keys));
            let size = Size { rows: ROW_UNIT, cols: width, inner, format };
            let left = Left::columns(&weights.values[row - col..], weights.stride);
            let right = Right { values: of_keys, stride: width };
            self.run(size, left, right, add, &mut to[row * width..], width);
        }
    }

    /// Packs the rows of keys as the operand `right` of [`sum_of_keys`](Self::sum_of_keys). AMX tiles need scratch of
    /// the same size.
    pub(super) fn pack_keys(&self, values: Values<'_>, rows: Rows<'_>, to: &mut [f32], room: &mut [f32]) {
        let (isa, format) = (self.isa, self.format);
        if format != OperandFormat::AmxTiles {
            return values.pack_along_rows(isa, format, rows, to);
        }
        values.pack_along_rows(isa, format, rows, room);
        transpose(isa, room, format.count(rows.starts.len()), rows.width, rows.width, to);
    }

    /// Calls `take` with each row of sums `[ROWS, width]` of [`sum_of_keys`](Self::sum_of_keys), some columns at a
    /// time: the row's number, the first column and the elements. AMX tiles need scratch of `[ROWS, ROWS]`.
    pub(super) fn each_row(
        &self,
        sums: &[f32],
        num_rows: usize,
        num_cols: usize,
        room: &mut [f32],
        mut take: impl FnMut(usize, usize, &[f32]),
    ) {
        let width = sums.len() / ROWS;
        if self.format != OperandFormat::AmxTiles {
            return (0..num_rows).for_each(|row| take(row, 0, &sums[row * width..][..num_cols]));
        }
        for first in (0..num_cols).step_by(ROWS) {
            transpose(self.isa, &sums[first * ROWS..], ROWS.min(width - first), ROWS, ROWS, room);
            let cols = ROWS.min(num_cols - first);
            (0..num_rows).for_each(|row| take(row, first, &room[row * ROWS..][..cols]));
        }
    }
}

/// Cuts a product into tiles that fit registers: 8 x 32 or 8 x 16 elements, 4 x 16, or 4 x 8. They divide the units
/// at any width of vectors.
///
/// # Safety
/// The sizes must fit the slices. `COLUMNS` says whether `a` is transposed, `PAIRS` whether words are pairs of bf16.
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

/// A tile of a product: pointers to its first elements, and the distance between rows.
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

/// Computes a product that is small enough for its result to stay in registers: `M` rows of `N` vectors.
///
/// # Safety
/// The operands' elements must be readable and the result's writable.
#[inline(always)]
unsafe fn tile_product<S: Level, const COLUMNS: bool, const PAIRS: bool, const M: usize, const N: usize>(
    tile: Tile,
    add: bool,
) {
    /// Steps of an iteration, so that the addresses of rows are computed once for all of them.
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
                let sum = if add { S::vector_add(sum, S::load(to)) } else { sum };
                S::store(to, sum);
            }
        }
    }
}

/// Adds the outer product of column `step` of `a` and a row of `b`.
///
/// # Safety
/// See [`tile_product`].
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
