//! Packing for tiles: all operands become pairs of bf16 that are consecutive along the depth, with zeros beyond its
//! end.
//!
//! Sixteen rows along the depth are read 32 elements at a time, two rows across it 16 elements at a time; either
//! gives a vector of 16 units. Transposing 16 such vectors turns one kind into the other. Columns of B are packed as
//! for the dot product ([`pack`](crate::gemm::pack)). Elements split into several [`bf16x3`] give as many vectors,
//! whose blocks are consecutive.

use core::arch::x86_64::{
    __m512i, _mm512_loadu_si512, _mm512_setzero_si512, _mm512_shuffle_i32x4, _mm512_unpackhi_epi32,
    _mm512_unpackhi_epi64, _mm512_unpacklo_epi32, _mm512_unpacklo_epi64,
};

use moeworks_tensor::bf16;

use super::{BLOCK, PARTS, bf16x3};
use crate::gemm::Span;
use crate::gemm::pack::{across, along, interleave, store};
use crate::gemm::source::{Block, Elements, Format, Source};
use crate::prefetch::prefetch_far;

/// Elements of the depth in a block.
const DEPTH: usize = 2 * BLOCK;

/// Packs rows of A that run along the depth: for each sixteen rows the blocks of the depth one after the other, each
/// `[row][unit]`.
#[inline(always)]
pub(super) fn rows(source: &Source<'_>, rows: Span, depth: Span, format: Format, to: &mut [u32]) {
    // SAFETY: tiles are used only on machines that have these instructions.
    unsafe {
        match format.parts {
            1 => rows_in_vectors::<1>(source, rows, depth, to),
            _ => rows_in_vectors::<PARTS>(source, rows, depth, to),
        }
    }
}

/// Packs columns of A, whose rows run across the depth, in the layout of [`rows`].
#[inline(always)]
pub(super) fn transposed_rows(source: &Source<'_>, columns: Span, depth: Span, format: Format, to: &mut [u32]) {
    // SAFETY: as above.
    unsafe {
        match format.parts {
            1 => transposed_rows_in_vectors::<1>(source, columns, depth, to),
            _ => transposed_rows_in_vectors::<PARTS>(source, columns, depth, to),
        }
    }
}

/// Packs a panel of B whose rows run along the depth, in the layout of [`Columns`](crate::gemm::pack::Columns).
#[inline(always)]
pub(in crate::gemm) fn transposed_columns(
    source: &Source<'_>,
    block: Block,
    format: Format,
    width: usize,
    to: &mut [u32],
) {
    // SAFETY: as above.
    unsafe {
        match format.parts {
            1 => transposed_columns_in_vectors::<1>(source, block, width, to),
            _ => transposed_columns_in_vectors::<PARTS>(source, block, width, to),
        }
    }
}

