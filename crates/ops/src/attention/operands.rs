//! The operands of attention's products, copied out of tensors and packed.
//!
//! Products step along their inner dimension by words of 32 bits. A word is one f32, or two bf16 that are multiplied
//! and summed by one instruction where the machine has that. Both kinds lie in memory of f32; nothing computes with a
//! pair as if it were an f32.

use moeworks_tensor::{DType, Tensor, bf16};

use super::blocks::{COL_UNIT, ROW_UNIT, ROWS, SCORE_COLS};
use crate::Isa;
use crate::parallel::prefetch_elements_far;
use crate::simd::{Float, LANES, kernel, store_all, sum_lanes};

/// Words of a row of an AMX tile register.
const TILE_WORDS: usize = 16;

/// The format of a product's operands along its inner dimension.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum OperandFormat {
    /// One f32 a word.
    F32,
    /// Two consecutive bf16 a word.
    Bf16Pairs,
    /// Two consecutive bf16 a word, for AMX tile registers: operands are padded with zeros to sixteen words.
    AmxTiles,
}

impl OperandFormat {
    /// Chooses the fastest format for tensors of these types.
    pub(super) fn new(isa: Isa, dtypes: &[DType]) -> Self {
        match isa {
            Isa::Avx512Bf16 if dtypes.iter().all(|&dtype| dtype == DType::BF16) => Self::Bf16Pairs,
            Isa::Amx | Isa::AmxF32 if dtypes.iter().all(|&dtype| dtype == DType::BF16) => Self::AmxTiles,
            _ => Self::F32,
        }
    }

    /// Returns whether a word is two bf16.
    pub(super) fn are_pairs(self) -> bool {
        self != Self::F32
    }

    /// Returns the number of words that `elements` elements take, padding included.
    pub(super) fn count(self, elements: usize) -> usize {
        match self {
            Self::F32 => elements,
            Self::Bf16Pairs => elements.div_ceil(2),
            Self::AmxTiles => elements.div_ceil(2).next_multiple_of(TILE_WORDS),
        }
    }

    /// Returns the first word at which a product can begin so that element `at` is among its own.
    pub(super) fn start(self, at: usize) -> usize {
        match self {
            Self::F32 => at,
            Self::Bf16Pairs => at / 2,
            Self::AmxTiles => at / 2 / TILE_WORDS * TILE_WORDS,
        }
    }

    /// Zeroes the padding behind `num_rows` rows that are packed along their index: `to [count(rows), width]`.
    pub(super) fn fill(self, num_rows: usize, width: usize, to: &mut [f32]) {
        if self == Self::AmxTiles {
            to[Self::Bf16Pairs.count(num_rows) * width..self.count(num_rows) * width].fill(0.0);
        }
    }

    /// Returns the length of a packed row of `elements` elements.
    pub(super) fn width(self, elements: usize) -> usize {
        match self {
            Self::F32 | Self::Bf16Pairs => elements.next_multiple_of(COL_UNIT),
            Self::AmxTiles => elements.next_multiple_of(2 * TILE_WORDS),
        }
    }

    /// Returns the unit that a product's number of keys is a multiple of.
    pub(super) fn key_unit(self) -> usize {
        match self {
            Self::F32 | Self::Bf16Pairs => ROW_UNIT,
            Self::AmxTiles => 2 * TILE_WORDS,
        }
    }
}

/// The elements of a float tensor.
#[derive(Clone, Copy)]
pub(super) enum Values<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
}

impl<'a> From<&'a Tensor> for Values<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        match tensor.dtype() {
            DType::F32 => Self::F32(tensor.f32s()),
            DType::BF16 => Self::Bf16(tensor.bf16s()),
            dtype => panic!("attention over {dtype:?}"),
        }
    }
}

/// Rows of a tensor that are copied: the offset where each starts, its number of elements, and the length of its
/// copy, which is padded with zeros.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) starts: &'a [usize],
    pub(super) cols: usize,
    pub(super) width: usize,
}

/// The distance in rows of the prefetch. Rows are short and far apart, so that hardware prefetchers do not find them.
const ROWS_AHEAD: usize = 12;

impl Rows<'_> {
    /// Prefetches the row that is [`ROWS_AHEAD`] rows behind `row`.
    #[inline(always)]
    fn prefetch_behind<T>(&self, row: usize, values: &[T]) {
        if let Some(&start) = self.starts.get(row + ROWS_AHEAD) {
            prefetch_elements_far(values.as_ptr().wrapping_add(start), self.cols);
        }
    }
}

