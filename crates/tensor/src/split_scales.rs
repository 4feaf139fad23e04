//! Matrices in blocks whose values and scales are in two places of a file.

use std::sync::OnceLock;

use crate::blocks::{F8Block, Mxfp4Block};
use crate::dtype::{DType, Element};
use crate::pool::MemoryPool;
use crate::tensor::{Bytes, Tensor};

/// The bytes of each row of a matrix, or of each group of consecutive rows that share a line.
#[derive(Clone, Copy, Debug)]
pub struct Lines<'a> {
    bytes: &'a [u8],
    first: usize,
    len: usize,
    step: usize,
    /// The base-2 logarithm of the number of rows that share a line; a division per row would take measurable time.
    shift: u32,
}

impl<'a> Lines<'a> {
    /// Returns consecutive lines of `len` bytes each.
    #[must_use]
    pub const fn packed(bytes: &'a [u8], len: usize) -> Self {
        Self { bytes, first: 0, len, step: len, shift: 0 }
    }

    /// Returns the bytes of a row. Panics if it is beyond the end.
    #[inline(always)]
    #[must_use]
    pub fn row(self, row: usize) -> &'a [u8] {
        &self.bytes[self.start(row)..][..self.len]
    }

    /// Returns the lines of the rows from `row` on.
    #[inline(always)]
    #[must_use]
    pub const fn starting_at(self, row: usize) -> Self {
        Self { first: self.first + row, ..self }
    }

    /// Returns the address of a row, which need not exist.
    #[inline(always)]
    #[must_use]
    pub fn address(self, row: usize) -> *const u8 {
        self.bytes.as_ptr().wrapping_add(self.start(row))
    }

    /// Returns the bytes of a row; 0 if everything is elsewhere.
    #[inline(always)]
    #[must_use]
    pub const fn row_bytes(self) -> usize {
        self.len
    }

    #[inline(always)]
    const fn start(self, row: usize) -> usize {
        ((self.first + row) >> self.shift) * self.step
    }
}

/// The place of lines in memory of another owner.
#[derive(Clone)]
pub struct Place {
    /// The owner of the memory.
    pub owner: Bytes,
    /// The offset of the first line in bytes.
    pub start: usize,
    /// The number of bytes from one line to the next.
    pub step: usize,
    /// The number of consecutive rows that share a line, a power of two.
    pub rows_each: usize,
}

impl Place {
    fn lines(&self, len: usize) -> Lines<'_> {
        let bytes = (*self.owner).as_ref().get(self.start..).unwrap_or_default();
        Lines { bytes, first: 0, len, step: self.step, shift: self.rows_each.trailing_zeros() }
    }

    /// Returns true if the memory has the lines of `rows` rows.
    fn holds(&self, rows: usize, len: usize) -> bool {
        if !self.rows_each.is_power_of_two() {
            return false;
        }
        let Some(last) = rows.checked_sub(1) else { return true };
        let steps = (last / self.rows_each).checked_mul(self.step);
        let end = steps.and_then(|steps| self.start.checked_add(steps)?.checked_add(len));
        end.is_some_and(|end| end <= (*self.owner).as_ref().len())
    }
}

/// The storage of a tensor with separate values and scales, and the blocks made of them on first use.
pub(crate) struct SplitScales {
    places: [Place; 2],
    pool: MemoryPool,
    joined: OnceLock<Tensor>,
}

impl SplitScales {
    /// Makes the storage; none if a line is missing, or for a type without separate scales.
    pub(crate) fn new(
        pool: &MemoryPool,
        (rows, cols): (usize, usize),
        dtype: DType,
        places: [Place; 2],
    ) -> Option<Self> {
        let lens = line_lens(dtype, cols)?;
        let are_there = places.iter().zip(lens).all(|(place, len)| place.holds(rows, len));
        are_there.then(|| Self { places, pool: pool.clone(), joined: OnceLock::new() })
    }

    pub(crate) fn lines(&self, cols: usize, dtype: DType) -> [Lines<'_>; 2] {
        let lens = line_lens(dtype, cols).expect("types with scales of their own");
        [self.places[0].lines(lens[0]), self.places[1].lines(lens[1])]
    }

    pub(crate) fn stored_bytes(&self, rows: usize, cols: usize, dtype: DType) -> usize {
        let lens = line_lens(dtype, cols).expect("types with scales of their own");
        self.places.iter().zip(lens).map(|(place, len)| rows.div_ceil(place.rows_each) * len).sum()
    }

    pub(crate) fn joined(&self, shape: &[usize], dtype: DType) -> &Tensor {
        self.joined.get_or_init(|| {
            let mut joined = Tensor::empty(&self.pool, shape, dtype);
            let (cols, rows) = (joined.cols(), joined.rows());
            let [numbers, scales] = self.lines(cols, dtype);
            match dtype {
                DType::Mxfp4 => join(rows, (numbers, scales), joined.slice_mut(), Mxfp4Block::joined),
                _ => join(rows, (numbers, scales), joined.slice_mut(), F8Block::joined),
            }
            joined
        })
    }
}

/// Returns the bytes of a row's values and of its scales; none for a type without separate scales.
fn line_lens(dtype: DType, cols: usize) -> Option<[usize; 2]> {
    let blocks = cols / dtype.block_len();
    match dtype {
        DType::Mxfp4 => Some([cols / 2, blocks]),
        DType::F8 => Some([cols, 4 * blocks]),
        _ => None,
    }
}

fn join<B: Element, const NUMBERS: usize, const SCALE: usize>(
    rows: usize,
    (numbers, scales): (Lines<'_>, Lines<'_>),
    to: &mut [B],
    joined: impl Fn(&[u8; NUMBERS], &[u8; SCALE]) -> B,
) {
    for (row, to) in to.chunks_exact_mut((to.len() / rows.max(1)).max(1)).enumerate() {
        let blocks = numbers.row(row).as_chunks().0.iter().zip(scales.row(row).as_chunks().0);
        to.iter_mut().zip(blocks).for_each(|(to, (numbers, scale))| *to = joined(numbers, scale));
    }
}