/// Defines a function compiled with features that every machine with tiles has.
macro_rules! in_vectors {
    ($(#[$meta:meta])* fn $name:ident$([$N:ident])?($($arg:tt)*) $(-> $result:ty)? $body:block) => {
        $(#[$meta])*
        #[inline]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c,bmi2")]
        fn $name$(<const $N: usize>)?($($arg)*) $(-> $result)? $body
    };
}

in_vectors! {
    fn rows_in_vectors[N](source: &Source<'_>, rows: Span, depth: Span, to: &mut [u32]) {
        let (Span { first, len: rows }, Span { first: start, len: depth }) = (rows, depth);
        let num_blocks = depth.div_ceil(DEPTH);
        if num_blocks == 0 {
            return;
        }
        for (number, to) in to.chunks_exact_mut(N * num_blocks * BLOCK * BLOCK).enumerate().take(rows.div_ceil(BLOCK)) {
            let (first, rows) = (first + number * BLOCK, (rows - number * BLOCK).min(BLOCK));
            let whole = match source.elements {
                Elements::Bf16(x) if N == 1 => {
                    whole_blocks(source, x, Span::new(first, rows), Span::new(start, depth), to)
                }
                _ => 0,
            };
            for (block, to) in to.chunks_exact_mut(N * BLOCK * BLOCK).enumerate().skip(whole) {
                let done = block * DEPTH;
                for row in 0..BLOCK {
                    let mut units = [_mm512_setzero_si512(); N];
                    if row < rows {
                        units = units_along(source, first + row, start + done, (depth - done).min(DEPTH));
                    }
                    for (part, units) in units.into_iter().enumerate() {
                        store(units, &mut to[(part * BLOCK + row) * BLOCK..]);
                    }
                }
            }
        }
    }
}

in_vectors! {
    /// Packs the whole blocks of the depth of sixteen rows of bf16, and returns how many they are. Each block is
    /// written from end to end; row by row products took a twentieth longer.
    fn whole_blocks(
        source: &Source<'_>,
        x: &[bf16],
        rows: Span,
        depth: Span,
        to: &mut [u32],
    ) -> usize {
        let (Span { first, len: rows }, Span { first: start, len: depth }) = (rows, depth);
        if rows < BLOCK {
            return 0;
        }
        let mut of_rows = [&x[..0]; BLOCK];
        for (row, of_row) in (first..).zip(&mut of_rows) {
            *of_row = &x[source.start(row) + start..][..depth];
        }
        let whole = depth / DEPTH;
        for (block, to) in to.chunks_exact_mut(BLOCK * BLOCK).enumerate().take(whole) {
            for (of_row, to) in of_rows.iter().zip(to.chunks_exact_mut(BLOCK)) {
                let from = &of_row[block * DEPTH..][..DEPTH];
                // SAFETY: 32 elements of 16 bits are there.
                store(unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }, to);
            }
        }
        whole
    }
}

in_vectors! {
    /// Converts at most 32 elements of a row to units, in `N` parts.
    fn units_along[N](source: &Source<'_>, row: usize, at: usize, len: usize) -> [__m512i; N] {
        let mut units = [_mm512_setzero_si512(); N];
        if N == 1 {
            units[0] = along(source, row, at, len);
        } else {
            units.copy_from_slice(&bf16x3::along(source, row, at, len));
        }
        units
    }
}

in_vectors! {
    fn transposed_rows_in_vectors[N](
        source: &Source<'_>,
        columns: Span,
        depth: Span,
        to: &mut [u32],
    ) {
        let (Span { first, len: columns }, Span { first: start, len: depth }) = (columns, depth);
        let num_blocks = depth.div_ceil(DEPTH);
        let bytes = source.bytes_of(columns);
        for block in 0..num_blocks {
            let (row, rows) = (start + block * DEPTH, (depth - block * DEPTH).min(DEPTH));
            // A few lines are read of each row, too few for the hardware prefetcher to predict the next row.
            for row in row..row + rows {
                let later = source.address_later(row, DEPTH, first);
                (0..bytes).step_by(64).for_each(|line| prefetch_far(later.wrapping_add(line)));
            }
            for column in (0..columns).step_by(DEPTH) {
                let num_columns = (columns - column).min(DEPTH);
                let mut units = [[[_mm512_setzero_si512(); BLOCK]; N]; 2];
                let halves = &mut units[..num_columns.div_ceil(BLOCK)];
                if let (1, DEPTH, DEPTH, [low, high]) = (N, rows, num_columns, &mut *halves) {
                    whole_pairs(source, row, first + column, [&mut low[0], &mut high[0]]);
                } else {
                    for (half, units) in halves.iter_mut().enumerate() {
                        let num_columns = (num_columns - half * BLOCK).min(BLOCK);
                        let columns = Span::new(first + column + half * BLOCK, num_columns);
                        units_across(source, Span::new(row, rows), columns, units);
                    }
                }
                for (half, units) in halves.iter_mut().enumerate() {
                    for (part, units) in units.iter_mut().enumerate() {
                        transpose(units);
                        let at = (((column / BLOCK + half) * num_blocks + block) * N + part) * BLOCK * BLOCK;
                        let to = &mut to[at..][..BLOCK * BLOCK];
                        for (units, to) in units.iter().zip(to.chunks_exact_mut(BLOCK)) {
                            store(*units, to);
                        }
                    }
                }
            }
        }
    }
}

in_vectors! {
    /// Converts at most 16 columns of at most 32 rows to units, in `N` parts: a vector for each unit.
    fn units_across[N](
        source: &Source<'_>,
        rows: Span,
        columns: Span,
        units: &mut [[__m512i; BLOCK]; N],
    ) {
        for unit in 0..BLOCK {
            if N == 1 {
                let pair = Span::new(rows.first + 2 * unit, rows.len.saturating_sub(2 * unit).min(2));
                units[0][unit] = across(source, pair, columns.first, columns.len);
            } else {
                let parts = bf16x3::across(source, rows, unit, columns);
                for (to, part) in units.iter_mut().zip(parts) {
                    to[unit] = part;
                }
            }
        }
    }
}

in_vectors! {
    /// Pairs the elements of two rows each of 32 columns of 32 rows: the first sixteen columns, and the others.
    fn whole_pairs(source: &Source<'_>, first: usize, column: usize, units: [&mut [__m512i; BLOCK]; 2]) {
        let [low_units, high_units] = units;
        for (unit, (low_units, high_units)) in low_units.iter_mut().zip(high_units).enumerate() {
            let row = first + 2 * unit;
            [*low_units, *high_units] =
                interleave([along(source, row, column, 2 * BLOCK), along(source, row + 1, column, 2 * BLOCK)]);
        }
    }
}

in_vectors! {
    fn transposed_columns_in_vectors[N](source: &Source<'_>, block: Block, width: usize, to: &mut [u32]) {
        let (Span { first, len: columns }, Span { first: start, len: depth }) = (block.rows, block.columns);
        for column in (0..width).step_by(BLOCK) {
            for block in 0..depth.div_ceil(DEPTH) {
                let done = block * DEPTH;
                let mut units = [[_mm512_setzero_si512(); BLOCK]; N];
                for row in 0..BLOCK.min(columns.saturating_sub(column)) {
                    let later = source.address_later(first + column + row, BLOCK, start + done);
                    (0..source.bytes_of(DEPTH)).step_by(64).for_each(|line| prefetch_far(later.wrapping_add(line)));
                    let parts: [_; N] = units_along(source, first + column + row, start + done, (depth - done).min(DEPTH));
                    for (units, part) in units.iter_mut().zip(parts) {
                        units[row] = part;
                    }
                }
                for (part, units) in units.iter_mut().enumerate() {
                    transpose(units);
                    for (unit, units) in units.iter().enumerate() {
                        store(*units, &mut to[((block * N + part) * BLOCK + unit) * width + column..]);
                    }
                }
            }
        }
    }
}

in_vectors! {
    /// Transposes sixteen vectors of sixteen lanes.
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