impl Values<'_> {
    /// Prefetches rows that will be copied.
    pub(super) fn prefetch(self, starts: &[usize], cols: usize) {
        for &start in starts {
            match self {
                Self::F32(values) => prefetch_elements_far(values.as_ptr().wrapping_add(start), cols),
                Self::Bf16(values) => prefetch_elements_far(values.as_ptr().wrapping_add(start), cols),
            }
        }
    }

    /// Copies rows as f32: `to [rows, width]`.
    pub(super) fn copy_rows(self, isa: Isa, rows: Rows<'_>, to: &mut [f32]) {
        match self {
            Self::F32(values) => copy_kernel::<f32>(isa, values, rows, to),
            Self::Bf16(values) => copy_kernel::<bf16>(isa, values, rows, to),
        }
    }

    /// Computes the dot products of rows and those of `others [rows, count(width)]`, packed along their elements.
    pub(super) fn row_dots(self, isa: Isa, format: OperandFormat, rows: Rows<'_>, others: &[f32], dots: &mut [f32]) {
        let pairs: &[bf16] = bytemuck::cast_slice(others);
        match (self, format.are_pairs()) {
            (Self::F32(values), false) => dots_kernel::<f32, f32>(isa, values, rows, others, dots),
            (Self::F32(values), true) => dots_kernel::<f32, bf16>(isa, values, rows, pairs, dots),
            (Self::Bf16(values), false) => dots_kernel::<bf16, f32>(isa, values, rows, others, dots),
            (Self::Bf16(values), true) => dots_kernel::<bf16, bf16>(isa, values, rows, pairs, dots),
        }
    }

    /// Copies rows, packed along their elements: `to [rows, count(width)]`.
    pub(super) fn pack_along_cols(self, isa: Isa, format: OperandFormat, rows: Rows<'_>, to: &mut [f32]) {
        match (format, self) {
            (OperandFormat::F32, _) => self.copy_rows(isa, rows, to),
            (_, Self::Bf16(values)) => copy_pairs_kernel(isa, values, rows, to),
            (_, Self::F32(_)) => panic!("pairs of f32"),
        }
    }

    /// Copies rows, packed along the rows' index: `to [count(rows), width]`.
    pub(super) fn pack_along_rows(self, isa: Isa, format: OperandFormat, rows: Rows<'_>, to: &mut [f32]) {
        match (format, self) {
            (OperandFormat::F32, _) => self.copy_rows(isa, rows, to),
            (_, Self::Bf16(values)) => pair_down_kernel(isa, values, rows, to),
            (_, Self::F32(_)) => panic!("pairs of f32"),
        }
        format.fill(rows.starts.len(), rows.width, to);
    }

    /// Copies rows packed both ways, [along their elements](Self::pack_along_cols) and [along the rows'
    /// index](Self::pack_along_rows). Where the format has pairs, f32 is rounded to the same bf16 in both.
    pub(super) fn pack_both_ways(
        self,
        isa: Isa,
        format: OperandFormat,
        rows: Rows<'_>,
        along: &mut [f32],
        down: &mut [f32],
    ) {
        match (format, self) {
            (OperandFormat::Bf16Pairs | OperandFormat::AmxTiles, Self::F32(values)) => {
                round_both_ways(isa, values, rows, along, down);
                format.fill(rows.starts.len(), rows.width, down);
            }
            _ => {
                self.pack_along_cols(isa, format, rows, along);
                self.pack_along_rows(isa, format, rows, down);
            }
        }
    }
}

kernel! {
    fn copy_kernel<S: Level, T: Float>(values: &[T], rows: Rows<'_>, to: &mut [f32]) {
        for ((row, &start), to) in rows.starts.iter().enumerate().zip(to.chunks_exact_mut(rows.width)) {
            rows.prefetch_behind(row, values);
            let from = &values[start..start + rows.cols];
            let (from, last) = from.as_chunks::<COL_UNIT>();
            let (to, _) = to.as_chunks_mut::<COL_UNIT>();
            let load = |to: &mut [f32; COL_UNIT], from: &[T; COL_UNIT]| {
                for i in 0..COL_UNIT {
                    to[i] = from[i].load();
                }
            };
            in_pairs(to, from, load);
            for (chunk, to) in to[from.len()..].iter_mut().enumerate() {
                for (i, to) in to.iter_mut().enumerate() {
                    *to = last.get(chunk * COL_UNIT + i).map_or(0.0, |value| value.load());
                }
            }
        }
    }
}

