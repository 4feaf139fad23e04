//! Packing for tiles: everything becomes pairs of bf16 that are neighbours along the depth, zeros beyond its end.
//!
//! Sixteen rows along the depth are read 32 elements at a time, two rows across it 16 elements at a time; either gives a
//! vector of 16 units. A transposition of 16 vectors turns one kind into the other.

use core::arch::x86_64::{
    __m256bh, __m256i, __m512, __m512bh, __m512i, _mm256_maskz_loadu_epi16, _mm512_cvtepu16_epi32, _mm512_cvtne2ps_pbh,
    _mm512_cvtneps_pbh, _mm512_maskz_loadu_epi16, _mm512_maskz_loadu_ps, _mm512_maskz_mul_ps, _mm512_or_si512,
    _mm512_set1_ps, _mm512_setzero_si512, _mm512_shuffle_i32x4, _mm512_slli_epi32, _mm512_storeu_si512,
    _mm512_unpackhi_epi32, _mm512_unpackhi_epi64, _mm512_unpacklo_epi32, _mm512_unpacklo_epi64,
};

use std::ops::Range;

use super::BLOCK;
use crate::gemm::kernel::prefetch_far;
use crate::gemm::source::{Block, Elements, Source};
use crate::gemm::tasks::Panels;

/// Elements of the depth in a block.
const DEPTH: usize = 2 * BLOCK;

/// Rows by which memory is asked for ahead of those that are packed.
const ROWS_AHEAD: usize = 16;

/// Packs rows of A that run along the depth: for each sixteen rows the blocks of the depth one after the other, each
/// `[row][unit]`.
#[inline(always)]
pub(super) fn rows(source: &Source<'_>, (first, rows): (usize, usize), depth: (usize, usize), to: &mut [u32]) {
    // SAFETY: tiles are used only on machines that have these instructions.
    unsafe { rows_in_vectors(source, (first, rows), depth, to) }
}

/// Packs columns `columns` of rows of A that run across the depth, in the same form as [`rows`].
#[inline(always)]
pub(super) fn transposed_rows(source: &Source<'_>, columns: (usize, usize), depth: (usize, usize), to: &mut [u32]) {
    // SAFETY: as above.
    unsafe { transposed_rows_in_vectors(source, columns, depth, to) }
}

/// Packs the panels `range` of B whose rows run across the depth, one after the other, each `[unit][width]`, zeros beyond the
/// last column. All panels grow at once, so that rows are read from end to end.
#[inline(always)]
pub(super) fn columns(
    source: &Source<'_>,
    depth: (usize, usize),
    panels: &Panels,
    range: Range<usize>,
    to: &mut [u32],
) {
    // SAFETY: as above.
    unsafe { columns_in_vectors(source, depth, panels, range, to) }
}

/// Packs a panel of B whose rows run along the depth, in the same form as [`columns`].
#[inline(always)]
pub(super) fn transposed_columns(source: &Source<'_>, block: Block, width: usize, to: &mut [u32]) {
    // SAFETY: as above.
    unsafe { transposed_columns_in_vectors(source, block, width, to) }
}

