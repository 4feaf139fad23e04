//! bf16x3: splits f32 elements into sums of three bf16, which tiles multiply one at a time.
//!
//! An f32 has 24 bits and a bf16 eight. Rounding to bf16 leaves a remainder of 16 bits and a sign; rounding that
//! leaves a remainder that is a bf16 itself. Numbers below 2^-102 are rounded to one bf16, because tiles treat
//! numbers below 2^-126 as zero.
//!
//! A unit of a block of the depth is the pair of elements u and u + 16. Any order works if both operands share it,
//! and this one moves nothing between lanes. The three parts of a block of units are consecutive, the largest first.

use core::arch::x86_64::{
    __m512, __m512i, _mm512_add_epi32, _mm512_and_si512, _mm512_castps_si512, _mm512_castsi512_ps,
    _mm512_cmpge_epu32_mask, _mm512_maskz_mov_epi32, _mm512_maskz_mov_ps, _mm512_or_si512, _mm512_set1_epi32,
    _mm512_slli_epi32, _mm512_srli_epi32, _mm512_sub_ps,
};

use super::{BLOCK, PARTS};
use crate::gemm::Span;
use crate::gemm::pack::{Columns, store, widened};
use crate::gemm::source::{Elements, Source, with_elements};
use crate::simd::Float;

/// Defines a function compiled with features that every machine with tiles has.
macro_rules! in_vectors {
    ($(#[$meta:meta])* $vis:vis fn $name:ident$([$T:ident])?($($arg:tt)*) $(-> $result:ty)? $body:block) => {
        $(#[$meta])*
        #[inline]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2")]
        $vis fn $name$(<$T: Float>)?($($arg)*) $(-> $result)? $body
    };
}

in_vectors! {
    /// Pairs the lanes of two vectors, part by part.
    fn pairs(low: __m512, high: __m512) -> [__m512i; PARTS] {
        let (low, high, mut units) = (parts_of(low), parts_of(high), [_mm512_set1_epi32(0); PARTS]);
        for ((low, high), units) in low.into_iter().zip(high).zip(&mut units) {
            *units = _mm512_or_si512(_mm512_srli_epi32::<16>(low), high);
        }
        units
    }
}

in_vectors! {
    /// Splits each element into three bf16 that add up to it, in the upper halves of lanes. If an element is not
    /// finite, or not when rounded, at least one part is NaN, or two are infinities of different signs.
    fn parts_of(x: __m512) -> [__m512i; PARTS] {
        /// The bits of 2^-102 without the sign. The remainder of a smaller number would be denormal, which takes a
        /// hundred times as long.
        const LEAST: i32 = (127 - 102) << 24;
        let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
        let has_rest = _mm512_cmpge_epu32_mask(_mm512_slli_epi32::<1>(_mm512_castps_si512(x)), _mm512_set1_epi32(LEAST));
        let mut parts = [upper; PARTS];
        let mut rest = x;
        for part in &mut parts[..PARTS - 1] {
            // Half of the lowest bit that is kept.
            let rounded = _mm512_add_epi32(_mm512_castps_si512(rest), _mm512_set1_epi32(0x8000));
            *part = _mm512_and_si512(rounded, upper);
            // Not a masked subtraction, which takes as long for the lanes it leaves out.
            let taken = _mm512_castsi512_ps(_mm512_maskz_mov_epi32(has_rest, *part));
            rest = _mm512_sub_ps(_mm512_maskz_mov_ps(has_rest, rest), taken);
        }
        parts[PARTS - 1] = _mm512_and_si512(_mm512_castps_si512(rest), upper);
        parts
    }
}

in_vectors! {
    /// Converts the elements `at..at + len` of a row of a source, at most 32, to units.
    pub(super) fn along(source: &Source<'_>, row: usize, at: usize, len: usize) -> [__m512i; PARTS] {
        let start = source.start(row) + at;
        with_elements!(source.elements, x => {
            let x = &x[start..start + len];
            pairs(widened(x, 0), widened(x, BLOCK))
        })
    }
}

in_vectors! {
    /// Converts the elements `columns`, at most 16, to unit `unit` of the block of the depth that has the rows
    /// `rows`.
    pub(super) fn across(
        source: &Source<'_>,
        rows: Span,
        unit: usize,
        columns: Span,
    ) -> [__m512i; PARTS] {
        with_elements!(source.elements, x => {
            let mut both = [&x[..0]; 2];
            for (row, to) in [unit, BLOCK + unit].into_iter().zip(&mut both) {
                if row < rows.len {
                    *to = &x[source.start(rows.first + row) + columns.first..][..columns.len];
                }
            }
            pairs(widened(both[0], 0), widened(both[1], 0))
        })
    }
}

in_vectors! {
    /// Packs panels of rows across the depth, one after the other, each `[unit][width]`.
    pub(in crate::gemm) fn panels(columns: &Columns<'_>, to: &mut [u32]) {
        match columns.source.elements {
            Elements::F32(x) => panels_of(columns, x, to),
            Elements::Bf16(x) => panels_of(columns, x, to),
            Elements::F16(x) => panels_of(columns, x, to),
        }
    }
}

in_vectors! {
    fn panels_of[T](columns: &Columns<'_>, x: &[T], to: &mut [u32]) {
        let num_units = columns.format.units_of(columns.depth.len);
        for block in 0..num_units / (PARTS * BLOCK) {
            for unit in 0..BLOCK {
                // A unit is two rows that are 16 apart, not consecutive ones.
                let (low, high) = (2 * BLOCK * block + unit, 2 * BLOCK * block + BLOCK + unit);
                let [[low], [high]]: [[&[T]; 1]; 2] = [columns.rows(x, low), columns.rows(x, high)];
                // The rows of the next block.
                columns.prefetch_row(2 * BLOCK * block + unit, 2 * BLOCK);
                columns.prefetch_row(2 * BLOCK * block + BLOCK + unit, 2 * BLOCK);
                let (mut start, mut at) = (0, 0);
                for panel in columns.range.clone() {
                    let width = columns.panels.width(panel);
                    let place = start + (PARTS * BLOCK * block + unit) * width;
                    for column in (0..width).step_by(BLOCK) {
                        let units = pairs(widened(low, at + column), widened(high, at + column));
                        for (part, units) in units.into_iter().enumerate() {
                            store(units, &mut to[place + part * BLOCK * width + column..]);
                        }
                    }
                    (start, at) = (start + num_units * width, at + width);
                }
            }
        }
    }
}

#[cfg(test)]
#[path = "bf16x3_tests.rs"]
mod tests;