kernel! {
    fn dots_kernel<S: Level, T: Float, U: Float>(values: &[T], rows: Rows<'_>, others: &[U], dots: &mut [f32]) {
        for (((row, &start), other), dot) in rows.starts.iter().enumerate().zip(others.chunks_exact(rows.width)).zip(dots) {
            rows.prefetch_behind(row, values);
            let (row, rest) = values[start..start + rows.cols].as_chunks::<LANES>();
            let (other, other_rest) = other[..rows.cols].as_chunks::<LANES>();
            let mut sums = [0.0; LANES];
            for (a, b) in row.iter().zip(other) {
                for i in 0..LANES {
                    sums[i] = S::mul_add(a[i].load(), b[i].load(), sums[i]);
                }
            }
            for ((a, b), sum) in rest.iter().zip(other_rest).zip(&mut sums) {
                *sum = S::mul_add(a.load(), b.load(), *sum);
            }
            *dot = sum_lanes(sums);
        }
    }
}

kernel! {
    fn copy_pairs_kernel<S: Level>(values: &[bf16], rows: Rows<'_>, to: &mut [f32]) {
        let to: &mut [bf16] = bytemuck::cast_slice_mut(to);
        for ((row, &start), to) in rows.starts.iter().enumerate().zip(to.chunks_exact_mut(rows.width)) {
            rows.prefetch_behind(row, values);
            let (from, last) = values[start..start + rows.cols].as_chunks::<COL_UNIT>();
            let (to, _) = to.as_chunks_mut::<COL_UNIT>();
            let (twos, one) = from.as_chunks::<2>();
            in_pairs(to.as_chunks_mut::<2>().0, twos, |to, from| *to = *from);
            if let [one] = one {
                to[from.len() - 1] = *one;
            }
            for (chunk, to) in to[from.len()..].iter_mut().enumerate() {
                *to = padded(last.get(chunk * COL_UNIT..).unwrap_or(&[]));
            }
        }
    }
}

/// Applies `copy` to each chunk, two in an iteration. With one in an iteration the compiler calls a function for each
/// row, which is too short for that.
#[inline(always)]
fn in_pairs<T, U>(to: &mut [T], from: &[U], copy: impl Fn(&mut T, &U)) {
    let (twos, one) = from.as_chunks::<2>();
    let (to_twos, _) = to[..from.len()].as_chunks_mut::<2>();
    for ([to, next_to], [from, next]) in to_twos.iter_mut().zip(twos) {
        copy(to, from);
        copy(next_to, next);
    }
    if let ([from], Some(to)) = (one, to[..from.len()].last_mut()) {
        copy(to, from);
    }
}

kernel! {
    fn pair_down_kernel<S: Level>(values: &[bf16], rows: Rows<'_>, to: &mut [f32]) {
        let to: &mut [u32] = bytemuck::cast_slice_mut(to);
        for ((pair, starts), to) in rows.starts.chunks(2).enumerate().zip(to.chunks_exact_mut(rows.width)) {
            [2 * pair, 2 * pair + 1].into_iter().for_each(|row| rows.prefetch_behind(row, values));
            // The last row may have no partner.
            let (high, mask) = starts.get(1).map_or((starts[0], 0), |&start| (start, u32::MAX << 16));
            let row = |start: usize| values[start..start + rows.cols].as_chunks::<COL_UNIT>();
            let ((low, low_rest), (high, high_rest)) = (row(starts[0]), row(high));
            let (to, _) = to.as_chunks_mut::<COL_UNIT>();
            for ((to, low), high) in to.iter_mut().zip(low).zip(high) {
                *to = paired(low, high, mask);
            }
            for (chunk, to) in to[low.len()..].iter_mut().enumerate() {
                let rest = |row: &[bf16]| padded(row.get(chunk * COL_UNIT..).unwrap_or(&[]));
                *to = paired(&rest(low_rest), &rest(high_rest), mask);
            }
        }
    }
}

/// Returns the words of two rows' elements. The second row's elements are masked by `mask`.
#[inline(always)]
fn paired(low: &[bf16; COL_UNIT], high: &[bf16; COL_UNIT], mask: u32) -> [u32; COL_UNIT] {
    let mut words = [0; COL_UNIT];
    for i in 0..COL_UNIT {
        words[i] = u32::from(low[i].to_bits()) | (u32::from(high[i].to_bits()) << 16) & mask;
    }
    words
}

/// Pads fewer elements than [`COL_UNIT`] with zeros.
#[inline(always)]
fn padded(last: &[bf16]) -> [bf16; COL_UNIT] {
    std::array::from_fn(|i| last.get(i).copied().unwrap_or(bf16::from_bits(0)))
}

kernel! {
    bf16
    /// Writes elements times `scale`.
    pub(super) fn store_scaled<S: Level, T: Float>(from: &[f32], scale: f32, to: &mut [T]) {
        if T::DTYPE != DType::BF16 {
            to.iter_mut().zip(from).for_each(|(to, from)| *to = T::store(from * scale));
            return;
        }
        let ((from, rest), (to, to_rest)) = (from.as_chunks::<{ 2 * LANES }>(), to.as_chunks_mut::<{ 2 * LANES }>());
        for (from, to) in from.iter().zip(to) {
            let mut scaled = *from;
            for x in &mut scaled {
                *x *= scale;
            }
            store_all::<S, T>(&scaled, to);
        }
        to_rest.iter_mut().zip(rest).for_each(|(to, from)| *to = T::store(from * scale));
    }
}