/// The instructions that every machine with tiles has and that packing uses.
macro_rules! in_vectors {
    ($(#[$meta:meta])* fn $name:ident($($arg:tt)*) $(-> $result:ty)? $body:block) => {
        $(#[$meta])*
        #[inline]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c,bmi2")]
        fn $name($($arg)*) $(-> $result)? $body
    };
}

in_vectors! {
    fn rows_in_vectors(source: &Source<'_>, (first, rows): (usize, usize), (start, depth): (usize, usize), to: &mut [u32]) {
        let num_blocks = depth.div_ceil(DEPTH);
        if num_blocks == 0 {
            return;
        }
        for row in 0..rows.next_multiple_of(BLOCK) {
            let to = &mut to[row / BLOCK * num_blocks * BLOCK * BLOCK + row % BLOCK * BLOCK..];
            for block in 0..num_blocks {
                let done = block * DEPTH;
                let units = if row < rows {
                    along(source, first + row, start + done, (depth - done).min(DEPTH))
                } else {
                    _mm512_setzero_si512()
                };
                store(units, &mut to[block * BLOCK * BLOCK..]);
            }
        }
    }
}

in_vectors! {
    fn transposed_rows_in_vectors(
        source: &Source<'_>,
        (first, columns): (usize, usize),
        (start, depth): (usize, usize),
        to: &mut [u32],
    ) {
        let num_blocks = depth.div_ceil(DEPTH);
        for block in 0..num_blocks {
            for column in (0..columns).step_by(BLOCK) {
                let mut units = [_mm512_setzero_si512(); BLOCK];
                let num_columns = (columns - column).min(BLOCK);
                for (unit, units) in units.iter_mut().enumerate() {
                    let row = block * DEPTH + 2 * unit;
                    *units = across(source, (start + row, depth.saturating_sub(row).min(2)), first + column, num_columns);
                }
                transpose(&mut units);
                let to = &mut to[(column / BLOCK * num_blocks + block) * BLOCK * BLOCK..][..BLOCK * BLOCK];
                for (units, to) in units.iter().zip(to.chunks_exact_mut(BLOCK)) {
                    store(*units, to);
                }
            }
        }
    }
}

in_vectors! {
    fn columns_in_vectors(
        source: &Source<'_>,
        (start, depth): (usize, usize),
        panels: &Panels,
        range: Range<usize>,
        to: &mut [u32],
    ) {
        let num_units = depth.div_ceil(DEPTH) * BLOCK;
        let (first, end) = (panels.panel(range.start).0, panels.panel(range.end - 1));
        let row_bytes = source.bytes_of(end.0 + end.1 - first);
        for unit in 0..num_units {
            let rows = (start + 2 * unit, depth.saturating_sub(2 * unit).min(2));
            for row in rows.0..rows.0 + rows.1 {
                let later = source.address_later(row, ROWS_AHEAD, first);
                (0..row_bytes).step_by(64).for_each(|line| prefetch_far(later.wrapping_add(line)));
            }
            let mut panel_start = 0;
            for panel in range.clone() {
                let (first, columns, width) = panels.panel(panel);
                let to = &mut to[panel_start + unit * width..][..width];
                for (column, to) in (0..width).step_by(BLOCK).zip(to.chunks_exact_mut(BLOCK)) {
                    let num_columns = columns.saturating_sub(column).min(BLOCK);
                    store(across(source, rows, first + column, num_columns), to);
                }
                panel_start += num_units * width;
            }
        }
    }
}

in_vectors! {
    fn transposed_columns_in_vectors(source: &Source<'_>, block: Block, width: usize, to: &mut [u32]) {
        let ((first, columns), (start, depth)) = (block.rows, block.columns);
        for column in (0..width).step_by(BLOCK) {
            for block in 0..depth.div_ceil(DEPTH) {
                let done = block * DEPTH;
                let mut units = [_mm512_setzero_si512(); BLOCK];
                for (row, units) in units.iter_mut().enumerate() {
                    if column + row < columns {
                        prefetch_far(source.address_later(first + column + row, BLOCK, start + done));
                        *units = along(source, first + column + row, start + done, (depth - done).min(DEPTH));
                    }
                }
                transpose(&mut units);
                for (unit, units) in units.iter().enumerate() {
                    store(*units, &mut to[(block * BLOCK + unit) * width + column..]);
                }
            }
        }
    }
}

in_vectors! {
    fn store(units: __m512i, to: &mut [u32]) {
        let to = &mut to[..BLOCK];
        // SAFETY: sixteen units may be written there.
        unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), units) }
    }
}

in_vectors! {
    /// The elements `at..at + len` of a row, at most 32, as 16 units.
    fn along(source: &Source<'_>, row: usize, at: usize, len: usize) -> __m512i {
        let start = source.start(row) + at;
        let mask = ((1_u64 << len) - 1) as u32;
        match source.elements {
            Elements::F32(x) => {
                let x = &x[start..start + len];
                // SAFETY: the masks keep the loads to the elements of the slice.
                let (low, high) = unsafe {
                    let high = x.as_ptr().wrapping_add(BLOCK);
                    (_mm512_maskz_loadu_ps(mask as u16, x.as_ptr()), _mm512_maskz_loadu_ps((mask >> 16) as u16, high))
                };
                // SAFETY: the transmute renames 512 bits.
                unsafe { std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low)) }
            }
            Elements::Bf16(x) => {
                let x = &x[start..start + len];
                // SAFETY: as above.
                unsafe { _mm512_maskz_loadu_epi16(mask, x.as_ptr().cast()) }
            }
        }
    }
}

in_vectors! {
    /// The elements `at..at + len`, at most 16, of one or two rows (or none), as 16 units.
    fn across(source: &Source<'_>, (first, rows): (usize, usize), at: usize, len: usize) -> __m512i {
        let zero = _mm512_setzero_si512();
        let low = if rows > 0 { halves(source, first, at, len) } else { zero };
        let high = if rows > 1 { halves(source, first + 1, at, len) } else { zero };
        _mm512_or_si512(low, _mm512_slli_epi32::<16>(high))
    }
}

in_vectors! {
    /// The elements `at..at + len` of a row, at most 16, times the row's factor, as bf16 in the low halves of 16 lanes.
    fn halves(source: &Source<'_>, row: usize, at: usize, len: usize) -> __m512i {
        let start = source.start(row) + at;
        let mask = ((1_u32 << len) - 1) as u16;
        let values = match source.elements {
            Elements::F32(x) => {
                let x = &x[start..start + len];
                // SAFETY: the mask keeps the load to the elements of the slice.
                unsafe { _mm512_maskz_loadu_ps(mask, x.as_ptr()) }
            }
            Elements::Bf16(x) => {
                let x = &x[start..start + len];
                // SAFETY: as above.
                let halves = _mm512_cvtepu16_epi32(unsafe { _mm256_maskz_loadu_epi16(mask, x.as_ptr().cast()) });
                if source.scales.is_none() {
                    return halves;
                }
                // SAFETY: the transmute renames 512 bits.
                unsafe { std::mem::transmute::<__m512i, __m512>(_mm512_slli_epi32::<16>(halves)) }
            }
        };
        let values = match source.scales {
            None => values,
            // Beyond the mask lie zeros, which an infinite factor would make NaN.
            Some(scales) => _mm512_maskz_mul_ps(mask, values, _mm512_set1_ps(scales[row])),
        };
        // SAFETY: the transmute renames 256 bits.
        _mm512_cvtepu16_epi32(unsafe { std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(values)) })
    }
}

in_vectors! {
    /// Swaps vectors and lanes.
    fn transpose(v: &mut [__m512i; BLOCK]) {
        let mut t = *v;
        for i in 0..BLOCK / 2 {
            t[2 * i] = _mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]);
            t[2 * i + 1] = _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
        }
        for i in 0..BLOCK / 4 {
            let (a, b, c, d) = (t[4 * i], t[4 * i + 1], t[4 * i + 2], t[4 * i + 3]);
            v[4 * i] = _mm512_unpacklo_epi64(a, c);
            v[4 * i + 1] = _mm512_unpackhi_epi64(a, c);
            v[4 * i + 2] = _mm512_unpacklo_epi64(b, d);
            v[4 * i + 3] = _mm512_unpackhi_epi64(b, d);
        }
        // Vector 4 i + j holds, in its quarter q, lane 4 q + j of the vectors 4 i to 4 i + 3.
        for j in 0..4 {
            let (a, b, c, d) = (v[j], v[4 + j], v[8 + j], v[12 + j]);
            let (ab_even, ab_odd) = (_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0xdd>(a, b));
            let (cd_even, cd_odd) = (_mm512_shuffle_i32x4::<0x88>(c, d), _mm512_shuffle_i32x4::<0xdd>(c, d));
            t[j] = _mm512_shuffle_i32x4::<0x88>(ab_even, cd_even);
            t[4 + j] = _mm512_shuffle_i32x4::<0x88>(ab_odd, cd_odd);
            t[8 + j] = _mm512_shuffle_i32x4::<0xdd>(ab_even, cd_even);
            t[12 + j] = _mm512_shuffle_i32x4::<0xdd>(ab_odd, cd_odd);
        }
        *v = t;
    }
}