kernel! {
    bf16
    /// Packs f32 rows, rounded to bf16, as pairs along their elements, `along [rows, width / 2]`, and along the rows'
    /// index, `down [rows / 2, width]`. A missing last row counts as zeros.
    fn round_both_ways<S: Level>(values: &[f32], rows: Rows<'_>, along: &mut [f32], down: &mut [f32]) {
        const HALF: usize = COL_UNIT / 2;
        assert!(S::HAS_PAIR_DOT, "pairs of bf16");
        let twos = along.chunks_mut(rows.width).zip(down.chunks_exact_mut(rows.width));
        for (pair, (starts, (along, down))) in rows.starts.chunks(2).zip(twos).enumerate() {
            [2 * pair, 2 * pair + 1].into_iter().for_each(|row| rows.prefetch_behind(row, values));
            let low = &values[starts[0]..][..rows.cols];
            let high = starts.get(1).map_or(&[][..], |&start| &values[start..][..rows.cols]);
            let (to_low, to_high) = along.split_at_mut(rows.width / 2);
            for (chunk, down) in down.as_chunks_mut::<COL_UNIT>().0.iter_mut().enumerate() {
                let (low, high) = (lanes_or_zeros(low, chunk), lanes_or_zeros(high, chunk));
                let mut in_order = [0.0; COL_UNIT];
                // SAFETY: arrays of COL_UNIT lanes, as vectors have where pairs are multiplied.
                unsafe {
                    let [both, pairs] = S::round_and_pair(S::load(low.as_ptr()), S::load(high.as_ptr()));
                    S::store(in_order.as_mut_ptr(), both);
                    S::store(down.as_mut_ptr(), pairs);
                }
                to_low[chunk * HALF..][..HALF].copy_from_slice(&in_order[..HALF]);
                to_high[chunk * HALF..][..HALF].copy_from_slice(&in_order[HALF..]);
            }
        }
    }
}

/// Returns chunk number `chunk` of [`COL_UNIT`] elements of a row, padded with zeros.
#[inline(always)]
fn lanes_or_zeros(row: &[f32], chunk: usize) -> [f32; COL_UNIT] {
    let rest = row.get(chunk * COL_UNIT..).unwrap_or(&[]);
    if let Some(lanes) = rest.first_chunk() {
        return *lanes;
    }
    let mut lanes = [0.0; COL_UNIT];
    for (lane, x) in lanes.iter_mut().zip(rest) {
        *lane = *x;
    }
    lanes
}

/// Writes the first `cols` columns of `from [num_rows, width]`, transposed, to `to [cols, ROWS]`. The rest of
/// [`SCORE_COLS`] columns of `to` becomes zero. Elements are words.
pub(super) fn transpose(isa: Isa, from: &[f32], num_rows: usize, width: usize, cols: usize, to: &mut [f32]) {
    let mut first = 0;
    #[cfg(target_arch = "x86_64")]
    if isa >= Isa::Avx512 {
        let units: &[u32] = bytemuck::cast_slice(from);
        let to: &mut [u32] = bytemuck::cast_slice_mut(to);
        while first + 16 <= num_rows {
            let rows = std::array::from_fn(|row| units[(first + row) * width..][..cols].as_ptr());
            // SAFETY: the instruction set is there, and each row has `cols` units.
            unsafe { crate::gemm::transpose::words(&rows, cols, ROWS, 16, &mut to[first..]) };
            first += 16;
        }
    }
    transpose_from(isa, from, first, num_rows, width, cols, to);
}

kernel! {
    /// Does the work of [`transpose`] for the rows from `first` on.
    fn transpose_from<S: Level>(from: &[f32], start: usize, num_rows: usize, width: usize, cols: usize, to: &mut [f32]) {
        const TILE: usize = 16;
        assert!(num_rows <= ROWS);
        for first in (start..num_rows.next_multiple_of(SCORE_COLS)).step_by(TILE) {
            let count = TILE.min(num_rows.saturating_sub(first));
            for (col, to) in to.chunks_exact_mut(ROWS).take(cols).enumerate() {
                let to = &mut to[first..first + TILE];
                let (to, rest) = to.split_at_mut(count);
                for (row, to) in to.iter_mut().enumerate() {
                    *to = from[(first + row) * width + col];
                }
                rest.fill(0.0);
            }
        }
    }
}
